"""Placeholders for the values that a traced step reads from tensors: ``item()``, ``float()``,
``bool()``, ``tolist()``, formatting; and for the symbols that integers are."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.utils._pytree import tree_iter, tree_map

from fcoll.source import is_library
from fcoll.tracing import _torch
from fcoll.tracing.values import Branch, Unknown, Values, active, current


@contextmanager
def reading(values: Values, is_written: Callable[[Tensor], bool]) -> Iterator[None]:
    """Inside, what is read of tensors are placeholders, and branches on them ask ``values``.

    ``is_written`` says whether the trace gave a tensor of the program a new value.
    """
    replacements: dict[Any, dict[str, Any]] = {
        Tensor: _of_tensors(is_written),
        SymInt: _of_symbols(SymInt, {"__int__": _plain_int, "__index__": _plain_int}),
        SymFloat: _of_symbols(SymFloat, {"__int__": _plain_int, "__float__": _plain_float}),
        SymBool: _of_symbols(SymBool, {}),
        torch: {"tensor": _unless_symbols(torch.tensor)},
        math: {name: _unless_unknown(getattr(math, name)) for name in _MATH},
        json.JSONEncoder: {"default": _to_json(json.JSONEncoder.default)},
    }
    with ExitStack() as stack:
        stack.enter_context(active(values))
        for owner, attributes in replacements.items():
            stack.enter_context(_torch.replaced(owner, attributes))
        yield


@contextmanager
def reading_compiled(values: Values) -> Iterator[None]:
    """``reading`` for a compiled step: values are plain numbers, which Dynamo knows."""

    def item(x: Tensor) -> Any:
        value = read(x)
        if not isinstance(value, _torch.SYMBOLS) or _torch.is_compiling():
            return value
        if isinstance(value, SymBool):
            return values.decide()
        return values.plain_float() if isinstance(value, SymFloat) else values.plain_int()

    read = Tensor.item
    conversions = {"__bool__": bool, "__float__": float, "__int__": int, "__index__": int}
    methods: dict[str, Any] = {k: lambda x, to=to: to(x.item()) for k, to in conversions.items()}
    methods |= {"item": item, "tolist": _listed, "__format__": _formatted(Tensor.__format__)}
    outside = {name: torch.compiler.disable(fn) for name, fn in methods.items()}
    with active(values), _torch.replaced(Tensor, outside):
        yield


# -- tensors ---


def _of_tensors(is_written: Callable[[Tensor], bool]) -> dict[str, Any]:
    """The methods of tensors that read values. Each first takes the value as it is, if it has one:
    a constant of the program, or one that follows from what is known."""
    read, listed, array = Tensor.item, Tensor.tolist, Tensor.numpy

    def item(x: Tensor) -> Any:
        value = read(x)
        if not isinstance(value, SymFloat):
            return value
        return Unknown.computed(current().number, str(_torch.expression(value)))

    def tolist(x: Tensor) -> Any:
        if isinstance(x, _torch.FakeTensor) or not is_written(x):
            return listed(x)
        return _listed(x)

    def truth(x: Tensor) -> bool:
        return _truth(x.item())

    def number(x: Tensor) -> float:
        return _converted(x.item(), float, _plain_float)

    def count(x: Tensor) -> int:
        return _converted(x.item(), int, _plain_int)

    def numpy_array(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, _torch.FakeTensor):
            return array(x, *args, **kwargs)
        dtype = numpy.dtype(str(x.dtype).removeprefix("torch."))
        value = current().plain_float() if x.is_floating_point() else current().plain_int()
        return numpy.broadcast_to(numpy.array(value).astype(dtype), tuple(x.shape))

    return {
        "item": item,
        "tolist": tolist,
        "numpy": numpy_array,
        "is_nonzero": truth,
        "__bool__": truth,
        "__float__": number,
        "__int__": count,
        "__index__": count,
        "__format__": _formatted(Tensor.__format__),
    }


def _listed(x: Tensor) -> Any:
    return x.item() if x.dim() == 0 else [_listed(part) for part in x]


def _formatted(shown: Callable[[Tensor, str], str]) -> Callable[[Tensor, str], str]:
    """f"{loss:.3f}": torch formats a plain tensor of one number only."""

    def method(x: Tensor, spec: str) -> str:
        has_none = isinstance(x, _torch.FakeTensor) or x.is_meta
        return format(x.item(), spec) if spec and has_none and x.dim() == 0 else shown(x, spec)

    return method


def _truth(x: Any) -> bool:
    """bool(x) of what a tensor's item() gave."""
    if not isinstance(x, _torch.SYMBOLS):
        return bool(x)
    try:
        return bool(x)
    except _torch.NO_VALUE:
        return current().decide(condition=_torch.expression(x))


