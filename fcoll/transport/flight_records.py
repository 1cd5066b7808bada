"""The last calls of this process, in the format of c10d's flight recorder.

torch's own recorder cannot be linked: its class is not exported, and of gloo's calls it names a
group that its dump does not list. So calls on shared memory are recorded by the groups themselves
(native/flight_recorder.h), those of other groups are taken from torch's records, and groups,
states and lines are filled in here. ``torchfrtrace`` and ``fcoll why`` read the result.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from fcoll import _torch
from fcoll.source import Site, is_library, show

VERSION = "2.10"  # of the format, in torch 2.13: minor versions add fields
# torchfrtrace knows the names of backends; ours is in the entry's "fcoll".
_BACKEND = "gloo"
_FORM = re.compile("(_into)?_tensor$|_single$")  # of a row's name, that torch's records leave out
_PYTHON = sysconfig.get_path("stdlib") + os.sep
Entry = dict[str, Any]


def records(rank: int, reasons: list[str], error: str, in_call: bool) -> dict[str, Any]:
    """A dump of this process: ``reasons`` say why it is made, the last one last; ``error`` is what
    it raised, or empty. Unless it is made from inside a call, ``in_call``, this thread is in none.
    """
    frames = dict(sys._current_frames())
    inside = {
        thread: f for thread, f in frames.items() if in_call or thread != threading.get_ident()
    }
    groups = list(_groups())
    entries: list[Entry] = []
    count = 0
    for group in groups:
        if group["handle"]:
            flights = json.loads(torch.ops.fcoll_native.flights(group["handle"]))
            count += flights[-1]["number"] if flights else 0
            entries += [_entry(flight, group, inside) for flight in flights]
            messages = json.loads(torch.ops.fcoll_native.messages(group["handle"]))
            count += messages[-1]["number"] if messages else 0
            entries += [_message(message, group) for message in messages]
    torchs = _torch.flight_records()
    count += 1 + torchs[-1]["record_id"] if torchs else 0
    entries += _of_torch(torchs, groups)
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for i, entry in enumerate(entries, count - len(entries)):
        entry["record_id"] = i
    return {
        "version": VERSION,
        "pg_config": {group["name"]: _config(group) for group in groups},
        "pg_status": {group["name"]: _status(group["name"], entries) for group in groups},
        "entries": entries,
        "fcoll": {
            "rank": rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time_ns": time.time_ns(),
            "reasons": reasons,
            "error": error,
            "line": _line(frames.get(threading.main_thread().ident or 0)),
        },
    }


# -- groups ---


def _groups() -> Iterator[dict[str, Any]]:
    """The process groups of this rank; those that have shared memory by its handle."""
    from fcoll.transport import shared_memory

    for pg in _torch.process_groups():
        facts = {"name": pg.group_name, "desc": pg.group_desc, "ranks": _torch.group_ranks(pg)}
        facts["rank"] = pg.rank()
        handle = shared_memory.known_handle(pg)
        yield {**facts, "handle": handle}
        if handle:  # what its backend hands over; their calls are counted by themselves
            for name in (_gloo_of(pg.group_name), _messages_of(pg.group_name)):
                yield {**facts, "name": name, "handle": 0}


def _gloo_of(name: str) -> str:
    return f"{name} (gloo)"


def _messages_of(name: str) -> str:
    """Not the group's own: torchfrtrace takes a message and a collective with the same number, one
    behind the other, for one coalesced call."""
    return f"{name} (messages)"


def _config(group: Mapping[str, Any]) -> dict[str, str]:
    ranks = str(list(group["ranks"]))
    return {"name": group["name"], "desc": group["desc"], "ranks": ranks}


def _status(name: str, entries: list[Entry]) -> dict[str, int]:
    own = [entry for entry in entries if entry["process_group"][0] == name]
    last = max((entry["collective_seq_id"] for entry in own), default=-1)
    complete = [entry["collective_seq_id"] for entry in own if entry["state"] == "completed"]
    return {
        "last_enqueued_collective": last,
        "last_started_collective": last,
        "last_completed_collective": max(complete, default=-1),
    }


# -- entries ---


def _entry(flight: Mapping[str, Any], group: Mapping[str, Any], frames: Any) -> Entry:
    """A call on shared memory. One that waits and has no stack is where its thread is."""
    complete, stack = flight["complete"], flight["frames"]
    if not stack and not complete:
        stack = _frames(frames.get(flight["thread"]))
    row = flight["row"].removesuffix(" (gloo)")
    name = torch_name(row) or torch_name(flight["kind"])
    ins, outs = _sizes(flight, len(group["ranks"]))
    dtypes = [flight["dtype"]] * len(ins) if flight["dtype"] else []
    return {
        "pg_id": 0,
        "process_group": (group["name"], group["desc"]),
        "collective_seq_id": flight["number"],
        "p2p_seq_id": 0,
        "op_id": flight["number"],
        "profiling_name": f"{_BACKEND}:{name}",
        "time_created_ns": time.time_ns() - flight["age_ns"],
        "timeout_ms": 0,
        "is_p2p": False,
        "input_sizes": ins,
        "input_dtypes": dtypes,
        "output_sizes": outs,
        "output_dtypes": dtypes,
        "state": "completed" if complete else "started",
        "retired": complete,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "thread_id": str(flight["thread"]),
        "thread_name": "",
        "frames": stack,
        "fcoll": {
            "row": flight["row"],
            "call": flight["call"],
            "digest": flight["digest"],
            "line": _first_line([(frame["filename"], frame["line"]) for frame in stack]),
        },
    }


def _message(flight: Mapping[str, Any], group: Mapping[str, Any]) -> Entry:
    """One between two ranks, as torch's records name it: "send 0->1", by ranks of the group. Nobody
    may wait yet for one that was only issued."""
    mine, peer, row = group["rank"], flight["peer"], flight["row"]
    sends = row == "send"
    entry = _entry(flight, group, {})
    return {
        **entry,
        "process_group": (_messages_of(group["name"]), group["desc"]),
        "collective_seq_id": 0,
        "p2p_seq_id": flight["number"],
        "profiling_name": f"{_BACKEND}:{row} {mine}{'->' if sends else '<-'}{peer}",
        "is_p2p": True,
        "state": _state(flight),
        "fcoll": {
            "group": group["name"],
            "line": entry["fcoll"]["line"],
            "peer": group["ranks"][peer] if peer >= 0 else -1,
        },
    }


def _state(message: Mapping[str, Any]) -> str:
    if message["complete"]:
        return "completed"
    return "started" if message["waited_for"] else "scheduled"


def torch_name(row: str) -> str:
    """What torch's records call a row; empty for those that torchfrtrace does not know.

    >>> torch_name("all_reduce"), torch_name("reduce_scatter_tensor"), torch_name("permute")
    ('all_reduce', '_reduce_scatter_base', '')
    """
    from torch.distributed.flight_recorder.components.types import COLLECTIVES  # 10 ms

    short = _FORM.sub("", row)
    name = f"_{short}_base" if row.endswith("_tensor") else short
    if row.endswith("reduce_coalesced"):
        name = row.replace("all_", "all")
    return name if name in COLLECTIVES else ""


def _sizes(flight: Mapping[str, Any], n: int) -> tuple[list[list[int]], list[list[int]]]:
    """Of what goes in and what comes out, as torchfrtrace checks them against each other."""
    whole, count = flight["sizes"], flight["count"]
    if not flight["dtype"]:
        return [], []
    item = getattr(torch, _torch.dtype_name(flight["dtype"])).itemsize
    if min(whole, default=0) < 0:  # sizes that are each rank's own
        whole = [count * flight["item_bytes"] // item]
    carried = _FORM.sub("", flight["kind"])
    if carried == "all_to_all":
        return [[flight["sent"] // item]], [[flight["received"] // item]]
    if carried == "all_gather":
        return [whole], [[n * math.prod(whole)]]
    if carried == "reduce_scatter":
        return [[n * count]], [[count]]
    return [whole], [whole]


def _of_torch(entries: list[Entry], groups: list[dict[str, Any]]) -> Iterator[Entry]:
    """Gloo's calls from torch's records, which do not say that one is complete but that it is
    retired; a call that timed out is not."""
    on_memory = {group["name"] for group in groups if group["handle"]}
    known = {group["name"]: group["desc"] for group in groups}
    for entry in entries:
        name = entry["process_group"][0]
        if name not in known or not entry["profiling_name"].startswith("gloo:"):
            continue
        name = _gloo_of(name) if name in on_memory else name
        frames = [(frame["filename"], frame["line"]) for frame in entry["frames"]]
        yield {
            **entry,
            "process_group": (name, known[name]),
            "state": "completed" if entry["retired"] else "started",
            "fcoll": {"line": _first_line(frames)},
        }


# -- lines ---


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    """The stack of a thread from the user's innermost line on, as torch's records have it."""
    found: list[dict[str, Any]] = []
    while frame is not None:
        code = frame.f_code
        if found or not is_library(code.co_filename):
            place = {"filename": code.co_filename, "line": frame.f_lineno}
            found.append({"name": code.co_name, **place})
        frame = frame.f_back
    return found


def _line(frame: FrameType | None) -> str:
    return _first_line([(frame["filename"], frame["line"]) for frame in _frames(frame)])


def _first_line(sites: list[Site]) -> str:
    """The innermost of the user's lines, "train.py:31"; empty if there is none. A thread that waits
    in Python's own library is where the program called that."""
    own = [site for site in sites if not is_library(site[0]) and not site[0].startswith(_PYTHON)]
    return show(own[0]) if own else ""


def pickled(found: dict[str, Any]) -> bytes:
    return pickle.dumps(found, protocol=2)  # the one that torch's C++ writes


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()
