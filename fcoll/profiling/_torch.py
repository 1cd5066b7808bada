"""The private torch APIs that timing a real run takes. Tested with torch 2.13.0,
2.14.1 and 2.15.0, which all have these names."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from fcoll._torch import at_end_of_backward as at_end_of_backward
from fcoll.imports import say_what_is_missing
from fcoll.tracing._torch import ENGINE_CODE

_AROUND = (__file__, os.path.join(os.path.dirname(__file__), "timers.py"), torch.library.__file__)
_BACKEND_SELECT, _META = torch._C.DispatchKey.BackendSelect, torch._C.DispatchKey.Meta


@contextmanager
def around_op(op: Any, hook: Callable[..., Any]) -> Iterator[None]:
    """Every call of the op, from Python or C++, becomes hook(run, args, kwargs).

    BackendSelect is a key that every call passes, below autograd and the modes: what they do is as
    it was, and nothing sees that somebody listens. Tensors without data are let through.
    """
    library = torch.library.Library(op.namespace, "IMPL")

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(op.redispatch, keys.remove(_BACKEND_SELECT))
        return run(*args, **kwargs) if keys.has(_META) else hook(run, args, kwargs)

    library.impl(op, kernel, "BackendSelect", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def called_by_engine() -> bool:
    """Did C++ that the autograd engine runs make the call that is timed, and no Python?"""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _AROUND:
        frame = frame.f_back
    return frame is None or frame.f_code is ENGINE_CODE


def find_op(name: str) -> Any:
    """The op "namespace::name" if it has a kernel of its own; None if it is but a name for others,
    or there is none."""
    if not torch._C._dispatch_has_kernel(name):
        return None
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return None
    space, _, short = name.partition("::")
    return getattr(getattr(torch.ops, space), short).default


say_what_is_missing(__name__)
