"""Elementwise functions: on each shard alone, without communication.

Sharded arguments are cut the same way. A number or a 0-dim tensor meets every element; a plain
tensor may be broadcast over the dims that are cut, because then it does not matter whether it is
a rank's part or the whole: a bias for rows, for instance. It is the same on all ranks; each rank's
gets the gradient of its own shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fcoll.sharded.boxes import Box
from fcoll.sharded.dispatch import elementwise, is_sharded, name_of, sharded_among, unsupported
from fcoll.sharded.errors import LayoutsDiffer
from fcoll.sharded.layout import held
from fcoll.sharded.results import changed, cut_dims, probe_of, result_of
from fcoll.sharded.specs import box_of

UNARY = """abs absolute neg negative positive sign sgn signbit exp exp2 expm1 log log2 log10 log1p
sqrt rsqrt square reciprocal sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh
acosh atanh sigmoid logit erf erfc erfinv lgamma digamma ceil floor round trunc frac isnan isinf
isfinite logical_not bitwise_not angle real imag conj nan_to_num clamp clip clamp_min clamp_max
bernoulli relu relu6 gelu silu mish elu selu celu leaky_relu hardtanh hardswish hardsigmoid
softplus softsign softshrink hardshrink tanhshrink threshold logsigmoid dropout alpha_dropout"""
BINARY = """add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow
float_power maximum minimum fmax fmin atan2 arctan2 hypot copysign eq ne lt le gt ge greater less
greater_equal less_equal not_equal isclose logical_and logical_or logical_xor bitwise_and bitwise_or
bitwise_xor where lerp masked_fill addcmul addcdiv rsub xlogy logaddexp heaviside"""
OPERATORS = """__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__
__floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__
__ge__ __and__ __or__ __xor__ __invert__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__
__iand__ __ior__ __ixor__ __neg__ __abs__"""
FILLS = "zero_ fill_ uniform_ normal_ exponential_ log_normal_ cauchy_ geometric_ random_"
IN_PLACE_OPERATORS = {name for name in OPERATORS.split() if name.startswith("__i")} - {"__invert__"}


def on_shards(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func`` of each shard, as a sharded tensor."""
    given = list(sharded_among((*args, *kwargs.values())))
    first = given[0]
    for other in given[1:]:
        check_same_layout(func, first, other)
    writes = _writes(func, kwargs)
    plain_written = kwargs.get("out") is not None or (writes and not is_sharded(args[0]))
    if plain_written or not _broadcastable(first, (*args, *kwargs.values())):
        raise unsupported(func, args, kwargs)

    def call(pick: Callable[[Any], Any]) -> Any:
        return func(*map(pick, args), **{k: pick(v) for k, v in kwargs.items()})

    tensors = [call(_Part(box_of(shard.metadata))) for shard in first._local_shards]
    probe = call(_Empty(first))
    if not isinstance(probe, Tensor):  # torch.where(condition), for instance
        raise unsupported(func, args, kwargs)
    return changed(args[0], probe) if writes else result_of(first, tensors, probe)


class _Part:
    """An argument as a shard's op takes it: of sharded ones the block at this place."""

    def __init__(self, box: Box) -> None:
        self.box = box

    def __call__(self, value: Any) -> Any:
        if not is_sharded(value):
            return value
        blocks = {box_of(shard.metadata): shard.tensor for shard in value._local_shards}
        block = blocks.get(self.box)
        return probe_of(value).reshape(self.box.sizes) if block is None else block


class _Empty:
    """An argument as the probe's op takes it."""

    def __init__(self, st: Any) -> None:
        self.shape = (0, *st._metadata.size[1:])

    def __call__(self, value: Any) -> Any:
        if is_sharded(value):
            return probe_of(value)
        if isinstance(value, Tensor) and value.dim() == len(self.shape) and value.dim():
            return value[:0]  # a broadcast first dim: 1
        return value


def check_same_layout(func: Callable, one: Any, other: Any) -> None:
    """Raise unless both lie in the same blocks on the same ranks."""
    sizes = tuple(one._metadata.size), tuple(other._metadata.size)
    if sizes[0] != sizes[1]:
        why = f"Implicit broadcasting not supported: sharded tensors of {sizes[0]} and {sizes[1]}"
        raise LayoutsDiffer(func=name_of(func), why=why, hint="Expand it before sharding it.")
    if one._sharding_spec is other._sharding_spec:
        return
    blocks = [{block for block in held(st) if block.box.volume} for st in (one, other)]
    if blocks[0] != blocks[1]:
        why = f"the tensors are cut in two ways, {one._sharding_spec} and {other._sharding_spec}"
        hint = "Use fcoll.sharded.reshard(b, a.sharding_spec()) in b's place."
        raise LayoutsDiffer(func=name_of(func), why=why, hint=hint)


def _broadcastable(st: Any, values: tuple) -> bool:
    """Has every plain tensor one element along the dims that are cut, and fits the others?"""
    size, cut = st._metadata.size, cut_dims(st)
    for value in values:
        if not isinstance(value, Tensor) or is_sharded(value):
            continue
        lead = len(size) - value.dim()
        if lead < 0:
            return False
        for d, n in enumerate(value.shape, lead):
            if n != 1 and (d in cut or n != size[d]):
                return False
    return True


def _writes(func: Callable, kwargs: dict[str, Any]) -> bool:
    name = name_of(func)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in IN_PLACE_OPERATORS or bool(kwargs.get("inplace"))


def _register(name: str) -> None:
    """A rule for a name wherever torch has it: as a function, a method, and both in place."""
    places = (torch, Tensor, F)
    found = {getattr(place, n, None) for place in places for n in (name, f"{name}_")}
    for func in found:
        if func is not None:
            _rule(func)


def _rule(func: Callable) -> None:
    def rule(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
        return on_shards(func, args, kwargs)

    elementwise(func, rule)


for _name in [*UNARY.split(), *BINARY.split()]:
    _register(_name)
for _name in [*OPERATORS.split(), *FILLS.split()]:
    if hasattr(Tensor, _name):
        _rule(getattr(Tensor, _name))
