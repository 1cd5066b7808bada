"""What the arguments of a call hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch
from fcoll.local.ints import is_local_int
from fcoll.local.local_tensor import LocalTensor

# Tensors that are plain for us; any other subclass handles the call itself.
_PLAIN = (Tensor, _torch.FakeTensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass
class Seen:
    """The tensors and ranks' ints among a call's arguments."""

    locals: list[LocalTensor] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    foreign: list[type] = field(default_factory=list)
    local_ints: bool = False


def scan(args: Any, kwargs: dict[str, Any]) -> Seen:
    """Look through arguments, lists and dicts."""
    seen = Seen()
    _look(args, seen)
    if kwargs:
        _look(kwargs.values(), seen)
    return seen


def _look(values: Any, seen: Seen) -> None:
    for v in values:
        if isinstance(v, Tensor):
            if isinstance(v, LocalTensor):
                seen.locals.append(v)
            elif type(v) in _PLAIN:
                seen.tensors.append(v)
            else:
                seen.foreign.append(type(v))
        elif isinstance(v, (list, tuple)):
            _look(v, seen)
        elif isinstance(v, dict):
            _look(v.values(), seen)
        elif is_local_int(v):
            seen.local_ints = True


def mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """``fn`` on everything inside lists, tuples and dicts."""
    if isinstance(value, (list, tuple)):
        out = [mapped(fn, v) for v in value]
        return type(value)(*out) if hasattr(value, "_fields") else type(value)(out)
    if isinstance(value, dict):
        return {k: mapped(fn, v) for k, v in value.items()}
    return fn(value)
