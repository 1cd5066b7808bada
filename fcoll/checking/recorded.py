"""Flight records that ranks wrote, read again: ours, and those of torch's own backends."""

from __future__ import annotations

import ast
import io
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from fcoll._torch import dtype_name
from fcoll.errors import BadDump
from fcoll.source import is_library, show
from fcoll.table.collectives import COLLECTIVES
from fcoll.transport.flight_records import torch_name

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_RANK = re.compile(r"(\d+)$")
_MARK = re.compile(r" #[0-9a-f]{4}$")  # of a signature, where it is not to be told from another
_OF_TORCH = re.compile(r"/(site|dist)-packages/(torch|fcoll|inductor_ext|fcoll_backend)/")
# By what torch's records call them, the first rows of that name.
_ROWS = {torch_name(row): row for row in reversed(COLLECTIVES)}
_MESSAGE = re.compile(r":(send|recv) \d+(?:->|<-)(-?\d+)$")
_OWN_INPUT, _OWN_OUTPUT = ("all_to_all", "scatter"), ("all_to_all", "gather")


@dataclass(frozen=True)
class RecordedGroup:
    """A group as a dump names it."""

    name: str
    desc: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        named = self.desc and self.desc not in ("undefined", self.name)
        return f"{self.name} ({self.desc})" if named else self.name


@dataclass(frozen=True)
class Recorded:
    """A call that a rank made."""

    rank: int
    group: RecordedGroup
    number: int  # of the group's calls, from 1
    row: str  # the table's name
    text: str  # "all_reduce(float32 [16], sum)"
    mark: str  # tells calls apart whose text is the same
    key: Any  # equal on ranks whose calls match
    dtype: str
    numel: int | None  # of the first tensor
    line: str  # "train.py:31", empty where it is not known
    complete: bool
    time_ns: int
    peer: int | None = None  # of a message: the other rank, -1 for any


@dataclass(frozen=True)
class Dump:
    """What one rank wrote."""

    rank: int
    groups: tuple[RecordedGroup, ...]
    calls: tuple[Recorded, ...]  # in the order they were made
    messages: tuple[Recorded, ...]  # between two ranks, that it has waited for
    time_ns: int | None  # when, where it says so
    line: str  # where its main thread was
    reasons: tuple[str, ...]  # why it was written
    error: str  # what the rank raised

    def on(self, group: RecordedGroup) -> dict[int, Recorded]:
        """Its calls on a group, by number."""
        return {call.number: call for call in self.calls if call.group == group}


def read(paths: Paths) -> dict[int, Dump]:
    """The dumps of a folder, or of these files, by rank."""
    dumps: dict[int, Dump] = {}
    for path in _files(paths):
        dump = _read(path)
        if dump.rank in dumps:
            raise BadDump(path=path, why=f"there is another one of rank {dump.rank}")
        dumps[dump.rank] = dump
    return dict(sorted(dumps.items()))


def _files(paths: Paths) -> list[Path]:
    roots = [Path(paths)] if isinstance(paths, (str, os.PathLike)) else list(map(Path, paths))
    files: list[Path] = []
    for path in roots:
        if path.is_dir():
            files += sorted(p for p in path.iterdir() if _RANK.search(p.name) and p.is_file())
        else:
            files.append(path)
    if not files:
        raise BadDump(path=", ".join(map(str, roots)) or "nothing", why="there are none")
    return files


