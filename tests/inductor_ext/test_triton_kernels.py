"""The Triton kernels on symmetric memory: in the interpreter on real ranks, and compiled for a GPU
that need not be there."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from programs import bits, normal
from programs import compiled as compile_afresh
from ranks import RankPool

import inductor_ext
from fcoll.groups import by_name
from fcoll.transport.native import build
from inductor_ext.lower import cuda, triton_ops

pytestmark = [
    pytest.mark.usefixtures("compiled"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="symmetric memory on CPU needs g++"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]
Tensor = torch.Tensor
WORLD = "0"  # the default group's name
INTERPRETED = {"FCOLL_NATIVE": "1", "TRITON_INTERPRET": "1"}
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
TILE = 2048  # elements of f32 that a block reduces at a time


@pytest.fixture(scope="module")
def interpreted2(compiled: None) -> Iterator[RankPool]:
    with RankPool(2, INTERPRETED) as pool:
        yield pool


@pytest.fixture(scope="module")
def interpreted4(compiled: None) -> Iterator[RankPool]:
    with RankPool(4, INTERPRETED) as pool:
        yield pool


@pytest.fixture(params=["interpreted2", "interpreted4"])
def interpreted(request: pytest.FixtureRequest) -> RankPool:
    return request.getfixturevalue(request.param)


def symmetric(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    assert build.load() == ""
    return symm_mem.empty(*size, dtype=dtype, device="cpu")


def ops() -> Any:
    _share_cores()
    return torch.ops.fcoll_triton


SENT: list[set[int]] = []  # where this rank has put signals, an entry for each meeting


@functools.cache
def _share_cores() -> None:
    """Have a rank that waits in the interpreter let another run: there may be more than cores."""
    from triton.runtime import interpreter

    exchange = interpreter.InterpreterBuilder.create_atomic_rmw

    def exchange_and_yield(self: Any, op: Any, pointers: Any, values: Any, *args: Any) -> Any:
        os.sched_yield()
        if values.data.any():  # it sends
            SENT.append({int(p) for p in pointers.data})
        return exchange(self, op, pointers, values, *args)

    interpreter.InterpreterBuilder.create_atomic_rmw = exchange_and_yield


def every_rank(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What the ranks put in: every rank knows all of it."""
    n = dist.get_world_size()
    return torch.stack([normal(*size, rank=r, seed=seed, dtype=dtype) for r in range(n)])