def _converted(x: Any, convert: Callable[[Any], Any], otherwise: Callable[[Any], Any]) -> Any:
    """float(x) or int(x) of what a tensor's item() gave."""
    try:
        return convert(x)
    except (*_torch.NO_VALUE, TypeError):  # a SymBool is not a float
        return otherwise(x)


# -- symbols ---


def _of_symbols(cls: Any, conversions: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """The conversions of a symbol to plain numbers, and its way to be printed."""

    def formatted(x: Any, spec: str) -> str:
        return format(_as_number(x), spec) if spec else str(x)

    def truth(x: Any) -> bool:
        """bool(n) and bool(n > 3): torch may know the answer from what it knows of n."""
        return current().decide(condition=_torch.expression(x))

    answers: dict[str, Callable[[Any], Any]] = {**conversions, "__bool__": truth}
    methods = {name: _if_unknown(getattr(cls, name), fn) for name, fn in answers.items()}
    return {**methods, "__format__": formatted, "__round__": lambda x, digits=None: x}


def _if_unknown(exact: Callable[[Any], Any], otherwise: Callable[[Any], Any]) -> Callable[..., Any]:
    """``exact(x)`` if torch can say it; else, to a program that asks, ``otherwise(x)``. torch's own
    code goes by the error."""

    def method(x: Any) -> Any:
        try:
            return exact(x)
        except _torch.NO_VALUE:
            if is_library(sys._getframe(1).f_code.co_filename):
                raise
        return otherwise(x)

    return method


def _plain_int(x: Any) -> int:
    return current().plain_int()


def _plain_float(x: Any) -> float:
    return current().plain_float()


def _as_number(x: Any) -> Any:
    """A symbol as a number to print."""
    if isinstance(x, SymBool):
        return False
    return current().count if isinstance(x, SymInt) else current().number


def _unless_symbols(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor, which takes no symbols: torch.tensor([rows.shape[0]])."""

    def tensor(data: Any, **options: Any) -> Tensor:
        data = tree_map(lambda x: bool(x) if isinstance(x, Branch) else x, data)
        if not any(isinstance(x, _torch.SYMBOLS) for x in tree_iter(data)):
            return make(data, **options)
        requires_grad = options.pop("requires_grad", False)
        return _stacked(data, options).requires_grad_(requires_grad)

    return tensor


def _stacked(data: Any, options: dict[str, Any]) -> Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_stacked(x, options) for x in data])
    kinds = {SymInt: torch.int64, SymBool: torch.bool}
    return torch.full((), data, **{"dtype": kinds.get(type(data)), **options})


def _to_json(default: Callable[..., Any]) -> Callable[..., Any]:
    def method(encoder: Any, x: Any) -> Any:
        return _as_number(x) if isinstance(x, _torch.SYMBOLS) else default(encoder, x)

    return method


# -- functions of numbers ---

_PREDICATES = {"isnan": False, "isinf": False, "isfinite": True}  # what they usually say
_MATH = (*_PREDICATES, "exp", "log", "log2", "log10", "log1p", "sqrt", "pow", "tanh", "fabs")


def _unless_unknown(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of module math, which would take an Unknown for the number that it shows."""

    def call(*args: Any) -> Any:
        if not any(isinstance(x, Unknown) for x in args):
            return fn(*args)
        name = fn.__name__
        return Branch(_PREDICATES[name]) if name in _PREDICATES else Unknown(current().number)

    return call
