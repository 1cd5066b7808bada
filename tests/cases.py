"""Calls of collectives as data: what every rank passes, and how to make the call on one of them.

A Case says what differs between tests: the row of the table, shapes, dtypes, layout, group and
arguments. Inputs follow from it, so the test can compute in one process what the ranks passed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fcoll
from fcoll.groups import resolve
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective

Tensor = torch.Tensor
Shape = tuple[int, ...]

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOAT8S = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
INTS = (torch.int8, torch.int16, torch.int32, torch.int64)
UINTS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *FLOAT8S, *INTS, *UINTS, torch.bool, *COMPLEX)
SCALES = torch.float8_e8m0fnu  # of block-scaled formats: powers of two, moved but never reduced

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
LAYOUTS = ("contiguous", "transposed", "strided", "offset", "expanded")


def has_meaning(reduce_op: str, dtype: torch.dtype) -> bool:
    inexact = dtype.is_floating_point or dtype.is_complex
    if reduce_op in ("band", "bor", "bxor"):
        return not inexact
    if reduce_op in ("min", "max"):
        return not dtype.is_complex
    return inexact or reduce_op != "avg"


# -- groups: every way to name one ---


@dataclass(frozen=True)
class Form:
    """A way to name a group. ``groups(world_size)`` are the ranks of each group, in its order."""

    groups: Callable[[int], list[list[int]]]
    make: Callable[[list[list[int]], int], Any]


def _everyone(world: int) -> list[list[int]]:
    return [list(range(world))]


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))


def _rows(world: int) -> list[list[int]]:
    half = world // 2
    return [list(range(half)), list(range(half, world))]


def _columns(world: int) -> list[list[int]]:
    return [[r, r + world // 2] for r in range(world // 2)]


def _line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _given(*by_world: list[list[int]]) -> Callable[[int], list[list[int]]]:
    """Groups written out: for two ranks, and for four."""
    return lambda world: by_world[world // 2 - 1]


FORMS: dict[str, Form] = {
    "None": Form(_everyone, lambda groups, rank: None),
    "ProcessGroup": Form(_everyone, lambda groups, rank: dist.group.WORLD),
    "name": Form(_everyone, lambda groups, rank: dist.group.WORLD.group_name),
    "ranks": Form(_given([[0, 1]], [[0, 1, 3]]), lambda groups, rank: groups[0]),
    "unsorted": Form(_given([[1, 0]], [[2, 0, 3, 1]]), lambda groups, rank: groups[0]),
    "nested": Form(_given([[1, 0]], [[0, 3], [2, 1]]), lambda groups, rank: groups),
    "alone": Form(lambda world: [[r] for r in range(world)], lambda groups, rank: [rank]),
    "(mesh, 0)": Form(_columns, lambda groups, rank: (_mesh(), 0)),
    "(mesh, -1)": Form(_rows, lambda groups, rank: (_mesh(), -1)),
    "(mesh, name)": Form(_columns, lambda groups, rank: (_mesh(), "dp")),
    "1-D mesh": Form(_everyone, lambda groups, rank: _line()),
    "slice of a mesh": Form(_rows, lambda groups, rank: _mesh()["tp"]),
}


def group_of(form: str, rank: int, world: int) -> list[int] | None:
    """The ranks of the group that this rank is in, in the group's order."""
    return next((g for g in FORMS[form].groups(world) if rank in g), None)


def size_of(form: str, world: int) -> int:
    return len(FORMS[form].groups(world)[0])


# -- cases ---


@dataclass(frozen=True)
class Case:
    """One call. ``shapes`` are of the parts: a scattered dim is multiplied by the group's size.

    ``args`` holds for all ranks: ``splits[i][j]`` rows go from i to j, ``shift`` is how far a
    transfer between two ranks goes. ``op_level`` calls torch.ops.fcoll, not the user function.
    """

    op: str
    shapes: tuple[Shape, ...] = ((2, 3),)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    args: dict[str, Any] = field(default_factory=dict)
    group: str = "None"
    layout: str = "contiguous"
    op_level: bool = False
    exact: bool = True  # values whose sums and products need no rounding

    @property
    def row(self) -> Collective:
        return COLLECTIVES[self.op]

    @property
    def overwrites(self) -> bool:
        return self.row.mutates and "out)" not in self.row.schema


