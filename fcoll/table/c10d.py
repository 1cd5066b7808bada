"""torch's c10d ops in terms of the table's rows: what torch.distributed's own calls send.

An op's function takes those of its schema's arguments that it names, and gives the message that it
sends: a row, the row's arguments, and where the results go. Whoever runs, traces or times these ops
reads it here.
``process_group`` comes as (name, n) and ``reduce_op`` as a name. Lists of tensors travel flat, one
behind the other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
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
from fcoll.errors import MismatchedLists, fail
from fcoll.reductions import parse

Tensors: TypeAlias = Sequence[Tensor]
Group: TypeAlias = tuple[Any, int]  # what the row's group_name becomes, and the size


class Message(NamedTuple):
    """A call of a row: its arguments in order, but ``out``."""

    row: str
    args: tuple[Any, ...]
    #: Of each result, the tensors that it is cut up into; none where nothing is to be written.
    outs: Sequence[Tensors] = ()
    #: The one rank of the group that results are written on; None: all.
    root: int | None = None
    #: The list that only the root has to give, where it was not given.
    missing: str = ""

    @property
    def from_anyone(self) -> bool:
        """Is it a receive from any source? Only the carrier knows the sender then."""
        return self.row == "irecv" and self.args[1] == ANY

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
    def arguments(self) -> tuple[str, ...]:
        """The names of all that the op takes."""
        return c10d_arguments(self.name)

    @cached_property
    def _taken(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.message).parameters)

    @cached_property
    def group_at(self) -> int:
        """Where the group stands among them, behind the tensors."""
        return self.arguments.index("process_group")

    @cached_property
    def _returns(self) -> int:
        """How many: nothing, a handle, or before it the tensors that it writes to."""
        return c10d_returns(self.name)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}

    def read(self, named: Mapping[str, Any], group: Callable[[ProcessGroup], Group]) -> Message:
        """The message of a call with these arguments; ``group`` makes (name, n) of a group."""
        known: dict[str, Any] = {"process_group": group(unboxed_group(named["process_group"]))}
        if not isinstance(named.get("reduce_op", ""), str):
            known["reduce_op"] = reduce_op_name(named["reduce_op"])
        given = {**named, **known}
        return self.message(**{name: given[name] for name in self._taken & given.keys()})

    def of_method(self, args: Sequence[Any]) -> dict[str, Any] | None:
        """The op's arguments of a call of one of its methods (tensors, more, options), by name but
        the group; None for a form of the method without options."""
        at = self.group_at
        tensors, rest = args[:at], list(args[at:])
        options: Any = rest.pop() if rest else None
        if not hasattr(options, "timeout") or len(rest) not in (0, 2):
            return None
        named = dict(zip(self.arguments, tensors, strict=False))
        for name in self.arguments[at + 1 :]:
            if name == "reduce_op":
                named[name] = parse(self.name, options.reduceOp)
            elif name == "root_rank":
                named[name] = options.rootRank
            elif rest:
                named[name] = rest.pop(0)
        return named

    def returned(self, args: Sequence[Any]) -> Any:
        """The return value of a completed call: tensors, a handle or both."""
        work = completed_work() if self._returns else None
        return (args[0], work) if self._returns == 2 else work


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
    return torch.cat([x.reshape(-1) for x in tensors])


def _one(op: str, tensors: Sequence[Any]) -> Any:
    """The tensor of a list of one: c10d once took a tensor a device."""
    _count(op, tensors, 1, "the call")
    return tensors[0]


def _count(op: str, tensors: Sequence[Any], n: int, whom: str) -> None:
    if len(tensors) != n:
        why = f"there are {len(tensors)} tensors, and {whom} needs {n}"
        fail(MismatchedLists, op=op, why=why, hint="Give one for each rank of the group.")


# -- all ranks with all ranks ---


@_op("allreduce_", "all_reduce_")
def allreduce_(tensors: Tensors, process_group: Group, reduce_op: str) -> Message:
    if len(tensors) > 1:
        return allreduce_coalesced_(tensors, process_group, reduce_op)
    return Message("all_reduce_", (tensors[0], reduce_op, process_group[0]), [tensors])


@_op("allreduce_coalesced_", "all_reduce_coalesced_")
def allreduce_coalesced_(tensors: Tensors, process_group: Group, reduce_op: str) -> Message:
    args = list(tensors), reduce_op, process_group[0]
    return Message("all_reduce_coalesced_", args, [[x] for x in tensors])


@_op("_allgather_base_", "all_gather_into_tensor_out", "_allgather_base", "all_gather_single")
def _allgather_base_(output_tensor: Tensor, input_tensor: Tensor, process_group: Group) -> Message:
    name, n = process_group
    return Message("all_gather_into_tensor_out", (input_tensor, n, name), [[output_tensor]])


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
    outs = [[out] for out in outputs]
    return Message("all_gather_into_tensor_coalesced", (list(inputs), n, name), outs)


@_op("allgather_", "all_gather_into_tensor")
def allgather_(
    output_tensors: Sequence[Tensors], input_tensors: Tensors, process_group: Group
) -> Message:
    name, n = process_group
    outs, x = _one("all_gather", output_tensors), _one("all_gather", input_tensors)
    _count("all_gather", outs, n, "the list of outputs")
    return Message("all_gather_into_tensor", (x.reshape(-1), n, name, 0, _sizes(outs)), [outs])


@_op("allgather_coalesced_", "all_gather_into_tensor_coalesced")
def allgather_coalesced_(
    output_lists: Sequence[Tensors], input_list: Tensors, process_group: Group
) -> Message:
    """``output_lists[r]`` are where rank r's tensors go."""
    name, n = process_group
    _count("all_gather_coalesced", output_lists, n, "the list of outputs")
    for of_rank in output_lists:
        _count("all_gather_coalesced", of_rank, len(input_list), "each list of outputs")
    outs = list(zip(*output_lists, strict=True))
    return Message("all_gather_into_tensor_coalesced", (list(input_list), n, name), outs)


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
    return Message("reduce_scatter_tensor_out", (rows, reduce_op, n, name), [[output_tensor]])


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
    outs = [[out] for out in outputs]
    return Message("reduce_scatter_tensor_coalesced", (list(inputs), reduce_op, n, name), outs)


