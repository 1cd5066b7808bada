"""What torch's ops are in an algebra: a rule for each op that computes, by its name.

A rule takes the algebra and the op's arguments, with tensors and numbers as elements. Ops that only
move elements need none (movement.py); ops without a rule are decomposed by torch, or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fcoll.proving.algebra import Algebra, NotExact

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def add(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return add


def element(a: Algebra, x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x if x.is_floating_point() else a.lift(x)
    return a.number(x)


def _elements(a: Algebra, *xs: Any) -> tuple[Tensor, ...]:
    return tuple(element(a, x) for x in xs)


def _dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]


def _count(x: Tensor, dims: list[int]) -> int:
    return torch.Size([x.shape[d] for d in dims]).numel() if x.dim() else 1


# -- elementwise arithmetic ---


@rule("add")
def _add(a: Algebra, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    x, y = _elements(a, x, y)
    return a.add(x, y if alpha == 1 else a.mul(y, a.number(alpha)))


@rule("sub")
def _sub(a: Algebra, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    return _add(a, x, a.neg(element(a, y)), alpha)


@rule("rsub")
def _rsub(a: Algebra, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    return _sub(a, y, x, alpha)


@rule("mul")
def _mul(a: Algebra, x: Any, y: Any) -> Tensor:
    return a.product(*_elements(a, x, y))


@rule("div")
def _div(a: Algebra, x: Any, y: Any, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is not None:
        raise NotExact(f"a division that rounds ({rounding_mode})")
    x, y = _elements(a, x, y)
    return a.product(x, a.inverse(y))


@rule("pow")
def _pow(a: Algebra, x: Any, y: Any) -> Tensor:
    if isinstance(y, Tensor):
        return a.opaque("pow", *_elements(a, x, y))
    x = element(a, x)
    if y in (0.5, -0.5):
        return a.root(x) if y > 0 else a.opaque("rsqrt", x)
    if float(y) != int(y) or abs(y) > 64:
        return a.opaque(f"pow {y}", x)
    done, square, n = None, x, abs(int(y))
    while n:
        if n & 1:
            done = square if done is None else a.mul(done, square)
        n >>= 1
        if n:
            square = a.square(square)
    if done is None:
        return a.number(1).expand(x.shape).clone()
    return a.inverse(done) if y < 0 else done


@rule("lerp")
def _lerp(a: Algebra, x: Any, y: Any, weight: Any) -> Tensor:
    x, y, weight = _elements(a, x, y, weight)
    return a.add(x, a.mul(weight, a.sub(y, x)))


@rule("addcmul")
def _addcmul(a: Algebra, x: Any, y: Any, z: Any, value: Any = 1) -> Tensor:
    x, y, z = _elements(a, x, y, z)
    return a.add(x, a.mul(a.number(value), a.product(y, z)))


@rule("addcdiv")
def _addcdiv(a: Algebra, x: Any, y: Any, z: Any, value: Any = 1) -> Tensor:
    x, y, z = _elements(a, x, y, z)
    return a.add(x, a.mul(a.number(value), a.div(y, z)))


def _one(fn: Callable[[Algebra, Tensor], Tensor]) -> Rule:
    return lambda a, x, **_: fn(a, element(a, x))


RULES |= {
    name: _one(fn)
    for name, fn in {
        "neg": lambda a, x: a.neg(x),
        "reciprocal": lambda a, x: a.inverse(x),
        "sqrt": lambda a, x: a.root(x),
        "exp": lambda a, x: a.exp(x),
        "expm1": lambda a, x: a.sub(a.exp(x), a.number(1)),
        "log": lambda a, x: a.log(x),
        "log1p": lambda a, x: a.log(a.add(a.number(1), x)),
        "abs": lambda a, x: _larger(a, x, a.neg(x)),
        "sgn": lambda a, x: _sign(a, x),
        "sign": lambda a, x: _sign(a, x),
        "silu": lambda a, x: a.mul(x, a.opaque("sigmoid", x)),
        "nan_to_num": lambda a, x: x,
    }.items()
}


# -- uninterpreted functions of one element, and what their gradients are multiplied by ---

_OPAQUE = """
    rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid erf erfc erfinv relu
    gelu elu softplus mish hardswish hardsigmoid exp2 log2 log10 lgamma digamma celu
    log_sigmoid_forward
"""
OPAQUE = tuple(_OPAQUE.split())
OPAQUE_GRADIENTS = ("gelu", "softplus", "mish", "hardswish", "hardsigmoid")


def _named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Functions with other settings are other functions."""
    more = [str(x) for x in args] + [f"{k}={v}" for k, v in sorted(kwargs.items())]
    return " ".join([name, *more])


