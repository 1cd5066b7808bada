"""fcoll.check finds seeded faults, with their ranks and lines, and nothing in right programs."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch
import torch.distributed as dist
from faults import FAULTS

import fcoll
from fcoll.checking.check import check
from fcoll.cli.demos import DEMOS
from fcoll.errors import BadMesh, CheckMismatch, Deadlock
from fcoll.tracing import workers

MESHES = {
    "tiny": {"dp": 2, "tp": 2},
    "tiny-sp": {"dp": 2, "tp": 2},
    "tiny-ddp": {"dp": 2, "tp": 2},
    "tiny-moe": {"ep": 4},
    "tiny-pipeline": {"pp": 4},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_fault_is_found(fault):
    with pytest.raises(fault.error) as raised:
        check(fault.build, fault.mesh)
    error = raised.value
    assert type(error) is fault.error
    assert fault.says in str(error)
    lines = [fault.line("a"), fault.line("b") or fault.line("a")]
    assert lines[0] in str(error)
    if not isinstance(error, CheckMismatch):
        assert error.rank == fault.ranks[0]
        return
    assert error.ranks == fault.ranks
    for rank in fault.ranks:
        assert f"rank {rank}" in str(error)
    for call, line in zip(error.calls, lines, strict=False):
        assert call is None or call.source.endswith(line)


def test_other_gradients_are_other_calls():
    """The forward passes send the same; with grad="identity" the backward pass sends nothing."""

    def build(mesh):
        grad = "identity" if mesh.get_rank() else "sum"
        return lambda x: fcoll.all_reduce(x, "sum", mesh, grad=grad), (torch.ones(4),)

    with pytest.raises(CheckMismatch, match="grad differs") as raised:
        check(build, {"tp": 2})
    assert raised.value.ranks == (0, 1) and "all_reduce(sum, grad=identity)" in str(raised.value)


def test_there_are_thirty_faults():
    assert len(FAULTS) >= 30


@pytest.mark.parametrize("name", MESHES)
def test_no_false_alarm(name):
    found = check(DEMOS[name], MESHES[name])
    assert found.ok, str(found)
    assert found.ranks_traced == (0, 1, 2, 3)
    assert found.calls >= 24


def test_no_false_alarm_for_uneven_parts():
    def build(mesh):
        rank = mesh.get_rank()
        sends = [[1, 3], [2, 2]]

        def step(x):
            y = fcoll.all_to_all_single(x, mesh, [row[rank] for row in sends], sends[rank])
            z = fcoll.all_gather_into_tensor(x[: rank + 1], mesh, sizes=[1, 2])
            ring = [("isend", x.detach(), 1 - rank), ("irecv", x.detach(), 1 - rank)]
            return y.sum(), z, fcoll.batch_p2p(ring)[1]

        return step, (torch.ones(4, 4, requires_grad=True),)

    found = check(build, {"ep": 2})
    assert found.ok, str(found)


def test_in_place_and_functional_calls_match():
    """What goes over the wire is the same."""

    def build(mesh):
        def step(x):
            if mesh.get_rank() == 0:
                return fcoll.all_reduce(x, "sum", mesh)
            torch.distributed.all_reduce(x)
            return x

        return step, (torch.ones(4),)

    assert check(build, {"dp": 2}).ok


def test_messages_in_any_order_do_not_deadlock():
    def build(mesh):
        rank, n = mesh.get_rank(), mesh.size()

        def step(x):
            token = fcoll.isend(x, (rank + 1) % n, mesh)
            y = fcoll.irecv(x, (rank - 1) % n, mesh)
            fcoll.wait_tensor(token)
            return y

        return step, (torch.ones(4),)

    assert check(build, {"pp": 5}).ok


# -- findings ---


def test_never_waited():
    def build(mesh):
        name = fcoll.groups.resolve(mesh).name

        def step(x):
            torch.ops._c10d_functional.all_reduce(x, "sum", name)
            return x * 2

        return step, (torch.ones(4),)

    found = check(build, {"tp": 2})
    assert not found.ok
    assert [f.rank for f in found.findings] == [0, 1]
    assert "is never waited for" in str(found) and "test_check.py" in str(found)


def test_used_without_a_wait():
    def build(mesh):
        name = fcoll.groups.resolve(mesh).name

        def step(x):
            return torch.ops._c10d_functional.all_reduce(x, "sum", name) * 2

        return step, (torch.ones(4),)

    assert {f.what for f in check(build, {"tp": 2}).findings} == {"is used without a wait"}


def test_result_never_used():
    def build(mesh):
        def step(x):
            fcoll.all_reduce(x, "sum", mesh)
            return x * 2

        return step, (torch.ones(4),)

    found = check(build, {"tp": 2}).findings
    assert {f.what for f in found} == {"gives a result that nobody uses"}


# -- who is traced ---


def test_peers_of_messages_are_traced_too():
    def build(mesh):
        rank, n = mesh.get_rank(), mesh.size()

        def step(x):
            ring = [("isend", x, (rank + 1) % n), ("irecv", x, (rank - 1) % n)]
            return fcoll.batch_p2p(ring, mesh)[1]

        return step, (torch.ones(4),)

    seen = []
    found = check(build, {"pp": 20}, progress=lambda done, of: seen.append((done, of)))
    assert found.ranks_traced == tuple(range(20))
    assert seen[-1] == (20, 20)
    assert check(build, {"pp": 20}, ranks=[3]).all_ranks  # one after the other


def test_result_says_what_was_proved():
    def build(mesh):
        return lambda x: fcoll.all_reduce(x, "sum", (mesh, "dp")), (torch.ones(4),)

    few, many = check(build, {"dp": 2, "tp": 2}), check(build, {"dp": 64, "tp": 16})
    assert "all 4 ranks" in str(few) and few.groups == 2 and few.calls == 4
    assert "proved for all 1024 ranks" in str(many) and many.ranks_traced == (0,)


def test_ranks_can_be_named():
    def build(mesh):
        return lambda x: fcoll.all_reduce(x[mesh.get_rank() // 9 :], "sum", mesh), (torch.ones(4),)

    found = check(build, {"dp": 100}, ranks=[0, 1, 2])
    assert found.ranks_traced == (0, 1, 2) and "3 of 100 ranks, those traced" in str(found)
    assert check(build, {"dp": 9}, ranks="all").all_ranks
    with pytest.raises(CheckMismatch):
        check(build, {"dp": 100}, ranks=[0, 10])
    with pytest.raises(BadMesh):
        check(build, {"dp": 2}, ranks=[2])


def exchange(mesh, how):
    """Two ranks that send to each other, by torch.distributed."""
    rank, peer = mesh.get_rank(), 1 - mesh.get_rank()

    def step(x):
        y = torch.empty_like(x)
        if how == "both send first":
            dist.send(x, peer)
            dist.recv(y, peer)
        elif how == "one sends first":
            first, second = (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send)
            first(x if rank == 0 else y, peer)
            second(y if rank == 0 else x, peer)
        elif how == "both wait later":
            sent = dist.isend(x, peer)
            dist.recv(y, peer)
            sent.wait()
        else:  # both receive first
            dist.recv(y, peer)
            dist.send(x, peer)
        return y * 2

    return step, (torch.ones(4),)


@pytest.mark.parametrize(
    ("how", "way_out"),
    [("both send first", "Let one receive first"), ("both receive first", "Send first")],
)
def test_blocking_messages_that_wait_for_each_other(how, way_out):
    with pytest.raises(Deadlock, match=way_out) as raised:
        check(lambda mesh: exchange(mesh, how), {"pp": 2})
    assert raised.value.ranks == (0, 1)


@pytest.mark.parametrize("how", ["one sends first", "both wait later"])
def test_blocking_messages_that_meet(how):
    assert check(lambda mesh: exchange(mesh, how), {"pp": 2}).ok


@pytest.fixture
def forks(monkeypatch):
    """Every trace is taken for long, so that all but the first are shared out to processes."""
    monkeypatch.setattr(workers, "LONG_S", 0.0)
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})


def ring(mesh):
    rank, n = mesh.get_rank(), mesh.size()

    def step(x):
        fcoll.all_reduce(x, "sum", mesh)  # nobody uses it
        return fcoll.batch_p2p([("isend", x, (rank + 1) % n), ("irecv", x, (rank - 1) % n)], mesh)

    return step, (torch.ones(4),)


def test_forks_find_the_same(forks, request):
    processes = []

    def build(mesh):
        processes.append(os.getpid())
        return ring(mesh)

    shared_out = check(build, {"pp": 20}, ranks="all")
    assert len(processes) < 20 and set(processes) == {os.getpid()}  # the rest in forks
    request.getfixturevalue("monkeypatch").undo()
    assert check(build, {"pp": 20}) == shared_out
    assert len(shared_out.findings) == 20
    assert not multiprocessing.active_children()


def test_a_rank_that_its_fork_does_not_trace_is_traced_here(forks):
    me = os.getpid()

    def build(mesh):
        if os.getpid() != me and mesh.get_rank() == 7:
            os._exit(1)
        return ring(mesh)

    assert check(build, {"pp": 9}).ranks_traced == tuple(range(9))


def test_an_error_in_a_fork_is_raised_here(forks):
    def build(mesh):
        size = 3 if mesh.get_rank() >= first else 8
        return lambda x: fcoll.reduce_scatter_tensor(x, "sum", mesh), (torch.ones(size),)

    for first in range(8):  # the others that have one are traced at the same time
        with pytest.raises(fcoll.errors.UnevenShard) as raised:
            check(build, {"dp": 8})
        assert raised.value.rank == first
    assert not multiprocessing.active_children()


def test_sizes_of_tensors_made_of_a_rank_are_asked_of_all_ranks():
    """As Megatron's vocabulary is cut: torch takes ints for sizes. Not every rank is traced."""

    def build(mesh):
        rank, n = dist.get_rank(mesh.get_group()), mesh.size()
        first, last = rank * 96 // n, (rank + 1) * 96 // n
        table = torch.randn(last - first, 4)

        def step(tokens):
            rows = table.new_zeros(last - first, 4) + table.view(last - first, 4)
            return fcoll.all_reduce(rows.sum(0) + tokens, "sum", mesh)

        return step, (torch.ones(4),)

    result = check(build, {"tp": 48})
    assert result.ok and len(result.ranks_traced) < 5
    assert "proved for all 48 ranks" in str(result)
