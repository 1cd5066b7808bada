"""The collectives of a real run, read from a profiler's file.

- PyTorch's profiler (Kineto): the JSON that ``export_chrome_trace`` writes, also as .gz. On GPUs
  the NCCL kernels, with what torch adds to them (collective, sizes, group); on CPUs the c10d calls
  and when the backend's threads ran them. On fcoll's shared memory the calls alone: what their
  waits take is not in the file, nor the size of a gather.
- Nsight Systems: ``nsys export --type sqlite``. NCCL kernels by name: their sizes and groups are
  not in the file.

A collective's exposed time is that in which no compute kernel (on CPUs: no aten op) runs.
"""

from __future__ import annotations

import gzip
import json
import re
import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from fcoll.errors import BadProfile
from fcoll.report.svg import merged

#: What the names of ops, kernels and backends have in common: the first that is found in a name.
KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "permute": "send_recv",
    "sendrecv": "send_recv",
    "isend": "send_recv",
    "irecv": "send_recv",
    "send": "send_recv",
    "recv": "send_recv",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
ITEM_BYTES = {
    "double": 8, "float": 4, "float32": 4, "float64": 8, "bfloat16": 2, "c10::bfloat16": 2,
    "half": 2, "c10::half": 2, "float16": 2, "long": 8, "long int": 8, "int64": 8, "int": 4,
    "int32": 4, "short": 2,
    "byte": 1, "char": 1, "unsigned char": 1, "signed char": 1, "bool": 1, "uint8": 1, "int8": 1,
}  # fmt: skip
NCCL = re.compile(r"nccl(?:Dev)?Kernel_?(\w*)")
STEP = re.compile(r"ProfilerStep#\d+")
BACKENDS = ("gloo:", "ucc:", "mpi:")  # of what c10d's backends run on threads of their own


@dataclass(frozen=True)
class ObservedCall:
    """One collective of a run. What the file does not tell is None or empty."""

    kind: str
    start_us: float
    end_us: float
    name: str
    bytes: int | None = None
    n: int | None = None
    ranks: tuple[int, ...] = ()
    group: str = ""
    exposed_us: float = 0.0

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True)
class ObservedRun:
    """What a file tells: collectives in order, compute, and the marks of steps, in us."""

    path: str
    tool: str  # "PyTorch profiler, CPU" | "PyTorch profiler, GPU" | "Nsight Systems"
    rank: int | None
    collectives: tuple[ObservedCall, ...]
    compute: tuple[tuple[float, float], ...]  # merged
    marks: tuple[tuple[float, float], ...] = ()


def kind_of(name: str) -> str:
    """
    >>> kind_of("_allgather_base_"), kind_of("AllReduce_Sum_f32_RING_LL"), kind_of("add")
    ('all_gather', 'all_reduce', '')
    """
    plain = re.sub(r"[^a-z]", "", name.lower())
    return next((kind for word, kind in KINDS.items() if word in plain), "")


def read(path: str | Path) -> ObservedRun:
    """The run in a file of one of the two tools."""
    try:
        raw = Path(path).read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        if raw[:15] == b"SQLite format 3":
            return _nsight(str(path))
        events, rank = _events(json.loads(raw))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, sqlite3.Error) as error:
        raise BadProfile(path=str(path), why=f"{type(error).__name__}: {error}") from error
    return _kineto(str(path), events, rank)


def _events(data: Any) -> tuple[list[dict[str, Any]], int | None]:
    """The slices of a chrome trace in the order of time, and the rank that it is of."""
    found = data if isinstance(data, list) else data["traceEvents"]
    slices = [e for e in found if e.get("ph") == "X" and "ts" in e]
    told = {} if isinstance(data, list) else data.get("distributedInfo") or {}
    for e in slices:
        e["ts"], e["dur"], e["args"] = float(e["ts"]), float(e.get("dur", 0)), e.get("args") or {}
    return sorted(slices, key=lambda e: e["ts"]), told.get("rank")


