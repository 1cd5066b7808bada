"""Functional collectives for PyTorch: a tensor in, a new tensor out.

Importing it imports neither torch nor what is not used: a public name is looked up where it is
first asked for. The ops (``torch.ops.fcoll``) and the kernels of torch's ops on shared memory are
there as soon as torch is imported, too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

from fcoll.imports import VERSION, before_import, when_imported

if TYPE_CHECKING:
    from fcoll import compat, dist, errors, local, sharded, symm_mem
    from fcoll.checking.check import Checked, check
    from fcoll.checking.hangs import Diagnosis, why
    from fcoll.costs.machine import Machine
    from fcoll.eager.async_tensor import AsyncCollectiveTensor
    from fcoll.eager.launch import launch
    from fcoll.eager.register import register
    from fcoll.errors import FcollError
    from fcoll.functions import *  # noqa: F403
    from fcoll.graph.issued import Issued
    from fcoll.groups import Group, GroupLike
    from fcoll.profiling.profile import Profile, profile
    from fcoll.proving.prove import prove
    from fcoll.proving.verdict import Verdict
    from fcoll.report.advice import Advice, advice
    from fcoll.report.all_ranks import WorldTimeline, timeline
    from fcoll.report.scale import Point, Points, scale
    from fcoll.scheduling.planner import schedule
    from fcoll.scheduling.scheduler_registry import scheduler
    from fcoll.scheduling.verified_plan import Plan
    from fcoll.scheduling.verify_graphs import GraphVerdict, verify
    from fcoll.simulation import faults
    from fcoll.simulation.batched.indices import axis_index, rank
    from fcoll.simulation.batched.simulate import simulate
    from fcoll.simulation.batched.stacked_modules import stack_modules
    from fcoll.simulation.explore import Exploration, explore
    from fcoll.simulation.ranks import simulate_ranks
    from fcoll.symm_mem import accelerate_c10d
    from fcoll.table.collectives import COLLECTIVES
    from fcoll.table.row import Collective
    from fcoll.tracing.fake_world import fake_world
    from fcoll.tracing.trace import Trace, trace
    from fcoll.tracing.values import assume
    from fcoll.training.data_parallel import DataParallel, MixedPrecision, accelerate_ddp
    from fcoll.training.logger import Logger
    from fcoll.training.reducer import Reducer
    from fcoll.transport.backend import as_gloo
    from fcoll.transport.dumps import dump_flight_records, dump_on_signal

__version__ = VERSION


def _source(file: str) -> str:
    with open(os.path.join(os.path.dirname(__file__), file)) as opened:
        return opened.read()


def _modules_by_name(functions: list[str]) -> dict[str, str]:
    """Where the public names are, as the imports above tell type checkers: a name in one place."""
    modules: dict[str, str] = {}
    for line in _source("__init__.py").splitlines():
        if line.startswith("    from fcoll"):
            _, module, _, names = line.partition("#")[0].split(maxsplit=3)
            listed = functions if names.strip() == "*" else names.split(", ")
            modules |= dict.fromkeys(listed, module)
        elif line.startswith("__version__"):
            break
    return modules


# functions.__all__, read without importing torch
_FUNCTIONS = ast.literal_eval(
    _source("functions.py").partition("\n__all__ = ")[2].partition("]")[0] + "]"
)
_MODULE_OF = _modules_by_name(_FUNCTIONS)

__all__ = [
    *_FUNCTIONS,
    "COLLECTIVES",
    "Advice",
    "AsyncCollectiveTensor",
    "Checked",
    "Collective",
    "DataParallel",
    "Diagnosis",
    "Exploration",
    "FcollError",
    "GraphVerdict",
    "Group",
    "GroupLike",
    "Issued",
    "Logger",
    "Machine",
    "MixedPrecision",
    "Plan",
    "Point",
    "Points",
    "Profile",
    "Reducer",
    "Trace",
    "Verdict",
    "WorldTimeline",
    "accelerate_c10d",
    "accelerate_ddp",
    "advice",
    "as_gloo",
    "assume",
    "axis_index",
    "check",
    "compat",
    "dist",
    "dump_flight_records",
    "dump_on_signal",
    "errors",
    "explore",
    "faults",
    "fake_world",
    "launch",
    "local",
    "profile",
    "prove",
    "rank",
    "register",
    "scale",
    "schedule",
    "scheduler",
    "sharded",
    "simulate",
    "simulate_ranks",
    "stack_modules",
    "symm_mem",
    "timeline",
    "trace",
    "verify",
    "why",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name, __name__)
    if module != __name__ and hasattr(importlib.import_module(module), name):
        value = getattr(importlib.import_module(module), name)
    elif not name.startswith("__") and importlib.util.find_spec(f"{module}.{name}"):
        value = importlib.import_module(f"{module}.{name}")
    else:
        raise AttributeError(f"module 'fcoll' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _register() -> None:
    """Register what is there without a call: the ops, kernels for torch's ops, the backend's name,
    hooks of torch's compiler."""
    import fcoll_backend
    from fcoll import _torch, functions, plugins, symm_mem  # noqa: F401
    from fcoll.ranks.patches import Patches

    def know_dynamo() -> None:
        Patches("import fcoll").wrap(*_torch.no_guards_on_globals_of(__name__))

    fcoll_backend.register()
    when_imported(_torch.TRACES_FUNCTIONS, know_dynamo)
    when_imported(_torch.PARTITIONER, lambda: plugins.call("partitioner"))
    when_imported(_torch.COMPILER, lambda: plugins.call("compiler"))


# All others import torch, in the middle of which what is registered would import them.
_WITHOUT_TORCH = ("fcoll.__main__", "fcoll.cli", "fcoll.cli.parser", "fcoll.imports")


def _needs_torch(module: str) -> bool:
    return module.startswith("fcoll.") and module not in _WITHOUT_TORCH


before_import(_needs_torch, lambda: importlib.import_module("torch"))
when_imported("torch", _register)
