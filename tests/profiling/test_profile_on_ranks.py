"""Profiles and traces on simulated ranks: each rank's own calls, or a clear error."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll.errors import NotOnSimulatedRanks
from fcoll.profiling.timers import timers
from fcoll.simulation.group import SimulatedGroup


def test_a_rank_has_its_own_calls():
    def run(rank):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.ones(4, requires_grad=True)
        with fcoll.profile() as p:
            fcoll.all_reduce(x, "sum", mesh["tp"]).sum().backward()
            dist.all_reduce(torch.ones(8))
            if rank == 1:
                dist.send(torch.ones(2), 3)
            elif rank == 3:
                dist.recv(torch.ones(2), 1)
            work = dist.all_gather_single(torch.ones(8), torch.ones(2), async_op=True)
            work.wait()
            dist.barrier()
        assert all(c.waits == 1 for c in p.calls if c.way == "c10d")
        assert "simulated ranks take turns" in str(p)
        return [(c.op, c.group.n, c.bytes, c.phase, c.way) for c in p.calls]

    found = fcoll.simulate_ranks(run, 4)
    first = [
        ("all_reduce", 2, 16, "fwd", "op"),
        ("all_reduce", 2, 16, "bwd", "op"),
        ("all_reduce_", 4, 32, "fwd", "c10d"),
    ]
    last = [("all_gather_into_tensor_out", 4, 32, "fwd", "c10d"), ("barrier", 4, 0, "fwd", "c10d")]
    assert found[0] == found[2] == [*first, *last]
    assert found[1] == [*first, ("isend", 4, 8, "fwd", "c10d"), *last]
    assert found[3] == [*first, ("irecv", 4, 8, "fwd", "c10d"), *last]


def test_a_profile_around_the_simulation_has_all():
    with fcoll.profile() as p:
        fcoll.simulate_ranks(lambda rank: dist.all_reduce(torch.ones(2)), 3)
    assert [c.op for c in p.calls] == ["all_reduce_"] * 3


def test_nothing_is_left_after_a_failure():
    method = SimulatedGroup.allreduce

    def run(rank):
        with fcoll.profile():
            dist.all_reduce(torch.ones(2))
            if rank == 1:
                raise ValueError("in the block")
            dist.barrier()

    for _ in range(2):
        with pytest.raises(ValueError, match="rank 1: ValueError: in the block"):
            fcoll.simulate_ranks(run, 3)
        assert not timers.listeners and SimulatedGroup.allreduce is method


def test_lines_of_the_backward_pass_are_the_ranks_own():
    """Autograd counts its nodes in each thread: the numbers of two ranks are the same."""

    def one(x):
        return fcoll.all_reduce(x)

    def other(x):
        return fcoll.all_reduce(x)

    def run(rank):
        x = torch.ones(2, requires_grad=True)
        with fcoll.profile() as p:
            y = one(x) if rank == 0 else other(x)
            dist.barrier()
            y.sum().backward()
        forward, _, backward = p.calls
        assert (forward.phase, backward.phase) == ("fwd", "bwd")
        assert forward.source == backward.source
        return forward.source

    assert len(set(fcoll.simulate_ranks(run, 2))) == 2


def test_a_trace_of_functional_collectives():
    def run(rank):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.ones(4, requires_grad=True)

        def step(x):
            y = fcoll.all_reduce(x * rank, "sum", mesh["tp"])
            return fcoll.all_gather_into_tensor(y, mesh["dp"]).sum()

        traced = fcoll.trace(step, x)
        assert x.grad is None and traced.rank == rank
        return [(c.op, c.axis, c.n, c.bytes, c.phase) for c in traced.collectives], step(x)

    found = fcoll.simulate_ranks(run, 4)
    assert len({str(calls) for calls, _ in found}) == 1
    assert found[0][0] == [
        ("all_reduce", "tp", 2, 16, "fwd"),
        ("all_gather_into_tensor", "dp", 2, 32, "fwd"),
        ("reduce_scatter_tensor", "dp", 2, 32, "bwd"),
        ("all_reduce", "tp", 2, 16, "bwd"),
    ]
    assert [value.item() for _, value in found] == [24.0] * 4


@pytest.mark.parametrize(
    "call",
    [
        lambda x: dist.all_reduce(x),
        lambda x: dist.barrier(),
        lambda x: dist.send(x, 1 - dist.get_rank()),
    ],
    ids=["all_reduce", "barrier", "send"],
)
def test_a_trace_of_c10d_calls_exchanges_nothing(call):
    def run(rank):
        traced = fcoll.trace(lambda x: call(x.clone()), torch.ones(2))
        assert len(traced.collectives) == 1
        x = torch.ones(2)
        dist.all_reduce(x)
        return x.tolist()

    assert fcoll.simulate_ranks(run, 2) == [[2.0, 2.0]] * 2


def test_a_fake_world_is_refused():
    def run(rank):
        with (
            pytest.raises(NotOnSimulatedRanks, match=r"outside fcoll\.simulate_ranks"),
            fcoll.fake_world(tp=2),
        ):
            pass
        return dist.get_world_size()

    assert fcoll.simulate_ranks(run, 2) == [2, 2]