def reduced(xs: Tensor, op: str) -> Tensor:
    """In rank order, 16-bit floats in f32."""
    total, *others = xs.float() if xs.dtype.itemsize == 2 else xs
    join = {"product": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    for x in others:
        total = join(total, x)
    total = total / len(xs) if op == "avg" else total
    if xs.dtype == torch.bfloat16:  # cut off in the interpreter; rounded on a GPU: cvt.rn below
        total = (total.view(torch.int32) >> 16 << 16).view(torch.float32)
    return total.to(xs.dtype)


# -- values ---


def one_and_two_shot(rank: int, dtype: torch.dtype, op: str, count: int) -> list[bytes]:
    xs = every_rank(count, dtype=dtype)
    buffer = symmetric(count, dtype=dtype)
    got = []
    for call in (ops().one_shot_all_reduce, ops().two_shot_all_reduce):
        buffer.copy_(xs[rank])
        got.append(call(buffer, op, WORLD))
    exact = reduced(xs.double(), op)
    for y in got:
        assert torch.equal(y, reduced(xs, op))
        if dtype.is_floating_point:
            scale = xs.double().abs().prod(0) if op == "product" else xs.double().abs().sum(0)
            assert ((y.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * scale).all()
    return [bits(y) for y in got]


CALLS = [
    *itertools.product(FLOATS, ("sum", "avg", "product", "min", "max")),
    *itertools.product(INTS, ("sum", "product", "min", "max")),
]


@pytest.mark.parametrize("dtype, op", CALLS, ids=str)
def test_every_reduction_of_every_dtype(interpreted2, dtype, op):
    ranks = interpreted2.run(one_and_two_shot, dtype, op, 1001)
    assert all(r == ranks[0] for r in ranks)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_four_ranks_have_the_same_bits(interpreted4, dtype):
    ranks = interpreted4.run(one_and_two_shot, dtype, "sum", 1001)
    assert all(r == ranks[0] for r in ranks)


SIZES = (0, 1, 3, 16, 17, TILE - 1, TILE, TILE + 1, 5 * TILE + 7, 40 * TILE + 3)


def all_sizes(rank: int) -> None:
    for count in SIZES:
        one_and_two_shot(rank, torch.float32, "sum", count)


def test_all_sizes(interpreted):
    """From none to more tiles than there are blocks."""
    interpreted.run(all_sizes)


def nan_wins(rank: int) -> None:
    buffer = symmetric(4)
    for op, call in itertools.product(("min", "max"), ("one_shot", "two_shot")):
        buffer.copy_(torch.tensor([0.0, float("nan"), 2.0, 3.0]) if rank else torch.zeros(4))
        y = getattr(ops(), f"{call}_all_reduce")(buffer, op, WORLD)
        assert y.isnan().tolist() == [False, True, False, False]


def test_nan_is_kept(interpreted2):
    interpreted2.run(nan_wins)


def in_the_middle(rank: int) -> None:
    """Parts that are not at the start of their memory, nor aligned."""
    whole = symmetric(100)
    for start in (4, 5):
        xs = every_rank(50, dtype=torch.float32, seed=start)
        whole.fill_(-1)
        view = whole[start : start + 50]
        view.copy_(xs[rank])
        y = ops().one_shot_all_reduce(view, "sum", WORLD)
        assert torch.equal(y, reduced(xs, "sum"))
        y = ops().two_shot_all_reduce(view, "sum", WORLD)
        assert torch.equal(y, reduced(xs, "sum"))
        assert (whole[:start] == -1).all() and (whole[start + 50 :] == -1).all()


def test_a_part_of_an_allocation(interpreted2):
    interpreted2.run(in_the_middle)


# -- signals ---


def repeated(rank: int, calls: int) -> None:
    """The buffer is written again at once: no rank may still be reading it. Sizes differ, so grids
    do, and torch's own barrier uses the same pad."""
    n = dist.get_world_size()
    whole = symmetric(2 * TILE)
    handle = symm_mem.rendezvous(whole, WORLD)
    for i in range(calls):
        count = (1, TILE + 1, TILE, 2 * TILE)[i % 4]
        buffer = whole[:count]
        call = ops().two_shot_all_reduce if i % 3 == 1 else ops().one_shot_all_reduce
        buffer.fill_(i + rank)
        y = call(buffer, "sum", WORLD)
        buffer.fill_(-1)
        assert (y == n * i + sum(range(n))).all(), i
        if i % 7 == 6:
            handle.barrier(channel=i % 2)
    dist.barrier()
    assert not handle.get_signal_pad(rank).any()


def test_many_calls_on_one_buffer(interpreted2, interpreted4):
    interpreted2.run(repeated, 100)
    interpreted4.run(repeated, 50)


def words_of_meetings(rank: int) -> None:
    buffer = symmetric(40 * TILE)
    first: set[int] = set()
    second: set[int] = set()
    for count in (TILE, 2 * TILE, 40 * TILE):  # on 1, 2 and 32 blocks, which run in a row here
        SENT.clear()
        ops().one_shot_all_reduce(buffer[:count], "sum", WORLD)
        assert len(SENT) == 2 * min(count // TILE, 32)
        first.update(*SENT[0::2])
        second.update(*SENT[1::2])
    assert len(first) == len(second) == 32 * dist.get_world_size()
    assert not first & second


def test_a_word_is_of_one_meeting_whatever_the_grid(interpreted2):
    """A peer may still have to take the signal of one kernel's last meeting when the next one's
    first begins."""
    interpreted2.run(words_of_meetings)


# -- fused with the norm ---


def with_norm(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[bytes]:
    xs = every_rank(*shape, dtype=dtype)
    residual = normal(*shape, rank=0, seed=7, dtype=dtype)
    weight = normal(shape[-1], rank=0, seed=8, dtype=dtype)
    buffer = symmetric(*shape, dtype=dtype)
    buffer.copy_(xs[rank])
    args = (buffer, residual, weight, 1e-5, "sum", WORLD)
    normed, total = ops().one_shot_all_reduce_rms_norm(*args)
    want = xs.double().sum(0) + residual.double()
    scale = torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5)
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(total.double(), want, **tolerance)
    torch.testing.assert_close(normed.double(), want * scale * weight.double(), **tolerance)
    return [bits(normed), bits(total)]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 100), (40, 8)], ids=str)
