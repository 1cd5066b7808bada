"""The rules of ops that reduce by an index, or choose elements by their order."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fcoll.proving.algebra import Algebra, NotExact
from fcoll.proving.elementwise_rules import element, elements, rule, selected
from fcoll.proving.pooling_rules import RULES

# -- elements by their order ---


@rule("kthvalue")
def _kthvalue(a: Algebra, x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    x = element(a, x)
    index = a.key(x).kthvalue(k, dim, keepdim).indices
    return selected(x, index, dim, keepdim), index


@rule("median")
def _median(a: Algebra, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    x = element(a, x)
    if dim is None:
        return x.flatten()[a.key(x).flatten().median(0).indices].clone()
    index = a.key(x).median(dim, keepdim).indices
    return selected(x, index, dim, keepdim), index


def _cumulative(name: str, a: Algebra, x: Any, dim: int) -> tuple[Tensor, Tensor]:
    x = element(a, x)
    index = getattr(torch, name)(a.key(x), dim).indices
    return (x.gather(dim, index) if x.dim() else x.clone()), index


RULES |= {name: partial(_cumulative, name) for name in ("cummax", "cummin")}


# -- scatters that reduce ---


@rule("scatter_reduce")
def _scatter_reduce(
    a: Algebra, x: Any, dim: int, index: Tensor, source: Any, how: str, include_self: bool = True
) -> Tensor:
    x, source = elements(a, x, source)
    if how in ("amax", "amin"):
        keys, of_source = a.key(x), a.key(source)
        chosen = keys.scatter_reduce(dim, index, of_source, how, include_self=include_self)
        return _element_of_key(chosen, torch.cat([keys.flatten(), of_source.flatten()]), x, source)
    if how not in ("sum", "mean"):
        raise NotExact(f"a scatter that reduces by {how}")
    ones = torch.ones(index.shape, dtype=torch.float64)
    counts = torch.zeros(x.shape, dtype=torch.float64).scatter_add(dim, index, ones)
    kept = x if include_self else torch.where(counts > 0, 0.0, x)
    done = RULES["scatter_add"](a, kept, dim, index, source)
    if how == "sum":
        return done
    return a.div(done, a.lift((counts + include_self).clamp(min=1)))


def _element_of_key(chosen: Tensor, keys: Tensor, *values: Tensor) -> Tensor:
    ordered, place = keys.sort()
    at = torch.searchsorted(ordered, chosen.contiguous())
    return torch.cat([x.flatten() for x in values])[place[at]]


@rule("index_reduce")
def _index_reduce(
    a: Algebra, x: Any, dim: int, index: Tensor, source: Any, how: str, include_self: bool = True
) -> Tensor:
    source = element(a, source)
    rows = index.view([-1 if d == dim % source.dim() else 1 for d in range(source.dim())])
    return _scatter_reduce(a, x, dim, rows.expand(source.shape), source, how, include_self)


# -- bags of rows ---

SUM, MEAN, MAX = 0, 1, 2


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    a: Algebra,
    weight: Any,
    indices: Tensor,
    offsets: Tensor,
    by_frequency: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample: Any = None,
    include_last: bool = False,
    padding: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bags, of each index its bag, sizes of bags, and which rows have the largest elements."""
    weight, count = element(a, weight), len(offsets) - include_last
    bag = (
        torch.searchsorted(offsets[:count].contiguous(), torch.arange(len(indices)), right=True) - 1
    )
    used = indices != padding
    sizes = torch.zeros(count, dtype=torch.int64).index_add(0, bag, used.to(torch.int64))
    rows = weight[indices]
    if mode == MAX:
        most = torch.zeros(count, weight.shape[1], dtype=torch.int64)
        for b in sizes.nonzero().flatten().tolist():
            of_bag = (bag == b) & used
            most[b] = indices[of_bag][a.key(rows[of_bag]).argmax(0)]
        done = torch.where(sizes[:, None] > 0, weight.gather(0, most), 0.0)
        return done, bag, sizes, most
    rows = rows if per_sample is None else a.mul(rows, element(a, per_sample).unsqueeze(1))
    done = _summed_rows(a, rows, bag, used, count)
    if mode == MEAN:
        done = a.div(done, a.lift(sizes.clamp(min=1).unsqueeze(1)))
    return done, bag, sizes, sizes.clone()


def _summed_rows(a: Algebra, rows: Tensor, index: Tensor, used: Tensor, count: int) -> Tensor:
    zero = torch.zeros(count, rows.shape[1], dtype=torch.float64)
    rows = torch.where(used.unsqueeze(1), rows, 0.0)
    return a.linear(lambda d: zero.index_add(0, index, d), rows, max(len(index), 1))


