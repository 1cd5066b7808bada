"""The ops of c10d (``torch.distributed``'s own collectives) on LocalTensors.

Served as ``torch.distributed._local_tensor._c10d``. Each is the row that ``table/c10d.py`` says, on
all ranks, but for some calls of lists, messages and checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch, collectives, groups, own, runner
from fcoll.local.collectives import Result, local
from fcoll.local.ints import LocalIntNode
from fcoll.local.tensor import LocalTensor, stacked

__all__ = ["local_p2p_op", "wait_all"]


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The op of torch, by its name."""
    from fcoll.table.c10d import OPS  # not at import: this may be served early

    name = func._schema.name.partition("::")[2]
    if name == "check_for_nan":
        return check_for_nan(*args)
    if name not in OPS:
        raise NotImplementedError(f"{func} not implemented")
    if name in _ON_LISTS:
        return _ON_LISTS[name](*args, **kwargs)
    op = OPS[name]
    message = op.read(op.named(args, kwargs), lambda pg: (pg, pg.size()))
    if message.row == "isend":
        send(*message.args)
    elif message.row == "irecv":
        return _receive(*message.args)
    elif message.outs:
        _carry_out(message, may_be_plain=name in _OF_OBJECTS)
    return op.returned(args)


# all_gather_object has one plain tensor for all ranks
_OF_OBJECTS = {"allgather_", *(("_allgather_base_",) if _torch.OBJECTS_IN_ONE_TENSOR else ())}


def _carry_out(message: Any, may_be_plain: bool) -> None:
    from fcoll.table.collectives import COLLECTIVES, functional_row

    row, args, order = functional_row(COLLECTIVES[message.row]), message.args, None
    for out in message.outs[0]:
        order = local(out, "Output")._order
    if may_be_plain and not isinstance(args[0], LocalTensor) and order is not None:
        args = stacked(args[0].expand(len(order), *args[0].shape), order), *args[1:]
    only = None
    if message.root is not None and order is not None:
        group = args[row.position["group_name"]]
        only = [g[message.root] for g in groups.calling(group, order)]
    for result, outs in zip(own.results(row, args, {}), message.outs, strict=True):
        for out, part in zip(outs, collectives.cut(result, outs), strict=True):
            collectives.write(part, out, only, take=len(outs) == 1)


def check_for_nan(tensor: Any) -> None:
    bad = [r for r, t in local(tensor)._tensors().items() if bool(t.isnan().any())]
    if bad:
        raise RuntimeError(f"NaN on ranks {bad}")


# ---- lists: moved from rank to rank; a flat tensor of all, as rows take it, costs 10 times as much


def _only(tensors: Sequence[Any]) -> Any:
    if len(tensors) != 1:
        raise AssertionError(f"one tensor, not {len(tensors)}")
    return tensors[0]


def _groups(group: Any, x: LocalTensor) -> groups.Groups:
    return groups.calling(_torch.unbox_group(group), x._order)


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


_ON_LISTS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn for fn in (gather_, scatter_, reduce_scatter_, alltoall_)
}


# ---- messages: the threads of a LocalRunnerMode exchange them


def _peer(group: Any, rank: int, peer: int) -> int:
    """The global rank of a peer in the group of ``rank``."""
    for g in groups.groups_of(group):
        if rank in g:
            return g[peer]
    raise AssertionError(f"rank {rank} is in no group of {group}")


def send(tensor: Any, dst: int, tag: int, group: Any) -> None:
    x = local(tensor)
    source = int(x.__src_rank__)
    runner.LocalRunnerMode.current()._signal_send(
        source, _peer(group, source, dst), x._tensors()[source].clone(), tag
    )


def _receive(tensor: Any, src: int, tag: int, group: Any) -> Any:
    receive = receiving(tensor, src, tag, group)

    def wait(timeout: timedelta) -> bool:
        receive()
        return True

    return _torch.boxed(_torch.PythonCallbackWork(wait))


def receiving(tensor: Any, src: int, tag: int, group: Any) -> Callable[[], None]:
    """What waits for a message (from anybody, if ``src`` is -1) and writes it to the tensor."""
    x = local(tensor)
    here = int(x.__src_rank__)
    source = src if src == -1 else _peer(group, here, src)

    def store(obj: Any) -> None:
        if not isinstance(obj, Tensor):
            raise AssertionError("Expected to receive a Tensor")
        x._tensors()[here].copy_(obj)

    return lambda: runner.LocalRunnerMode.current()._wait_recv(source, here, store, tag)


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
