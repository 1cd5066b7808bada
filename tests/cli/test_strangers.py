"""Programs written by somebody who has read only the README, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fcoll.cli import main
from fcoll.cli.commands import FINE

PROGRAMS = Path(__file__).with_name("strangers.py")
NOTES = {
    "plain": ["if not: SystemExit", "if not: the collectives are the same"],
    "moe": ["proved: the rows of all_to_all_single", "bincount is taken to give minlength=4"],
    "fsdp": ["if not: the collectives are the same"],
}
# FSDP2 says so of a linear layer, whatever runs it
WARNING = "ignore:FSDP2-wrapped module .* returned a view tensor"


@pytest.mark.filterwarnings(WARNING)
@pytest.mark.parametrize("name", NOTES)
def test_report_and_check(capsys, name):
    program = (f"{PROGRAMS}:{name}", "--mesh", "dp=4", "--json", "-q")
    assert main(["report", *program]) == FINE
    report = json.loads(capsys.readouterr().out)
    calls = {"plain": 8, "moe": 9, "fsdp": 7}
    assert report["collectives"] == calls[name]
    assert all("strangers.py" in row["source"] and row["bytes"] > 0 for row in report["rows"])
    assert main(["check", *program]) == FINE
    check = json.loads(capsys.readouterr().out)
    assert check["ok"] is True and check["ranks_traced"] == [0, 1, 2, 3]
    for note in NOTES[name]:
        assert any(note in found for found in check["notes"]), check["notes"]
    assert not any("not compared" in note for note in check["notes"])
