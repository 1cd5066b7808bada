"""torch's ``symm_mem`` ops that take ordinary tensors, on CPU: values against plain torch on the
whole tensors, which every rank makes from one seed; shapes and strides against torch's fakes."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from fcoll import errors
from fcoll.transport.native import build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
WORLD = "0"
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
ops = torch.ops.symm_mem


@pytest.fixture(params=["shared2", "shared4", "ranks2"])
def pool(request):
    """2 and 4 ranks with shared memory, and 2 of which process groups carry the bytes."""
    return request.getfixturevalue(request.param)


def whole(*shape, dtype=torch.float32, seed=0):
    """The same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def everyones(*shape, dtype=torch.float32, seed=0):
    """A tensor of each rank, all of which every rank knows: stacked."""
    return whole(dist.get_world_size(), *shape, dtype=dtype, seed=seed)


def close(got, want):
    assert got.shape == want.shape and got.dtype == want.dtype
    size = want.double().abs().max().item()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(want.dtype, 3e-2) * size
    if want.dtype.itemsize == 1:
        tolerance = 0.13 * size
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=tolerance)


def like_fakes(op, got, *args, **kwargs):
    """Inductor's code asserts the strides that torch's fake kernel gives."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
        args = [[fake(y) for y in x] if isinstance(x, list) else fake(x) for x in args]
        made = op(*args, **kwargs)
    for real, promised in zip(tree_leaves(got), tree_leaves(made), strict=True):
        if real is not None:
            assert (real.shape, real.dtype) == (promised.shape, promised.dtype)
            assert real.stride() == promised.stride()


# -- gathers and scatters alone ---


def low_contention_all_gather(rank, dtype, symmetric):
    parts = everyones(6, 5, dtype=dtype)
    x = parts[rank].clone()
    if symmetric:
        assert build.load() == ""
        x = symm_mem.empty(6, 5, dtype=dtype, device="cpu").copy_(parts[rank])
    out = torch.ops._c10d_functional.wait_tensor(ops._low_contention_all_gather(x, WORLD))
    assert torch.equal(out, parts.flatten(0, 1))
    like_fakes(ops._low_contention_all_gather, out, x, WORLD)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_low_contention_all_gather(pool, dtype):
    pool.run(low_contention_all_gather, dtype, False)


def test_low_contention_all_gather_of_symmetric_memory(shared2, shared4):
    for ranks in (shared2, shared4):
        ranks.run(low_contention_all_gather, torch.float32, True)


def low_contention_reduce_scatter(rank, dtype, op, symmetric):
    parts = everyones(8, 5, dtype=dtype)
    x = parts[rank].clone()
    if symmetric:
        assert build.load() == ""
        x = symm_mem.empty(8, 5, dtype=dtype, device="cpu").copy_(parts[rank])
    out = torch.ops._c10d_functional.wait_tensor(ops._low_contention_reduce_scatter(x, op, WORLD))
    reduced = parts.double().sum(0) if op == "sum" else parts.double().mean(0)
    close(out, reduced.chunk(len(parts))[rank].to(dtype))
    like_fakes(ops._low_contention_reduce_scatter, out, x, op, WORLD)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_low_contention_reduce_scatter(pool, dtype, op):
    pool.run(low_contention_reduce_scatter, dtype, op, False)


def test_low_contention_reduce_scatter_of_symmetric_memory(shared2, shared4):
    for ranks in (shared2, shared4):
        ranks.run(low_contention_reduce_scatter, torch.float32, "avg", True)


# -- a gather and matmuls ---


def gather_matmul(rank, shape, dim, dtype, return_A):
    n = dist.get_world_size()
    A = whole(*shape, dtype=dtype)
    Bs = [whole(shape[-1], width, dtype=dtype, seed=width) for width in (3, 7)]
    shard = A.chunk(n, dim)[rank].contiguous()
    call = (shard, Bs, dim, WORLD)
    got, products = ops.fused_all_gather_matmul(*call, return_A=return_A)
    assert torch.equal(got, A) if return_A else got is None
    for product, B in zip(products, Bs, strict=True):
        close(product, (A.double() @ B.double()).to(dtype))
    like_fakes(ops.fused_all_gather_matmul, (got, products), *call, return_A=return_A)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_fused_all_gather_matmul(pool, dim, dtype):
    pool.run(gather_matmul, (8, 12), dim, dtype, True)


@pytest.mark.parametrize("return_A", [True, False])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_fused_all_gather_matmul_of_three_dims(pool, dim, return_A):
    pool.run(gather_matmul, (4, 8, 12), dim, torch.float32, return_A)


def fp8(*shape, seed=0):
    return whole(*shape, seed=seed).to(torch.float8_e4m3fn)


def gather_scaled_matmul(rank, dim, mode):
    n = dist.get_world_size()
    A, Bs = fp8(8, 4, 32), [fp8(16, 32, seed=s).T for s in (1, 2)]
    dtypes = [torch.bfloat16, torch.float32 if mode == "tensor-wise" else torch.bfloat16]
    if mode == "tensor-wise":
        scale, B_scales = torch.tensor(0.3), [torch.tensor(0.1), torch.tensor(0.2)]
    else:
        scale, B_scales = whole(8, 4, 1).abs(), [whole(1, 16, seed=s).abs() for s in (3, 4)]
    given = scale.chunk(n, dim)[rank].contiguous() if mode == "row-wise-sharded" else scale
    shard = A.chunk(n, dim)[rank].contiguous()
    call = (shard, Bs, given, B_scales, dim, WORLD, [None] * 2, [None] * 2, dtypes, [False] * 2)
    got, products = ops.fused_all_gather_scaled_matmul(*call)
    assert torch.equal(got.float(), A.float())
    for product, B, B_scale, dtype in zip(products, Bs, B_scales, dtypes, strict=True):
        close(product, ((A.double() * scale) @ (B.double() * B_scale)).to(dtype))
    like_fakes(ops.fused_all_gather_scaled_matmul, (got, products), *call)


@pytest.mark.parametrize("mode", ["tensor-wise", "row-wise-sharded", "row-wise-replicated"])
@pytest.mark.parametrize("dim", [0, 1])
def test_fused_all_gather_scaled_matmul(pool, dim, mode):
    pool.run(gather_scaled_matmul, dim, mode)


# -- a matmul and a reduction ---


def matmul_scatter(rank, shape, dim, dtype, op):
    As, Bs = everyones(*shape, dtype=dtype), everyones(shape[-1], 8, dtype=dtype, seed=1)
    call = (As[rank], Bs[rank], op, dim, WORLD)
    got = ops.fused_matmul_reduce_scatter(*call)
    products = torch.stack([A.double() @ B.double() for A, B in zip(As, Bs, strict=True)])
    reduced = products.sum(0) if op == "sum" else products.mean(0)
    close(got, reduced.chunk(len(As), dim)[rank].to(dtype))
    like_fakes(ops.fused_matmul_reduce_scatter, got, *call)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_matmul_reduce_scatter(pool, dtype, op):
    pool.run(matmul_scatter, (8, 12), 0, dtype, op)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_fused_matmul_reduce_scatter_of_three_dims(pool, dim):
    pool.run(matmul_scatter, (4, 8, 12), dim, torch.float32, "avg")


def scaled_matmul_scatter(rank, dim, row_wise, flat, dtype):
    n = dist.get_world_size()
    As = [fp8(4, 8, 32, seed=r) for r in range(n)]
    B = fp8(16, 32, seed=9).T
    scales = [whole(4, 8, 1, seed=r).abs() if row_wise else torch.tensor(0.5) for r in range(n)]
    B_scale = whole(1, 16, seed=7).abs() if row_wise else torch.tensor(0.25)
    A, scale, dim_of_A = As[rank], scales[rank], dim
    if flat:  # as the pass of Inductor's calls it for what a reshape came before
        A, dim_of_A = A.flatten(0, 1), 0
        scale = scale.flatten(0, 1) if row_wise else scale
    call = (A, B, scale, B_scale, "sum", dim, dim_of_A, WORLD, [4, 8, 16])
    got = ops.fused_scaled_matmul_reduce_scatter(*call, out_dtype=dtype)
    parts = [(a.double() * s) @ (B.double() * B_scale) for a, s in zip(As, scales, strict=True)]
    close(got, torch.stack(parts).sum(0).chunk(n, dim)[rank].to(dtype))
    like_fakes(ops.fused_scaled_matmul_reduce_scatter, got, *call, out_dtype=dtype)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_fused_scaled_matmul_reduce_scatter(pool, dim, row_wise, flat):
    pool.run(scaled_matmul_scatter, dim, row_wise, flat, torch.bfloat16)


# -- a reduction to one rank ---


def reduce_to_root(rank, dtype, root, count):
    assert build.load() == ""
    parts = everyones(count, dtype=dtype)
    x = symm_mem.empty(count + 3, dtype=dtype, device="cpu").fill_(0)
    symm_mem.rendezvous(x, WORLD)
    x[3:].copy_(parts[rank])
    out = torch.full((count,), -1, dtype=dtype)
    ops.multimem_one_shot_reduce_out(x[3:], "sum", root, WORLD, out)
    if rank == root:
        close(out, parts.double().sum(0).to(dtype))
    else:
        assert out.eq(-1).all()


@pytest.mark.parametrize("count", [1, 2048, 2049])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_multimem_one_shot_reduce_out(shared2, shared4, dtype, count):
    shared2.run(reduce_to_root, dtype, 0, count)
    shared4.run(reduce_to_root, dtype, 3, count)


# -- wrong calls, and words of memory ---


def wrong_calls(rank):
    A, B, one = torch.ones(4, 6), torch.ones(6, 2), torch.tensor(1.0)
    wrong = [
        lambda: ops.fused_all_gather_matmul(torch.ones(4), [B], 0, WORLD),
        lambda: ops.fused_all_gather_matmul(A, [B, torch.ones(6)], 0, WORLD),
        lambda: ops.fused_all_gather_matmul(A, [B], 2, WORLD),
        lambda: ops.fused_matmul_reduce_scatter(A, B, "sum", -2, WORLD),
        lambda: ops.fused_scaled_matmul_reduce_scatter(
            A, B, torch.ones(3, 1), one, "sum", 0, 0, WORLD, [4, 2]
        ),
        lambda: ops.fused_all_gather_scaled_matmul(
            A, [B], torch.ones(3, 1), [one], 0, WORLD, [None], [None], [None], [False]
        ),
        lambda: ops.fused_all_gather_scaled_matmul(
            A, [B], one, [one, one], 0, WORLD, [None], [None], [None], [False]
        ),
    ]
    for call in wrong:
        with pytest.raises(errors.BadSymmetricCall, match="fused_"):
            call()
    with pytest.raises(errors.UnknownReduceOp):
        ops._low_contention_reduce_scatter(A, "most", WORLD)
    with pytest.raises(errors.UnevenShard):
        ops.fused_matmul_reduce_scatter(torch.ones(5, 6), B, "sum", 0, WORLD)
    out = ops.fused_matmul_reduce_scatter(A, B, "sum", 0, WORLD)  # no byte was sent
    assert out.tolist() == [[12.0, 12.0]] * 2


def test_wrong_calls(shared2, ranks2):
    shared2.run(wrong_calls)
    ranks2.run(wrong_calls)


def words(rank):
    assert build.load() == ""
    memory = symm_mem._SymmetricMemory
    x = symm_mem.empty(64, dtype=torch.uint32, device="cpu").fill_(0)
    memory.memset32(x, offset=32, val=1, count=16)
    memory.stream_write_value32(x, 3, 7)
    assert x.tolist() == [0] * 3 + [7] + [0] * 28 + [1] * 16 + [0] * 16
    wrong = {
        "flat, contiguous uint32": (x.view(8, 8), 0, 1, 1),
        "contiguous uint32 tensor": (x.view(torch.float32), 0, 1, 1),
        "offset must be greater": (x, -1, 1, 1),
        "val must be in the range": (x, 0, 1 << 32, 1),
        "count must be a positive": (x, 0, 1, 0),
        r"offset \+ count \(64 \+ 1\) exceeded the numel": (x, 64, 1, 1),
    }
    for message, args in wrong.items():
        with pytest.raises(RuntimeError, match=message) as caught:
            memory.memset32(*args)
        assert type(caught.value) is errors.BadSymmetricCall
    for offset, value in ((-1, 1), (64, 1), (0, 1 << 32)):
        with pytest.raises(RuntimeError):
            memory.stream_write_value32(x, offset, value)


def test_words(shared2):
    shared2.run(words)


# -- which ops there are ---

# Named after the libraries for GPUs that they call, a kernel that another stream feeds, or switches
# between GPUs that copy to all of them (from torch 2.15 on).
GPU_ONLY = ("nccl_", "nvshmem_", "_async_input_mm", "memcpy_to_multicast_")
GPU_ONLY += ("_low_contention_all_gather_ce_multicast",)


def without_a_kernel(rank):
    assert build.load() == ""
    names = [s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("symm_mem::")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = "CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"
    return [name for name in sorted(set(names)) if not any(has(name, key) for key in keys)]


def test_every_op_that_means_something_on_a_cpu_has_a_kernel(shared2):
    missing = [name.removeprefix("symm_mem::") for name in shared2.run(without_a_kernel)[0]]
    assert missing and all(name.startswith(GPU_ONLY) for name in missing), missing


def handles_of_the_dispatcher(rank):
    assert build.load() == ""
    x = symm_mem.empty(4, device="cpu").fill_(rank)
    handle = ops._rendezvous(x, WORLD)
    ops._barrier(handle)
    peers = ops.get_remote_tensors(x, WORLD)
    assert [peer[0].item() for peer in peers] == list(range(len(peers)))
    ops._barrier(handle)


def test_handles_of_the_dispatcher(shared2):
    shared2.run(handles_of_the_dispatcher)
