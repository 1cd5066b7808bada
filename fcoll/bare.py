"""The ops that have a C++ kernel, called without the dispatcher where nobody listens to it.

Of a small collective's time, the dispatcher and the Python kernels it finds for autograd would be
nine tenths. Gradients call their collectives through here, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fcoll import _torch
from fcoll.errors import from_native
from fcoll.native import build

# Rows whose kernel for CPU tensors is in C++ (native/torch_ops.cpp). What it does not serve it
# passes on to the Python kernel, which for that has a name of its own (ops.py).
IN_CPP = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "broadcast",
    "all_to_all_single",
)


def has_kernel(name: str, x: Any) -> bool:
    """Has the op a C++ kernel for x, a plain tensor or a list of them?"""
    return name in IN_CPP and x.is_cpu and build.loaded()


def kernel(name: str, *args: Any) -> Tensor:
    """Run the op's C++ kernel; autograd and modes must have no part in it."""
    try:
        return _torch.native_op(name)(*args)
    except RuntimeError as error:
        raise from_native(error) from None


def call(name: str, *args: Any) -> Any:
    """``torch.ops.fcoll.<name>(*args)``, the short way if there is one."""
    if not is_compiling() and _torch.plain(args[0]) and has_kernel(name, args[0]):
        return kernel(name, *args)
    return getattr(torch.ops.fcoll, name)(*args)


def wait(x: Tensor) -> Tensor:
    """``torch.ops.fcoll.wait_tensor(x)``, the short way if there is one."""
    if is_compiling() or not _torch.plain(x):
        return torch.ops.fcoll.wait_tensor(x)
    if _torch.work_registry_size():  # else nothing at all is under way
        try:
            _torch.wait_plain(x)
        except RuntimeError as error:
            raise from_native(error) from None
    return x
