"""Report of the compiled graphs that are loaded in this process: the form of each collective.

Every collective writes a line about itself into the code that is generated for it, so that a graph
from a cache can be asked as well as one that was compiled just now.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fcoll import units
from fcoll.graph.nodes import arguments, line_of
from fcoll.table.collectives import row_of
from fcoll.transport.native import build
from inductor_ext._torch import loaded_graphs
from inductor_ext.choice import Choice, choice_of

_WHY_COPIED = "its ranks ran different graphs"
_MARK = " fcoll: "  # after what begins a comment, "#" or "//"


@dataclass(frozen=True)
class Lowered:
    """One collective of a compiled graph."""

    op: str
    group: str
    shape: tuple[int | str, ...]
    dtype: str
    bytes: int | None  # of the argument; None if it is not known before the graph runs
    form: str
    why: str  # it is not a better one
    source: str
    kernel: str = ""  # that reads the parts, where the form is read in place
    code: str = ""  # the file of the graph
    plan: str = ""  # what the schedule did to it


def note(node: torch.fx.Node) -> str:
    """The comment on a collective in its generated code."""
    row, choice = row_of(node.target), choice_of(node) or Choice()
    x = node.all_input_nodes[0].meta["val"] if node.all_input_nodes else torch.empty(0)
    size = x.numel() * x.element_size()
    group = arguments(node).get("group_name")
    facts = Lowered(
        op=row.name if row else str(node.target),
        group=group if isinstance(group, str) else "",  # a group may be a value of the graph
        shape=tuple(s if isinstance(s, int) else str(s) for s in x.shape),
        dtype=str(x.dtype).removeprefix("torch."),
        bytes=size if isinstance(size, int) else None,
        form=choice.form,
        why=choice.why,
        source=line_of(node),
        plan=choice.plan,
    )
    return _MARK + json.dumps(asdict(facts))


def report() -> list[Lowered]:
    """Every collective of the compiled graphs that are loaded, in their order.

    ``print(inductor_ext.table())`` shows them.
    """
    return [entry for file in loaded_graphs() for entry in _entries(file, file.stat().st_mtime_ns)]


# A graph of 300 collectives takes half a second to read, and programs ask after every step.
@functools.cache
def _entries(file: Path, written_ns: int) -> tuple[Lowered, ...]:
    lines = [line.strip() for line in file.read_text().splitlines()]
    entries = []
    for i, line in enumerate(lines):
        _, mark, facts_json = line.partition(_MARK)
        if mark and line.startswith(("#", "//")):
            facts = json.loads(facts_json)
            facts["shape"] = tuple(facts["shape"])
            facts.update(kernel=_reader(lines[i:]), code=str(file))
            entries.append(Lowered(**facts))
    return tuple(entries)


def _reader(lines: list[str]) -> str:
    """The kernel that is called with the parts which the next line, or the next collect, gives."""
    assigned = re.match(r"(\w+) = .*\.(meet|announce)(?:\.default)?\(", next(iter(lines[1:]), ""))
    if not assigned:
        return ""
    whole = assigned[1]
    if assigned[2] == "announce":
        of_token = re.compile(rf"(\w+) = .*collect(?:\.default)?\({whole}\b")
        collected = next((m[1] for m in map(of_token.match, lines) if m), None)
        if collected is None:
            return ""
        whole = collected
    parts = [m[1] for line in lines if (m := re.match(rf"(\w+) = {whole}\[\d+\]", line))]
    uses = re.compile(rf"(\w*fused\w*)\(.*\b({'|'.join(parts)})\b") if parts else None
    return next((m[1] for line in lines if uses and (m := uses.match(line))), "")


def table(entries: list[Lowered] | None = None) -> str:
    """The report for people: a line for each collective, and one for each group whose ranks have
    run different graphs."""
    rows = [("collective", "bytes", "group", "form", "read by / why not", "schedule", "at")]
    shown = report() if entries is None else entries
    for e in shown:
        size = "?" if e.bytes is None else str(e.bytes)
        rows.append((e.op, size, e.group, e.form, e.kernel or e.why, e.plan, e.source))
    lines = units.table(rows, "<" * len(rows[0]))
    for group in sorted({e.group for e in shown if e.group}):
        if copied := lane_disagreements(group):
            lines.append(f'parts on group "{group}" were copied {copied} times: {_WHY_COPIED}')
    return "\n".join(lines)


def lane_disagreements(group: str) -> int:
    """How many collectives of compiled graphs had their parts in different places on the ranks of a
    group, as where one of them has recompiled alone: those parts were copied, not read in place."""
    return torch.ops.fcoll_native.lane_disagreements(group) if build.loaded() else 0
