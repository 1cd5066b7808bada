"""Faults in source: all are found, none is proved; so many are placed, and so many are named with
what mends them."""

from __future__ import annotations

import warnings

import pytest
from proved_programs import PROGRAMS
from source_faults import FAULTS

import fcoll

NAMED = 14  # of the faults, with what mends them, and the line
PLACED = 41  # with a module or a parameter, and the line


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


def test_where_they_show(verdicts):
    """The value that must differ does; before it, if the forward pass is wrong, a module."""
    shown = {f: [d.name for d in v.differences] for f, v in verdicts.items()}
    assert not {f.title: names for f, names in shown.items() if f.name not in names}
    first = {f: v.differences[0] for f, v in verdicts.items()}
    named = [f for f, d in first.items() if f.said and f.said in d.what and d.remedy and d.line]
    assert len(named) >= NAMED
    placed = [f for f, d in first.items() if d.line]
    assert len(placed) >= PLACED
