"""The ops of c10d (``torch.distributed``'s own collectives) on LocalTensors.

Served as ``torch.distributed._local_tensor._c10d``. Most arguments are lists of one tensor: c10d
once took a tensor a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch, collectives, groups, runner
from fcoll.local.collectives import Result, local
from fcoll.local.ints import LocalIntNode
from fcoll.local.tensor import LocalTensor

__all__ = ["local_p2p_op", "wait_all"]


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The op of torch, by its name."""
    found = OPS.get(func._schema.name.partition("::")[2])
    if found is None:
        raise NotImplementedError(f"{func} not implemented")
    return found(*args, **kwargs)


def _into(out: Any, name: str, x: Any, group: Any, **args: Any) -> None:
    result = collectives.run(name, local(x), _torch.unbox_group(group), **args)
    collectives.write(result, local(out, "Output"))


def _only(tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise AssertionError(f"one tensor, not {len(tensors)}")
    return tensors[0]


def _groups(group: Any, x: LocalTensor) -> groups.Groups:
    return groups.calling(_torch.unbox_group(group), x._order)


def allreduce_(tensors: Any, group: Any, reduce_op: Any, *more: Any, **options: Any) -> Any:
    x = _only(tensors)
    _into(x, "all_reduce", x, group, reduce_op=reduce_op)
    return tensors, _torch.done()


def allreduce_coalesced_(tensors: Any, group: Any, reduce_op: Any, *more: Any, **kw: Any) -> Any:
    for x in tensors:
        _into(x, "all_reduce", x, group, reduce_op=reduce_op)
    return _torch.done()


def reduce_(
    tensors: Any, group: Any, reduce_op: Any, root_rank: int, *more: Any, **options: Any
) -> Any:
    x = local(_only(tensors))
    result = collectives.run("all_reduce", x, _torch.unbox_group(group), reduce_op=reduce_op)
    collectives.write(result, x, only=[g[root_rank] for g in _groups(group, x)])
    return _torch.done()


def broadcast_(
    tensors: Any, group: Any, root_rank: int, root_tensor: int, *more: Any, **options: Any
) -> Any:
    if root_tensor != 0:
        raise AssertionError(f"root_tensor is 0, not {root_tensor}")
    x = _only(tensors)
    _into(x, "broadcast", x, group, src=root_rank)
    return tensors, _torch.done()


def _allgather_base_(output: Any, input: Any, group: Any, *more: Any, **options: Any) -> Any:
    if _torch.OBJECTS_IN_ONE_TENSOR and not isinstance(input, LocalTensor):
        for t in local(output, "Output")._tensors().values():
            t.copy_(torch.cat([input] * (t.numel() // input.numel())))
    else:
        _into(output, "all_gather_into_tensor", input, group)
    return output, _torch.done()


def allgather_into_tensor_coalesced_(
    outputs: Any, inputs: Any, group: Any, *more: Any, **options: Any
) -> Any:
    if len(outputs) != len(inputs):
        raise AssertionError(
            f"Number of outputs ({len(outputs)}) must match number of inputs ({len(inputs)})"
        )
    for output, input in zip(outputs, inputs, strict=True):
        _into(output, "all_gather_into_tensor", input, group)
    return _torch.done()


def _gather_into(outputs: Sequence[Any], x: Any, group: Any) -> None:
    """Output i gets the tensor of each group's rank i."""
    if not isinstance(x, LocalTensor):  # all_gather_object has one plain tensor for all ranks
        for output in outputs:
            for t in local(output, "Output")._tensors().values():
                t.copy_(x)
        return
    calling = _groups(group, x)
    if len(outputs) != len(calling[0]):
        raise AssertionError(f"{len(outputs)} outputs for groups of {len(calling[0])} ranks")
    for i, output in enumerate(outputs):
        if x._as_stack() is not None:
            _into(output, "broadcast", x, group, src=i)
            continue
        for g in calling:  # of uneven sizes: each output has the size of the rank it comes from
            for r in g:
                local(output, "Output")._tensors()[r].copy_(x._tensors()[g[i]])


def allgather_(outputs: Any, inputs: Any, group: Any, *more: Any, **options: Any) -> Any:
    _gather_into(_only(outputs), _only(inputs), group)
    return outputs, _torch.done()


def allgather_coalesced_(outputs: Any, inputs: Any, group: Any, *more: Any, **kw: Any) -> Any:
    for i, x in enumerate(inputs):
        _gather_into(outputs[i], x, group)
    return _torch.done()


def gather_(
    outputs: Any, inputs: Any, group: Any, root_rank: int, *more: Any, **options: Any
) -> Any:
    x = local(_only(inputs))
    calling = _groups(group, x)
    if not outputs:
        raise ValueError("gather: the root's list of outputs is missing (gather_list)")
    lists = _only(outputs)
    if len(lists) != len(calling[0]):
        raise ValueError(f"gather: {len(lists)} outputs for groups of {len(calling[0])} ranks")
    for g in calling:
        for i, r in enumerate(g):
            local(lists[i], "Output")._tensors()[g[root_rank]].copy_(x._tensors()[r])
    return _torch.done()


def gather_into_tensor_(
    output: Any, input: Any, group: Any, root_rank: int, *more: Any, **options: Any
) -> Any:
    """dist.gather_single, from torch 2.14 on."""
    x, out = local(input), local(output, "Output")
    for g in _groups(group, x):
        whole = torch.cat([x._tensors()[r] for r in g])
        out._tensors()[g[root_rank]].copy_(whole)
    return output, _torch.done()


def scatter_(
    outputs: Any, inputs: Any, group: Any, root_rank: int, *more: Any, **options: Any
) -> Any:
    output, lists = local(_only(outputs), "Output"), _only(inputs)
    calling = _groups(group, output)
    if len(lists) != len(calling[0]):
        raise AssertionError(f"{len(lists)} inputs for groups of {len(calling[0])} ranks")
    parts = {r: local(lists[i])._tensors()[g[root_rank]] for g in calling for i, r in enumerate(g)}
    collectives.write(_result(parts), output)
    return outputs, _torch.done()


def _result(parts: dict[int, Tensor]) -> Result:
    ranks = tuple(sorted(parts))
    shapes = {t.shape for t in parts.values()}
    if len(shapes) == 1:
        return Result(ranks, stack=torch.stack([parts[r] for r in ranks]))
    return Result(ranks, parts={r: parts[r].clone() for r in ranks})


def _reduce_scatter_base_(
    output: Any, input: Any, group: Any, reduce_op: Any, *more: Any, **options: Any
) -> Any:
    _into(output, "reduce_scatter_tensor", input, group, reduce_op=reduce_op)
    return output, _torch.done()


def reduce_scatter_tensor_coalesced_(
    outputs: Any, inputs: Any, group: Any, reduce_op: Any, *more: Any, **options: Any
) -> Any:
    for output, input in zip(outputs, inputs, strict=True):
        _into(output, "reduce_scatter_tensor", input, group, reduce_op=reduce_op)
    return _torch.done()


def reduce_scatter_(
    outputs: Any, inputs: Any, group: Any, reduce_op: Any, *more: Any, **options: Any
) -> Any:
    """From a list: rank i of a group gets the reduced i-th tensors, whatever their sizes."""
    output, lists = local(_only(outputs), "Output"), _only(inputs)
    calling = _groups(group, output)
    if len(lists) != len(calling[0]):
        raise ValueError(
            f"reduce_scatter: {len(lists)} inputs for groups of {len(calling[0])} ranks"
        )
    for i, x in enumerate(lists):
        pg = _torch.unbox_group(group)
        result = collectives.run("all_reduce", local(x), pg, reduce_op=reduce_op)
        collectives.write(result, output, only=[g[i] for g in calling])
    return outputs, _torch.done()


def alltoall_(outputs: Any, inputs: Any, group: Any, *more: Any, **options: Any) -> Any:
    calling = _groups(group, local(inputs[0]))
    if not len(inputs) == len(outputs) == len(calling[0]):
        raise AssertionError(
            f"Number of input tensors ({len(inputs)}), output tensors ({len(outputs)}), and "
            f"ranks ({len(calling[0])}) must match"
        )
    sent = [dict(local(x)._tensors()) for x in inputs]
    results = [
        _result({r: sent[j][g[i]] for g in calling for j, r in enumerate(g)})
        for i in range(len(outputs))
    ]
    for output, result in zip(outputs, results, strict=True):
        collectives.write(result, local(output, "Output"))
    return outputs, _torch.done()


def alltoall_base_(
    output: Any, input: Any, group: Any, output_split_sizes: Any, input_split_sizes: Any,
    *more: Any, **options: Any,
) -> Any:  # fmt: skip
    splits = {
        "output_split_sizes": list(output_split_sizes or ()),
        "input_split_sizes": list(input_split_sizes or ()),
    }
    _into(output, "all_to_all_single", input, group, **splits)
    return _torch.done()


def barrier(tensor: Any, group: Any, *more: Any, **options: Any) -> Any:
    local(tensor)  # all ranks are here
    return _torch.done()


def monitored_barrier_(tensor: Any, group: Any, *more: Any, **options: Any) -> None:
    local(tensor)


def check_for_nan(tensor: Any) -> None:
    bad = [r for r, t in local(tensor)._tensors().items() if bool(t.isnan().any())]
    if bad:
        raise RuntimeError(f"NaN on ranks {bad}")


# ---- messages: the threads of a LocalRunnerMode exchange them


def _peer(group: Any, rank: int, peer: int) -> int:
    """The global rank of a peer in the group of ``rank``."""
    for g in groups.groups_of(_torch.unbox_group(group)):
        if rank in g:
            return g[peer]
    raise AssertionError(f"rank {rank} is in no group of {group}")


def send(tensors: Any, group: Any, dst: int, tag: int) -> Any:
    x = local(_only(tensors))
    source = int(x.__src_rank__)
    runner.LocalRunnerMode.current()._signal_send(
        source, _peer(group, source, dst), x._tensors()[source].clone(), tag
    )
    return _torch.done()


def recv_(tensors: Any, group: Any, src: int, tag: int) -> Any:
    receive = receiving(_only(tensors), group, src, tag)

    def wait(timeout: timedelta) -> bool:
        receive()
        return True

    return _torch.boxed(_torch.PythonCallbackWork(wait))


def receiving(tensor: Any, group: Any, src: int, tag: int) -> Callable[[], None]:
    """What waits for a message (from anybody, if ``src`` is -1) and writes it to the tensor."""
    x = local(tensor)
    here = int(x.__src_rank__)
    source = src if src == -1 else _peer(group, here, src)

    def store(obj: Any) -> None:
        if not isinstance(obj, Tensor):
            raise AssertionError("Expected to receive a Tensor")
        x._tensors()[here].copy_(obj)

    return lambda: runner.LocalRunnerMode.current()._wait_recv(source, here, store, tag)


def recv_any_source_(tensors: Any, group: Any, tag: int) -> Any:
    return recv_(tensors, group, -1, tag)


def _attach_rank(tensor: Any, rank: int) -> Any:
    """The local tensor, marked with the rank that sends or receives it."""
    if not isinstance(tensor, LocalTensor) and hasattr(tensor, "_local_tensor"):
        tensor = tensor._local_tensor  # of a DTensor
    tensor.__src_rank__ = rank
    return tensor


def local_p2p_op(dst: torch.SymInt, tensor: Tensor, op: Callable[[Tensor, int], Any]) -> list[Any]:
    """Make a point-to-point call (dist.isend, dist.irecv, ...) for each rank of ``dst``.

    ``dst`` is an int of each rank: the peer of that rank. Returns the works, for ``wait_all``.
    """
    _torch.check_p2p_op(op)
    if not isinstance(dst.node, LocalIntNode):
        raise AssertionError(
            "Expected 'dst' to be a LocalIntNode where the value is the destination rank and key "
            "is the source rank"
        )
    return [op(_attach_rank(tensor, s), d) for s, d in dst.node._local_ints.items()]


def wait_all(work: Any) -> None:
    """Wait for one Work, or for all of a list; None is complete."""
    works = work if isinstance(work, list) else [work]
    for w in works:
        if w is not None:
            w.wait()


OPS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        allreduce_, allreduce_coalesced_, reduce_, broadcast_, _allgather_base_,
        allgather_into_tensor_coalesced_, allgather_, allgather_coalesced_, gather_,
        gather_into_tensor_, scatter_,
        _reduce_scatter_base_, reduce_scatter_tensor_coalesced_, reduce_scatter_, alltoall_,
        alltoall_base_, barrier, monitored_barrier_, check_for_nan, send, recv_,
        recv_any_source_,
    )
}  # fmt: skip
