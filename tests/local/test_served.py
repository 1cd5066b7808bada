"""fcoll.local in the place of torch's own module, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("served_program.py")


def test_served_in_the_place_of_torchs_module():
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = PROGRAM.read_text().count("\ndef test_")
    assert done.stdout.count("ok test_") == wanted
