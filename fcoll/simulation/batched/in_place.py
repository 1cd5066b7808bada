"""torch.distributed's own calls inside a simulation: they write each rank's result.

Each is the collective of fcoll that does the same, copied into the tensor of the call. As on real
ranks, autograd does not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.errors import NotInBatch, fail
from fcoll.groups import group_size
from fcoll.simulation.batched import _torch
from fcoll.source import user_line

_fcoll = torch.ops.fcoll


def _write(out: Tensor, y: Tensor) -> None:
    """Into the tensor of the call; one that all ranks share can take only what all share."""
    level = _torch.current_level()
    if _torch.is_stacked(y, level) and not _torch.is_stacked(out, level):
        why = "the tensor that is written to is one for all ranks, and their results differ"
        hint = "Make it from a tensor that differs between ranks, as in x.new_empty(shape)"
        fail(NotInBatch, line=user_line(), why=why, hint=hint)
    out.copy_(y.reshape(out.shape))


def _write_on(root: int, out: Tensor, y: Tensor, name: str) -> None:
    """Only on one rank of each group; the others keep what they have."""
    there = torch.ops.fcoll_simulation.rank(name) == root
    _write(out, torch.where(there, y.reshape(out.shape), out))


def _reduce_op(reduce_op: Any) -> str:
    name = _torch.reduce_op_name(reduce_op)
    if name == "premul_sum":
        why = "the factor of premul_sum is not known to the call"
        fail(NotInBatch, line=user_line(), why=why, hint="Use the function of fcoll")
    return name


def _listed(xs: Sequence[Tensor], name: str, what: str) -> Tensor:
    n = group_size(name)
    if len(xs) != n:
        why = f"{what} has {len(xs)} tensors for groups of {n} ranks"
        hint = "All simulated ranks make one call: it needs the list, and the root is rank 0"
        fail(NotInBatch, line=user_line(), why=why, hint=hint)
    return torch.stack(list(xs))


def _allreduce(tensors: Any, name: str, reduce_op: Any, *more: Any) -> Any:
    for x in tensors:
        _write(x, _fcoll.all_reduce(x, _reduce_op(reduce_op), name))
    return tensors


def _broadcast(tensors: Any, name: str, root: int, *more: Any) -> Any:
    for x in tensors:
        _write(x, _fcoll.broadcast(x, root, name))
    return tensors


def _reduce(tensors: Any, name: str, reduce_op: Any, root: int, *more: Any) -> Any:
    for x in tensors:
        _write_on(root, x, _fcoll.reduce(x, _reduce_op(reduce_op), root, name), name)
    return tensors


def _allgather_base(output: Any, input: Any, name: str, *more: Any) -> Any:
    _write(output, _fcoll.all_gather_into_tensor(input, group_size(name), name))
    return output


def _allgathers(outputs: Any, inputs: Any, name: str, *more: Any) -> Any:
    for output, x in zip(outputs, inputs, strict=True):
        _allgather_base(output, x, name)
    return outputs


def _allgather(outputs: Any, inputs: Any, name: str, *more: Any) -> Any:
    for into, x in zip(outputs, inputs, strict=True):
        _listed(into, name, "the list of outputs")
        whole = _fcoll.all_gather_into_tensor(x.unsqueeze(0), len(into), name)
        for i, output in enumerate(into):
            _write(output, whole[i])
    return outputs


def _gather(outputs: Any, inputs: Any, name: str, root: int, *more: Any) -> Any:
    into = outputs[0] if outputs else ()
    _listed(into, name, "gather_list")
    whole = _fcoll.all_gather_into_tensor(inputs[0].unsqueeze(0), len(into), name)
    for i, output in enumerate(into):
        _write_on(root, output, whole[i], name)
    return outputs


def _gather_tensor(output: Any, input: Any, name: str, root: int, *more: Any) -> Any:
    """dist.gather_single, from torch 2.14 on."""
    _write_on(root, output, _fcoll.all_gather_into_tensor(input, group_size(name), name), name)
    return output


def _scatter(outputs: Any, inputs: Any, name: str, root: int, *more: Any) -> Any:
    parts = _listed(inputs[0] if inputs else (), name, "scatter_list")
    _write(outputs[0], _fcoll.scatter(parts, root, parts.shape[0], name))
    return outputs


def _reduce_scatter_base(output: Any, input: Any, name: str, reduce_op: Any, *more: Any) -> Any:
    n = group_size(name)
    _write(output, _fcoll.reduce_scatter_tensor(input, _reduce_op(reduce_op), n, name))
    return output


def _reduce_scatters(outputs: Any, inputs: Any, name: str, reduce_op: Any, *more: Any) -> Any:
    for output, x in zip(outputs, inputs, strict=True):
        _reduce_scatter_base(output, x, name, reduce_op)
    return outputs


def _reduce_scatter(outputs: Any, inputs: Any, name: str, reduce_op: Any, *more: Any) -> Any:
    for output, xs in zip(outputs, inputs, strict=True):
        _reduce_scatter_base(output, _listed(xs, name, "the list of inputs"), name, reduce_op)
    return outputs


def _alltoall(outputs: Any, inputs: Any, name: str, *more: Any) -> Any:
    parts = _listed(inputs, name, "the list of inputs")
    ones = [1] * len(inputs)
    received = _fcoll.all_to_all_single(parts, ones, ones, name)
    for output, y in zip(outputs, received.unbind(), strict=True):
        _write(output, y)
    return outputs


def _alltoall_base(output: Any, input: Any, name: str, gets: Any, sends: Any, *more: Any) -> Any:
    n = group_size(name)
    even = [input.shape[0] // n] * n
    _write(output, _fcoll.all_to_all_single(input, list(gets or even), list(sends or even), name))
    return output


def _nothing(tensor: Any, *more: Any) -> None:
    """All ranks are here."""


# name of c10d's op -> (what it does, where the group stands, does it return (tensors, work)?)
OPS: dict[str, tuple[Callable[..., Any], int, bool]] = {
    "allreduce_": (_allreduce, 1, True),
    "allreduce_coalesced_": (_allreduce, 1, False),
    "broadcast_": (_broadcast, 1, True),
    "reduce_": (_reduce, 1, False),
    "_allgather_base_": (_allgather_base, 2, True),
    "allgather_into_tensor_coalesced_": (_allgathers, 2, False),
    "allgather_": (_allgather, 2, True),
    "allgather_coalesced_": (_allgather, 2, False),
    "gather_": (_gather, 2, False),
    "gather_into_tensor_": (_gather_tensor, 2, True),
    "scatter_": (_scatter, 2, True),
    "_reduce_scatter_base_": (_reduce_scatter_base, 2, True),
    "reduce_scatter_tensor_coalesced_": (_reduce_scatters, 2, False),
    "reduce_scatter_": (_reduce_scatter, 2, True),
    "alltoall_": (_alltoall, 2, True),
    "alltoall_base_": (_alltoall_base, 2, False),
    "barrier": (_nothing, 1, False),
}


def run(op: str, name_of: Callable[[str], str], args: Sequence[Any]) -> Any:
    """c10d's op of this name; ``name_of`` gives the name of a group in the simulation."""
    if op in ("monitored_barrier_", "check_for_nan"):
        return None
    if op not in OPS:
        why = f"c10d::{op} is a message, which has another peer on each rank"
        fail(NotInBatch, line=user_line(), why=why, hint="Use fcoll.permute")
    call, at, returns_tensors = OPS[op]
    given = list(args)
    given[at] = name_of(_torch.unboxed_group(given[at]).group_name)
    with torch.no_grad():
        out = call(*given)
    work = _torch.completed_work()
    return (out, work) if returns_tensors else work
