"""Many ops on LocalTensors have the values that torch's own LocalTensor gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._local_tensor as torchs
import torch.nn.functional as F
from local.worlds import fake_world
from torch.utils._pytree import tree_leaves

from fcoll import local

Tensor = torch.Tensor
W = 3

# x is [4, 6], of positive floats; i its ranks' permutation of 0..3
POINTWISE = (
    "abs angle asinh atan ceil cos cosh deg2rad digamma erf erfc erfinv exp2 expm1 fix floor frac "
    "isfinite isnan lgamma log log10 log1p log2 nan_to_num neg positive rad2deg reciprocal relu "
    "round rsqrt sgn sigmoid sign sin sinc sinh sqrt square tan tanh trunc"
)
WITH_A_NUMBER = "add clamp_min copysign fmod pow remainder sub mul div floor_divide xlogy hypot"

OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    **{name: (lambda x, i, n=name: getattr(x, n)()) for name in POINTWISE.split()},
    **{
        name: (lambda x, i, n=name: getattr(x, n)(x.new_tensor(0.3)))
        for name in WITH_A_NUMBER.split()
    },
    "addcmul": lambda x, i: torch.addcmul(x, x, x, value=0.5),
    "lerp": lambda x, i: torch.lerp(x, x + 1, 0.3),
    "atan2": lambda x, i: torch.atan2(x, x + 1),
    "maximum": lambda x, i: torch.maximum(x, 1 - x),
    "logaddexp": lambda x, i: torch.logaddexp(x, -x),
    "bitwise": lambda x, i: (i & 1) | (i << 2) ^ 3,
    "int division": lambda x, i: (i // 2, i % 2, i / 2),
    "promotion": lambda x, i: x + i.sum() + torch.tensor(2.0, dtype=torch.float64),
    "comparison": lambda x, i: (x > 0.5, x == x, i != 2, torch.isclose(x, x)),
    "logical": lambda x, i: torch.logical_xor(x > 0.5, x < 0.7).any(),
    "reductions": lambda x, i: (x.sum(), x.mean(0), x.prod(1), x.std(), x.var(0), x.amax((0, 1))),
    "min and max": lambda x, i: (*x.max(1), *x.min(0), x.argmin(), *x.median(1), *x.mode(1)),
    "aminmax": lambda x, i: tuple(x.aminmax(dim=1)),
    "quantile": lambda x, i: x.quantile(0.3, dim=1),
    "all any": lambda x, i: ((x > 0).all(), (x > 0.5).any(1), (x > 0.5).count_nonzero()),
    "scans": lambda x, i: (x.cumsum(1), x.cumprod(0), *x.cummax(1), x.logcumsumexp(0), x.diff()),
    "norms": lambda x, i: (x.norm(), x.norm(1, 1), torch.linalg.matrix_norm(x), F.normalize(x)),
    "softmaxes": lambda x, i: (x.softmax(0), x.log_softmax(1), F.softmin(x, 1), x.logsumexp(1)),
    "activations": lambda x, i: (
        F.gelu(x),
        F.silu(x),
        F.elu(x - 1),
        F.leaky_relu(x - 1),
        F.hardswish(x),
        F.mish(x),
        F.softplus(x),
        F.relu6(x * 9),
        F.glu(x, 1),
        F.hardtanh(x),
        F.selu(x - 1),
        F.celu(x - 1),
    ),
    "norm layers": lambda x, i: (
        F.layer_norm(x, (6,)),
        F.rms_norm(x, (6,)),
        F.group_norm(x[None], 2),
        F.batch_norm(x, None, None, training=True),
    ),
    "losses": lambda x, i: (
        F.mse_loss(x, 1 - x),
        F.l1_loss(x, 1 - x),
        F.cross_entropy(x, i),
        F.nll_loss(x.log(), i),
        F.binary_cross_entropy(x.sigmoid(), x.clamp(0, 1)),
        F.smooth_l1_loss(x, x * 2),
        F.kl_div(x.log(), x),
    ),
    "products": lambda x, i: (
        x @ x.t(),
        torch.mm(x.t(), x),
        x.mv(x[0]),
        x[0].dot(x[1]),
        torch.outer(x[0], x[1]),
        torch.bmm(x[None], x.t()[None]),
        torch.baddbmm(x[None, :, :4], x[None], x.t()[None]),
        torch.addmm(x[:, :4], x, x.t()),
        torch.addmv(x[:, 0], x, x[1]),
        torch.kron(x, x[:1]),
        torch.matmul(x[None], x.t()),
        F.linear(x, x, x[:, 0]),
        F.bilinear(x[:, :2], x[:, :3], x.new_ones(2, 2, 3)),
        torch.cdist(x, x + 1),
    ),
    "einsum": lambda x, i: (torch.einsum("ij,kj->ik", x, x), torch.tensordot(x, x, ([1], [1]))),
    "attention": lambda x, i: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "linalg": lambda x, i: (
        torch.linalg.inv(x[:, :4] + 9 * torch.eye(4)),
        torch.linalg.det(x[:, :4]),
        torch.linalg.svdvals(x),
        torch.linalg.solve(x[:, :4] + 9 * torch.eye(4), x[:, 0]),
        torch.linalg.cholesky(x @ x.t() + torch.eye(4)),
    ),
    "views": lambda x, i: (
        x.view(24),
        x.view(2, 12),
        x.t(),
        x.permute(1, 0),
        x[None],
        x.unsqueeze(-1),
        x[:, 0],
        x.unflatten(1, (2, 3)),
        x.reshape(3, 8),
        x.flatten(),
        x.narrow(1, 1, 2),
        x.select(0, 1),
        x.expand(2, 4, 6),
        x.movedim(0, 1),
        x.squeeze(),
        x.diagonal(),
        x.unfold(1, 2, 2),
        x.swapaxes(0, 1),
        x.view_as(x),
        x.mT,
        x.view(torch.int32),
    ),
    "indexing": lambda x, i: (
        x[1:3, ::2],
        x[..., -1],
        x[i],
        x[i, i],
        x[x > 0.5].sum(),
        x[None, 1],
        x[[0, 2]],
        x[torch.tensor([1, 1])],
        x.index_select(0, i),
        x.gather(0, i[None, :].expand(2, 4).contiguous()),
        x.take(i),
        torch.take_along_dim(x, i[:, None], 1),
        x.masked_select(x > 0.2).numel() > 0,
        x.masked_fill(x > 0.5, 0),
        torch.where(x > 0.5, x, -x),
    ),
    "scatters": lambda x, i: (
        x.index_add(0, i, x),
        x.index_copy(0, i, x),
        x.index_fill(0, i, 2.0),
        x.scatter(0, i[None, :], 1.0),
        x.scatter_add(0, i[None, :], x),
        x.scatter_reduce(0, i[None, :], x, "amax"),
        x.index_put((i, i), x[:, 0]),
    ),
    "joining": lambda x, i: (
        torch.cat([x, x]),
        torch.stack([x, x], 1),
        torch.hstack([x, x]),
        torch.vstack([x, x]),
        torch.block_diag(x, x),
        x.repeat(2, 1),
        x.repeat_interleave(2, 0),
        x.tile(2),
        torch.cartesian_prod(x[0], x[1]),
        torch.meshgrid(x[0], x[1], indexing="ij"),
    ),
    "splitting": lambda x, i: (
        x.split(4, 1),
        x.chunk(3),
        x.tensor_split(3, 1),
        x.unbind(1),
        x.hsplit(2),
    ),
    "moving": lambda x, i: (
        x.roll(1, 0),
        x.flip(0),
        x.rot90(),
        F.pad(x, (1, 2)),
        x.tril(),
        x.triu(1),
        F.pixel_shuffle(x.view(1, 4, 2, 3), 2),
    ),
    "sorting": lambda x, i: (
        *x.sort(1),
        x.argsort(0),
        *x.topk(2, 1),
        *x.kthvalue(2, 1),
        torch.searchsorted(x[0].sort()[0], x[1]),
    ),
    "sets": lambda x, i: (
        i.unique(),
        torch.isin(i, torch.tensor([1, 3])),
        i.bincount(),
        torch.histc(x, 4),
        F.one_hot(i, 4),
    ),
    "dtypes": lambda x, i: (
        x.double(),
        x.bfloat16() + 1,
        x.half() * 2,
        i.float(),
        x.to(torch.int64),
        x.bool(),
        i.char(),
    ),
    "complex": lambda x, i: (
        torch.complex(x, x).abs(),
        torch.view_as_real(torch.complex(x, x)),
        torch.polar(x, x).conj().resolve_conj().imag,
    ),
    "fft": lambda x, i: (
        torch.fft.fft(x).abs(),
        torch.fft.rfft(x).real,
        torch.fft.irfft(torch.fft.rfft(x)),
    ),
    "convolutions": lambda x, i: (
        F.conv1d(x[None], x.new_ones(2, 4, 3)),
        F.conv2d(x[None, None], x.new_ones(2, 1, 2, 2)),
        F.max_pool1d(x[None], 2),
        F.avg_pool2d(x[None], 2),
        F.adaptive_avg_pool1d(x[None], 3),
        F.interpolate(x[None], scale_factor=2),
        F.unfold(x[None, None], 2),
    ),
    "embedding": lambda x, i: (F.embedding(i, x), F.embedding_bag(i[None], x)),
    "factories": lambda x, i: (
        torch.zeros_like(x),
        torch.ones_like(x),
        torch.full_like(x, 3),
        torch.empty_like(x).fill_(1),
        x.new_zeros(2),
        x.new_full((2,), 4),
        torch.arange(4),
        torch.eye(3),
        torch.linspace(0, 1, 5),
        x.new_tensor([1.0, 2.0]),
        torch.tensor([1, 2]),
    ),
    "random": lambda x, i: (
        torch.rand(3),
        torch.randn_like(x),
        torch.randperm(5),
        torch.randint(9, (4,)),
        F.dropout(x, 0.5),
        torch.bernoulli(x.clamp(0, 1)),
        x.multinomial(2),
        torch.empty(4).normal_(),
        torch.empty(3).uniform_(),
    ),
    "in place": lambda x, i: (
        x.clone().add_(1),
        x.clone().mul_(x),
        x.clone().clamp_(0.2, 0.6),
        x.clone().zero_(),
        x.clone().copy_(x + 1),
        x.clone().masked_fill_(x > 0.5, 0.0),
        x.clone().index_add_(0, i, x),
        x.clone().scatter_(0, i[None, :], 2.0),
        x.clone().t_(),
        x.clone().unsqueeze_(0),
        x.clone().squeeze_(),
        x.clone().fill_diagonal_(1.0),
        x.clone().cumsum_(1),
        x.clone().exp_(),
        x.clone().lerp_(x + 1, 0.5),
        x.clone().addcdiv_(x, x + 1),
        x.clone().bernoulli_(0.5),
        x.clone().resize_(2, 3) * 0,
    ),
    "foreach": lambda x, i: (
        torch._foreach_add([x, x], 1.0),
        torch._foreach_mul([x, x], [x, x]),
        torch._foreach_norm([x, x]),
    ),
    "gradient": lambda x, i: torch.autograd.grad(
        (y := x.clone().requires_grad_()).sigmoid().matmul(y.t()).sum(), y
    ),
    "questions": lambda x, i: (
        x.shape[0],
        x.dim(),
        x.numel(),
        x.dtype,
        x.is_contiguous(),
        x.t().is_contiguous(),
        x.stride(),
        x.size(1),
        len(x),
    ),
}


def outcome(face: Any, fn: Callable[[Tensor, Tensor], Any], rows: tuple[int, ...]) -> Any:
    """By leaf of the result: each rank's tensor, or the value; or the error."""
    g = torch.Generator().manual_seed(0)
    xs = {r: torch.rand(n, 6, generator=g) + 0.05 for r, n in enumerate(rows)}
    order = {r: torch.randperm(n, generator=g) for r, n in enumerate(rows)}
    with fake_world(W), face.LocalTensorMode(W) as mode:
        torch.manual_seed(5)
        try:
            out = fn(face.LocalTensor(xs), face.LocalTensor(order))
        except Exception as error:
            return error
        with mode.disable():
            return [seen(face, leaf) for leaf in tree_leaves(out)]


def seen(face: Any, leaf: Any) -> Any:
    if isinstance(leaf, face.LocalTensor):
        return {r: leaf._local_tensors[r].detach().clone() for r in sorted(leaf._ranks)}
    if isinstance(leaf, torch.SymInt):
        return dict(leaf.node._local_ints)
    return leaf


@pytest.mark.parametrize("rows", [(4, 4, 4), (4, 5, 4)], ids=["even", "uneven"])
@pytest.mark.parametrize("name", OPS)
def test_as_torchs(name, rows):
    theirs = outcome(torchs, OPS[name], rows)
    if isinstance(theirs, Exception):
        pytest.skip(f"torch's own: {type(theirs).__name__}")
    ours = outcome(local, OPS[name], rows)
    assert not isinstance(ours, Exception), ours
    assert len(ours) == len(theirs)
    for at, (mine, their) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(their, (dict, Tensor)):
            torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-6, equal_nan=True)
        else:
            assert mine == their, at
