"""Messages between two ranks (isend, irecv, batch_p2p_ops), the barrier and the wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.errors import BadOption, MismatchedLists, NoGradient, fail
from fcoll.groups import by_name, check_device, group_size
from fcoll.table import stacks, wire
from fcoll.table.checks import check_list, check_rank
from fcoll.table.partition import Partition
from fcoll.table.row import Call, Collective, Native, Shape, declare, torch_ops
from fcoll.table.shapes import nothing, same
from fcoll.transport.carriers import Then, carrier_of, carrier_of_pairs, issued
from fcoll.transport.messages import PLAIN, TAGS
from fcoll.transport.protocol import Transfer


def _no_gradient(grad: object, a: Call) -> Tensor:
    raise NoGradient(
        op=a.op,
        why="its peer could not know that a gradient must be sent back, and would hang",
        hint="Use permute, scatter or all_to_all_single, which every rank of the group calls.",
    )


def _no_peers(op: str) -> Callable[..., Any]:
    return stacks.no_rule(
        op,
        why="stacked ranks make one call, and a message has another peer on each rank",
        hint="Use permute, which names all of them, or fcoll.simulate_ranks.",
    )


def _check_tag(op: str, tag: int) -> None:
    if not 0 <= (tag - PLAIN if tag >= PLAIN else tag) < TAGS:
        fail(BadOption, op=op, arg="tag", value=tag, known=f"0 to {TAGS - 1}")


# -- isend, irecv ---


def _transfer(name: str, peer: str, shape: Callable[..., Shape]) -> Collective:
    """The row of one message, to or from a rank, which the argument ``peer`` names."""

    def check(tensor: Tensor, rank: int, tag: int, group_name: str) -> None:
        check_device(name, tensor.device.type, group_name)
        check_rank(name, peer, rank, group_name)
        _check_tag(name, tag)

    def run(tensor: Tensor, rank: int, tag: int, group_name: str) -> Tensor:
        return _run_batch([name], [rank], [tag], [tensor], group_name)[0]

    return Collective(
        name,
        f"(Tensor tensor, int {peer}, int tag, str group_name) -> Tensor",
        check=check,
        shape=shape,
        run=run,
        adjoint=_no_gradient,
        stacked=_no_peers(name),
        wire_bytes=wire.everything,
        steps=wire.one,
        personal=True,
        is_p2p=True,
        targets=torch_ops(name),
        side_effect=True,
    )


ISEND = _transfer("isend", "dst", nothing)
IRECV = _transfer("irecv", "src", same)


# -- batch_p2p_ops: many of both at once ---


def _check_batch(
    op: str, op_list: Sequence[str], peer_list: Sequence[int], tag_list: Sequence[int],
    tensors: Sequence[Tensor], group_name: str,
) -> None:  # fmt: skip
    lengths = [len(op_list), len(peer_list), len(tag_list), len(tensors)]
    if len(set(lengths)) != 1:
        why = f"{lengths[0]} ops, {lengths[1]} peers, {lengths[2]} tags, {lengths[3]} tensors"
        fail(MismatchedLists, op=op, why=why, hint="Give one of each for every transfer.")
    check_list(op, tensors)
    check_device(op, tensors[0].device.type, group_name)
    for name, peer, tag in zip(op_list, peer_list, tag_list, strict=True):
        _check_tag(op, tag)
        if name not in ("isend", "irecv"):
            fail(BadOption, op=op, arg="op", value=name, known="isend, irecv")
        check_rank(op, "peer", peer, group_name)


def _batch_shape(op_list: Sequence[str], tensors: Sequence[Tensor]) -> list[Shape]:
    return [[0] if op == "isend" else list(x.shape) for op, x in zip(op_list, tensors, strict=True)]


def _run_batch(
    op_list: Sequence[str], peer_list: Sequence[int], tag_list: Sequence[int],
    tensors: Sequence[Tensor], group_name: str,
) -> list[Tensor]:  # fmt: skip
    """A received tensor is new, of the shape of the one given; a send gives an empty token."""
    g = by_name(group_name)
    outs, transfers = [], []
    for name, peer, tag, x in zip(op_list, peer_list, tag_list, tensors, strict=True):
        sends = name == "isend"
        buf = x.contiguous() if sends else x.new_empty(x.shape)
        outs.append(x.new_empty(0) if sends else buf)
        transfers.append(Transfer(sends, buf, peer, tag))
    works = carrier_of_pairs(g).transfer(transfers, g)
    work = works[0] if len(works) == len(outs) == 1 else Then(works)
    return [issued(out, work) for out in outs]


BATCH_P2P_OPS = declare(
    "batch_p2p_ops",
    "(str[] op_list, int[] peer_list, int[] tag_list, Tensor[] tensors, str group_name)"
    " -> Tensor[]",
    check=_check_batch,
    shape=_batch_shape,
    run=_run_batch,
    adjoint=_no_gradient,
    stacked=_no_peers("batch_p2p_ops"),
    wire_bytes=wire.everything,
    steps=wire.one,
    personal=True,
    is_p2p=True,
    targets=torch_ops("batch_p2p_ops"),
    side_effect=True,
)


# -- barrier ---


def _check_barrier(group_name: str) -> None:
    group_size(group_name)  # there is such a group


def _run_barrier(group_name: str) -> Tensor:
    g = by_name(group_name)
    token = torch.empty(0)
    return token if g.n == 1 else issued(token, carrier_of(g, token.device).barrier(g))


def _stacked_barrier(xs_W: None, args: stacks.Args, groups: Partition) -> Tensor:
    return torch.empty(Partition.of(groups).world, 0)


BARRIER = Collective(
    "barrier",
    "(str group_name) -> Tensor",
    check=_check_barrier,
    shape=nothing,
    run=_run_barrier,
    adjoint=None,
    stacked=_stacked_barrier,
    wire_bytes=wire.nothing,
    steps=wire.twice_n_minus_1,
    side_effect=True,
    native=Native(fast=("group",)),
)


# -- wait_tensor ---


def _check_wait(tensor: Tensor) -> None:
    pass


def _run_wait(tensor: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(tensor)


def _wait_adjoint(grad: Tensor, a: Call) -> Tensor:
    return grad


# It moves nothing and its result is its argument, so it has no kernel of its own: it is torch's
# wait, the one that AOTAutograd's partitioner and Inductor know.
WAIT_TENSOR = Collective(
    "wait_tensor",
    "(Tensor tensor) -> Tensor",
    check=_check_wait,
    shape=same,
    run=_run_wait,
    adjoint=_wait_adjoint,
    stacked=lambda x_W, args, groups: x_W,  # stacked results are complete
    wire_bytes=wire.nothing,
    steps=wire.zero,
    is_wait=True,
    targets=torch_ops("wait_tensor"),
    side_effect=True,
)

ROWS = (ISEND, IRECV, BATCH_P2P_OPS, BARRIER, WAIT_TENSOR)
