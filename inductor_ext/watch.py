"""Watchdog of compiled graphs that are stuck: do other ranks wait to compare a new graph?

Ranks compare a graph when it first runs (comparison.py). One that comes with a new graph, while
this rank runs one on which all agreed, waits for this rank, and this rank waits for it inside a
collective. A thread looks, once a second, whether a run has begun long ago and is still there; only
then it asks the group's store, and tells those who wait. They raise OtherGraph; here it is logged.
"""

from __future__ import annotations

import json
import linecache
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from fcoll.errors import FcollError
from fcoll.graph.call_agreement import turn_away
from fcoll.groups import by_name

log = logging.getLogger("inductor_ext")

RUNS = "fcoll_begins"  # in generated code: its comparison.Runs
LOOK_S = 1.0
STUCK_S = 5.0  # a run that is older may be stuck; a slow one is not turned away by the counts

#: By thread: the graph that it runs in C++, which has no Python frame.
in_cpp: dict[int, Any] = {}

#: By thread: when it last began to run a graph. Stacks are looked at only if that is long ago, and
#: once if the run has ended.
begun: dict[int, float] = {}

_thread: threading.Thread | None = None
_lock = threading.Lock()


def start() -> None:
    """Have runs watched from now on; once is enough for a process."""
    global _thread
    with _lock:
        if _thread is None or not _thread.is_alive():  # a fork has no threads
            _thread = threading.Thread(target=_watch, name="fcoll-runs", daemon=True)
            _thread.start()


def _watch() -> None:
    logged: set[str] = set()
    while True:
        time.sleep(LOOK_S)
        now = time.monotonic()
        old = {thread: at for thread, at in list(begun.items()) if now - at >= STUCK_S}
        running = {thread: (runs, what) for thread, runs, what in _running()} if old else {}
        for thread, at in old.items():
            if thread in running:
                _tell(*running[thread], logged)
            elif begun.get(thread) == at:
                del begun[thread]  # it has ended


def _running() -> Iterator[tuple[int, Any, str]]:
    """(thread, graph, where it is) of those that run now."""
    for thread, frame in sys._current_frames().items():
        run = _graph_in(frame)
        if run is not None:
            yield thread, *run
        elif (runs := in_cpp.get(thread)) is not None:
            yield thread, runs, ""


def _graph_in(frame: FrameType | None) -> tuple[Any, str] | None:
    while frame is not None:
        if (runs := frame.f_globals.get(RUNS)) is not None:
            return runs, call_at(linecache.getlines(frame.f_code.co_filename), frame.f_lineno)
        frame = frame.f_back
    return None


def _tell(runs: Any, what: str, logged: set[str]) -> None:
    by_group, _ = runs.calls()
    for name in runs.groups:
        first = by_group[name][0][1]
        begins = "a graph that was agreed on before, which begins with"
        try:
            group = by_name(name)
            text = turn_away(group, f"{begins} {first}" + (f", and is at {what}" if what else ""))
        except (RuntimeError, FcollError):  # the group or its store is gone: so is the run, soon
            continue
        if text and text not in logged:
            logged.add(text)
            log.error("%s. They wait for each other.", text)


_NOTE = re.compile(r"\s*(?:#|//) fcoll: (\{.*)")
_WAIT = re.compile(r"(?:wait_tensor\.default|collect(?:\.default)?)\((\w+)")


def call_at(lines: list[str], number: int) -> str:
    """The collective that a line of generated code (from 1) is about, by the note before it; of a
    wait by the note before what is waited for."""
    at = number - 1
    waited = _WAIT.search(lines[at]) if 0 <= at < len(lines) else None
    places = [at]
    if waited is not None:
        name = re.compile(rf"\b{waited[1]}\b")
        places = [i for i in range(at - 1, -1, -1) if name.search(lines[i])]
    notes = (_note_before(lines, i) for i in places)
    facts = next((facts for facts in notes if facts), None)
    return f"{facts['op']} of {facts['shape']} at {facts['source']}" if facts else ""


def _note_before(lines: list[str], i: int) -> dict[str, Any] | None:
    """The note on a call: in the comments right before it."""
    for line in reversed(lines[:i]):
        if not line.lstrip().startswith(("#", "//")):
            return None
        if match := _NOTE.match(line):
            facts: dict[str, Any] = json.loads(match[1])
            return facts
    return None
