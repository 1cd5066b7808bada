"""Functional collectives for PyTorch: a tensor in, a new tensor out."""

from fcoll import _torch, compat, dist, errors, functions, symm_mem
from fcoll.async_tensor import AsyncCollectiveTensor
from fcoll.check import Checked, check
from fcoll.collectives import COLLECTIVES
from fcoll.errors import FcollError
from fcoll.fake_world import fake_world
from fcoll.functions import *  # noqa: F403
from fcoll.groups import Group, GroupLike
from fcoll.launch import launch
from fcoll.profile import Profile, profile
from fcoll.symm_mem import accelerate_c10d
from fcoll.trace import Issued, Trace, trace

_torch.no_guards_on_globals_of(__name__)

__version__ = "0.1.0"

__all__ = [
    *functions.__all__,
    "COLLECTIVES",
    "AsyncCollectiveTensor",
    "Checked",
    "FcollError",
    "Group",
    "GroupLike",
    "Issued",
    "Profile",
    "Trace",
    "accelerate_c10d",
    "check",
    "compat",
    "dist",
    "errors",
    "fake_world",
    "launch",
    "profile",
    "symm_mem",
    "trace",
]
