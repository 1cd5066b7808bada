"""What torch's ops are in an algebra: a rule for each op that computes, by its name.

A rule takes the algebra and the op's arguments, with tensors and numbers as elements. Ops that only
move elements need none (movement.py); ops without a rule are decomposed by torch, or refused. Here
those that add up; those on elements are in elementwise.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fcoll.proving.algebra import Algebra, NotExact
from fcoll.proving.elementwise_rules import (
    RULES,
    dims_of,
    element,
    elements,
    extremes,
    rule,
)

# -- sums ---


def _count(x: Tensor, dims: list[int]) -> int:
    return torch.Size([x.shape[d] for d in dims]).numel() if x.dim() else 1


@rule("sum")
def _sum(a: Algebra, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    x = element(a, x)
    return a.total(x, dims_of(x, dim), keepdim)


@rule("mean")
def _mean(a: Algebra, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    x = element(a, x)
    dims = dims_of(x, dim)
    return a.div(a.total(x, dims, keepdim), a.number(_count(x, dims)))


def _variance(
    a: Algebra,
    x: Any,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> tuple[Tensor, Tensor]:
    """With its mean; forms with ``correction`` and with ``unbiased``, which may be the first."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    x = element(a, x)
    dims, less = dims_of(x, dim), int(unbiased) if correction is None else correction
    mean = _mean(a, x, dims, True)
    spread = a.total(a.square(a.sub(x, mean)), dims, keepdim)
    done = a.div(spread, a.number(_count(x, dims) - less))
    return done, mean if keepdim else mean.reshape(done.shape)


RULES |= {
    "var": lambda a, x, *args, **kw: _variance(a, x, *args, **kw)[0],
    "var_mean": _variance,
    "std": lambda a, x, *args, **kw: a.root(_variance(a, x, *args, **kw)[0]),
}


@rule("linalg_vector_norm", "norm")
def _norm(
    a: Algebra, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any
) -> Tensor:
    x = element(a, x)
    if ord == float("inf"):
        return extremes("max", a, a.absolute(x), dims_of(x, dim), keepdim)
    if ord == 1:
        return a.total(a.absolute(x), dims_of(x, dim), keepdim)
    if ord not in (2, None):
        raise NotExact(f"a norm of order {ord}")
    return a.root(a.total(a.square(x), dims_of(x, dim), keepdim))


@rule("cumsum")
def _cumsum(a: Algebra, x: Any, dim: int, **_: Any) -> Tensor:
    x = element(a, x)
    return a.linear(lambda d: d.cumsum(dim), x, _count(x, dims_of(x, dim)), wraps=True)


@rule("cumprod")
def _cumprod(a: Algebra, x: Any, dim: int, **_: Any) -> Tensor:
    x = element(a, x)
    products: list[Tensor] = []
    if not x.numel() or not x.dim():
        return x.clone()
    for part in x.unbind(dim):
        products.append(a.mul(products[-1], part) if products else part)
    return torch.stack(products, dim)


@rule("prod")
def _prod(a: Algebra, x: Any, dim: int | None = None, keepdim: bool = False, **_: Any) -> Tensor:
    x = element(a, x)
    x, dim = (x.flatten(), 0) if dim is None or not x.dim() else (x, dim)
    if not x.shape[dim]:
        return a.number(1).expand(x.sum(dim, keepdim).shape).clone()
    done = _cumprod(a, x, dim).select(dim, -1)
    return done.unsqueeze(dim) if keepdim else done


