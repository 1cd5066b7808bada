"""Some seconds of tests/fuzz_calls.py, and that it would notice."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter

import fuzz_calls
import pytest
import torch
from cases import Case
from fuzz_calls import Fuzzer, Trial, trial

from fcoll.eager import dispatch

SECONDS = 8.0


@pytest.mark.parametrize("pool", ["shared2", "shared4"])
def test_random_calls(pool, request):
    """Another seed each day: over time it sees more than one."""
    fuzzer = Fuzzer(request.getfixturevalue(pool), seed=int(time.time() // 86400))
    fault = fuzzer.run_for(SECONDS, batch=10)
    assert not fault, fault
    assert sum(fuzzer.done.values()) >= 10


def test_trials_are_of_all_kinds():
    made = [trial(i, 1, 4) for i in range(3000)]
    assert trial(7, 1, 4) == made[7]
    ways = Counter(t.way for t in made)
    assert set(ways) == set(fuzz_calls.WAYS)
    changed = Counter(t.what for t in made if t.changed is not None)
    kinds = {"collective", "dtype", "shape", "op", "root", "dim", "sizes", "splits", "list"}
    kinds |= {"splits of one direction"}
    assert kinds <= set(changed)
    assert all(t.changed != t.calls[t.at] for t in made if t.changed is not None)


CASE = Case("all_reduce", ((4,),), (torch.float32,), {"reduce_op": "sum"})


def faults_of(t: Trial, pool) -> list[str]:
    return fuzz_calls.faults(t, next(zip(*pool.run(fuzz_calls.play, [t]), strict=True)))


def test_silence_and_wrong_values_are_faults(shared2):
    same = dataclasses.replace(CASE)
    silent = Trial(0, "eager", (CASE, CASE), at=1, victim=0, what="nothing", changed=same)
    (fault,) = faults_of(silent, shared2)
    assert fault == "another nothing on rank 0: the ranks raised ['', '']"
    seen = shared2.run(fuzz_calls.play, [Trial(0, "eager", (CASE,))])
    assert not fuzz_calls.faults(Trial(0, "eager", (CASE,)), [played[0] for played in seen])
    other = dataclasses.replace(CASE, args={"reduce_op": "max"})
    assert fuzz_calls.faults(Trial(0, "eager", (other,)), [played[0] for played in seen])


def play_without_dtypes(rank: int, trials: list[Trial]) -> list[fuzz_calls.Played]:
    """As if signatures had the tensors' bytes only."""
    signed = dispatch.signed

    def forgetful(*args):
        made = signed(*args)
        plain = [x.detach().contiguous().view(-1).view(torch.uint8) for x in made.tensors]
        return made._replace(tensors=plain)

    dispatch.signed = forgetful
    try:
        return fuzz_calls.play(rank, trials)
    finally:
        dispatch.signed = signed


def test_a_word_that_the_signature_lacks_is_noticed(shared2):
    made = (trial(i, 0, 2, {"eager": 1}) for i in itertools.count())
    # what C++ serves makes its own signature; Python makes that of all else
    of_it = (t for t in made if t.what == "dtype" and t.calls[t.at].op in ("gather", "permute"))
    some = list(itertools.islice(of_it, 4))
    assert not any(faults_of(t, shared2) for t in some)
    seen = list(zip(*shared2.run(play_without_dtypes, some), strict=True))
    found = [fuzz_calls.faults(t, played) for t, played in zip(some, seen, strict=True)]
    assert any("another dtype" in fault for fault in itertools.chain(*found)), found