ROWS = list(COLLECTIVES)
REDUCING = [op for op, row in COLLECTIVES.items() if "reduce_op" in row.schema]
LISTS = [op for op, row in COLLECTIVES.items() if "Tensor[]" in row.schema]
SCATTERS = [op for op in ROWS if "scatter" in op] + ["all_to_all_single", "shard_dim_alltoall"]
P2P = ["isend", "irecv", "batch_p2p_ops"]


def default_args(op: str, n: int) -> dict[str, Any]:
    """Arguments that a row cannot do without."""
    return {
        **({"reduce_op": "sum"} if op in REDUCING else {}),
        **({"src": n - 1} if op in ("broadcast", "broadcast_", "scatter") else {}),
        **({"dst": n - 1} if op in ("reduce", "gather") else {}),
        **({"dst": [(r + 1) % n for r in range(n)]} if op == "permute" else {}),
        **({"gather_dim": 0, "shard_dim": 1} if op == "shard_dim_alltoall" else {}),
        **({"shift": 1} if op in P2P else {}),
    }


def default_case(op: str, n: int, **changes: Any) -> Case:
    args = default_args(op, n) | changes.pop("args", {})
    if op in LISTS and "shapes" not in changes:
        changes["shapes"] = ((2, 3), (1, 2))
    if len(changes.get("dtypes", ())) <= 1 and op in LISTS:
        changes["dtypes"] = changes.get("dtypes", (torch.float32,)) * len(changes["shapes"])
    return Case(op, args=args, **changes)


def _shape(case: Case, position: int, rank: int, n: int) -> list[int]:
    """The shape of a rank's input, from the part's."""
    shape = list(case.shapes[position])
    sizes, splits = case.args.get("sizes"), case.args.get("splits")
    if case.op == "shard_dim_alltoall":
        dim = case.args["shard_dim"]
    elif "dims" in case.args:
        dim = case.args["dims"][position]
    else:
        dim = case.args.get("dim", 0)
    if splits:
        shape[0] = sum(splits[rank])
    elif case.op in SCATTERS:
        shape[dim] = sum(sizes) if sizes else shape[dim] * n
    elif sizes and shape:
        shape[dim] = sizes[rank]
    return shape