def _opaque(name: str, a: Algebra, x: Any, *args: Any, **kwargs: Any) -> Any:
    found = a.opaque(_named(name, args, kwargs), element(a, x))
    return (found, torch.zeros_like(found)) if name == "log_sigmoid_forward" else found


def _opaque_gradient(name: str, a: Algebra, grad: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    grad, x = _elements(a, grad, x)
    return a.mul(grad, a.opaque(_named(f"{name}'", args, kwargs), x))


RULES |= {name: partial(_opaque, name) for name in OPAQUE}
RULES |= {f"{name}_backward": partial(_opaque_gradient, name) for name in OPAQUE_GRADIENTS}


@rule("atan2", "hypot", "fmod", "remainder", "floor_divide", "xlogy")
def _of_two(a: Algebra, x: Any, y: Any) -> Tensor:
    raise NotExact("it has no rule")


@rule("log_sigmoid_backward")
def _log_sigmoid_backward(a: Algebra, grad: Any, x: Any, buffer: Any) -> Tensor:
    return _opaque_gradient("log_sigmoid_forward", a, grad, x)


@rule("tanh_backward")
def _tanh_backward(a: Algebra, grad: Any, y: Any) -> Tensor:
    grad, y = _elements(a, grad, y)
    return a.mul(grad, a.sub(a.number(1), a.square(y)))


@rule("sigmoid_backward")
def _sigmoid_backward(a: Algebra, grad: Any, y: Any) -> Tensor:
    grad, y = _elements(a, grad, y)
    return a.mul(grad, a.mul(y, a.sub(a.number(1), y)))


@rule("silu_backward")
def _silu_backward(a: Algebra, grad: Any, x: Any) -> Tensor:
    grad, x = _elements(a, grad, x)
    s = a.opaque("sigmoid", x)
    inside = a.add(a.number(1), a.mul(x, a.sub(a.number(1), s)))
    return a.mul(grad, a.mul(s, inside))


# -- comparisons, by an order drawn at random ---


def _larger(a: Algebra, x: Tensor, y: Tensor) -> Tensor:
    return a.pick(a.key(x) >= a.key(y), x, y)


def _smaller(a: Algebra, x: Tensor, y: Tensor) -> Tensor:
    return a.pick(a.key(x) <= a.key(y), x, y)


def _sign(a: Algebra, x: Tensor) -> Tensor:
    signs = a.pick(a.key(x) > a.key(a.number(0)), a.number(1), a.number(-1))
    return a.pick(x == a.number(0), a.number(0), signs)


def _compare(test: Callable[[Tensor, Tensor], Tensor], a: Algebra, x: Any, y: Any) -> Tensor:
    x, y = _elements(a, x, y)
    return test(a.key(x), a.key(y))


RULES |= {
    name: partial(_compare, getattr(torch, name)) for name in ("gt", "ge", "lt", "le", "eq", "ne")
}
RULES |= {
    "maximum": lambda a, x, y: _larger(a, *_elements(a, x, y)),
    "minimum": lambda a, x, y: _smaller(a, *_elements(a, x, y)),
    "fmax": lambda a, x, y: _larger(a, *_elements(a, x, y)),
    "fmin": lambda a, x, y: _smaller(a, *_elements(a, x, y)),
    "isnan": lambda a, x: torch.zeros_like(x, dtype=torch.bool),
    "isinf": lambda a, x: x.isinf(),
    "logical_not": lambda a, x: x == a.number(0),
    "any": lambda a, x, *args: (x != a.number(0)).any(*args),
    "all": lambda a, x, *args: (x != a.number(0)).all(*args),
}


@rule("threshold_backward")
def _threshold_backward(a: Algebra, grad: Any, x: Any, threshold: Any) -> Tensor:
    return _opaque_gradient("relu", a, grad, x, threshold)


@rule("clamp")
def _clamp(a: Algebra, x: Any, min: Any = None, max: Any = None) -> Tensor:
    """Uninterpreted, not by order: by order a wrong norm is clipped to 1 in half of the trials."""
    x = element(a, x)
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        x = x if min is None else _larger(a, x, element(a, min))
        return x if max is None else _smaller(a, x, element(a, max))
    return a.opaque(f"clamp {min} {max}", x)


RULES |= {
    "clamp_min": lambda a, x, low: _clamp(a, x, low),
    "clamp_max": lambda a, x, high: _clamp(a, x, None, high),
}


@rule("where")
def _where(a: Algebra, condition: Tensor, x: Any, y: Any) -> Tensor:
    return a.pick(condition, *_elements(a, x, y))


@rule("masked_fill")
def _masked_fill(a: Algebra, x: Any, mask: Tensor, value: Any) -> Tensor:
    x, value = _elements(a, x, value)
    return torch.where(mask, value, x)


def _selected(x: Tensor, index: Tensor, dim: int, keepdim: bool) -> Tensor:
    if not x.dim():
        return x.clone()
    kept = index if keepdim else index.unsqueeze(dim)
    found = x.gather(dim, kept)
    return found if keepdim else found.squeeze(dim)


def _extreme(choose: str, a: Algebra, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """max, min: of all elements, along a dim with indices, or of two tensors."""
    if isinstance(dim, Tensor):
        return RULES[{"max": "maximum", "min": "minimum"}[choose]](a, x, dim)
    x = element(a, x)
    if dim is None:
        return x.flatten()[getattr(torch, f"arg{choose}")(a.key(x).flatten())].clone()
    index = getattr(torch, f"arg{choose}")(a.key(x), dim, keepdim)
    return _selected(x, index, dim, keepdim), index


def _extremes(choose: str, a: Algebra, x: Any, dim: Any = (), keepdim: bool = False) -> Tensor:
    """amax, amin."""
    x = element(a, x)
    for d in sorted(_dims(x, list(dim) if not isinstance(dim, int) else dim), reverse=True):
        x = _extreme(choose, a, x, d, keepdim)[0]
    return x


def _arg(choose: str, a: Algebra, x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    return getattr(torch, f"arg{choose}")(a.key(element(a, x)), dim, keepdim)


for _choose in ("max", "min"):
    RULES[_choose] = partial(_extreme, _choose)
    RULES[f"a{_choose}"] = partial(_extremes, _choose)
    RULES[f"arg{_choose}"] = partial(_arg, _choose)


@rule("topk")
def _topk(
    a: Algebra, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    x = element(a, x)
    index = a.key(x).topk(k, dim, largest, True).indices
    return x.gather(dim, index), index


@rule("sort")
def _sort(a: Algebra, x: Any, *args: Any, **kwargs: Any) -> Any:
    x = element(a, x)
    named = [k for k in args if isinstance(k, int) and not isinstance(k, bool)]
    dim = kwargs.get("dim", named[0] if named else -1)
    down = kwargs.get("descending", args[-1] if args and isinstance(args[-1], bool) else False)
    index = a.key(x).sort(dim=dim, descending=down, stable=True).indices
    return x.gather(dim, index), index


# -- sums ---


@rule("sum")
def _sum(a: Algebra, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    x = element(a, x)
    return a.total(x, _dims(x, dim), keepdim)


@rule("mean")
def _mean(a: Algebra, x: Any, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
    x = element(a, x)
    dims = _dims(x, dim)
    return a.div(a.total(x, dims, keepdim), a.number(_count(x, dims)))


def _variance(a: Algebra, x: Any, dim: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """With its mean; forms with ``correction`` and with ``unbiased``."""
    if isinstance(dim, bool):
        dim, kwargs["unbiased"] = None, dim
    x, keepdim = element(a, x), kwargs.get("keepdim", False)
    dims, unbiased = _dims(x, dim), kwargs.get("unbiased", True)
    less = kwargs.get("correction")
    less = (1 if unbiased else 0) if less is None else less
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
        return _extremes("max", a, _larger(a, x, a.neg(x)), _dims(x, dim), keepdim)
    if ord == 1:
        return a.total(_larger(a, x, a.neg(x)), _dims(x, dim), keepdim)
    if ord not in (2, None):
        raise NotExact(f"a norm of order {ord}")
    return a.root(a.total(a.square(x), _dims(x, dim), keepdim))


@rule("cumsum")
def _cumsum(a: Algebra, x: Any, dim: int, **_: Any) -> Tensor:
    x = element(a, x)
    return a.linear(lambda d: d.cumsum(dim), x, _count(x, _dims(x, dim)))


@rule("index_add")
def _index_add(a: Algebra, x: Any, dim: int, index: Tensor, source: Any, alpha: Any = 1) -> Tensor:
    x, source = _elements(a, x, source)
    source = source if alpha == 1 else a.mul(source, a.number(alpha))
    zero = torch.zeros_like(x)
    moved = a.linear(lambda d: zero.index_add(dim, index, d), source, index.numel())
    return a.add(x, moved)


@rule("scatter_add")
def _scatter_add(a: Algebra, x: Any, dim: int, index: Tensor, source: Any) -> Tensor:
    x, source = _elements(a, x, source)
    zero = torch.zeros_like(x)
    moved = a.linear(lambda d: zero.scatter_add(dim, index, d), source, index.numel())
    return a.add(x, moved)


@rule("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(
    a: Algebra, x: Any, indices: Any, values: Any, accumulate: bool = False, *_: Any
) -> Tensor:
    x, values = _elements(a, x, values)
    if not accumulate:
        return x.index_put(tuple(indices), values)
    zero = torch.zeros_like(x)
    shape = zero[tuple(slice(None) if i is None else i for i in indices)].shape
    put = lambda d: zero.index_put(tuple(indices), d, accumulate=True)  # noqa: E731
    return a.add(x, a.linear(put, values.expand(shape), max(values.numel(), 1)))


@rule("embedding_dense_backward")
def _embedding_backward(
    a: Algebra, grad: Any, index: Tensor, rows: int, padding: int, by_frequency: bool
) -> Tensor:
    if by_frequency:
        raise NotExact("scale_grad_by_freq")
    flat = element(a, grad).reshape(index.numel(), -1)
    zero = torch.zeros(rows, flat.shape[1], dtype=torch.float64)
    used = (index.flatten() != padding).unsqueeze(1)
    flat = torch.where(used, flat, 0.0)
    return a.linear(lambda d: zero.index_add(0, index.flatten(), d), flat, index.numel())


# -- products of matrices ---


def _product(fn: Callable[[Tensor, Tensor], Tensor], a: Algebra, x: Any, y: Any) -> Tensor:
    x, y = _elements(a, x, y)
    return a.bilinear(fn, x, y, max(x.shape[-1], 1))


RULES |= {name: partial(_product, getattr(torch, name)) for name in ("mm", "bmm", "mv", "dot")}


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


@rule("convolution")
def _convolution(a: Algebra, x: Any, weight: Any, bias: Any, *how: Any) -> Tensor:
    x, weight = _elements(a, x, weight)
    conv = lambda x, w: torch.convolution(x, w, None, *how)  # noqa: E731
    out = a.bilinear(conv, x, weight, weight[0].numel() * max(1, weight.shape[0]))
    if bias is None:
        return out
    return a.add(out, element(a, bias).view(-1, *[1] * (out.dim() - 2)))


@rule("convolution_backward")
def _convolution_backward(
    a: Algebra, grad: Any, x: Any, weight: Any, bias_sizes: Any, *how: Any
) -> Any:
    grad, x, weight = _elements(a, grad, x, weight)
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
    total = a.total(weights, _dims(weights, dim), True)
    return a.mul(weights, a.inverse_of_sum(total))


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
    grad, y = _elements(a, grad, y)
    along = a.total(a.mul(grad, y), _dims(y, dim), True)
    return a.mul(y, a.sub(grad, along))


@rule("logsumexp")
def _logsumexp(a: Algebra, x: Any, dim: Any, keepdim: bool = False) -> Tensor:
    x = element(a, x)
    return a.log(a.total(a.exp(x), _dims(x, dim), keepdim))


@rule("_log_softmax")
def _log_softmax(a: Algebra, x: Any, dim: int, *_: Any, **__: Any) -> Tensor:
    x = element(a, x)
    return a.sub(x, _logsumexp(a, x, [dim], True))


@rule("_log_softmax_backward_data")
def _log_softmax_backward(a: Algebra, grad: Any, y: Any, dim: int, *_: Any) -> Tensor:
    """exp(y) lacks the root of unity that the logarithm lost: what sums to 1 has it again."""
    grad, y = _elements(a, grad, y)
    total = a.total(grad, _dims(y, dim), True)
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
    grad, x = _elements(a, grad, x)
    _, index, counts = _class_weights(a, x, target, weight, ignored)
    share = a.neg(a.mul(grad, counts))
    share = a.div(share, element(a, total)) if reduction == 1 else share
    return torch.zeros_like(x).scatter(-1, index.unsqueeze(-1), share.unsqueeze(-1))


# -- new tensors ---


def _filled(a: Algebra, shape: Any, value: Any) -> Tensor:
    return a.number(value).expand(torch.Size(shape)).clone()


RULES |= {
    "ones": lambda a, shape, **_: _filled(a, shape, 1),
    "full": lambda a, shape, value, **_: _filled(a, shape, value),
    "ones_like": lambda a, x, **_: _filled(a, x.shape, 1),
    "full_like": lambda a, x, value, **_: _filled(a, x.shape, value),
    "new_ones": lambda a, x, shape, **_: _filled(a, shape, 1),
    "new_full": lambda a, x, shape, value, **_: _filled(a, shape, value),
    "scalar_tensor": lambda a, value, **_: a.number(value),
    "fill": lambda a, x, value: element(a, value).expand(x.shape).clone(),
    "arange": lambda a, *args, **_: a.lift(torch.arange(*args, dtype=torch.float64)),
    "eye": lambda a, *args, **_: a.lift(torch.eye(*args, dtype=torch.float64)),
}


@rule("constant_pad_nd")
def _pad(a: Algebra, x: Any, pad: Any, value: Any = 0) -> Tensor:
    x = element(a, x)
    inside = torch.constant_pad_nd(torch.ones(x.shape, dtype=torch.bool), pad, 0)
    return torch.where(inside, torch.constant_pad_nd(x, pad, 0), a.number(value))
