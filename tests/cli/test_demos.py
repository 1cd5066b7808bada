"""Every collective of every demo points at a line of the demo, and at its module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fcoll
from fcoll.cli import demos

MESHES: dict[str, dict[str, int]] = {
    "tiny": {"dp": 2, "tp": 2},
    "tiny-sp": {"dp": 2, "tp": 2},
    "tiny-ddp": {"dp": 2, "tp": 2},
    "tiny-moe": {"ep": 4},
    "tiny-pipeline": {"pp": 4},
}
SOURCE = Path(demos.__file__)
# Of Llama's modules.
MODULE = re.compile(r"(tok_embeddings|norm|output|layers\.\d+\.\w+(\.\w+)?)$")
NO_MODULE = ("cross_entropy", "pipeline")  # functions that are called by no module


def enclosing(line: int) -> str:
    """The class or function at the top level of demos.py that the line is in."""
    for node in ast.parse(SOURCE.read_text()).body:
        named = isinstance(node, (ast.ClassDef, ast.FunctionDef))
        if named and node.lineno <= line <= (node.end_lineno or 0):
            return node.name
    raise AssertionError(f"line {line} is in no function")


def test_every_small_demo_is_here():
    assert MESHES.keys() == {name for name in demos.DEMOS if name.startswith("tiny")}


@pytest.mark.parametrize("name", MESHES)
def test_every_collective_has_its_line_and_module(name):
    with fcoll.fake_world(**MESHES[name], rank=1) as mesh:
        step, args = demos.DEMOS[name](mesh)
        found = fcoll.trace(step, *args).collectives
    assert {c.phase for c in found} == {"fwd", "bwd"}
    for c in found:
        path, _, line = c.source.rpartition(":")
        assert Path(path).resolve() == SOURCE, c
        if enclosing(int(line)) in NO_MODULE:
            assert c.module == "", c
        else:
            assert MODULE.match(c.module), c
