"""Ops whose result torch's shape rule refuses in a dtype that the op itself may take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map

from fcoll.errors import ShapeRuleLacksDtype
from fcoll.tracing import _torch

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def lacks_dtype(func: Any, args: Any, kwargs: Any, error: Exception) -> Exception | None:
    """What to raise for an op that failed on fake tensors of one dtype, if the same call is right
    in another: then it is the rule that knows no more, as that of grouped products, which is for
    bfloat16 alone where the op computes in float32, too. None where anything else is wrong."""
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    dtypes = {x.dtype for x in tensors if x.is_floating_point()}
    if type(error) is not RuntimeError or len(dtypes) != 1 or not _torch.is_pure(func):
        return None
    (dtype,) = dtypes
    for other in _DTYPES:
        if other != dtype and _takes(func, args, kwargs, other):
            facts = {"op": _torch.op_name(func), "dtype": _name(dtype), "takes": _name(other)}
            return ShapeRuleLacksDtype(**facts, said=str(error).partition("\n")[0].rstrip(". "))
    return None


def _takes(func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> bool:
    def as_dtype(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return x.new_empty_strided(x.shape, x.stride(), dtype=dtype)

    args, kwargs = tree_map(as_dtype, (args, kwargs))
    try:
        func(*args, **kwargs)
    except Exception:
        return False
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