def _kineto(path: str, events: Sequence[dict[str, Any]], rank: int | None) -> ObservedRun:
    kernels = [e for e in events if e.get("cat") == "kernel"]
    sends = [e for e in kernels if _is_collective(e)]
    if sends:
        tool, found = "PyTorch profiler, GPU", list(map(_kernel, sends))
        compute = _ends(e for e in kernels if not _is_collective(e))
    else:
        tool, found = "PyTorch profiler, CPU", _calls(events)
        threads = {e["tid"] for e in events if e["name"].startswith(BACKENDS)}
        ops = (e for e in events if e["name"].startswith("aten::") and e["tid"] not in threads)
        compute = _ends(ops)
    if not found:
        why = "it has no collectives: no NCCL kernels, no calls of c10d or fcoll"
        raise BadProfile(path=path, why=why)
    marks = [e for e in events if STEP.fullmatch(e["name"])]
    on_gpu = [e for e in marks if "gpu" in str(e.get("cat"))]
    both = tuple((e["ts"], e["ts"] + e["dur"]) for e in (sends and on_gpu) or marks)
    return ObservedRun(
        path, tool, rank, _exposed(found, compute), compute, tuple(dict.fromkeys(both))
    )


def _is_collective(e: Mapping[str, Any]) -> bool:
    return bool(NCCL.match(e["name"])) or "Collective name" in e["args"]


def _ends(events: Iterable[Mapping[str, Any]]) -> tuple[tuple[float, float], ...]:
    return tuple(merged(((e["ts"], e["ts"] + e["dur"]) for e in events), 1e-6))


# -- GPUs ---


def _kernel(e: Mapping[str, Any]) -> ObservedCall:
    """An NCCL kernel, with what torch tells of the call that started it."""
    args = e["args"]
    name = NCCL.match(e["name"])
    kind = kind_of(str(args.get("Collective name", ""))) or kind_of(name[1] if name else "")
    sizes = [args[k] for k in ("In msg nelems", "Out msg nelems") if args.get(k) is not None]
    item = ITEM_BYTES.get(str(args.get("dtype", "")).lower())
    return ObservedCall(
        kind=kind,
        start_us=e["ts"],
        end_us=e["ts"] + e["dur"],
        name=e["name"].partition("(")[0],
        bytes=int(max(map(float, sizes))) * item if sizes and item else None,
        n=int(args["Group size"]) if "Group size" in args else None,
        ranks=_ranks(args.get("Process Group Ranks")),
        group=str(args.get("Process Group Description") or args.get("Process Group Name") or ""),
    )


def _ranks(told: Any) -> tuple[int, ...]:
    """Of "[0, 1, 2, 3]"; none of a list that was cut."""
    text = str(told or "")
    return () if "..." in text else tuple(map(int, re.findall(r"\d+", text)))


# -- CPUs ---


def _calls(events: Sequence[dict[str, Any]]) -> list[ObservedCall]:
    """The calls of c10d in order, each with the time in which its backend ran it."""
    calls = _outermost(e for e in events if e["name"].startswith("c10d::") and kind_of(e["name"]))
    if not calls:  # on shared memory there is no c10d
        own = (e for e in events if e["name"].startswith("fcoll::") and kind_of(e["name"]))
        return [replace(_call(e, e), name=e["name"]) for e in _outermost(own)]
    runs = [e for e in events if e["name"].startswith(BACKENDS)]
    if len(runs) != len(calls):  # not every backend tells; then the calls' own times
        runs = []
    return [_call(call, runs[i] if runs else call) for i, call in enumerate(calls)]


def _call(call: Mapping[str, Any], run: Mapping[str, Any]) -> ObservedCall:
    kind, end = kind_of(call["name"]), run["ts"] + run["dur"]
    part = kind == "all_gather" and call["name"].startswith("fcoll::")  # only the input is told
    nbytes = None if part else _input_bytes(call, run)
    return ObservedCall(kind, run["ts"], end, f"{call['name']} {run['name']}", nbytes)


