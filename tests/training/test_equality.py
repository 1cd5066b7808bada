"""Training in data parallel is training: the same parameters and gradients as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from programs_to_train import PROGRAMS, Program, in_one_process, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fcoll


def on_torchs_reducer(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    return DistributedDataParallel(model, **options)


def on_our_reducer(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    with fcoll.accelerate_ddp():
        module = DistributedDataParallel(model, **options)
    assert isinstance(module.reducer, fcoll.Reducer) and isinstance(module.logger, fcoll.Logger)
    return module


def in_data_parallel(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    module = fcoll.DataParallel(model, **options)
    assert isinstance(module.reducer, fcoll.Reducer) and isinstance(module.logger, fcoll.Logger)
    return module


class compiled:
    """The whole step but the optimizer in one graph; no_sync as it is."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        torch.compiler.reset()  # or another program's graphs count as recompilations
        self.module = fcoll.DataParallel(model, **options)
        self.no_sync = self.module.no_sync
        self.step = torch.compile(self.module, fullgraph=True, backend="aot_eager")

    def __call__(self, *args: Any) -> Any:
        return self.step(*args)


WRAPS: dict[str, Callable[..., nn.Module]] = {
    "torch": on_torchs_reducer,
    "ours": on_our_reducer,
    "fcoll": in_data_parallel,
    "aot_eager": compiled,
}


def run(rank: int, wrap: str, names: list[str]) -> dict[str, Any]:
    """All programs one after the other."""
    # torch's reducer says it in words of its own where no parameter is unused in a first step
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    # Dynamo makes one itself where it traces an autograd function
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    return {name: train(PROGRAMS[name], rank, WRAPS[wrap]) for name in names}


def close(a: Any, b: Any, exact: bool) -> bool:
    if a is None or b is None:
        return a is b
    if exact:
        return torch.equal(a, b)
    narrow = a.dtype in (torch.float32, torch.float16)
    return torch.allclose(a, b, rtol=1e-5 if narrow else 1e-11, atol=1e-6 if narrow else 1e-13)


def differing(a: dict[str, Any], b: dict[str, Any], exact: bool) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not close(a[name], b[name], exact)]


# After join() only the parameters are the same on all ranks: gradients are of a rank's last batch.
def comparable(program: Program, found: dict[str, Any]) -> dict[str, Any]:
    if program.uneven:
        return {name: x for name, x in found.items() if not name.endswith(".grad")}
    return found


# Without what AOTAutograd does not take (sparse gradients, a nested backward pass), without joining
# and ranks that take different branches: their graphs have other collectives.
COMPILED = [
    "mlp in small buckets",
    "channels last",
    "transformer with shared parameters",
    "unused",
    "unused static",
    "complex",
    "mixed",
    "no_sync",
    "checkpoint",
]
FEW = ["mlp in small buckets", "unused changing", "sparse", "complex", "no_sync", "uneven"]
RUNS = [
    ("shared2", "ours", list(PROGRAMS)),
    ("shared2", "fcoll", list(PROGRAMS)),
    ("shared2", "aot_eager", COMPILED),
    ("ranks2", "ours", list(PROGRAMS)),
    ("ranks2", "fcoll", FEW),
    ("shared4", "ours", FEW),
    ("shared4", "fcoll", FEW),
]


@pytest.mark.parametrize("pool, wrap, names", RUNS, ids=lambda x: x if isinstance(x, str) else "")
def test_as_in_one_process(pool, wrap, names, request):
    check(request.getfixturevalue(pool).run(run, wrap, names, timeout=150), names)


# join() has torch's module tell the ranks that have joined something, and not wait for it
@pytest.mark.filterwarnings("ignore:simulated ranks ended, and nobody waited")
@pytest.mark.parametrize("n, names", [(2, list(PROGRAMS)), (4, FEW)], ids=["2", "4"])
def test_on_simulated_ranks(n, names):
    check(fcoll.simulate_ranks(lambda rank: run(rank, "fcoll", names), n), names)


def check(found: list[dict[str, Any]], names: list[str]) -> None:
    """All ranks have the same bits, and what one process computes."""
    wrong = {}
    for name in names:
        program = PROGRAMS[name]
        first, *others = [comparable(program, answers[name]) for answers in found]
        alone = comparable(program, in_one_process(program, len(found)))
        differ = [f"rank: {d}" for other in others for d in differing(first, other, exact=True)]
        differ += [f"alone: {d}" for d in differing(first, alone, exact=False)]
        if differ:
            wrong[name] = differ
    assert not wrong


def test_torchs_module_has_the_same_bits_on_both_reducers(shared2):
    names = list(PROGRAMS)
    ours, torchs = (shared2.run(run, wrap, names, timeout=120) for wrap in ("ours", "torch"))
    for mine, theirs in zip(ours, torchs, strict=True):
        wrong = {name: differing(mine[name], theirs[name], exact=True) for name in names}
        assert not {name: differ for name, differ in wrong.items() if differ}
