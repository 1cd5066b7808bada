"""simulate_ranks: torch.distributed on ranks that are threads; nothing is left of it afterwards."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fcoll
from fcoll.errors import Deadlock, RankFailed, RanksTimeout


def total(rank):
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    return x.tolist()


def test_results_are_in_rank_order():
    assert fcoll.simulate_ranks(lambda rank: (rank, *total(rank)), 4) == [
        (rank, 6.0, 6.0) for rank in range(4)
    ]


def test_torch_distributed_serves_the_threads_rank():
    def fn(rank):
        return dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend()

    assert fcoll.simulate_ranks(fn, 3) == [(True, rank, 3, "gloo") for rank in range(3)]


@pytest.mark.parametrize("init", ["gloo", "nccl", None, "cpu:gloo,cuda:nccl"])
def test_a_program_makes_its_world_and_destroys_it(init):
    def fn(rank):
        dist.init_process_group(init)
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group(init)
        found = total(rank)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group(init, init_method="env://")
        again = total(rank)
        dist.destroy_process_group()
        return found, again

    assert fcoll.simulate_ranks(fn, 3) == [([3.0, 3.0], [3.0, 3.0])] * 3


def test_a_program_reads_torchruns_variables():
    def fn(rank):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        dist.barrier()  # the others have run meanwhile
        return [int(os.environ[name]) for name in names]

    before = dict(os.environ)
    assert fcoll.simulate_ranks(fn, 3) == [[rank, rank, 3] for rank in range(3)]
    assert dict(os.environ) == before


def test_an_init_for_another_rank_is_an_error():
    def fn(rank):
        dist.init_process_group("gloo", rank=0, world_size=2)

    with pytest.raises(fcoll.errors.BadOption, match=r"^rank 1: .*rank=0.*Use one of 1"):
        fcoll.simulate_ranks(fn, 2)


def test_fcolls_calls_run_unchanged():
    def fn(rank):
        x = torch.full((2,), float(rank), requires_grad=True)
        y = fcoll.all_reduce(x * x)
        y.sum().backward()
        assert str(fcoll.symm_mem.status()).endswith("simulated")
        return y.tolist(), x.grad.tolist()

    # d(sum over ranks of the sum of y) / dx = 2x for each of 3 ranks
    want = [([5.0, 5.0], [6.0 * rank] * 2) for rank in range(3)]
    assert fcoll.simulate_ranks(fn, 3) == want


def test_a_returned_result_is_complete():
    results = fcoll.simulate_ranks(lambda rank: {"y": fcoll.all_reduce(torch.ones(2))}, 3)
    assert [type(r["y"]) for r in results] == [torch.Tensor] * 3
    assert [r["y"].tolist() for r in results] == [[3.0, 3.0]] * 3


def test_groups():
    def fn(rank):
        pair = dist.new_group([0, 2])
        x = torch.tensor([float(rank)])
        if rank in (0, 2):
            dist.all_reduce(x, group=pair)
        halves, _ = dist.new_subgroups(2)
        y = torch.tensor([float(rank)])
        dist.all_reduce(y, group=halves)
        part = dist.split_group(split_ranks=[[0, 1, 3], [2]])
        z = torch.tensor([float(rank)])
        dist.all_reduce(z, group=part)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        w = fcoll.all_reduce(torch.tensor([float(rank)]), "sum", (mesh, "dp"))
        v = fcoll.all_reduce(x, "sum", [3, 1]) if rank in (1, 3) else x
        return [t.item() for t in (x, y, z, w, v)]

    assert fcoll.simulate_ranks(fn, 4) == [
        [2.0, 1.0, 4.0, 2.0, 2.0],
        [1.0, 1.0, 4.0, 4.0, 4.0],
        [2.0, 5.0, 2.0, 2.0, 2.0],
        [3.0, 5.0, 4.0, 4.0, 4.0],
    ]


# -- errors ---


def test_the_error_of_a_rank_is_raised_with_its_number():
    unwound = []

    def fn(rank):
        try:
            if rank == 2:
                raise KeyError("lost")
            dist.barrier()
        finally:
            unwound.append(rank)

    with pytest.raises(RankFailed, match=r"^rank 2: KeyError: 'lost'") as caught:
        fcoll.simulate_ranks(fn, 4)
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.rank == 2
    assert unwound == [2, 0, 1]  # rank 3 had not begun
    assert fcoll.simulate_ranks(total, 2) == [[1.0, 1.0]] * 2


def test_a_deadlock_names_ranks_and_lines():
    def fn(rank):
        dist.recv(torch.zeros(2), 1 - rank)

    with pytest.raises(Deadlock) as caught:
        fcoll.simulate_ranks(fn, 2)
    line = f"{os.path.relpath(__file__)}:{fn.__code__.co_firstlineno + 1}"
    for rank in range(2):
        want = f'rank {rank} waits in recv(2 float32) from rank {1 - rank} on "world" at {line}'
        assert want in str(caught.value)
    assert caught.value.ranks == (0, 1)


def test_a_loop_ends_with_the_timeout():
    def fn(rank):
        while rank == 1:
            time.perf_counter()

    with pytest.raises(RanksTimeout, match=r"did not end in 0\.2 s.*: rank 1 was running, at"):
        fcoll.simulate_ranks(fn, 2, timeout=0.2)
    assert not any(t.name.startswith("rank ") for t in threading.enumerate())
    assert fcoll.simulate_ranks(total, 2) == [[1.0, 1.0]] * 2


# -- nothing is left ---


def footprint():
    c10d = dist.distributed_c10d
    modules = (c10d, dist, dist.device_mesh)
    names = {f"{m.__name__}.{k}": id(v) for m in modules for k, v in vars(m).items()}
    return names, sys.excepthook, warnings.filters, torch.get_num_threads(), dict(os.environ)


@pytest.mark.parametrize("error", [None, ValueError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_nothing_is_left_patched(error):
    def fn(rank):
        dist.init_process_group("gloo")
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(rank)
        warnings.simplefilter("ignore")
        dist.barrier()
        if error and rank == 1:
            raise error("stop")
        dist.barrier()

    before, state = footprint(), torch.get_rng_state()
    if error:
        with pytest.raises(RankFailed, match=r"^rank 1: "):
            fcoll.simulate_ranks(fn, 3)
    else:
        fcoll.simulate_ranks(fn, 3)
    assert footprint() == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert not dist.is_initialized()


def test_a_warning_is_shown_once(recwarn):
    """Though each rank has filters of its own, which are changed whenever ranks take turns."""
    warnings.simplefilter("default")

    def program(rank):
        for _ in range(3):
            warnings.warn("said", UserWarning, stacklevel=1)
            dist.barrier()

    fcoll.simulate_ranks(program, 2)
    assert [str(w.message) for w in recwarn] == ["said"]


def test_inside_a_real_world(solo):
    x = torch.ones(2)
    assert fcoll.simulate_ranks(total, 3) == [[3.0, 3.0]] * 3
    assert dist.group.WORLD is solo
    dist.all_reduce(x)
    assert fcoll.all_reduce(x).tolist() == [1.0, 1.0]


def test_inside_a_simulated_rank():
    def outer(rank):
        before = dist.get_rank()
        inner = fcoll.simulate_ranks(total, 2 + rank)
        assert dist.get_rank() == before == rank
        return inner, total(rank)

    assert fcoll.simulate_ranks(outer, 2) == [
        ([[1.0, 1.0]] * 2, [1.0, 1.0]),
        ([[3.0, 3.0]] * 3, [1.0, 1.0]),
    ]


# -- what each rank has for itself ---


def test_random_numbers_and_defaults_are_a_ranks_own():
    def fn(rank):
        torch.manual_seed(rank)
        torch.set_default_dtype(torch.float64 if rank else torch.float32)
        found = []
        for _ in range(3):
            found.append(torch.rand(1).item())
            dist.barrier()
        return found, torch.get_default_dtype()

    want = []
    for rank in range(3):
        dtype = torch.float64 if rank else torch.float32
        generator = torch.Generator().manual_seed(rank)
        numbers = [torch.rand(1, generator=generator, dtype=dtype).item() for _ in range(3)]
        want.append((numbers, dtype))
    assert fcoll.simulate_ranks(fn, 3) == want