def _outermost(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those inside another on the same thread: an op that calls itself on another key."""
    ends: dict[Any, float] = {}
    found = []
    for e in events:
        if e["ts"] >= ends.get(e["tid"], float("-inf")):
            found.append(e)
            ends[e["tid"]] = e["ts"] + e["dur"]
    return found


def _input_bytes(call: Mapping[str, Any], run: Mapping[str, Any]) -> int | None:
    """The bytes of a call's largest argument; the profiler tells them with record_shapes=True."""
    types = [*call["args"].get("Input type", ()), *run["args"].get("Input type", ())]
    item = next((ITEM_BYTES[t.lower()] for t in types if t.lower() in ITEM_BYTES), None)
    sizes = [_elements(x) for x in call["args"].get("Input Dims", ())]
    return max(sizes) * item if item and any(sizes) else None


def _elements(dims: Any) -> int:
    """Of a tensor's sizes, or of a list of them."""
    if dims and isinstance(dims[0], list):
        return sum(_elements(x) for x in dims)
    return prod(dims) if dims else 0


# -- Nsight Systems ---


def _nsight(path: str) -> ObservedRun:
    """Kernels and the NVTX ranges that mark steps."""
    with sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True) as base:
        names = dict(base.execute("select id, value from StringIds"))
        columns = {row[1] for row in base.execute("pragma table_info(CUPTI_ACTIVITY_KIND_KERNEL)")}
        name = "demangledName" if "demangledName" in columns else "shortName"
        query = f"select start, end, {name} from CUPTI_ACTIVITY_KIND_KERNEL order by start"
        kernels = [(a / 1e3, b / 1e3, str(names.get(k, k))) for a, b, k in base.execute(query)]
        tables = {row[0] for row in base.execute("select name from sqlite_master")}
        marks = _nvtx_steps(base, names) if "NVTX_EVENTS" in tables else ()
    base.close()
    sends = [(a, b, k, m[1]) for a, b, k in kernels if (m := NCCL.match(k))]
    if not sends:
        raise BadProfile(path=path, why="it has no NCCL kernels")
    compute = tuple(merged(((a, b) for a, b, k in kernels if not NCCL.match(k)), 1e-6))
    found = [ObservedCall(kind_of(word), a, b, k.partition("(")[0]) for a, b, k, word in sends]
    return ObservedRun(path, "Nsight Systems", None, _exposed(found, compute), compute, marks)


def _nvtx_steps(
    base: sqlite3.Connection, names: Mapping[int, str]
) -> tuple[tuple[float, float], ...]:
    columns = {row[1] for row in base.execute("pragma table_info(NVTX_EVENTS)")}
    text = "text, textId" if "textId" in columns else "text, null"
    rows = base.execute(f"select start, end, {text} from NVTX_EVENTS order by start")
    return tuple(
        (a / 1e3, b / 1e3)
        for a, b, word, number in rows
        if b is not None and STEP.fullmatch(str(word or names.get(number, "")))
    )


# -- what compute leaves ---


def _exposed(
    found: Iterable[ObservedCall], compute: Sequence[tuple[float, float]]
) -> tuple[ObservedCall, ...]:
    """In the order of time, with the time in which nothing is computed."""
    begins, made = [a for a, _ in compute], []
    for one in sorted(found, key=lambda o: o.start_us):
        i, beside = max(bisect_right(begins, one.start_us) - 1, 0), 0.0
        while i < len(compute) and compute[i][0] < one.end_us:
            low, high = max(compute[i][0], one.start_us), min(compute[i][1], one.end_us)
            beside += max(high - low, 0.0)
            i += 1
        made.append(replace(one, exposed_us=one.us - beside))
    return tuple(made)
