"""torch's c10d ops in terms of the table's rows: what torch.distributed's own calls send.

An op's function takes those of its schema's arguments that it names, and gives the message that it
sends: a row, the row's arguments, and where the results go. Whoever runs, traces or times these ops
reads it here. ``process_group`` comes as (name, n) and ``reduce_op`` as a name. Lists of tensors
travel flat, one behind the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fcoll._torch import (
    c10d_arguments,
    c10d_returns,
    completed_work,
    guard_or_false,
    reduce_op_name,
    unboxed_group,
)
from fcoll.errors import BadOutput, MismatchedLists, fail
from fcoll.reductions import parse
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.pieces import GIVEN_TO_EACH, GOT_FROM_EACH, ROUTES

Tensors: TypeAlias = Sequence[Tensor]
Group: TypeAlias = tuple[Any, int]  # what the row's group_name becomes, and the size


@dataclass(eq=False)
class Message:
    """A call of a row: the tensors that are sent and written, as the call has them, and the row's
    other arguments.

    Where a rank gives or gets something for each rank, a call may have a tensor for each or one of
    all. Rows take one (``args``), and ``pieces`` are one for each."""

    row: str
    #: Of each tensor that the row takes, the tensors that it is put together of.
    ins: Sequence[Tensors]
    #: The row's other arguments in order, but ``out``.
    more: tuple[Any, ...]
    #: Of each result, the tensors that it is cut up into; none where nothing is to be written.
    outs: Sequence[Tensors] = ()
    #: The one rank of the group that results are written on; None: all.
    root: int | None = None
    #: The list that only the root has to give, where it was not given.
    missing: str = ""
    #: Has the call a tensor for each rank? The row takes those flat: sizes are of elements.
    lists: bool = False
    _args: tuple[Any, ...] | None = None

    @property
    def from_anyone(self) -> bool:
        """Is it a receive from any source? Only the carrier knows the sender then."""
        return self.row == "irecv" and self.more[0] == ANY

    @property
    def args(self) -> tuple[Any, ...]:
        """The row's arguments in order, but ``out``."""
        if self._args is None:  # as in cached_property, whose lock Dynamo cannot trace
            tensors = [_flat(parts) if self.lists else parts[0] for parts in self.ins]
            on_lists = COLLECTIVES[self.row].on_lists
            self._args = (tensors, *self.more) if on_lists else (*tensors, *self.more)
        return self._args

    @property
    def options(self) -> dict[str, Any]:
        """The row's arguments that are no tensors, by name."""
        names = [a.name for a in COLLECTIVES[self.row].arguments if not a.is_tensor]
        return dict(zip(names, self.more, strict=False))

    @property
    def sent(self) -> list[Tensor]:
        return [x for parts in self.ins for x in parts]

    def copies(self, results: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """(where to, what) of the results, which may have other shapes."""
        each = [results] if isinstance(results, Tensor) else results
        for result, outs in zip(each, self.outs, strict=True):
            if len(outs) == 1:
                yield outs[0], result
            elif outs:
                yield from zip(outs, result.reshape(-1).split(_numels(outs)), strict=True)


@dataclass(frozen=True)
class Op:
    """An op of the namespace: its function, and the row that calls of it are known as."""

    name: str
    row: str
    message: Callable[..., Message]
    #: The methods of a ProcessGroup that call it, by the names of all versions of torch.
    methods: tuple[str, ...]

    @cached_property
    def reduces(self) -> bool:
        return "reduce_op" in self.arguments

    @cached_property
    def has_root(self) -> bool:
        return "root_rank" in self.arguments

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of all that the op takes."""
        return c10d_arguments(self.name)

    @cached_property
    def _own_arguments(self) -> frozenset[str]:
        """The arguments that its message is made of."""
        return frozenset(inspect.signature(self.message).parameters)

    @cached_property
    def route(self) -> str:
        """How its pieces go around (``pieces.ROUTES``), which rows are named after; "" if there are
        none."""
        return max((r for r in ROUTES if self.row.startswith(r)), key=len, default="")

    @cached_property
    def called(self) -> str:
        """As people know it, in messages."""
        several = "_coalesced" if "coalesced" in self.name else ""
        return f"{self.route}{several}" if self.route else self.name.removesuffix("_")

    @cached_property
    def alike(self) -> bool:
        """Must all ranks send as much? Where each has parts of its own, they need not."""
        return "coalesced" in self.name or self.route not in (*GIVEN_TO_EACH, *GOT_FROM_EACH)

    @cached_property
    def group_at(self) -> int:
        """Where the group stands among them, behind the tensors."""
        return self.arguments.index("process_group")

    @cached_property
    def _tensors(self) -> list[tuple[str, int]]:
        """Its tensor arguments, and how deep they lie in lists."""
        depths = {"Tensor": 0, "Tensors": 1, "Sequence[Tensors]": 2}
        parameters = list(inspect.signature(self.message).parameters.values())
        return [(p.name, depths[p.annotation]) for p in parameters[: self.group_at]]

    @cached_property
    def _returns(self) -> int:
        """How many: nothing, a handle, or before it the tensors that it writes to."""
        return c10d_returns(self.name)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}

    def read(self, named: Mapping[str, Any], group: Callable[[ProcessGroup], Group]) -> Message:
        """The message of a call with these arguments; ``group`` makes (name, n) of a group."""
        resolved: dict[str, Any] = {"process_group": group(unboxed_group(named["process_group"]))}
        if not isinstance(named.get("reduce_op", ""), str):
            resolved["reduce_op"] = reduce_op_name(named["reduce_op"])
        values = {**named, **resolved}
        return self.message(**{name: values[name] for name in self._own_arguments & values.keys()})

    def settings(self, args: Sequence[Any]) -> tuple[Any, int, tuple[Any, ...]]:
        """What a call of one of its methods gives behind the tensors, in c10d's options or as it
        is: reduce op, root, and sizes of splits, those of the output first."""
        reduce_op, root = _SUM, 0
        splits: tuple[Any, ...] = ()
        for x in args[self.group_at :]:
            if isinstance(x, (list, tuple)):
                splits = *splits, tuple(x)
            elif isinstance(x, int):
                root = x
            elif isinstance(x, _REDUCE_OPS):
                reduce_op = x
            else:  # c10d's options, or a timeout
                reduce_op = getattr(x, "reduceOp", reduce_op) if self.reduces else reduce_op
                root = getattr(x, "rootRank", root) if self.has_root else root
        return reduce_op, root, splits

    def of_method(self, args: Sequence[Any]) -> tuple[dict[str, Any], Any]:
        """The op's arguments of a call of one of its methods, by name but the group; and what was
        given as reduce op, which may have a factor inside.

        Methods take lists of tensors and c10d's options, or tensors and what they need of those."""
        reduce_op, root, splits = self.settings(args)
        named: dict[str, Any] = {}
        for x, name in zip(splits, ("output_split_sizes", "input_split_sizes"), strict=False):
            named[name] = x
        for x, (name, depth) in zip(args, self._tensors, strict=False):
            named[name] = x if depth == 0 else _nested(x, depth)
        if self.reduces:
            named["reduce_op"] = parse(self.called, reduce_op)
        if self.has_root:
            named["root_rank"] = root
        return named, reduce_op

    def pieces(self, message: Message, n: int) -> tuple[list[Tensor], list[Tensor]]:
        """The pieces that a rank of n gives and gets: the tensors of the call, or views of them
        where one tensor is for all ranks."""
        ins, outs = message.ins, message.outs
        if message.lists:
            return list(ins[0]), list(outs[0])
        if self.route == "all_to_all":
            ((x,),), ((out,),), (out_splits, in_splits, _) = ins, outs, message.more
            return _split(x, in_splits, "input"), _split(out, out_splits, "output")
        if self.route in GIVEN_TO_EACH:
            ins = [_cut(self.called, x, out, n) for (x,), (out,) in zip(ins, outs, strict=True)]
        elif self.route in GOT_FROM_EACH and any(outs):
            each = zip(ins, outs, strict=True)
            outs = [y if len(y) == n else _cut(self.called, y[0], x, n) for (x,), y in each]
        return [x for xs in ins for x in xs], [y for ys in outs for y in ys]

    def returned(self, args: Sequence[Any]) -> Any:
        """The return value of a completed call: tensors, a handle or both."""
        work = completed_work() if self._returns else None
        return (args[0], work) if self._returns == 2 else work


_SUM, _REDUCE_OPS = dist.ReduceOp.SUM, (dist.ReduceOp, dist.ReduceOp.RedOpType)
ANY = -1  # in the place of the sender's rank
#: By the op's name in the namespace.
OPS: dict[str, Op] = {}
#: Ops that send nothing, and so are no row, with the reason.
SEND_NOTHING = {"check_for_nan": "it looks at a tensor of this rank"}


def _op(name: str, row: str, *methods: str) -> Callable[[Callable[..., Message]], Any]:
    def add(message: Callable[..., Message]) -> Callable[..., Message]:
        OPS[name] = Op(name, row, message, methods or (name.removesuffix("_"),))
        return message

    return add


# -- lists of tensors ---


def _numels(tensors: Tensors) -> list[int]:
    return [x.numel() for x in tensors]


def _sizes(tensors: Tensors) -> list[int] | None:
    """How large each is, if they are not all alike."""
    sizes = _numels(tensors)
    alike = all([guard_or_false(s == sizes[0]) for s in sizes])
    return None if alike else sizes


def _flat(tensors: Tensors) -> Tensor:
    parts = [x.reshape(-1) for x in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def one(op: str, tensors: Sequence[Any]) -> Any:
    """The tensor of a list of one: c10d once took a tensor a device."""
    _count(op, tensors, 1, "the call")
    return tensors[0]


def _nested(x: Any, depth: int) -> Any:
    """A tensor, or a list of some, in lists so deep."""
    if isinstance(x, Tensor):
        return [x] if depth == 1 else [[x]]
    return [x] if depth == 2 and len(x) and isinstance(x[0], Tensor) else x


def _cut(op: str, whole: Tensor, part: Tensor, n: int) -> Tensors:
    """A tensor for each rank, as large as ``part``, of that of all."""
    whole = whole.detach()
    if whole.numel() != part.numel() * n or whole.dtype != part.dtype:
        want = f"{n} x {part.numel()} elements of {part.dtype}"
        raise BadOutput(op=op, got=f"{whole.numel()} of {whole.dtype}", want=want)
    if n == 1 or not whole.numel():
        return [whole] * n
    return (whole if whole.shape[0] % n == 0 else whole.view(-1)).chunk(n)


def _split(x: Tensor, splits: Sequence[int], which: str) -> list[Tensor]:
    """A tensor for each rank of an exchange, of the rows of one."""
    rows = x.shape[0] if x.dim() else 0
    if sum(splits) != rows:
        why = f"the {which} splits {list(splits)} do not add up to its {rows} rows"
        hint = "Give split sizes that do, one for each rank."
        raise MismatchedLists(op="all_to_all_single", why=why, hint=hint)
    return list(x.detach().split(list(splits)))


def _count(op: str, tensors: Sequence[Any], n: int, whom: str) -> None:
    if len(tensors) != n:
        why = f"there are {len(tensors)} tensors, and {whom} needs {n}"
        fail(MismatchedLists, op=op, why=why, hint="Give one for each rank of the group.")


# -- all ranks with all ranks ---


@_op("allreduce_", "all_reduce_")
def allreduce_(tensors: Tensors, process_group: Group, reduce_op: str) -> Message:
    if len(tensors) > 1:
        return allreduce_coalesced_(tensors, process_group, reduce_op)
    return Message("all_reduce_", [tensors], (reduce_op, process_group[0]), [tensors])


@_op("allreduce_coalesced_", "all_reduce_coalesced_")
def allreduce_coalesced_(tensors: Tensors, process_group: Group, reduce_op: str) -> Message:
    each = [[x] for x in tensors]
    return Message("all_reduce_coalesced_", each, (reduce_op, process_group[0]), each)


@_op("_allgather_base_", "all_gather_into_tensor_out", "_allgather_base", "all_gather_single")
def _allgather_base_(output_tensor: Tensor, input_tensor: Tensor, process_group: Group) -> Message:
    name, n = process_group
    return Message("all_gather_into_tensor_out", [[input_tensor]], (n, name), [[output_tensor]])


@_op(
    "allgather_into_tensor_coalesced_",
    "all_gather_into_tensor_coalesced",
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
)
def allgather_into_tensor_coalesced_(
    outputs: Tensors, inputs: Tensors, process_group: Group
) -> Message:
    _count("all_gather_coalesced", outputs, len(inputs), "the list of inputs")
    name, n = process_group
    ins, outs = [[x] for x in inputs], [[out] for out in outputs]
    return Message("all_gather_into_tensor_coalesced", ins, (n, name), outs)


@_op("allgather_", "all_gather_into_tensor")
def allgather_(
    output_tensors: Sequence[Tensors], input_tensors: Tensors, process_group: Group
) -> Message:
    name, n = process_group
    outs, x = one("all_gather", output_tensors), one("all_gather", input_tensors)
    _count("all_gather", outs, n, "the list of outputs")
    more = n, name, 0, _sizes(outs)
    return Message("all_gather_into_tensor", [[x]], more, [outs], lists=True)


@_op("allgather_coalesced_", "all_gather_into_tensor_coalesced")
def allgather_coalesced_(
    output_lists: Sequence[Tensors], input_list: Tensors, process_group: Group
) -> Message:
    """``output_lists[r]`` are where rank r's tensors go."""
    name, n = process_group
    _count("all_gather_coalesced", output_lists, n, "the list of outputs")
    for of_rank in output_lists:
        _count("all_gather_coalesced", of_rank, len(input_list), "each list of outputs")
    ins, outs = [[x] for x in input_list], list(zip(*output_lists, strict=True))
    return Message("all_gather_into_tensor_coalesced", ins, (n, name), outs)


@_op(
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_out",
    *("_reduce_scatter_base", "reduce_scatter_single"),
)
def _reduce_scatter_base_(
    output_tensor: Tensor, input_tensor: Tensor, process_group: Group, reduce_op: str
) -> Message:
    name, n = process_group
    x = input_tensor  # parts are counted in elements
    rows = x if x.dim() and x.shape[0] % n == 0 else x.reshape(-1)
    more = reduce_op, n, name
    return Message("reduce_scatter_tensor_out", [[rows]], more, [[output_tensor]])


@_op(
    "reduce_scatter_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced",
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
)
def reduce_scatter_tensor_coalesced_(
    outputs: Tensors, inputs: Tensors, process_group: Group, reduce_op: str
) -> Message:
    _count("reduce_scatter_coalesced", outputs, len(inputs), "the list of inputs")
    name, n = process_group
    ins, outs = [[x] for x in inputs], [[out] for out in outputs]
    return Message("reduce_scatter_tensor_coalesced", ins, (reduce_op, n, name), outs)


@_op("reduce_scatter_", "reduce_scatter_tensor")
def reduce_scatter_(
    output_tensors: Tensors, input_tensors: Sequence[Tensors], process_group: Group, reduce_op: str
) -> Message:
    name, n = process_group
    out, parts = one("reduce_scatter", output_tensors), one("reduce_scatter", input_tensors)
    _count("reduce_scatter", parts, n, "the list of inputs")
    more = reduce_op, n, name, 0, _sizes(parts)
    return Message("reduce_scatter_tensor", [parts], more, [[out]], lists=True)


@_op("alltoall_", "all_to_all_single")
def alltoall_(output_tensors: Tensors, input_tensors: Tensors, process_group: Group) -> Message:
    name, n = process_group
    _count("all_to_all", output_tensors, n, "the list of outputs")
    _count("all_to_all", input_tensors, n, "the list of inputs")
    more = _numels(output_tensors), _numels(input_tensors), name
    return Message("all_to_all_single", [input_tensors], more, [output_tensors], lists=True)


@_op("alltoall_base_", "all_to_all_single", "alltoall_base", "all_to_all_single")
def alltoall_base_(
    output: Tensor, input: Tensor, process_group: Group, output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
) -> Message:  # fmt: skip
    name, n = process_group
    sides = (output, output_split_sizes), (input, input_split_sizes)
    splits = [list(sizes or [x.shape[0] // n] * n) for x, sizes in sides]
    return Message("all_to_all_single", [[input]], (*splits, name), [[output]])


@_op("barrier", "barrier")
@_op("monitored_barrier_", "barrier")
def barrier(process_group: Group) -> Message:
    return Message("barrier", (), (process_group[0],))


# -- from or to one rank ---


@_op("broadcast_", "broadcast_")
def broadcast_(tensors: Tensors, process_group: Group, root_rank: int) -> Message:
    x = one("broadcast", tensors)
    return Message("broadcast_", [[x]], (root_rank, process_group[0]), [tensors])


@_op("reduce_", "reduce")
def reduce_(tensors: Tensors, process_group: Group, reduce_op: str, root_rank: int) -> Message:
    x = one("reduce", tensors)
    return Message("reduce", [[x]], (reduce_op, root_rank, process_group[0]), [tensors], root_rank)


@_op("gather_", "gather")
def gather_(
    output_tensors: Sequence[Tensors], input_tensors: Tensors, process_group: Group, root_rank: int
) -> Message:
    name, n = process_group
    x, outs = one("gather", input_tensors), output_tensors[0] if output_tensors else ()
    if outs:
        _count("gather", outs, n, "gather_list")
    missing = "" if outs else "gather_list"
    return Message("gather", [[x]], (root_rank, n, name), [outs], root_rank, missing, lists=True)


@_op("gather_into_tensor_", "gather", "gather_single")
def gather_into_tensor_(
    output_tensor: Tensor, input_tensor: Tensor, process_group: Group, root_rank: int
) -> Message:
    """dist.gather_single, from torch 2.14 on; elsewhere than on the root, the output is empty."""
    name, n = process_group
    outs = [output_tensor] if output_tensor.numel() else []
    return Message("gather", [[input_tensor]], (root_rank, n, name), [outs], root_rank)


@_op("scatter_", "scatter")
def scatter_(
    output_tensors: Tensors, input_tensors: Sequence[Tensors], process_group: Group, root_rank: int
) -> Message:
    name, n = process_group
    out, parts = one("scatter", output_tensors), input_tensors[0] if input_tensors else ()
    if parts:
        _count("scatter", parts, n, "scatter_list")
    # elsewhere than on the root, the row wants no more than the shape
    ins = parts or [out.new_empty(()).expand(n * out.numel())]
    more, missing = (root_rank, n, name, 0, _sizes(parts)), "" if parts else "scatter_list"
    return Message("scatter", [ins], more, [[out]], missing=missing, lists=True)


# -- between two ranks ---


@_op("send", "isend")
def send(tensors: Tensors, process_group: Group, dst: int, tag: int) -> Message:
    return Message("isend", [[one("send", tensors)]], (dst, tag, process_group[0]))


@_op("recv_", "irecv")
def recv_(tensors: Tensors, process_group: Group, src: int, tag: int) -> Message:
    return Message("irecv", [[one("recv", tensors)]], (src, tag, process_group[0]), [tensors])


@_op("recv_any_source_", "irecv", "recv_anysource")
def recv_any_source_(tensors: Tensors, process_group: Group, tag: int) -> Message:
    return recv_(tensors, process_group, ANY, tag)