@rule("_embedding_bag_backward")
def _embedding_bag_backward(
    a: Algebra,
    grad: Any,
    indices: Tensor,
    offsets: Tensor,
    bag: Tensor,
    sizes: Tensor,
    most: Tensor,
    count: int,
    by_frequency: bool,
    mode: int,
    sparse: bool,
    per_sample: Any,
    padding: int = -1,
) -> Tensor:
    grad = element(a, grad)
    if by_frequency or sparse:
        raise NotExact("scale_grad_by_freq, or sparse gradients")
    if mode == MAX:
        zero = torch.zeros(count, grad.shape[1], dtype=torch.float64)
        grad = torch.where(sizes[:, None] > 0, grad, 0.0)
        return RULES["scatter_add"](a, zero, 0, most, grad)
    if mode == MEAN:
        grad = a.div(grad, a.lift(sizes.clamp(min=1).unsqueeze(1)))
    rows = grad[bag]
    rows = rows if per_sample is None else a.mul(rows, element(a, per_sample).unsqueeze(1))
    return _summed_rows(a, rows, indices, indices != padding, count)


@rule("_embedding_bag_per_sample_weights_backward")
def _per_sample_backward(
    a: Algebra,
    grad: Any,
    weight: Any,
    indices: Tensor,
    offsets: Tensor,
    bag: Tensor,
    mode: int,
    padding: int = -1,
) -> Tensor:
    grad, weight = elements(a, grad, weight)
    along = a.total(a.mul(grad[bag], weight[indices]), [1])
    return torch.where(indices != padding, along, 0.0)


# -- products and distances of three tensors ---


@rule("_trilinear")
def _trilinear(a: Algebra, x: Any, y: Any, z: Any, *how: Any) -> Tensor:
    """The sum over some dims of products, each tensor with more dims of 1."""
    *expands, sums = how[:4]
    wide = list(elements(a, x, y, z))
    for i, dims in enumerate(expands):
        for d in sorted(dims):
            wide[i] = wide[i].unsqueeze(d)
    product = a.mul(a.mul(wide[0], wide[1]), wide[2])
    return a.total(product, list(sums)) if sums else product


@rule("_cdist_forward")
def _distances(a: Algebra, x: Any, y: Any, p: float, *_: Any) -> Tensor:
    x, y = elements(a, x, y)
    return RULES["linalg_vector_norm"](a, a.sub(x.unsqueeze(-2), y.unsqueeze(-3)), p, [-1])


@rule("_cdist_backward")
def _distances_backward(a: Algebra, grad: Any, x: Any, y: Any, p: float, found: Any) -> Tensor:
    """Of the first tensor; where two points are one it is 0."""
    grad, x, y, found = elements(a, grad, x, y, found)
    apart = a.sub(x.unsqueeze(-2), y.unsqueeze(-3))
    if p == 1:
        slopes = RULES["sign"](a, apart)
    elif p == 2:
        over = a.inverse(torch.where(found == a.number(0), a.number(1), found))
        slopes = a.mul(apart, over.unsqueeze(-1))
    else:
        raise NotExact(f"distances of order {p}")
    return a.total(a.mul(grad.unsqueeze(-1), slopes), [grad.dim() - 1])


@rule("_weight_norm_interface_backward")
def _weight_norm_backward(
    a: Algebra, grad: Any, v: Any, g: Any, norms: Any, dim: int
) -> tuple[Tensor, Tensor]:
    """Of v g / |v|, by rows along dim."""
    grad, v, g, norms = elements(a, grad, v, g, norms)
    over = a.inverse(norms)
    rest = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = a.total(a.mul(grad, v), rest, True)
    straight = a.div(a.mul(v, along), a.square(norms))
    return a.mul(a.mul(g, over), a.sub(grad, straight)), a.mul(along, over)


# -- the largest of windows: its gradient goes to where it was ---


def _to_largest(dims: int, a: Algebra, grad: Any, x: Any, *how: Any) -> Tensor:
    grad, index = element(a, grad), how[-1]
    zero = torch.zeros(x.shape, dtype=torch.float64).flatten(-dims)
    back = RULES["scatter_add"](a, zero, -1, index.flatten(-dims), grad.flatten(-dims))
    return back.view(x.shape)


RULES |= {
    "adaptive_max_pool2d_backward": partial(_to_largest, 2),
    "adaptive_max_pool3d_backward": partial(_to_largest, 3),
    "max_pool3d_with_indices_backward": partial(_to_largest, 3),
}
