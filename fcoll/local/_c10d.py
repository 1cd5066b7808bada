"""Messages between ranks of LocalTensors, which the threads of a LocalRunnerMode exchange.

Served as ``torch.distributed._local_tensor._c10d``; collectives are in ``collective_calls.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fcoll.errors import NotInGroup, fail
from fcoll.local import _torch, rank_groups, runner
from fcoll.local.errors import BadRunner
from fcoll.local.ints import LocalIntNode
from fcoll.local.local_tensor import LocalTensor, local

__all__ = ["local_p2p_op", "wait_all"]


def _peer(group: Any, rank: int, peer: int) -> int:
    """The global rank of a peer in the group of ``rank``."""
    for g in rank_groups.groups_of(group):
        if rank in g:
            return g[peer]
    raise NotInGroup(rank=rank, ranks=group)


def refuse(call: str) -> None:
    """All ranks would make it at once, and a message has one rank that sends and one that gets."""
    what = f"{call} of a LocalTensor has another peer on each rank"
    hint = "Pass both to local_p2p_op, or use fcoll.permute, which all ranks call."
    fail(BadRunner, what=what, hint=hint)


def _own_rank(call: str, x: LocalTensor) -> int:
    """That of the rank whose message it is."""
    if not hasattr(x, "__src_rank__"):
        refuse(call)
    return int(x.__src_rank__)


def send(tensor: Any, dst: int, tag: int, group: Any) -> None:
    x = local(tensor)
    source = _own_rank("send", x)
    runner.LocalRunnerMode.current()._signal_send(
        source, _peer(group, source, dst), x._tensors()[source].clone(), tag
    )


def receiving(tensor: Any, src: int, tag: int, group: Any) -> Callable[[], None]:
    """What waits for a message (from anybody, if ``src`` is -1) and writes it to the tensor."""
    x = local(tensor)
    here = _own_rank("recv", x)
    source = src if src == -1 else _peer(group, here, src)

    def store(obj: Any) -> None:
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
        hint = "Give an int of each rank, its peer: torch.SymInt(LocalIntNode({rank: peer}))."
        raise BadRunner(what=f"local_p2p_op has one dst={dst} for all ranks", hint=hint)
    return [op(_attach_rank(tensor, s), d) for s, d in dst.node._local_ints.items()]


def wait_all(work: Any) -> None:
    """Wait for one Work, or for all of a list; None is complete."""
    works = work if isinstance(work, list) else [work]
    for w in works:
        if w is not None:
            w.wait()