@rule("histc")
def _histogram(a: Algebra, x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    known, counts = a.counts(element(a, x))
    if not bool(known.all()):
        raise NotExact("a histogram of values of the step")
    return a.lift(torch.histc(counts, bins, min, max))


@rule("index_add")
def _index_add(a: Algebra, x: Any, dim: int, index: Tensor, source: Any, alpha: Any = 1) -> Tensor:
    x, source = elements(a, x, source)
    source = source if alpha == 1 else a.mul(source, a.number(alpha))

    def moved(d: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=d.dtype).index_add(dim, index, d)

    return a.add(x, a.linear(moved, source, index.numel(), wraps=True))


@rule("scatter_add")
def _scatter_add(a: Algebra, x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    x, source = elements(a, x, source)

    def moved(d: Tensor) -> Tensor:
        return torch.zeros(x.shape, dtype=d.dtype).scatter_add(dim, index, d)

    return a.add(x, a.linear(moved, source, index.numel(), wraps=True))


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(
    a: Algebra, x: Any, indices: Any, values: Any, accumulate: bool = False, *_: Any
) -> Tensor:
    x, values = elements(a, x, values)
    if not accumulate:
        return torch.ops.aten.index_put(x, indices, values)
    zero = torch.zeros_like(x)
    shape = zero[tuple(slice(None) if i is None else i for i in indices)].shape
    put = lambda d: torch.ops.aten.index_put(zero, indices, d, True)  # noqa: E731
    return a.add(x, a.linear(put, values.expand(shape), max(values.numel(), 1)))


@rule("embedding_dense_backward")
def _embedding_backward(
    a: Algebra, grad: Any, index: Tensor, rows: int, padding: int, by_frequency: bool
) -> Tensor:
    flat = element(a, grad).reshape(index.numel(), -1)
    if by_frequency:
        counts = torch.bincount(index.flatten())[index.flatten()]
        flat = a.div(flat, a.lift(counts.unsqueeze(1)))
    zero = torch.zeros(rows, flat.shape[1], dtype=torch.float64)
    used = (index.flatten() != padding).unsqueeze(1)
    flat = torch.where(used, flat, 0.0)
    return a.linear(lambda d: zero.index_add(0, index.flatten(), d), flat, index.numel())


# -- products of matrices ---


def _product(fn: Callable[[Tensor, Tensor], Tensor], a: Algebra, x: Any, y: Any) -> Tensor:
    x, y = elements(a, x, y)
    return a.bilinear(fn, x, y, max(x.shape[-1], 1))


RULES |= {name: partial(_product, getattr(torch, name)) for name in ("mm", "bmm", "mv", "dot")}


@rule("_grouped_mm")
def _grouped(
    a: Algebra, x: Any, y: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Of tokens that are sorted by expert, with each expert's matrix, or (two matrices) over the
    tokens of each; what lies behind the last is 0."""
    x, y = elements(a, x, y)
    if offs is None or x.dim() > 2 or bias is not None:
        raise NotExact("a grouped product of other shapes than tokens by experts")
    ends = offs.tolist()
    spans = [slice(first, max(first, end)) for first, end in zip([0, *ends], ends, strict=False)]
    if y.dim() == 2:
        return torch.stack([RULES["mm"](a, x[:, span], y[span]) for span in spans])
    done = torch.zeros(len(x), y.shape[-1], dtype=torch.float64)
    for span, weight in zip(spans, y, strict=True):
        done[span] = RULES["mm"](a, x[span], weight)
    return done


def _with_product(
    name: str, a: Algebra, z: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    product = RULES[name](a, x, y)
    product = product if alpha == 1 else a.mul(product, a.number(alpha))
    if beta == 0:
        return product
    z = element(a, z)
    return a.add(z if beta == 1 else a.mul(z, a.number(beta)), product)


RULES |= {
    name: partial(_with_product, inner)
    for name, inner in {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv"}.items()
}


@rule("addbmm")
def _addbmm(a: Algebra, z: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """The sum of all products: one of matrices that stand side by side."""
    x, y = elements(a, x, y)
    return RULES["addmm"](a, z, x.permute(1, 0, 2).flatten(1), y.flatten(0, 1), beta, alpha)


@rule("convolution")
def _convolution(a: Algebra, x: Any, weight: Any, bias: Any, *how: Any) -> Tensor:
    x, weight = elements(a, x, weight)
    conv = lambda x, w: torch.convolution(x, w, None, *how)  # noqa: E731
    out = a.bilinear(conv, x, weight, weight[0].numel() * max(1, weight.shape[0]))
    if bias is None:
        return out
    return a.add(out, element(a, bias).view(-1, *[1] * (out.dim() - 2)))


@rule("convolution_backward")
def _convolution_backward(
    a: Algebra, grad: Any, x: Any, weight: Any, bias_sizes: Any, *how: Any
) -> Any:
    grad, x, weight = elements(a, grad, x, weight)
    how, wanted = how[:-1], how[-1]
    back = torch.ops.aten.convolution_backward.default

    def part(i: int, g: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return back(g, x, w, None, *how, [i == 0, i == 1, False])[i]

    terms = max(grad[:, 0].numel(), weight.numel())
    dx = a.bilinear(lambda g, w: part(0, g, x, w), grad, weight, terms) if wanted[0] else None
    dw = a.bilinear(lambda g, x: part(1, g, x, weight), grad, x, terms) if wanted[1] else None
    db = a.total(grad, [d for d in range(grad.dim()) if d != 1]) if wanted[2] else None
    return dx, dw, db


# -- softmax and the losses made of it ---


def _normalized(a: Algebra, weights: Tensor, dim: int) -> Tensor:
    total = a.total(weights, dims_of(weights, dim), True)
    return a.mul(weights, a.inverse(total))


@rule("_softmax")
def _softmax(a: Algebra, x: Any, dim: int, *_: Any, **__: Any) -> Tensor:
    return _normalized(a, a.exp(element(a, x)), dim)


@rule("_safe_softmax")
def _safe_softmax(a: Algebra, x: Any, dim: int, *_: Any, **__: Any) -> Tensor:
    """Rows that are masked as a whole are 0."""
    x = element(a, x)
    masked = (x == float("-inf")).all(dim, keepdim=True)
    return torch.where(masked, 0.0, _softmax(a, torch.where(masked, 0.0, x), dim))


@rule("_softmax_backward_data")
def _softmax_backward(a: Algebra, grad: Any, y: Any, dim: int, *_: Any) -> Tensor:
    grad, y = elements(a, grad, y)
    along = a.total(a.mul(grad, y), dims_of(y, dim), True)
    return a.mul(y, a.sub(grad, along))


@rule("logsumexp")
def _logsumexp(a: Algebra, x: Any, dim: Any, keepdim: bool = False) -> Tensor:
    x = element(a, x)
    return a.log(a.total(a.exp(x), dims_of(x, dim), keepdim))


@rule("_log_softmax")
def _log_softmax(a: Algebra, x: Any, dim: int, *_: Any, **__: Any) -> Tensor:
    x = element(a, x)
    return a.sub(x, _logsumexp(a, x, [dim], True))


@rule("_log_softmax_backward_data")
def _log_softmax_backward(a: Algebra, grad: Any, y: Any, dim: int, *_: Any) -> Tensor:
    """exp(y) lacks the root of unity that the logarithm lost: what sums to 1 has it again."""
    grad, y = elements(a, grad, y)
    total = a.total(grad, dims_of(y, dim), True)
    return a.sub(grad, a.mul(_normalized(a, a.exp(y), dim), total))


def _class_weights(a: Algebra, x: Tensor, target: Tensor, weight: Any, ignored: int) -> Any:
    """Of each target: does it count, its index where it does, and how much."""
    used = target != ignored
    index = torch.where(used, target, 0)
    counts = a.number(1) if weight is None else element(a, weight)[index]
    return used, index, torch.where(used, counts, 0.0)


@rule("nll_loss_forward")
def _nll(a: Algebra, x: Any, target: Tensor, weight: Any, reduction: int, ignored: int) -> Any:
    x = element(a, x)
    used, index, counts = _class_weights(a, x, target, weight, ignored)
    picked = x.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    losses = a.neg(a.mul(counts, torch.where(used, picked, 0.0)))
    total = a.total(counts, [])
    if reduction == 0:
        return losses, total
    loss = a.total(losses, [])
    return (a.div(loss, total) if reduction == 1 else loss), total


@rule("nll_loss_backward")
def _nll_backward(
    a: Algebra,
    grad: Any,
    x: Any,
    target: Tensor,
    weight: Any,
    reduction: int,
    ignored: int,
    total: Any,
) -> Tensor:
    grad, x = elements(a, grad, x)
    _, index, counts = _class_weights(a, x, target, weight, ignored)
    share = a.neg(a.mul(grad, counts))
    share = a.div(share, element(a, total)) if reduction == 1 else share
    return torch.zeros_like(x).scatter(-1, index.unsqueeze(-1), share.unsqueeze(-1))
