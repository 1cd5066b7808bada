"""torch.distributed's in-place ops, as the table's: what eager FSDP2, DDP and dist.* calls issue.

Each function starts the op's messages by ops of the table, from the arguments that the c10d op has,
by name, with the group's ``name`` and size ``n`` and the reduce op ``op`` besides. It gives the
results with where they go, None for one that is written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace as Call
from typing import Any

import torch
from torch import Tensor

from fcoll.tracing import _torch

Started = list[tuple[Tensor, Tensor | None]]  # (result, destination)


def _all_reduce(a: Call) -> Started:
    ops = torch.ops._c10d_functional
    if len(a.tensors) == 1:
        ops.all_reduce_(a.tensors[0], a.op, a.name)
    else:
        ops.all_reduce_coalesced_(a.tensors, a.op, a.name)
    return [(x, None) for x in a.tensors]


def _all_gather_base(a: Call) -> Started:
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out
    gather(a.input_tensor, a.n, a.name, out=a.output_tensor)
    return [(a.output_tensor, None)]


def _all_gather_tensors(a: Call) -> Started:
    results = torch.ops.fcoll.all_gather_into_tensor_coalesced(a.inputs, a.n, a.name)
    return list(zip(results, a.outputs, strict=True))


def _all_gather_lists(inputs: Sequence[Tensor], outputs: Sequence[Any], a: Call) -> Started:
    started: Started = []
    for x, outs in zip(inputs, outputs, strict=True):
        whole = torch.ops.fcoll.all_gather_into_tensor(x.unsqueeze(0), a.n, a.name)
        started += [(whole, _Parts(outs))]
    return started


def _reduce_scatter_base(a: Call) -> Started:
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor_out
    scatter(a.input_tensor, a.op, a.n, a.name, out=a.output_tensor)
    return [(a.output_tensor, None)]


def _reduce_scatter_tensors(a: Call) -> Started:
    results = torch.ops.fcoll.reduce_scatter_tensor_coalesced(a.inputs, a.op, a.n, a.name)
    return list(zip(results, a.outputs, strict=True))


def _reduce_scatter_lists(a: Call) -> Started:
    return [
        (torch.ops.fcoll.reduce_scatter_tensor(torch.stack(parts), a.op, a.n, a.name), out)
        for parts, out in zip(a.input_tensors, a.output_tensors, strict=True)
    ]


def _reduce(a: Call) -> Started:
    x = a.tensors[0]
    return [(torch.ops.fcoll.reduce(x, a.op, a.root_rank, a.name), x)]


def _broadcast(a: Call) -> Started:
    torch.ops._c10d_functional.broadcast_(a.tensors[0], a.root_rank, a.name)
    return [(a.tensors[0], None)]


def _gather(a: Call) -> Started:
    x = a.input_tensors[0].unsqueeze(0)
    result = torch.ops.fcoll.gather(x, a.root_rank, a.n, a.name)
    return [(result, _Parts(a.output_tensors[0]) if a.output_tensors else None)]


def _gather_tensor(a: Call) -> Started:
    """dist.gather_single, from torch 2.14 on; elsewhere than on the root, the output is empty."""
    result = torch.ops.fcoll.gather(a.input_tensor.unsqueeze(0), a.root_rank, a.n, a.name)
    parts = a.output_tensor.chunk(a.n) if a.output_tensor.numel() else None
    return [(result, _Parts(parts) if parts else None)]


def _scatter(a: Call) -> Started:
    out = a.output_tensors[0]
    whole = torch.stack(a.input_tensors[0]) if a.input_tensors else out.new_empty(a.n, *out.shape)
    return [(torch.ops.fcoll.scatter(whole, a.root_rank, a.n, a.name), out)]


def _all_to_all_base(a: Call) -> Started:
    even = [a.input.shape[0] // a.n] * a.n
    splits = (a.output_split_sizes or even, a.input_split_sizes or even)
    return [(torch.ops.fcoll.all_to_all_single(a.input, *splits, a.name), a.output)]


def _all_to_all(a: Call) -> Started:
    flat = torch.cat([x.flatten() for x in a.input_tensors])
    receives = [x.numel() for x in a.output_tensors]
    sends = [x.numel() for x in a.input_tensors]
    result = torch.ops.fcoll.all_to_all_single(flat, receives, sends, a.name)
    return [(result, _Parts(a.output_tensors))]


def _barrier(a: Call) -> Started:
    return [(torch.ops.fcoll.barrier(a.name), None)]


def _send(a: Call) -> Started:
    return [(torch.ops.fcoll.isend(x, a.dst, a.tag, a.name), None) for x in a.tensors]


def _receive(a: Call) -> Started:
    return [(torch.ops.fcoll.irecv(x, a.src, a.tag, a.name), x) for x in a.tensors]


class _Parts(tuple):
    """Tensors that a result is cut up into, one after the other."""


_STARTS: dict[str, Callable[[Call], Started]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "_allgather_base_": _all_gather_base,
    "allgather_into_tensor_coalesced_": _all_gather_tensors,
    "allgather_": lambda a: _all_gather_lists(a.input_tensors, a.output_tensors, a),
    "allgather_coalesced_": lambda a: _all_gather_lists(a.input_list, a.output_lists, a),
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_tensors,
    "reduce_scatter_": _reduce_scatter_lists,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "gather_": _gather,
    "gather_into_tensor_": _gather_tensor,
    "scatter_": _scatter,
    "alltoall_base_": _all_to_all_base,
    "alltoall_": _all_to_all,
    "barrier": _barrier,
    "send": _send,
    "recv_": _receive,
}


#: The row of the table that describes what a c10d op does.
ROWS = {
    "allreduce_": "all_reduce_",
    "allreduce_coalesced_": "all_reduce_coalesced_",
    "_allgather_base_": "all_gather_into_tensor_out",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "allgather_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base_": "reduce_scatter_tensor_out",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter_tensor",
    "reduce_": "reduce",
    "broadcast_": "broadcast_",
    "gather_": "gather",
    "gather_into_tensor_": "gather",
    "scatter_": "scatter",
    "alltoall_base_": "all_to_all_single",
    "alltoall_": "all_to_all_single",
    "barrier": "barrier",
    "send": "isend",
    "recv_": "irecv",
}


class Pending:
    """Messages that a c10d op started, to be completed before their tensors are used."""

    def __init__(self, started: Started) -> None:
        self.started = started
        self.done = False

    def storages(self) -> set[int]:
        """What is being written to: any use of it comes after the wait."""
        tensors = [part for x, out in self.started for part in _destinations(x, out)]
        return {_torch.storage_id(x) for x in tensors}

    def complete(self) -> None:
        """Wait for them, once."""
        if self.done:
            return
        self.done = True
        for result, out in self.started:
            done = torch.ops._c10d_functional.wait_tensor(result)
            if isinstance(out, _Parts):
                cut = done.flatten().split([x.numel() for x in out])
                for part, to in zip(cut, out, strict=True):
                    to.copy_(part.view(to.shape))
            elif out is not None:
                out.copy_(done.view(out.shape))


class Handle:
    """What an exchange gives whose splits a C++ group cannot take."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, timeout: Any = None) -> bool:
        self._wait()
        return True

    def is_completed(self) -> bool:
        return True


def start_exchange(
    group: Any, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any
) -> Pending:
    """An exchange whose splits are symbols."""
    name, n = _torch.boxed_group(group)
    splits = {"output_split_sizes": output_splits, "input_split_sizes": input_splits}
    with torch.no_grad():
        return Pending(_all_to_all_base(Call(input=input, output=output, name=name, n=n, **splits)))


def _destinations(result: Tensor, out: Any) -> Sequence[Tensor]:
    return out if isinstance(out, _Parts) else [result if out is None else out]


def start(func: Any, args: Any, kwargs: Any) -> tuple[Pending, bool] | None:
    """Start what a c10d op does; and is it to be completed at once? None if it is not known."""
    begin = _STARTS.get(_torch.op_name(func).removeprefix("c10d::"))
    if begin is None:
        return None
    call = Call(**_torch.call_arguments(func, args, kwargs))
    call.name, call.n = _torch.boxed_group(call.process_group)
    if hasattr(call, "reduce_op"):
        call.op = _torch.boxed_reduce_op(call.reduce_op)
    with torch.no_grad():
        return Pending(begin(call)), not getattr(call, "async_op", True)