def test_all_reduce_add_and_norm(interpreted2, shape, dtype):
    ranks = interpreted2.run(with_norm, shape, dtype)
    assert ranks[0] == ranks[1]


def test_all_reduce_add_and_norm_on_four_ranks(interpreted4):
    ranks = interpreted4.run(with_norm, (5, 48), torch.bfloat16)
    assert all(r == ranks[0] for r in ranks)


# -- in a compiled graph ---


def compiled_graph(rank: int) -> None:
    """The product is written into symmetric memory, of CPU tensors here, and reduced there."""
    op = ops().one_shot_all_reduce.default
    inductor_ext.requires_symmetric_memory(op, "symmetric_input")
    xs, w = every_rank(4, 32, dtype=torch.float32), normal(32, 32, rank=0)
    f = compile_afresh(lambda x, w: op(x @ w, "sum", WORLD))
    for _ in range(3):
        got = f(xs[rank], w)
    torch.testing.assert_close(got, sum(x @ w for x in xs), rtol=1e-5, atol=1e-5)


def test_in_a_compiled_graph(interpreted2):
    interpreted2.run(compiled_graph, timeout=170)


# -- mistakes ---


def wrong_calls(rank: int) -> None:
    x = symmetric(4, 6)
    call = ops().one_shot_all_reduce
    with pytest.raises(ValueError, match="not in symmetric memory"):
        call(torch.ones(3), "sum", WORLD)
    with pytest.raises(ValueError, match="must be contiguous"):
        call(x.t(), "sum", WORLD)
    with pytest.raises(ValueError, match="band is not a reduction"):
        call(x, "band", WORLD)
    with pytest.raises(ValueError, match=r"avg of torch\.int32"):
        call(symmetric(4, dtype=torch.int32), "avg", WORLD)
    with pytest.raises(ValueError, match=r"\[4, 6\], \[4, 6\], \[4\]"):
        ops().one_shot_all_reduce_rms_norm(x, x, torch.ones(4), 1e-5, "sum", WORLD)


def test_wrong_calls(interpreted2):
    interpreted2.run(wrong_calls)


def unmapped(rank: int) -> None:
    handle = mock.Mock(rank=rank, world_size=2, buffer_ptrs=[1, 0])
    with (
        mock.patch.object(triton_ops, "rendezvous", return_value=handle),
        pytest.raises(ValueError, match=f"memory of rank 1 is not mapped by rank {rank}"),
    ):
        ops().one_shot_all_reduce(torch.ones(3), "sum", WORLD)


def test_ranks_that_cannot_reach_each_other(interpreted2):
    interpreted2.run(unmapped)


def trial(rank: int) -> tuple[str, str]:
    """What cuda.enable does to find out whether it works."""
    ops()
    works = cuda._fails(by_name(WORLD), torch.device("cpu"))
    with mock.patch.object(triton_ops, "one_shot_all_reduce", lambda x, *_: x):
        return works, cuda._fails(by_name(WORLD), torch.device("cpu"))


def test_a_trial_shows_whether_it_works(interpreted2):
    wrong = "an all-reduce in symmetric memory gave {}, not 3"
    assert interpreted2.run(trial) == [("", wrong.format(1)), ("", wrong.format(2))]