def values(shape: Sequence[int], dtype: torch.dtype, seed: int, exact: bool = True) -> Tensor:
    """Every bit pattern of integers; of floats small whole numbers, or any if not ``exact``."""
    random = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=random).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=random, dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)
    width = (2, *shape) if dtype.is_complex else (1, *shape)
    if dtype == SCALES:
        return (2.0 ** torch.randint(-3, 4, shape, generator=random)).to(dtype)
    if exact:
        x = torch.randint(-3, 4, width, generator=random).double()
    else:
        x = torch.randn(width, generator=random, dtype=torch.float64)
    return torch.complex(x[0], x[1]).to(dtype) if dtype.is_complex else x[0].to(dtype)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another layout; expanded, those of the first row."""
    if x.dim() == 0 or x.numel() == 0:
        return x
    if layout == "transposed":
        return x.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    if layout == "offset":
        return torch.cat([x[:1], x])[1:]
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x


def inputs_of(case: Case, rank: int, group: Sequence[int]) -> list[Tensor]:
    """What a rank passes."""
    if case.op == "barrier":
        return []
    made = []
    for i, dtype in enumerate(case.dtypes):
        shape = _shape(case, i, group.index(rank), len(group))
        made.append(laid_out(values(shape, dtype, 97 * rank + i, case.exact), case.layout))
    return made


# -- a call on one rank ---


def arguments(case: Case, xs: Sequence[Tensor], group: Any) -> dict[str, Any]:
    """Every argument but tensors, by each name that a schema or a user function gives it."""
    g = resolve(group)
    args = _positive_dims(case, xs) if case.op_level else case.args
    named = {"group": group, "group_name": g.name, "group_size": g.n, "tag": 7, **args}
    if "reduce_op" in args:
        named["op"] = args["reduce_op"]
    if "dims" in args:
        named["dim"] = args["dims"]
    if "splits" in args:
        named["input_splits"] = named["input_split_sizes"] = list(args["splits"][g.rank])
        received = [row[g.rank] for row in args["splits"]]
        named["output_splits"] = named["output_split_sizes"] = received
    elif case.op == "all_to_all_single":
        named["input_split_sizes"] = [xs[0].shape[0] // g.n] * g.n
        named["output_split_sizes"] = named["input_split_sizes"]
    if "shift" in args:
        to, source = (g.rank + args["shift"]) % g.n, (g.rank - args["shift"]) % g.n
        named |= {"dst": to, "src": source}
        named["op_list"] = ["isend"] * len(xs) + ["irecv"] * len(xs)
        named["peer_list"] = [to] * len(xs) + [source] * len(xs)
        named["tag_list"] = [*range(len(xs)), *range(len(xs))]
    return named


def _positive_dims(case: Case, xs: Sequence[Tensor]) -> dict[str, Any]:
    """The ops count dims from the front only."""
    args = dict(case.args)
    for name in {"dim", "gather_dim", "shard_dim"} & args.keys():
        args[name] %= max(xs[0].dim(), 1)
    if "dims" in args:
        args["dims"] = [d % max(x.dim(), 1) for d, x in zip(args["dims"], xs, strict=True)]
    return args


def _tensor_arguments(op: str, xs: list[Tensor], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are or hold tensors, by each name."""
    if not xs:
        return {}
    first = xs[0]
    tensors = {"x": first, "like": first, "input": first, "tensor": first, "xs": xs, "inputs": xs}
    n = named["group_size"]
    if op == "all_gather_into_tensor_out":
        shape = first.shape or (1,)
        tensors["out"] = first.new_empty((shape[0] * n, *shape[1:]))
    if op == "reduce_scatter_tensor_out":
        tensors["out"] = first.new_empty((first.shape[0] // n, *first.shape[1:]))
    if op == "batch_p2p_ops":
        tensors["tensors"] = xs + xs
        transfers = zip(named["op_list"], xs + xs, named["peer_list"])  # noqa: B905 (for Dynamo)
        tensors["transfers"] = list(transfers)
    return tensors


_FUNCTION = {"batch_p2p_ops": "batch_p2p"}


def target_of(op: str, op_level: bool) -> tuple[Callable[..., Any], list[str]]:
    """torch.ops.fcoll.<op>, or the user function, and the names of its arguments."""
    if op_level:
        overload = getattr(torch.ops.fcoll, op).default
        return overload, [a.name for a in overload._schema.arguments]
    function = getattr(fcoll, _FUNCTION.get(op, op))
    return function, list(inspect.signature(function).parameters)


def keywords(op: str, names: list[str], xs: list[Tensor], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``target_of(op)``."""
    given = named | _tensor_arguments(op, xs, named)
    return {name: given[name] for name in names if name in given}


def _bound(op: str, named: dict[str, Any], op_level: bool) -> Callable[..., Any]:
    target, names = target_of(op, op_level)
    return lambda *xs: target(**keywords(op, names, list(xs), named))


def prepared(case: Case, named: dict[str, Any]) -> Callable[..., list[Tensor]]:
    """The call and its waits as a function of the tensors alone, for tracers too."""
    op_level = case.op_level or case.row.mutates
    if case.op in ("isend", "irecv"):
        send, receive = (_bound(op, named, op_level) for op in ("isend", "irecv"))

        def transfer(*xs: Tensor) -> list[Tensor]:  # a send needs its receive
            token, got = send(*xs), receive(*xs)
            waited = [fcoll.wait_tensor(token), fcoll.wait_tensor(got)]
            return waited[:1] if case.op == "isend" else waited[1:]

        return transfer
    make = _bound(case.op, named, op_level)
    in_a_list = case.op in LISTS

    def made(*xs: Tensor) -> list[Tensor]:
        out = make(*xs)
        if out is None:  # of barrier, which waits by itself
            return [torch.empty(0)]
        return [fcoll.wait_tensor(y) for y in (out if in_a_list else [out])]

    return made


def call(case: Case, xs: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Make the call on this rank and wait: the outputs."""
    return prepared(case, arguments(case, xs, group))(*xs)


class Groups:
    """The groups of this process by form, each made at its first use."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, form: str) -> Any:
        if form not in self._made:
            groups = FORMS[form].groups(dist.get_world_size())
            self._made[form] = FORMS[form].make(groups, dist.get_rank())
        return self._made[form]


def each_case(rank: int, cases: Sequence[Case]) -> Iterator[tuple[int, Case, list[Tensor], Any]]:
    """(position, case, inputs, group) of the cases whose group this rank is in."""
    groups = Groups()
    for i, case in enumerate(cases):
        group = groups[case.group]  # on all ranks: a mesh is made by all of them
        members = group_of(case.group, rank, dist.get_world_size())
        if members is not None:
            yield i, case, inputs_of(case, rank, members), group
