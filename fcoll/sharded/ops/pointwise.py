"""Elementwise functions and nn.init: on each shard alone, without communication.

Sharded arguments are cut the same way. A number or a 0-dim tensor meets every element; a plain
tensor may be broadcast over the dims that are cut, because then it does not matter whether it is
a rank's part or the whole: a bias for rows, for instance. It is the same on all ranks; each rank's
gets the gradient of its own shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fcoll.sharded._torch import Shard
from fcoll.sharded.errors import BadInit, LayoutsDiffer
from fcoll.sharded.ops.rules import (
    elementwise_rule,
    is_sharded,
    name_of,
    rule,
    rule_of_each,
    sharded_among,
)
from fcoll.sharded.shards import blocks_of, changed, cut_dims, probe_of, result_of
from fcoll.sharded.specs import box_of
from fcoll.sharded.transfer_plan import Box

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


def on_shards(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """``func`` of each shard, as a sharded tensor."""
    values = (*args, *kwargs.values())
    first, *others = sharded_among(values)
    for other in others:
        check_same_layout(func, first, other)
    writes = _writes(func, kwargs)
    plain_written = kwargs.get("out") is not None or (writes and not is_sharded(args[0]))
    if plain_written or not _broadcastable(first, values):
        return NotImplemented

    def call(part_of: Callable[[Any], Any]) -> Any:
        return func(*map(part_of, args), **{k: part_of(v) for k, v in kwargs.items()})

    def of_shard(shard: Shard) -> Any:
        return call(partial(_block_at, box_of(shard.metadata)))

    probe = call(partial(_empty_block, first._metadata.size))
    if not isinstance(probe, Tensor):  # torch.where(condition), for instance
        return NotImplemented
    if not writes:
        return result_of(first, of_shard, probe)
    for shard in first._local_shards:
        of_shard(shard)
    return changed(args[0], probe)


def _block_at(box: Box, value: Any) -> Any:
    """An argument as a shard's op takes it: of sharded ones the block at this place."""
    if not is_sharded(value):
        return value
    blocks = {box_of(shard.metadata): shard.tensor for shard in value._local_shards}
    return blocks[box] if box in blocks else probe_of(value).reshape(box.sizes)


def _empty_block(size: Sequence[int], value: Any) -> Any:
    """An argument as the probe's op takes it."""
    if is_sharded(value):
        return probe_of(value)
    if isinstance(value, Tensor) and value.dim() == len(size) and value.dim():
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
    blocks = [{block for block in blocks_of(st) if block.box.volume} for st in (one, other)]
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


def _named(name: str) -> set[Callable]:
    """What torch has of a name: a function, a method, and both in place."""
    funcs = {getattr(place, n, None) for place in (torch, Tensor, F) for n in (name, f"{name}_")}
    return {func for func in funcs if func is not None}


for _name in [*UNARY.split(), *BINARY.split()]:
    elementwise_rule(_named(_name), on_shards)
elementwise_rule(
    [getattr(Tensor, n) for n in f"{OPERATORS} {FILLS}".split() if hasattr(Tensor, n)], on_shards
)

# -- nn.init: each rank fills its own shards, by its own generator. What is not here (zeros_,
# xavier_uniform_, kaiming_normal_, ...) calls the Tensor methods above, with the size of the whole.


def _fill(func: Callable, tensor: Any, generator: Any = None, **values: Any) -> Any:
    _check_given(func, values)
    random = {} if generator is None else {"generator": generator}
    for shard in tensor._local_shards:
        func(shard.tensor, **values, **random)
    return tensor


rule_of_each([nn.init.uniform_, nn.init.normal_, nn.init.constant_], _fill)


@rule(nn.init.kaiming_uniform_)
def kaiming_uniform_(
    tensor: Any, a: Any, mode: Any, nonlinearity: Any, generator: Any = None
) -> Any:
    """The fan is that of the whole tensor (torch takes each shard's own)."""
    _check_given(nn.init.kaiming_uniform_, {"a": a, "mode": mode, "nonlinearity": nonlinearity})
    rows, columns, *field = tensor._metadata.size
    fan = math.prod(field) * {"fan_in": columns, "fan_out": rows}[mode.lower()]
    bound = nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3 / max(fan, 1))
    return _fill(nn.init.uniform_, tensor, generator, a=-bound, b=bound)


def _check_given(func: Callable, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is None:
            raise BadInit(func=name_of(func), name=name)
