"""The rules of ops on elements: arithmetic, uninterpreted functions, comparisons, new tensors."""

from __future__ import annotations

import math
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
        if x.is_complex():
            raise NotExact("it has no rule for complex numbers")
        return x if x.is_floating_point() else a.lift(x)
    return a.number(x)


def elements(a: Algebra, *xs: Any) -> tuple[Tensor, ...]:
    return tuple(element(a, x) for x in xs)


def dims_of(x: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.dim()))
    return [d % max(x.dim(), 1) for d in ([dim] if isinstance(dim, int) else dim)]


# -- elementwise arithmetic ---


@rule("add")
def _add(a: Algebra, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    x, y = elements(a, x, y)
    return a.add(x, y if alpha == 1 else a.mul(y, a.number(alpha)))


@rule("sub")
def _sub(a: Algebra, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    return _add(a, x, a.neg(element(a, y)), alpha)


@rule("rsub")
def _rsub(a: Algebra, x: Any, y: Any, alpha: Any = 1) -> Tensor:
    return _sub(a, y, x, alpha)


@rule("mul")
def _mul(a: Algebra, x: Any, y: Any) -> Tensor:
    return a.product(*elements(a, x, y))


@rule("div")
def _div(a: Algebra, x: Any, y: Any, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode == "floor":
        return _of_counts("floor_divide", a, x, y)
    x, y = elements(a, x, y)
    if rounding_mode == "trunc":
        return _of_counts("trunc", a, a.div(x, y))
    return a.product(x, a.inverse(y))


@rule("pow")
def _pow(a: Algebra, x: Any, y: Any) -> Tensor:
    if isinstance(y, Tensor):
        return a.opaque("pow", *elements(a, x, y))
    x = element(a, x)
    if y in (0.5, -0.5):
        return a.root(x) if y > 0 else a.inverse_root(x)
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
    x, y, weight = elements(a, x, y, weight)
    return a.add(x, a.mul(weight, a.sub(y, x)))


@rule("addcmul")
def _addcmul(a: Algebra, x: Any, y: Any, z: Any, value: Any = 1) -> Tensor:
    x, y, z = elements(a, x, y, z)
    return a.add(x, a.mul(a.number(value), a.product(y, z)))


@rule("addcdiv")
def _addcdiv(a: Algebra, x: Any, y: Any, z: Any, value: Any = 1) -> Tensor:
    x, y, z = elements(a, x, y, z)
    return a.add(x, a.mul(a.number(value), a.div(y, z)))


def _one(fn: Callable[[Algebra, Tensor], Tensor]) -> Rule:
    return lambda a, x, **_: fn(a, element(a, x))


RULES |= {
    name: _one(fn)
    for name, fn in {
        "neg": lambda a, x: a.neg(x),
        "reciprocal": lambda a, x: a.inverse(x),
        "sqrt": lambda a, x: a.root(x),
        "rsqrt": lambda a, x: a.inverse_root(x),
        "sigmoid": lambda a, x: a.sigmoid(x),
        "exp": lambda a, x: a.exp(x),
        "expm1": lambda a, x: a.sub(a.exp(x), a.number(1)),
        "log": lambda a, x: a.log(x),
        "log1p": lambda a, x: a.log(a.add(a.number(1), x)),
        "abs": lambda a, x: a.absolute(x),
        "sgn": lambda a, x: _sign(a, x),
        "sign": lambda a, x: _sign(a, x),
        "silu": lambda a, x: a.mul(x, a.sigmoid(x)),
    }.items()
}


# -- uninterpreted functions of one element, and what their gradients are multiplied by ---

_OPAQUE = """
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv relu gelu elu
    softplus mish hardswish hardsigmoid exp2 log2 log10 lgamma digamma celu
"""
OPAQUE = tuple(_OPAQUE.split())
OPAQUE_GRADIENTS = ("gelu", "softplus", "mish", "hardswish", "hardsigmoid")


def _named(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Functions with other settings are other functions."""
    more = [str(x) for x in args] + [f"{k}={v}" for k, v in sorted(kwargs.items())]
    return " ".join([name, *more])


def _opaque(name: str, a: Algebra, x: Any, *args: Any, **kwargs: Any) -> Any:
    return a.opaque(_named(name, args, kwargs), element(a, x))


def _opaque_gradient(name: str, a: Algebra, grad: Any, x: Any, *args: Any, **kwargs: Any) -> Tensor:
    grad, x = elements(a, grad, x)
    return a.mul(grad, a.opaque(_named(f"{name}'", args, kwargs), x))


RULES |= {name: partial(_opaque, name) for name in OPAQUE}
RULES |= {f"{name}_backward": partial(_opaque_gradient, name) for name in OPAQUE_GRADIENTS}


@rule("hypot")
def _hypot(a: Algebra, x: Any, y: Any) -> Tensor:
    x, y = elements(a, x, y)
    return a.root(a.add(a.square(x), a.square(y)))


def _of_counts(name: str, a: Algebra, *given: Any, **how: Any) -> Tensor:
    """Of small integers what torch computes; uninterpreted of others."""
    xs = torch.broadcast_tensors(*elements(a, *given))
    if how:
        return a.opaque(_named(name, (), how), *xs)
    counts = [torch.where(*a.counts(x), torch.nan) for x in xs]
    plain = getattr(torch, name)(*counts)
    known = plain == plain.round()  # not of NaN
    return a.pick(known, a.lift(torch.where(known, plain, 0.0)), a.opaque(name, *xs))


RULES |= {
    name: partial(_of_counts, name)
    for name in ("atan2", "fmod", "remainder", "floor_divide", "floor", "ceil", "round", "trunc")
}


@rule("log_sigmoid_forward")
def _log_sigmoid(a: Algebra, x: Any) -> tuple[Tensor, Tensor]:
    x = element(a, x)
    plain, logs = a.opaque("log_sigmoid", x), a.of_logs(x)
    if bool(logs.any()):
        plain = a.pick(logs, a.log(torch.where(logs, a.sigmoid(x), 1.0)), plain)
    return plain, torch.zeros_like(plain)


@rule("xlogy")
def _xlogy(a: Algebra, x: Any, y: Any) -> Tensor:
    """x log(y), which is 0 where x is."""
    x, y = torch.broadcast_tensors(*elements(a, x, y))
    gone = x == a.number(0)
    return torch.where(gone, 0.0, a.mul(x, a.log(torch.where(gone, a.number(1), y))))


@rule("log_sigmoid_backward")
def _log_sigmoid_backward(a: Algebra, grad: Any, x: Any, buffer: Any) -> Tensor:
    grad, x = elements(a, grad, x)
    return a.mul(grad, a.sub(a.number(1), a.sigmoid(x)))


@rule("logaddexp")
def _logaddexp(a: Algebra, x: Any, y: Any) -> Tensor:
    x, y = elements(a, x, y)
    return a.log(a.add(a.exp(x), a.exp(y)))


@rule("nan_to_num")
def _nan_to_num(a: Algebra, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """Elements are never NaN."""
    most = torch.finfo(torch.float64).max
    x = element(a, x)
    for found, value in ((torch.inf, posinf), (-torch.inf, neginf)):
        value = math.copysign(most, found) if value is None else value
        x = torch.where(x == found, a.number(value), x) if bool((x == found).any()) else x
    return x


@rule("tanh_backward")
def _tanh_backward(a: Algebra, grad: Any, y: Any) -> Tensor:
    grad, y = elements(a, grad, y)
    return a.mul(grad, a.sub(a.number(1), a.square(y)))


@rule("sigmoid_backward")
def _sigmoid_backward(a: Algebra, grad: Any, y: Any) -> Tensor:
    grad, y = elements(a, grad, y)
    return a.mul(grad, a.mul(y, a.sub(a.number(1), y)))


@rule("silu_backward")
def _silu_backward(a: Algebra, grad: Any, x: Any) -> Tensor:
    grad, x = elements(a, grad, x)
    s = a.sigmoid(x)
    inside = a.add(a.number(1), a.mul(x, a.sub(a.number(1), s)))
    return a.mul(grad, a.mul(s, inside))


# -- comparisons, by an order drawn at random ---


def _sign(a: Algebra, x: Tensor) -> Tensor:
    signs = a.pick(a.key(x) > a.key(a.number(0)), a.number(1), a.number(-1))
    return a.pick(x == a.number(0), a.number(0), signs)


def _compare(test: Callable[[Tensor, Tensor], Tensor], a: Algebra, x: Any, y: Any) -> Tensor:
    x, y = elements(a, x, y)
    return test(a.key(x), a.key(y))


RULES |= {
    name: partial(_compare, getattr(torch, name)) for name in ("gt", "ge", "lt", "le", "eq", "ne")
}
RULES |= {
    "maximum": lambda a, x, y: a.larger(*elements(a, x, y)),
    "minimum": lambda a, x, y: a.smaller(*elements(a, x, y)),
    "fmax": lambda a, x, y: a.larger(*elements(a, x, y)),
    "fmin": lambda a, x, y: a.smaller(*elements(a, x, y)),
    "isnan": lambda a, x: torch.zeros_like(x, dtype=torch.bool),
    "isinf": lambda a, x: x.isinf(),
    "logical_not": lambda a, x: x == a.number(0),
    "any": lambda a, x, *args: (x != a.number(0)).any(*args),
    "all": lambda a, x, *args: (x != a.number(0)).all(*args),
}


@rule("hardshrink_backward", "softshrink_backward")
def _shrink_backward(a: Algebra, grad: Any, x: Any, size: Any) -> Tensor:
    grad, x = elements(a, grad, x)
    return a.pick(_compare(torch.le, a, a.absolute(x), size), a.number(0), grad)


@rule("threshold_backward")
def _threshold_backward(a: Algebra, grad: Any, x: Any, threshold: Any) -> Tensor:
    return _opaque_gradient("relu", a, grad, x, threshold)


@rule("clamp")
def _clamp(a: Algebra, x: Any, min: Any = None, max: Any = None) -> Tensor:
    """Uninterpreted, not by order: by order a wrong norm is clipped to 1 in half of the trials."""
    x = element(a, x)
    if isinstance(min, Tensor) or isinstance(max, Tensor):
        x = x if min is None else a.larger(x, element(a, min))
        return x if max is None else a.smaller(x, element(a, max))
    return a.opaque(f"clamp {min} {max}", x)


RULES |= {
    "clamp_min": lambda a, x, low: _clamp(a, x, low),
    "clamp_max": lambda a, x, high: _clamp(a, x, None, high),
}


@rule("index_fill")
def _index_fill(a: Algebra, x: Any, dim: int, index: Tensor, value: Any) -> Tensor:
    x, value = elements(a, x, value)
    at = torch.zeros(x.shape, dtype=torch.bool).index_fill(dim, index, True)
    return torch.where(at, value, x)


@rule("scatter")
def _scatter(a: Algebra, x: Any, dim: int, index: Tensor, source: Any, **kwargs: Any) -> Tensor:
    if kwargs:
        raise NotExact("a scatter that reduces")
    x, source = elements(a, x, source)
    return x.scatter(dim, index, source if source.dim() else source.expand(index.shape))


@rule("where")
def _where(a: Algebra, condition: Tensor, x: Any, y: Any) -> Tensor:
    return a.pick(condition, *elements(a, x, y))


@rule("masked_fill")
def _masked_fill(a: Algebra, x: Any, mask: Tensor, value: Any) -> Tensor:
    x, value = elements(a, x, value)
    return torch.where(mask, value, x)


def selected(x: Tensor, index: Tensor, dim: int, keepdim: bool) -> Tensor:
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
    return selected(x, index, dim, keepdim), index


def extremes(choose: str, a: Algebra, x: Any, dim: Any = (), keepdim: bool = False) -> Tensor:
    """amax, amin."""
    x = element(a, x)
    for d in sorted(dims_of(x, list(dim) if not isinstance(dim, int) else dim), reverse=True):
        x = _extreme(choose, a, x, d, keepdim)[0]
    return x


def _arg(choose: str, a: Algebra, x: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    return getattr(torch, f"arg{choose}")(a.key(element(a, x)), dim, keepdim)


for _choose in ("max", "min"):
    RULES[_choose] = partial(_extreme, _choose)
    RULES[f"a{_choose}"] = partial(extremes, _choose)
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
