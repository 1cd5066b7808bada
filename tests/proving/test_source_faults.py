"""Faults in source: all are found, none is proved, and so many are named with what mends them."""

from __future__ import annotations

import warnings

import pytest
from proved_programs import PROGRAMS
from source_faults import FAULTS

import fcoll

NAMED = 12  # of the faults, with the parameter and the remedy


@pytest.fixture(scope="module")
def verdicts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of DTensor and DDP
        return {
            fault: fcoll.prove(
                fault.build(), PROGRAMS[fault.program][1], single=fault.one_device(), trials=1
            )
            for fault in FAULTS
        }


def test_all_are_found(verdicts):
    assert len(verdicts) >= 40
    assert not {fault.title: str(v) for fault, v in verdicts.items() if v.equal is not False}


def test_where_they_show_first(verdicts):
    first = {fault: verdict.differences[0] for fault, verdict in verdicts.items()}
    wrong = {f.title: str(d) for f, d in first.items() if f.name not in d.name}
    assert not wrong
    named = [f for f, d in first.items() if f.said and f.said in str(d)]
    assert len(named) >= NAMED
    assert all(d.line for f, d in first.items() if f in named)
