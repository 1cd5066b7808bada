"""Values that leave the tensors: ``.item()``, ``.numpy()`` and others that no mode sees."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fcoll.proving import _torch
from fcoll.proving.algebra import Algebra
from fcoll.proving.exact_mode import Exact, Refused
from fcoll.source import user_line
from fcoll.tracing._torch import replaced

_thread = threading.local()


@contextmanager
def active(mode: Exact) -> Iterator[None]:
    _thread.mode = mode
    try:
        with mode:
            yield
    finally:
        _thread.mode = None


def current() -> Exact | None:
    """The mode of the step that runs in this thread."""
    return getattr(_thread, "mode", None)


def _refusal(what: str) -> Refused:
    at = user_line()
    return Refused(what + (f", at {at}" if at else ""))


class Escaped:
    """What ``.item()`` gives for a value of the step: it can be shown, added to others and
    returned. It is no float: what asks for one (a comparison, ``math.floor``) is refused."""

    def __init__(self, element: Tensor, algebra: Algebra) -> None:
        self.element, self.algebra = element, algebra

    def __format__(self, how: str) -> str:
        return format(math.nan, how)

    def __repr__(self) -> str:
        return "nan"

    def of(self, fn: Callable[..., Tensor], *others: Any) -> Any:
        """fn of this and other values or numbers."""
        if not all(isinstance(x, (Escaped, int, float)) for x in others):
            self._refuse()
        mine = [x.element if isinstance(x, Escaped) else self.algebra.number(x) for x in others]
        with _torch.raw():
            return Escaped(fn(self.element, *mine), self.algebra)

    def __add__(self, other: Any) -> Any:
        return self.of(self.algebra.add, other)

    def __mul__(self, other: Any) -> Any:
        return self.of(self.algebra.mul, other)

    def __sub__(self, other: Any) -> Any:
        return self.of(self.algebra.sub, other)

    def __truediv__(self, other: Any) -> Any:
        return self.of(self.algebra.div, other)

    def __rsub__(self, other: Any) -> Any:
        return self.of(lambda x, y: self.algebra.sub(y, x), other)

    def __rtruediv__(self, other: Any) -> Any:
        return self.of(lambda x, y: self.algebra.div(y, x), other)

    def __neg__(self) -> Any:
        return self.of(self.algebra.neg)

    __radd__, __rmul__ = __add__, __mul__

    def _refuse(self, *_: Any) -> Any:
        raise _refusal(".item(): a value of the step is used as a number of Python's")


_REFUSED = """
    floordiv rfloordiv mod rmod pow rpow abs lt le gt ge eq ne bool int round trunc floor ceil
    float index
"""
for _name in _REFUSED.split():
    setattr(Escaped, f"__{_name}__", Escaped._refuse)


class Known(float):
    """What ``.item()`` gives where the value is a simple number: it is compared, if returned."""


def _of_math(name: str) -> Callable[..., Any]:
    """math's functions of values of the step, which are finite."""
    original = getattr(math, name)
    meaning: Callable[[Escaped], Any] = {
        "isfinite": lambda x: True,
        "isnan": lambda x: False,
        "isinf": lambda x: False,
        "exp": lambda x: x.of(x.algebra.exp),
        "sqrt": lambda x: x.of(x.algebra.root),
    }[name]
    return lambda *args: (
        meaning(args[0]) if args and isinstance(args[0], Escaped) else original(*args)
    )


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
        return Escaped(element, mode.algebra) if known is None else Known(known)

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
    ):
        yield


_READS: Sequence[str] = ("tolist", "numpy", "__array__", "__dlpack__")
_OF_MATH: Sequence[str] = ("isfinite", "isnan", "isinf", "exp", "sqrt")
