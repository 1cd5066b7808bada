"""The registry of rules: which function runs for a torch function on a sharded tensor.

Looked up in this order: a user's rule (``sharded_op``), one for the tensor's kind of spec
(``sharding_spec_op``), a built-in one (``rule``); without any, an error that says what there is.

A built-in rule takes the parameters of the torch function itself, by torch's names. It returns
NotImplemented where it has no way for these arguments, and parameters that it does not have
(``out=``) mean the same. Users' rules have torch's signature, ``(types, args, kwargs,
process_group)``; ``rule`` adapts ours to it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from fcoll.sharded import _torch
from fcoll.sharded._torch import ShardingSpec
from fcoll.sharded.errors import BadOpFunction, GroupsDiffer, NoShardedOp

TorchRule = Callable[[Any, tuple, dict[str, Any], Any], Any]

_users: dict[Callable, TorchRule] = {}
_of_specs: dict[type, dict[Callable, TorchRule]] = {}
_built_in: dict[Callable, TorchRule] = {}
_elementwise: set[Callable] = set()  # of the built-in ones: too many to list in an error
_attributes: set[Callable] = set()  # what looks at no element: not worth listing


def sharded_op(func: Callable) -> Callable[[TorchRule], TorchRule]:
    """Decorate a rule for a torch function; it comes before all others.

    >>> @fcoll.sharded.sharded_op(torch.special.erfcx)
    ... def erfcx(types, args, kwargs, process_group):
    ...     return [torch.special.erfcx(shard.tensor) for shard in args[0].local_shards()]
    """
    return functools.partial(_register, _users, (func,))


def sharding_spec_op(spec: type[ShardingSpec], func: Callable) -> Callable[[TorchRule], TorchRule]:
    """Decorate a rule for a torch function on tensors with this kind of spec.

    >>> @fcoll.sharded.sharding_spec_op(fcoll.sharded.GridShardingSpec, torch.trace)
    ... def trace(types, args, kwargs, process_group):
    ...     return torch.trace(args[0].all_gather())
    """
    return functools.partial(_register, _of_specs.setdefault(spec, {}), (func,))


def torch_built_in(*funcs: Callable) -> Callable[[TorchRule], TorchRule]:
    """torch's ``_sharded_op_impl``: decorate a rule that comes after users' and specs' rules."""
    return functools.partial(_register, _built_in, funcs)


def _register(
    table: dict[Callable, TorchRule], funcs: Sequence[Callable], rule: TorchRule
) -> TorchRule:
    signature = inspect.signature(rule)
    if len(signature.parameters) != 4:
        raise BadOpFunction(signature=signature)
    table |= dict.fromkeys(funcs, rule)
    return rule


def rule(*funcs: Callable) -> Callable[[Callable], Callable]:
    """Decorate a built-in rule for these torch functions, with their own parameters."""

    def decorate(own: Callable) -> Callable:
        _built_in.update(dict.fromkeys(funcs, _with_torch_signature(own)))
        return own

    return decorate


def rule_of_each(funcs: Collection[Callable], own: Callable) -> None:
    """One built-in rule for many torch functions: its first argument is the function."""
    for func in funcs:
        rule(func)(functools.partial(own, func))


def elementwise_rule(funcs: Collection[Callable], own: Callable) -> None:
    """``rule_of_each`` of functions of single elements."""
    rule_of_each(funcs, own)
    _elementwise.update(funcs)


def attribute_rule(funcs: Collection[Callable]) -> None:
    """These torch functions see the tensor without its shards: its size, its dtype."""
    rule_of_each(funcs, _without_shards)
    _attributes.update(funcs)


def _without_shards(func: Callable, *args: Any, **kwargs: Any) -> Any:
    with _torch.as_plain_tensors():
        return func(*args, **kwargs)


def _with_torch_signature(own: Callable) -> TorchRule:
    """The rule as torch's: NotImplemented where it lacks a parameter that the call gives. (Not
    ``Signature.bind``, which takes 2 us of a getter's 3.)"""
    parameters = inspect.signature(own).parameters.values()
    kinds = [parameter.kind for parameter in parameters]
    by_position = math.inf
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        by_position = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    any_name = inspect.Parameter.VAR_KEYWORD in kinds
    names = {parameter.name for parameter in parameters}

    def adapted(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
        if len(args) > by_position or not (any_name or kwargs.keys() <= names):
            return NotImplemented
        return own(*args, **kwargs)

    return adapted


@_torch.uncompiled
def dispatch(func: Callable, types: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """What ``func(*args, **kwargs)`` is for sharded tensors."""
    kwargs = kwargs or {}
    first, *others = sharded_among((*args, *kwargs.values())) or [None]
    if first is not None:
        group = first._process_group
        if any(other._process_group is not group for other in others):
            raise GroupsDiffer(func=name_of(func))
        spec_rule = _spec_rule(first._sharding_spec, func)
        torch_rule = _users.get(func) or spec_rule or _built_in.get(func)
        result = NotImplemented if torch_rule is None else torch_rule(types, args, kwargs, group)
        if result is not NotImplemented:
            return result
    raise unsupported(func, args, kwargs)


def unsupported(func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> NoShardedOp:
    """The error of a call that has no rule, or that a rule has no way for."""
    shown = [_kind(x) for x in args] + [f"{k}={_kind(v)}" for k, v in kwargs.items()]
    return NoShardedOp(
        func=f"torch.{name_of(func)}",
        name=name_of(func),
        supported=f"There are rules for elementwise functions of tensors that are cut the same "
        f"way, {', '.join(supported())}, size, dtype and the like.",
        given=f"({', '.join(shown)})",
    )


def supported() -> list[str]:
    """The names of torch functions that have a rule, but for elementwise ones and attributes."""
    funcs = {func for table in (_built_in, _users, *_of_specs.values()) for func in table}
    listed = {f for f in funcs - _attributes - _elementwise if _plain_name(f) != "__get__"}
    return sorted({name for name in map(name_of, listed) if not name.startswith("_")})


def sharded_among(values: Iterable[Any]) -> list[Any]:
    """The sharded tensors among arguments, also in lists and dicts."""
    tensors = []
    for value in values:
        if is_sharded(value):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += sharded_among(value)
        elif isinstance(value, dict):
            tensors += sharded_among(value.values())
    return tensors


def is_sharded(value: Any) -> bool:
    return hasattr(type(value), "_is_sharded_tensor")


def name_of(func: Callable) -> str:
    """A function's name; of a property (shape.__get__) the property's."""
    owner, own = getattr(func, "__self__", None), _plain_name(func)
    return getattr(owner, "__name__", own) if own == "__get__" else own


def _plain_name(func: Callable) -> str:
    return getattr(func, "__name__", str(func))


def _kind(value: Any) -> str:
    return f"{type(value).__name__}" if hasattr(value, "shape") else repr(value)[:60]


def _spec_rule(spec: ShardingSpec, func: Callable) -> TorchRule | None:
    tables = (_of_specs.get(kind, {}) for kind in type(spec).__mro__)
    return next((table[func] for table in tables if func in table), None)
