"""Faults in source: all are found, none is proved, and so many are named: the right line, with what
mends them. What is said to mend a step was tried on its values."""

from __future__ import annotations

import warnings

import pytest
from source_faults import FAULTS

import fcoll
from fcoll.proving import what_if

NAMED = 57  # of 83, with the right line and the right remedy
FEW = 20  # changes tried where none is known to help


def test_so_many_are_named():
    assert len(FAULTS) >= 40
    assert sum(bool(fault.said) for fault in FAULTS) == NAMED


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title)
def test_a_fault(fault, monkeypatch):
    if not fault.said:
        monkeypatch.setattr(what_if, "MOST", FEW)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of DTensor and DDP
        verdict = fcoll.prove(fault.build(), fault.mesh, single=fault.one_device(), trials=1)
    assert verdict.equal is False, str(verdict)
    assert fault.name in [d.name for d in verdict.differences]
    first = verdict.differences[0]
    is_said = fault.said in f"{first.what} {first.remedy}" and "right after" in first.remedy
    is_named = is_said and fault.is_placed(first.line)
    assert is_named or not fault.said, str(verdict)
