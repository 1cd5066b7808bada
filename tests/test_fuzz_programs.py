"""Some seconds of tests/fuzz_programs.py, and that it would notice."""

from __future__ import annotations

import time
from unittest import mock

import fuzz_programs
import pytest
from fuzz_programs import Fuzzer

SECONDS = 8.0
TODAY = int(time.time() // 86400)


@pytest.mark.parametrize("pool", ["shared2", "shared4"])
def test_random_programs(pool, request):
    """Another seed each day: over time it sees more than one."""
    fuzzer = Fuzzer(request.getfixturevalue(pool), seed=TODAY)
    fault = fuzzer.run_for(SECONDS, batch=10, compiled=False)
    assert not fault, fault
    assert fuzzer.done >= 10


def test_a_random_compiled_program(shared2):
    fault = Fuzzer(shared2, seed=TODAY).run_compiled(0)
    assert not fault, fault


def play_with_another_oracle(rank, programs):
    with mock.patch.object(fuzz_programs, "sum_of", lambda parts: sum(parts) + 1):
        return fuzz_programs.play(rank, programs)


def test_wrong_values_are_faults(shared2):
    fuzzer = Fuzzer(shared2, seed=1)
    with mock.patch.object(fuzz_programs, "play", play_with_another_oracle):
        fault = fuzzer.run(range(3))
    assert "again: python tests/fuzz_programs.py --seed 1 --ranks 2 --only" in fault
