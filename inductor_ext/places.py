"""The user's line of a node of a graph."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

import fcoll

_LIBRARIES = tuple(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, fcoll))
_FRAME = re.compile(r'\s*File "(.*?)", line (\d+)')


def users_line(node: torch.fx.Node) -> str:
    """ "model.py:31": the last line outside torch and fcoll that led to a node; empty if none is
    known."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    users = [(file, line) for file, line in frames if not file.startswith(_LIBRARIES)]
    if not users:
        return ""
    file, line = users[-1]
    short = os.path.relpath(file)
    return f"{file if short.startswith('..') else short}:{line}"
