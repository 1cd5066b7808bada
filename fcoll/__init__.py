"""Functional collectives for PyTorch: a tensor in, a new tensor out."""

from fcoll import compat, dist, errors, functions, symm_mem
from fcoll.async_tensor import AsyncCollectiveTensor
from fcoll.collectives import COLLECTIVES
from fcoll.errors import FcollError
from fcoll.functions import *  # noqa: F403
from fcoll.groups import Group, GroupLike
from fcoll.launch import launch
from fcoll.symm_mem import accelerate_c10d

__version__ = "0.1.0"

__all__ = [
    *functions.__all__,
    "COLLECTIVES",
    "AsyncCollectiveTensor",
    "FcollError",
    "Group",
    "GroupLike",
    "accelerate_c10d",
    "compat",
    "dist",
    "errors",
    "launch",
    "symm_mem",
]
