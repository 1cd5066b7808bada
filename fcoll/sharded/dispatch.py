"""Which rule runs for a torch function on a sharded tensor: a table that users can add to.

In this order: a rule of the user's (``sharded_op``), one for the tensor's kind of spec
(``sharding_spec_op``), a built-in one (``built_in``), or an error that says what there is.

A rule takes what ``__torch_function__`` gives and the tensor's group:
``rule(types, args, kwargs, process_group)``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fcoll.sharded import _torch
from fcoll.sharded._torch import ShardingSpec
from fcoll.sharded.errors import BadOpFunction, GroupsDiffer, NoShardedOp

Rule = Callable[[Any, tuple, dict[str, Any], Any], Any]

_users: dict[Callable, Rule] = {}
_of_specs: dict[type, dict[Callable, Rule]] = {}
_built_in: dict[Callable, Rule] = {}
_properties: set[Callable] = set()  # of the built-in ones: what looks at no element
_elementwise: set[Callable] = set()  # and what looks at one at a time: too many to list


def sharded_op(func: Callable) -> Callable[[Rule], Rule]:
    """Decorate a rule for a torch function; it comes before all others.

    >>> @fcoll.sharded.sharded_op(torch.special.erfcx)
    ... def erfcx(types, args, kwargs, process_group):
    ...     return [torch.special.erfcx(shard.tensor) for shard in args[0].local_shards()]
    """
    return functools.partial(_register, func, _users)


def sharding_spec_op(spec: type[ShardingSpec], func: Callable) -> Callable[[Rule], Rule]:
    """Decorate a rule for a torch function on tensors with this kind of spec.

    >>> @fcoll.sharded.sharding_spec_op(fcoll.sharded.GridShardingSpec, torch.trace)
    ... def trace(types, args, kwargs, process_group):
    ...     return torch.trace(args[0].all_gather())
    """
    return functools.partial(_register, func, _of_specs.setdefault(spec, {}))


def built_in(*funcs: Callable) -> Callable[[Rule], Rule]:
    """Decorate a rule of fcoll's own for these torch functions."""

    def decorate(rule: Rule) -> Rule:
        for func in funcs:
            _register(func, _built_in, rule)
        return rule

    return decorate


def elementwise(func: Callable, rule: Rule) -> None:
    """Register fcoll's own rule for a function of single elements."""
    _register(func, _built_in, rule)
    _elementwise.add(func)


def as_plain(*funcs: Callable) -> None:
    """These torch functions see the tensor without its shards: its size, its dtype."""

    def rule_of(func: Callable) -> Rule:
        def rule(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
            with _torch.as_plain_tensors():
                return func(*args, **kwargs)

        return rule

    for func in funcs:
        _register(func, _built_in, rule_of(func))
        _properties.add(func)


def _register(func: Callable, table: dict[Callable, Rule], rule: Rule) -> Rule:
    signature = inspect.signature(rule)
    if len(signature.parameters) != 4:
        raise BadOpFunction(signature=signature)
    table[func] = rule
    return rule


@_torch.uncompiled
def dispatch(func: Callable, types: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """What ``func(*args, **kwargs)`` is for sharded tensors."""
    kwargs = kwargs or {}
    found = list(sharded_among((*args, *kwargs.values())))
    first = found[0] if found else None
    if first is not None:
        group = first._process_group
        if any(other._process_group is not group for other in found[1:]):
            raise GroupsDiffer(func=name_of(func))
        rule = _users.get(func) or _spec_rule(first._sharding_spec, func) or _built_in.get(func)
        if rule is not None:
            return rule(types, args, kwargs, group)
    raise unsupported(func, args, kwargs)


def unsupported(func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> NoShardedOp:
    """The error of a call that has no rule, or that a rule has no way for."""
    given = [_kind(x) for x in args] + [f"{k}={_kind(v)}" for k, v in kwargs.items()]
    return NoShardedOp(
        func=f"torch.{name_of(func)}",
        name=name_of(func),
        supported=f"There are rules for elementwise functions of tensors that are cut the same "
        f"way, {', '.join(supported())}, size, dtype and the like.",
        given=f"({', '.join(given)})",
    )


def supported() -> list[str]:
    """The names of torch functions that have a rule, but for elementwise ones."""
    rules = [_built_in, _users, *_of_specs.values()]
    names = {name_of(func) for table in rules for func in table if not _is_property(func)}
    return sorted(name for name in names if not name.startswith("_"))


def _is_property(func: Callable) -> bool:
    return func in _properties | _elementwise or getattr(func, "__name__", "") == "__get__"


def sharded_among(values: Any) -> Iterator[Any]:
    """The sharded tensors among arguments, also in lists and dicts."""
    for value in values:
        if is_sharded(value):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from sharded_among(value)
        elif isinstance(value, dict):
            yield from sharded_among(value.values())


def is_sharded(value: Any) -> bool:
    return hasattr(type(value), "_is_sharded_tensor")


def name_of(func: Callable) -> str:
    """A function's name; of a property (shape.__get__) the property's."""
    owner = getattr(func, "__self__", None)
    own = getattr(func, "__name__", str(func))
    return getattr(owner, "__name__", own) if own == "__get__" else own


def _kind(value: Any) -> str:
    return f"{type(value).__name__}" if hasattr(value, "shape") else repr(value)[:60]


def _spec_rule(spec: ShardingSpec, func: Callable) -> Rule | None:
    for kind in type(spec).__mro__:
        if rule := _of_specs.get(kind, {}).get(func):
            return rule
    return None
