"""Inductor's own comm buffers on CPU: stock torch knows them on CUDA only."""

from __future__ import annotations

import contextlib
import re
import shutil
import warnings

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._inductor.utils import run_and_get_code

import inductor_ext
from fcoll.transport.native import build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
WORLD = "0"
c10d, symm = torch.ops._c10d_functional, torch.ops.symm_mem


@contextlib.contextmanager
def torchs_choice():
    """torch's own switches for one-shot all-reduces, with inductor_ext installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates it, and asks for it
        symm_mem.enable_symm_mem_for_group(WORLD)
    inductor_ext.install()
    try:
        with inductor_config.patch({"_collective.auto_select": True}):
            yield
    finally:
        inductor_ext.uninstall()


def inputs(rank, *shape):
    """This rank's tensor, and those of all ranks."""
    parts = torch.randn(dist.get_world_size(), *shape, generator=torch.Generator().manual_seed(1))
    return parts[rank].clone(), parts


def compiled(fn, *args):
    """The result of a second call, and the code."""
    torch._dynamo.reset()
    step = torch.compile(fn, fullgraph=True)
    _, [code] = run_and_get_code(step, *args)
    return step(*args), code


def allocations(code):
    return re.findall(r"(\w+) = empty_strided_p2p\(.*torch\.device\(\"cpu\"\)", code)


def all_reduce(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", WORLD))


def torchs_all_reduces(rank):
    x, parts = inputs(rank, 4, 4)
    programs = {
        "pointwise": (lambda x: all_reduce(x + 1), lambda p: p + 1, True),
        "slice": (lambda x: all_reduce((x + 1)[2:]), lambda p: (p + 1)[:, 2:], True),
        "matmul": (lambda x: all_reduce(x @ x), lambda p: p @ p, True),
        "input": (lambda x: all_reduce(x), lambda p: p, False),
    }
    with torchs_choice():
        for name, (program, part, one_shot) in programs.items():
            out, code = compiled(program, x)
            torch.testing.assert_close(out, part(parts).sum(0), msg=name)
            assert ("one_shot_all_reduce" in code) == one_shot, (name, code)
            assert len(allocations(code)) == one_shot, (name, code)
            assert "return (buf0" not in code or not one_shot
        large = torch.ones(200, 200)  # above torch's limit
        out, code = compiled(lambda x: all_reduce(x + 1), large)
        assert "one_shot_all_reduce" not in code and out.eq(4).all()


def test_torchs_switch_lowers_all_reduces_to_one_shot(shared2):
    shared2.run(torchs_all_reduces, timeout=300)


def symmetric_ops(rank):
    x, parts = inputs(rank, 8, 8)
    w, v = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(2))

    def both(x, w):  # two that are alive at once
        a = x @ w
        b = a @ w
        return symm.one_shot_all_reduce(a, "sum", WORLD) + symm.one_shot_all_reduce(b, "sum", WORLD)

    def chain(x, w, v):  # one after the other: the second is where the first was
        a = symm.one_shot_all_reduce(x @ w, "sum", WORLD)
        return symm.one_shot_all_reduce((a @ v) @ w, "sum", WORLD)

    def scaled(x, w):  # not in place of the matmul's result, which is ordinary memory
        return symm.one_shot_all_reduce((x @ w) * 2, "sum", WORLD)

    def multimem(x):
        return symm.multimem_one_shot_all_reduce(x + 1, "sum", WORLD)

    n = len(parts)
    want = {
        both: ((x, w), ((parts @ w) + (parts @ w @ w)).sum(0), 2),
        chain: ((x, w, v), n * ((parts @ w).sum(0) @ v @ w), 1),
        scaled: ((x, w), 2 * (parts @ w).sum(0), 1),
        multimem: ((x,), (parts + 1).sum(0), 1),
        lambda x: symm.one_shot_all_reduce(x, "sum", WORLD): ((x,), parts.sum(0), 1),
    }
    with torchs_choice():
        for program, (args, expected, count) in want.items():
            out, code = compiled(program, *args)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
            assert len(allocations(code)) == count, code


def test_ops_of_symmetric_memory_have_comm_buffers(shared2):
    shared2.run(symmetric_ops, timeout=300)


def copied(rank):
    """A buffer that the program made, and ordinary input for it."""
    x, parts = inputs(rank, 8, 8)
    buffer = symm_mem.empty(8, 8, device="cpu")
    symm_mem.rendezvous(buffer, WORLD)

    def program(buffer, x):
        return symm.one_shot_all_reduce_copy(buffer, x @ x, "sum", WORLD)

    with torchs_choice():
        out, code = compiled(program, buffer, x)
    torch.testing.assert_close(out, (parts @ parts).sum(0), rtol=1e-4, atol=1e-4)
    assert "one_shot_all_reduce_copy_out" in code and ", out=" in code


def of_a_users_op(rank):
    """torch's registration of arguments that must be in symmetric memory."""
    library = torch.library.Library("fcoll_comm_buffers", "DEF")
    library.define("mine(Tensor input, str group_name) -> Tensor")
    library.register_symm_mem_args("mine", ["input"])
    library.impl("mine", lambda x, group: torch.empty_like(x), "Meta")

    def kernel(x, group):
        assert symm_mem.is_symm_mem_tensor(x)
        return x.clone()

    library.impl("mine", kernel, "CPU")
    with torchs_choice():
        out, code = compiled(
            lambda x: torch.ops.fcoll_comm_buffers.mine(x + 1, WORLD), torch.ones(4)
        )
    assert out.tolist() == [2] * 4 and len(allocations(code)) == 1
    library._destroy()


def test_buffers_and_ops_of_users(shared2):
    shared2.run(copied, timeout=200)
    shared2.run(of_a_users_op, timeout=200)


def ids(rank):
    """A graph has the same memory whenever it is compiled, and another one than other graphs."""
    found = []
    with torchs_choice(), inductor_config.patch(fx_graph_cache=False):
        for n in (4, 8, 4):
            x, parts = inputs(rank, n, n)
            out, code = compiled(lambda x: symm.one_shot_all_reduce(x + 1, "sum", WORLD), x)
            torch.testing.assert_close(out, (parts + 1).sum(0))
            found += re.findall(r"alloc_id=(\d+)", code)
    return found


def test_memory_of_comm_buffers_is_the_same_on_all_ranks(shared2):
    first, second = shared2.run(ids, timeout=300)
    assert first == second and first[0] == first[2] != first[1]


def uninstalled(rank):
    assert build.load() == ""
    with torchs_choice():
        pass
    with pytest.raises(Exception, match=r"requires a valid (CUDA|accelerator) device"):
        compiled(lambda x: symm.one_shot_all_reduce(x + 1, "sum", WORLD), torch.ones(4))


def test_uninstall_gives_torch_back_its_own(shared2):
    shared2.run(uninstalled, timeout=120)