class _Plain(pickle.Unpickler):
    """Unpickles numbers, text and lists only: any other pickle may run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it has a {module}.{name}")


def _read(path: Path) -> Dump:
    try:
        raw = _Plain(io.BytesIO(path.read_bytes())).load()
        return _dump(raw, path)
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, IndexError) as error:
        raise BadDump(path=path, why=f"{type(error).__name__}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise BadDump(path=path, why=f"it has no {error}") from error


def _dump(raw: Mapping[str, Any], path: Path) -> Dump:
    own = raw.get("fcoll", {})
    named = _RANK.search(path.name)
    if not own and not named:
        raise BadDump(path=path, why="its name does not end with a rank")
    rank = own["rank"] if own else int(named[1])  # type: ignore[index]
    groups = {name: _group(facts) for name, facts in raw["pg_config"].items()}
    entries = [entry for entry in raw["entries"] if not entry["is_p2p"]]
    calls = tuple(_calls(rank, entries, groups))
    messages = tuple(_messages(rank, raw["entries"], groups))
    facts = own.get("line", ""), tuple(own.get("reasons", ())), own.get("error", "")
    return Dump(rank, tuple(groups.values()), calls, messages, own.get("time_ns"), *facts)


def _group(facts: Mapping[str, Any]) -> RecordedGroup:
    ranks = facts["ranks"]
    members = ast.literal_eval(ranks) if isinstance(ranks, str) else ranks
    return RecordedGroup(facts["name"], facts["desc"], tuple(members))


def _calls(
    rank: int, entries: list[dict[str, Any]], groups: Mapping[str, RecordedGroup]
) -> Iterator[Recorded]:
    first_calls: set[tuple[str, int]] = set()
    for entry in entries:
        name, number = entry["process_group"][0], entry["collective_seq_id"]
        if (name, number) in first_calls:  # of a coalesced call the first stands for all
            continue
        first_calls.add((name, number))
        group = groups.get(name) or RecordedGroup(name, entry["process_group"][1], (rank,))
        yield _recorded(rank, group, entry)


def _messages(
    rank: int, entries: list[dict[str, Any]], groups: Mapping[str, RecordedGroup]
) -> Iterator[Recorded]:
    """The messages that were waited for: one that is only issued holds nobody up."""
    for entry in entries:
        named = _MESSAGE.search(entry["profiling_name"])
        if not entry["is_p2p"] or not named or entry["state"] == "scheduled":
            continue
        own = entry.get("fcoll", {})
        name = own.get("group", entry["process_group"][0])
        group = groups.get(name) or RecordedGroup(name, entry["process_group"][1], (rank,))
        peer = own["peer"] if "peer" in own else dict(enumerate(group.ranks)).get(int(named[2]), -1)
        call = _recorded(rank, group, {**entry, "collective_seq_id": entry["p2p_seq_id"]})
        text = call.text.partition("(")[2].rpartition(")")[0]
        yield replace(call, row=named[1], text=text, peer=peer)


def _recorded(rank: int, group: RecordedGroup, entry: Mapping[str, Any]) -> Recorded:
    own = entry.get("fcoll", {})
    op = entry["profiling_name"].partition(":")[2]
    ins, dtypes = entry["input_sizes"], [dtype_name(name) for name in entry["input_dtypes"]]
    newer = f"_{op.removesuffix('_single')}_base"  # "all_gather_single" of torch 2.14
    row = own.get("row") or _ROWS.get(op) or _ROWS.get(newer, op)
    text = own.get("call") or f"{row}({', '.join(map(_shown, dtypes, ins))})"
    mark = _MARK.search(text)
    return Recorded(
        rank=rank,
        group=group,
        number=entry["collective_seq_id"],
        row=row.removesuffix(" (gloo)"),
        text=_MARK.sub("", text),
        mark=mark[0] if mark else "",
        key=(row, own["digest"]) if "digest" in own else _key(op, entry),
        dtype=dtypes[0] if dtypes else "",
        numel=prod(ins[0]) if ins else None,
        line=own.get("line") or _line(entry.get("frames", ())),
        complete=entry["state"] == "completed",
        time_ns=entry["time_created_ns"],
    )


def _shown(dtype: str, sizes: list[int]) -> str:
    return f"{dtype} {sizes}"


def _key(op: str, entry: Mapping[str, Any]) -> Any:
    """What ranks must have in common, of torch's records: of some calls a size is each rank's."""
    ins = None if op in _OWN_INPUT else entry["input_sizes"]
    outs = None if op in _OWN_OUTPUT else entry["output_sizes"]
    return op, repr(ins), repr(outs), repr(entry["input_dtypes"])


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost user line; files of another installation are known by their folders."""
    for frame in frames:
        name = frame["filename"]
        if not is_library(name) and not _OF_TORCH.search(name):
            return show((name, int(frame["line"])))
    return ""
