"""Functional messages between the threads of a LocalRunnerMode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from local.worlds import fake_world

from fcoll.local import LocalRunnerMode, LocalTensorMode, rank_map

ops = torch.ops._c10d_functional
W = 4


def of_rank(x, rank):
    """The tensor, marked with the rank that sends or receives it."""
    x.__src_rank__ = rank
    return x


def exchange(stage, batched):
    """Ranks 0 and 2 (stage 0), 1 and 3 (stage 1): each gets its neighbour's number."""
    mine, name = frozenset({stage, stage + 2}), dist.group.WORLD.group_name
    with LocalTensorMode(mine):
        x = rank_map(lambda r: torch.full((2,), float(r)))
        out = torch.zeros(2)
        for r in sorted(mine):
            sent, got, peer = of_rank(x, r), of_rank(out, r), r ^ 1
            if batched:
                ops.batch_p2p_ops(["irecv", "isend"], [peer] * 2, [0, 0], [got, sent], name)
            else:  # the receive first: it must not wait yet
                ops.irecv(got, peer, 0, name)
                ops.isend(sent, peer, 0, name)
        return ops.wait_tensor(out)


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "batched"])
def test_messages(batched):
    found = {}

    def run(stage):
        found.update(exchange(stage, batched)._local_tensors)

    with fake_world(W), LocalRunnerMode(W, 2, run):
        pass
    assert {r: t.tolist() for r, t in found.items()} == {r: [float(r ^ 1)] * 2 for r in range(W)}


def test_a_message_that_never_comes_is_an_error():
    def run(stage):
        with LocalTensorMode(frozenset({stage})):
            x = of_rank(torch.zeros(1), stage)
            ops.wait_tensor(ops.irecv(x, 1 - stage, 0, dist.group.WORLD.group_name))

    with fake_world(2), pytest.raises(RuntimeError, match="deadlock"), LocalRunnerMode(2, 2, run):
        pass
