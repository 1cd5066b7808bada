"""Each collective of the programs done wrong: what changes a value is found, or it is said why it
changes no function."""

from __future__ import annotations

import os
import random
import warnings

import mutants
import pytest
from proved_programs import PROGRAMS, SINGLE

import fcoll

_CHEAP = """
    by_hand torch_ddp fcoll_ddp vocabulary_parallel ring_attention sequence_by_hand pictures
    batch_norm_by_hand smoothed experts multihead_tp ddp_accumulating fsdp_accumulating dtensor_tp
    rotary_complex pipeline_gpipe
"""
SAMPLE, SEED = 50, 0  # of these programs; all of all with FCOLL_ALL_MUTANTS=1
WHOLE = bool(os.environ.get("FCOLL_ALL_MUTANTS"))


def explained(name, k, op, kind, reduce_op, elements, is_last):
    """Why a mutant that changes a value has changed no function."""
    if reduce_op == "max":
        return "a softmax does not depend on what is taken from all logits"
    if reduce_op == "sum" and elements == 1 and is_last and kind != "twice":
        return "ranks that each return their part of the loss are read as the sum"
    if (name, op, kind) == ("pictures", "all_gather", "rotated"):
        return "the statistics of ranks are put together in any order"
    if (name, k, op) == ("fsdp2", 2, "all_gather"):
        return "the second time for the gradient of the first layer's input, which nobody asks for"
    return ""


def mutants_of(name, monkeypatch):
    """(program, number of the collective, kind, why it is no fault), all that there are."""
    build, mesh = PROGRAMS[name]
    with mutants.Collectives().installed(monkeypatch) as collectives:
        assert fcoll.prove(build, mesh, single=SINGLE.get(name), trials=1).equal
    last = len(collectives.seen) - 1
    return [
        (name, k, kind, explained(name, k, op, kind, reduce_op, elements, k == last))
        for k, (op, reduce_op, elements) in enumerate(collectives.seen)
        for kind in mutants.kinds_of(op)
    ]


def judged(name, k, kind, monkeypatch):
    """The verdict on a mutant, and whether it has changed a value at all."""
    build, mesh = PROGRAMS[name]
    with mutants.Collectives((k, kind)).installed(monkeypatch) as collectives:
        verdict = fcoll.prove(build, mesh, single=SINGLE.get(name), trials=1, diagnose=False)
    return verdict, collectives.changed


@pytest.mark.timeout(3 * 3600 if WHOLE else 600)
def test_mutants(monkeypatch):
    """Skipped, done twice, with another op, by half of the group, at the next rank's offset, with
    the last call's result. An average of averages changes nothing, nor does a largest of the
    largest."""
    warnings.simplefilter("ignore")  # torch's own, of DTensor and DDP
    names = list(PROGRAMS) if WHOLE else _CHEAP.split()
    chosen = [m for name in names for m in mutants_of(name, monkeypatch)]
    if not WHOLE:
        chosen = random.Random(SEED).sample(chosen, SAMPLE)
    found, changing, survivors = 0, 0, []
    for name, k, kind, why_equal in chosen:
        verdict, changed = judged(name, k, kind, monkeypatch)
        if not changed:
            assert verdict.equal, (name, k, kind, str(verdict))
            continue
        changing += 1
        found += verdict.equal is False
        if verdict.equal is not False and not (verdict.equal and why_equal):
            survivors.append((name, k, kind, str(verdict)))
    print(f"{found} found of {changing} that change a value, of {len(chosen)}; {survivors=}")
    assert len(survivors) <= changing / 100, survivors
    assert not [s for s in survivors if s[-1].startswith("proved")]
    assert changing >= len(chosen) * 0.7