@_op("reduce_scatter_", "reduce_scatter_tensor")
def reduce_scatter_(
    output_tensors: Tensors, input_tensors: Sequence[Tensors], process_group: Group, reduce_op: str
) -> Message:
    name, n = process_group
    out, parts = _one("reduce_scatter", output_tensors), _one("reduce_scatter", input_tensors)
    _count("reduce_scatter", parts, n, "the list of inputs")
    args = _flat(parts), reduce_op, n, name, 0, _sizes(parts)
    return Message("reduce_scatter_tensor", args, [[out]])


@_op("alltoall_", "all_to_all_single")
def alltoall_(output_tensors: Tensors, input_tensors: Tensors, process_group: Group) -> Message:
    name, n = process_group
    _count("all_to_all", output_tensors, n, "the list of outputs")
    _count("all_to_all", input_tensors, n, "the list of inputs")
    splits = _numels(output_tensors), _numels(input_tensors)
    return Message("all_to_all_single", (_flat(input_tensors), *splits, name), [output_tensors])


@_op("alltoall_base_", "all_to_all_single", "alltoall_base", "all_to_all_single")
def alltoall_base_(
    output: Tensor, input: Tensor, process_group: Group, output_split_sizes: Sequence[int],
    input_split_sizes: Sequence[int],
) -> Message:  # fmt: skip
    name, n = process_group
    sides = (output, output_split_sizes), (input, input_split_sizes)
    splits = [list(sizes or [x.shape[0] // n] * n) for x, sizes in sides]
    return Message("all_to_all_single", (input, *splits, name), [[output]])


@_op("barrier", "barrier")
@_op("monitored_barrier_", "barrier")
def barrier(process_group: Group) -> Message:
    return Message("barrier", (process_group[0],))


# -- from or to one rank ---


@_op("broadcast_", "broadcast_")
def broadcast_(tensors: Tensors, process_group: Group, root_rank: int) -> Message:
    x = _one("broadcast", tensors)
    return Message("broadcast_", (x, root_rank, process_group[0]), [tensors])


@_op("reduce_", "reduce")
def reduce_(tensors: Tensors, process_group: Group, reduce_op: str, root_rank: int) -> Message:
    args = _one("reduce", tensors), reduce_op, root_rank, process_group[0]
    return Message("reduce", args, [tensors], root_rank)


@_op("gather_", "gather")
def gather_(
    output_tensors: Sequence[Tensors], input_tensors: Tensors, process_group: Group, root_rank: int
) -> Message:
    name, n = process_group
    x, outs = _one("gather", input_tensors), output_tensors[0] if output_tensors else ()
    if outs:
        _count("gather", outs, n, "gather_list")
    missing = "" if outs else "gather_list"
    return Message("gather", (x.reshape(-1), root_rank, n, name), [outs], root_rank, missing)


@_op("gather_into_tensor_", "gather", "gather_single")
def gather_into_tensor_(
    output_tensor: Tensor, input_tensor: Tensor, process_group: Group, root_rank: int
) -> Message:
    """dist.gather_single, from torch 2.14 on; elsewhere than on the root, the output is empty."""
    name, n = process_group
    outs = [output_tensor] if output_tensor.numel() else []
    return Message("gather", (input_tensor, root_rank, n, name), [outs], root_rank)


@_op("scatter_", "scatter")
def scatter_(
    output_tensors: Tensors, input_tensors: Sequence[Tensors], process_group: Group, root_rank: int
) -> Message:
    name, n = process_group
    out, parts = _one("scatter", output_tensors), input_tensors[0] if input_tensors else ()
    if parts:
        _count("scatter", parts, n, "scatter_list")
    # elsewhere than on the root, the row wants no more than the shape
    x = _flat(parts) if parts else out.new_empty(()).expand(n * out.numel())
    args = x, root_rank, n, name, 0, _sizes(parts)
    return Message("scatter", args, [[out]], missing="" if parts else "scatter_list")


# -- between two ranks ---


@_op("send", "isend")
def send(tensors: Tensors, process_group: Group, dst: int, tag: int) -> Message:
    return Message("isend", (_one("send", tensors), dst, tag, process_group[0]))


@_op("recv_", "irecv")
def recv_(tensors: Tensors, process_group: Group, src: int, tag: int) -> Message:
    return Message("irecv", (_one("recv", tensors), src, tag, process_group[0]), [tensors])


@_op("recv_any_source_", "irecv", "recv_anysource")
def recv_any_source_(tensors: Tensors, process_group: Group, tag: int) -> Message:
    return recv_(tensors, process_group, ANY, tag)