def test_shapes_without_data():
    with torch.device("meta"):
        x = torch.empty(3, 5, dtype=torch.bfloat16)
        for name in ("one_shot_all_reduce", "two_shot_all_reduce"):
            y = getattr(ops(), name)(x, "sum", WORLD)
            assert (y.shape, y.dtype) == (x.shape, x.dtype)
        both = ops().one_shot_all_reduce_rms_norm(x, x, torch.ones(5), 1e-5, "sum", WORLD)
        assert [y.shape for y in both] == [x.shape, x.shape]


# -- compiled for a GPU ---

KINDS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def ptx(kernel: str, kind: str, op: str = "sum", ranks: int = 8, aligned: bool = True) -> str:
    """A kernel as it is compiled for an H100."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fn = getattr(importlib.import_module("inductor_ext.lower.triton_kernels"), kernel)
    dtype = KINDS[kind]
    constants = {"RANKS": ranks, "LANES": 8, "OP": op, "ALIGNED": aligned}
    if kernel == "one_shot_norm":
        constants |= {"BLOCK": 4096, "WHOLE": True}
    else:
        constants |= {"BLOCK": 8192 // dtype.itemsize, "WIDE": triton_ops._wide(dtype)}
    types = {"buffers": "i64", "pads": "i64", "offset": "i64", "eps": "fp32", "rank": "i32"}
    types |= dict.fromkeys(("count", "share", "rows", "width"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, f"*{kind}") for name in fn.arg_names}
    aligned_args = [i for i, name in enumerate(fn.arg_names) if signature[name].startswith("*")]
    aligned_args += [i for i, name in enumerate(fn.arg_names) if name in ("share", "width")]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned_args}
    source = ASTSource(fn, signature, constexprs=constants, attrs=attrs)
    made = triton.compile(source, GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    return made.asm["ptx"]


@pytest.fixture
def fresh_triton(tmp_path, monkeypatch) -> None:
    """Nothing compiled before, and no warning about the default of a later version."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.mark.parametrize("kernel", ("one_shot", "two_shot", "one_shot_norm"))
@pytest.mark.parametrize("kind", ("bf16", "fp32"))
def test_signals_and_wide_loads_on_sm_90(fresh_triton, kernel, kind):
    code = ptx(kernel, kind)
    lines = re.findall(r"atom\S*|bar\.sync|(?:ld|st)\.global\.v4\S*|add\.f32", code)
    sends = [i for i, line in enumerate(lines) if "sys.release.exch" in line]
    takes = [i for i, line in enumerate(lines) if "sys.acquire.exch" in line]
    assert len(sends) == len(takes) == 2
    assert len([line for line in lines if line.startswith("atom")]) == 4
    for i in sends:  # what all threads did is done before one of them says so
        assert lines[i - 1] == "bar.sync"
    for i in takes:  # and they go on after it has been seen
        assert lines[i + 1] == "bar.sync"
    loads = [i for i, line in enumerate(lines) if line.startswith("ld.global.v4")]
    stores = [i for i, line in enumerate(lines) if line.startswith("st.global.v4")]
    read = [i for i in loads if takes[0] < i < sends[1]]
    assert len(read) >= 8  # one a rank
    assert read[7] - read[0] == 7  # all peers are asked before the first answer is used
    if kernel == "two_shot":
        assert len([i for i in stores if takes[0] < i < sends[1]]) == 8  # to every rank
        assert len([i for i in loads if i > takes[1]]) == 8  # every rank's share
    else:
        assert not [i for i in loads if i > sends[1]]  # nothing is read once it may be overwritten
    if kind == "bf16":
        assert "cvt.rn.bf16" in code


def test_an_unaligned_part_is_read_narrowly(fresh_triton):
    assert "ld.global.v4" not in ptx("one_shot", "fp32", ranks=5, aligned=False)


@pytest.mark.parametrize("op", ("avg", "product", "min", "max"))
def test_other_reductions_compile_for_sm_90(fresh_triton, op):
    ptx("one_shot", "fp16", op, ranks=3)
