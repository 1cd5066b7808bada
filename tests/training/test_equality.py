"""Training in data parallel is training: the same parameters and gradients as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs_to_train import PROGRAMS, Program, in_one_process, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fcoll

THEIRS = dist.Reducer


def on_torchs_reducer(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    return DistributedDataParallel(model, **options)


def on_our_reducer(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    dist.Reducer = fcoll.Reducer
    try:
        module = DistributedDataParallel(model, **options)
    finally:
        dist.Reducer = THEIRS
    assert isinstance(module.reducer, fcoll.Reducer) and isinstance(module.logger, fcoll.Logger)
    return module


WRAPS: dict[str, Callable[..., nn.Module]] = {
    "torch": on_torchs_reducer,
    "ours": on_our_reducer,
}


def run(rank: int, wrap: str, names: list[str]) -> dict[str, Any]:
    """All programs one after the other."""
    # torch's reducer says it in words of its own where no parameter is unused in a first step
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
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


@pytest.mark.parametrize("pool", ["shared2", "ranks2", "shared4"])
def test_as_in_one_process_and_as_torch(pool, request):
    """On four ranks without torch's own: gloo adds up in another order there."""
    ranks = request.getfixturevalue(pool)
    names = list(PROGRAMS)
    found = ranks.run(run, "ours", names, timeout=120)
    torchs = ranks.run(run, "torch", names, timeout=120) if pool == "shared2" else found
    wrong = {}
    for name, program in PROGRAMS.items():
        per_rank = [comparable(program, answers[name]) for answers in found]
        alone = comparable(program, in_one_process(program, len(found)))
        with_torch = comparable(program, torchs[0][name])
        differ = [d for other in per_rank[1:] for d in differing(per_rank[0], other, exact=True)]
        differ += [f"torch: {d}" for d in differing(per_rank[0], with_torch, exact=True)]
        differ += [f"alone: {d}" for d in differing(per_rank[0], alone, exact=False)]
        if differ:
            wrong[name] = differ
    assert not wrong
