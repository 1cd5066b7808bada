"""Values that leave the tensors: ``.item()``, ``.numpy()`` and others that no mode sees."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fcoll.proving import _torch
from fcoll.proving.algebra import Algebra
from fcoll.proving.exact_mode import ExactMode, Refused
from fcoll.source import user_line
from fcoll.tracing._torch import replaced

_thread = threading.local()


@contextmanager
def active(mode: ExactMode) -> Iterator[None]:
    _thread.mode = mode
    try:
        with mode:
            yield
    finally:
        _thread.mode = None


def current() -> ExactMode | None:
    """The mode of the step that runs in this thread."""
    return getattr(_thread, "mode", None)


def _refusal(what: str) -> Refused:
    at = user_line()
    return Refused(what + (f", at {at}" if at else ""))


class Escaped(Tensor):
    """What ``.item()`` gives for a value of the step: it can be shown, computed with, compared as
    tensors are, put into a tensor and returned. What asks for a float (``math.floor``) is refused;
    torch, where an op takes a number, gets one that stands for it (tokens.py)."""

    has_escaped = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with _torch.plain_functions():
            out = func(*args, **(kwargs or {}))
        if any(isinstance(x, Tensor) and not isinstance(x, Escaped) for x in args):
            return out
        if not isinstance(out, Tensor) or out.dim():
            return out
        return out.as_subclass(Escaped) if out.is_floating_point() else out.item()

    def __format__(self, how: str) -> str:
        return format(math.nan, how)

    def __repr__(self, **_: Any) -> str:
        return "nan"

    def item(self) -> Any:
        return self

    def _refuse(self, *_: Any) -> Any:
        raise _refusal(".item(): a value of the step is used as a number of Python's")


_REFUSED = """
    floordiv rfloordiv mod rmod bool int round trunc floor ceil float index len iter getitem
"""
for _name in _REFUSED.split():
    setattr(Escaped, f"__{_name}__", Escaped._refuse)


class KnownNumber(float):
    """What ``.item()`` gives where the value is a simple number: it is compared, if returned."""


def _of_math(name: str) -> Callable[..., Any]:
    """math's functions of values of the step, which are finite."""
    original = getattr(math, name)
    meaning = _OF_MATH[name]
    return lambda *args: (
        meaning(args[0]) if args and isinstance(args[0], Escaped) else original(*args)
    )


_OF_MATH: dict[str, Callable[[Escaped], Any]] = {
    "isfinite": lambda x: True,
    "isnan": lambda x: False,
    "isinf": lambda x: False,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
}


def _taking(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch.tensor, which asks what is in its lists for floats."""

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        mode = current()
        if mode is None or not _escaped_in(data):
            return original(data, *args, **kwargs)
        dtype = kwargs.get("dtype")
        if dtype is None or dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        return original(_with_tokens(data, mode.algebra), *args, **kwargs)

    return tensor


def _escaped_in(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        return any(map(_escaped_in, data))
    return isinstance(data, Escaped)


def _with_tokens(data: Any, algebra: Algebra) -> Any:
    if isinstance(data, (list, tuple)):
        return [_with_tokens(x, algebra) for x in data]
    if not isinstance(data, Escaped):
        return data
    with _torch.raw():
        return algebra.token(_torch.plain(data))


@contextmanager
def no_escapes() -> Iterator[None]:
    """Reads of a tensor's memory that no dispatch mode sees are refused in a step."""
    originals = {name: getattr(Tensor, name) for name in ("item", *_READS)}

    def item(x: Tensor) -> Any:
        mode = current()
        if mode is None or not x.is_floating_point() or x.numel() != 1:
            return originals["item"](x)
        whole = x.full_tensor() if hasattr(x, "full_tensor") else x
        with _torch.raw():
            element = _torch.local_of(whole).detach().reshape(()).clone()
            known = mode.algebra.constant(float(originals["item"](element)))
        if known is not None:
            return KnownNumber(known)
        mode.has_escaped = True
        return element.as_subclass(Escaped)

    def refused(name: str) -> Callable[..., Any]:
        def read(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            has_elements = x.is_floating_point() or x.is_complex()
            if current() is not None and has_elements:
                raise _refusal(f".{name}() takes values of the step out of it")
            return originals[name](x, *args, **kwargs)

        return read

    reads = {name: refused(name) for name in _READS}
    with (
        replaced(Tensor, {"item": item, **reads}),
        replaced(math, {name: _of_math(name) for name in _OF_MATH}),
        replaced(torch, {name: _taking(getattr(torch, name)) for name in ("tensor", "as_tensor")}),
    ):
        yield


_READS: Sequence[str] = ("tolist", "numpy", "__array__", "__dlpack__")
