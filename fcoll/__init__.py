"""Functional collectives for PyTorch: a tensor in, a new tensor out."""

from fcoll import _torch, compat, dist, errors, functions, local, sharded, symm_mem
from fcoll.checking.check import Checked, check
from fcoll.costs.machine import Machine
from fcoll.eager import callbacks as _callbacks  # noqa: F401  the fast path asks them
from fcoll.eager.async_tensor import AsyncCollectiveTensor
from fcoll.eager.launch import launch
from fcoll.eager.register import register
from fcoll.errors import FcollError
from fcoll.functions import *  # noqa: F403
from fcoll.graph.issued import Issued
from fcoll.groups import Group, GroupLike
from fcoll.profiling.profile import Profile, profile
from fcoll.report.advice import Advice, advice
from fcoll.report.world import WorldTimeline, timeline
from fcoll.scheduling.plan import Plan
from fcoll.scheduling.planner import schedule
from fcoll.scheduling.registry import scheduler
from fcoll.simulation import faults
from fcoll.simulation.batched.indices import axis_index, rank
from fcoll.simulation.batched.modules import stack_modules
from fcoll.simulation.batched.simulate import simulate
from fcoll.simulation.explore import Exploration, explore
from fcoll.simulation.ranks import simulate_ranks
from fcoll.symm_mem import accelerate_c10d
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective
from fcoll.tracing.fake_world import fake_world
from fcoll.tracing.trace import Trace, trace
from fcoll.tracing.values import assume
from fcoll.training import traced as _traced  # noqa: F401  DistributedDataParallel in traces
from fcoll.training.data_parallel import DataParallel, MixedPrecision
from fcoll.training.logger import Logger
from fcoll.training.reducer import Reducer

_torch.no_guards_on_globals_of(__name__)

__version__ = "0.1.0"

__all__ = [
    *functions.__all__,
    "COLLECTIVES",
    "Advice",
    "AsyncCollectiveTensor",
    "Checked",
    "Collective",
    "DataParallel",
    "Exploration",
    "FcollError",
    "Group",
    "GroupLike",
    "Issued",
    "Logger",
    "Machine",
    "MixedPrecision",
    "Plan",
    "Profile",
    "Reducer",
    "Trace",
    "WorldTimeline",
    "accelerate_c10d",
    "advice",
    "assume",
    "axis_index",
    "check",
    "compat",
    "dist",
    "errors",
    "explore",
    "faults",
    "fake_world",
    "launch",
    "local",
    "profile",
    "rank",
    "register",
    "schedule",
    "scheduler",
    "sharded",
    "simulate",
    "simulate_ranks",
    "stack_modules",
    "symm_mem",
    "timeline",
    "trace",
]
