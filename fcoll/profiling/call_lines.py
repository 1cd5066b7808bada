"""The user's line that a timed call is from. In a compiled graph that is the line which its code
names, in a backward pass the line of the collective whose gradient is computed."""

from __future__ import annotations

import json
import sys
from types import FrameType

from fcoll.source import Frames, is_library, is_own_or_torchs, show, sites_from
from fcoll.tracing import _torch

Marks = list[tuple[int, str]]  # (line of a generated file, the user's line)


class CallLines:
    """The user's line that a call is from; files are looked at once."""

    def __init__(self) -> None:
        self._files: dict[str, Marks | None] = {}  # of files that are not the user's
        self._shown: dict[Frames, str] = {}

    def here(self, forward: dict[int, str]) -> tuple[str, str]:
        """(line, phase). In the backward pass the line is that of the collective whose gradient it
        is, or of backward() if it is none's."""
        running = _torch.running_node()
        source, in_engine = self._walk(sys._getframe(3))
        if running is not None and in_engine:
            source = forward.get(_torch.node_number(running), source)
        return source, "bwd" if in_engine or running is not None else "fwd"

    def _walk(self, frame: FrameType | None) -> tuple[str, bool]:
        """The nearest line of the user's; and did the autograd engine come before it?"""
        in_engine = False
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._files:
                self._files[name] = _marks(name) if is_library(name) else None
            marks, line = self._files[name], frame.f_lineno
            if marks is None:
                return self._show(sites_from(frame)), in_engine
            if above := [source for at, source in marks if at <= line]:
                return above[-1], False
            in_engine = in_engine or frame.f_code is _torch.ENGINE_CODE
            frame = frame.f_back
        return "", in_engine

    def _show(self, sites: Frames) -> str:
        if sites not in self._shown:
            self._shown[sites] = show(*sites)
        return self._shown[sites]


def _marks(filename: str) -> Marks:
    """The marks of collectives in a file that the fcoll backend generated; none in another."""
    if is_own_or_torchs(filename) or filename.startswith("<"):
        return []
    marks = []
    try:
        with open(filename) as file:
            for number, text in enumerate(file, 1):
                head, mark, facts = text.partition("# fcoll: ")
                if mark and not head.strip():
                    marks.append((number, json.loads(facts)["source"]))
    except (OSError, ValueError, KeyError):
        return []
    return marks
