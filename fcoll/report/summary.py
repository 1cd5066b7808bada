"""What all renderers show: collectives that are alike added up, the verdict, and units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fcoll.graph.issued import why_none
from fcoll.report.why import Why, main_cause, reasons
from fcoll.scheduling.timeline import Timeline
from fcoll.units import show_bytes, show_us


@dataclass(frozen=True)
class Row:
    """Collectives of one op, axis, source line and phase, added up."""

    op: str
    axis: str
    n: int
    source: str
    phase: str
    count: int
    bytes: int
    wire_bytes: float
    us: float
    exposed_us: float
    ids: tuple[int, ...]
    form: str = ""  # that they were priced by
    module: str = ""  # what their modules have in common, "layers.*.attention"
    why: str = ""  # the cause of most of their exposed time: see why.py

    @property
    def hidden_us(self) -> float:
        return self.us - self.exposed_us


def rows(line: Timeline, why: Mapping[int, Why] | None = None) -> list[Row]:
    """The collectives by (op, axis, source line, phase), the most exposed first; with causes where
    ``why`` (see why.py) has them."""
    alike: dict[tuple[Any, ...], list[Any]] = {}
    for c in line.collectives:
        alike.setdefault((c.op, c.label, len(c.ranks), c.source, c.phase), []).append(c)
    made = []
    for (op, axis, n, source, phase), found in alike.items():
        exposed = sum(line.exposed_us.get(c.id, 0.0) for c in found)
        hidden = sum(line.hidden_us.get(c.id, 0.0) for c in found)
        nbytes = sum(_size(c.bytes) for c in found)
        wire = sum(float(_size(c.wire_bytes)) for c in found)
        ids = tuple(c.id for c in found)
        values = (op, axis, n, source, phase, len(found), nbytes, wire, exposed + hidden, exposed)
        forms = dict.fromkeys(line.forms.get(c.id, "") for c in found)
        form, module = "/".join(filter(None, forms)), common(c.module for c in found)
        cause = main_cause(ids, line.exposed_us, why) if why else ""
        made.append(Row(*values, ids, form, module, cause))
    return sorted(made, key=lambda r: (-r.exposed_us, -r.us, r.ids))


def common(modules: Iterable[str]) -> str:
    """What the names of modules have in common.

    >>> common(["layers.0.wo", "layers.1.wo"]), common(["layers.0.wq", "layers.0.wk"])
    ('layers.*.wo', 'layers.0.*')
    """
    names = [name.split(".") for name in dict.fromkeys(modules)]
    if len(names) < 2:
        return ".".join(names[0]) if names else ""
    same = len({len(name) for name in names}) == 1
    parts = [x[0] if len({*x}) == 1 else "*" for x in zip(*names, strict=False)]
    shown = parts if same else [*parts, "*"]
    return ".".join(shown) if {*shown} != {"*"} else "*"


@dataclass(frozen=True)
class Moved:
    """What became of a line's collectives: (before, after). ``lead_us`` is the compute between the
    start of a call and its first use, on average."""

    op: str
    axis: str
    source: str
    phase: str
    count: tuple[int, int]
    lead_us: tuple[float, float]
    exposed_us: tuple[float, float]


def moves(before: Timeline, after: Timeline) -> list[Moved]:
    """The lines whose calls start elsewhere or became fewer, what it saved the most first."""

    def key(r: Row) -> tuple[Any, ...]:
        return r.op, r.axis, r.source, r.phase

    old, new = ({key(r): r for r in rows(line)} for line in (before, after))
    found = []
    for name in [*old, *(k for k in new if k not in old)]:
        op, axis, source, phase = name
        pair = [(before, old.get(name)), (after, new.get(name))]
        count = _both(r.count if r else 0 for _, r in pair)
        lead_us = _both(_lead_us(line, r) for line, r in pair)
        exposed_us = _both(r.exposed_us if r else 0.0 for _, r in pair)
        one = Moved(op, axis, source, phase, count, lead_us, exposed_us)
        if one.count[0] != one.count[1] or abs(one.lead_us[0] - one.lead_us[1]) > 0.01:
            found.append(one)
    return sorted(found, key=lambda m: m.exposed_us[1] - m.exposed_us[0])


def _both(values: Iterable[Any]) -> tuple[Any, Any]:
    one, other = values
    return one, other


def _lead_us(line: Timeline, row: Row | None) -> float:
    ids = [i for i in row.ids if i in line.waited_us] if row else []
    lead = sum(line.waited_us[i] - line.issued_us[i] - line.exposed_us[i] for i in ids)
    return max(lead, 0.0) / (len(ids) or 1)


def gain(before: Timeline, after: Timeline) -> str:
    """One line: "1.32x as fast (244 ms -> 185 ms), 524 MiB more memory"."""
    ratio = before.step_us / after.step_us if after.step_us else 1.0
    memory = show_bytes(abs(after.peak_bytes - before.peak_bytes))
    more = "more" if after.peak_bytes >= before.peak_bytes else "less"
    times = f"{show_us(before.step_us)} -> {show_us(after.step_us)}"
    return f"{ratio:.2f}x as fast ({times}), {memory} {more} memory"


def tail_us(line: Timeline) -> float:
    """Of collectives that outlast compute and that nothing of the step waits for."""
    late = sum(s.us for s in line.host_waits)
    return max(line.step_us - line.compute_us - line.exposed_total_us - late, 0.0)


def _size(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else 0  # a symbol has no size of its own


def verdict(line: Timeline) -> str:
    """One line: "65% of the step is exposed communication; largest: model.py:31". A step that does
    not fit into the machine's memory is told first."""
    over = line.machine.too_small_for(line.peak_bytes)
    fits = f"does not fit: {show_bytes(line.peak_bytes)} is {over}. " if over else ""
    return fits + _verdict(line)


def _verdict(line: Timeline) -> str:
    found = rows(line)
    if not found:
        return f"the step has no collectives: {why_none(line.mesh)}"
    if line.exposed_share < 0.005:
        return "all communication is hidden behind compute"
    largest = by_source(found)[0][0]
    return f"{line.exposed_share:.0%} of the step is exposed communication; largest: {largest}"


def by_source(found: Iterable[Row]) -> list[tuple[str, float]]:
    """(source line, exposed us), the most first."""
    total: dict[str, float] = {}
    for row in found:
        name = row.source or row.op
        total[name] = total.get(name, 0.0) + row.exposed_us
    return sorted(total.items(), key=lambda x: -x[1])


def as_dict(line: Timeline, why: Mapping[int, Why] | None = None) -> dict[str, Any]:
    """The report for programs: what ``fcoll report --json`` prints."""
    return {
        "machine": line.machine.name,
        "mesh": line.mesh,
        "rank": line.rank,
        "step_us": line.step_us,
        "compute_us": line.compute_us,
        "exposed_us": line.exposed_total_us,
        "exposed_share": line.exposed_share,
        "communication_us": sum(line.hidden_us.values()) + line.exposed_total_us,
        "peak_bytes": line.peak_bytes,
        "fits": not line.machine.too_small_for(line.peak_bytes),
        "collectives": len(line.collectives),
        "verdict": verdict(line),
        "rows": [
            {k: v for k, v in asdict(row).items() if k != "ids"} | {"hidden_us": row.hidden_us}
            for row in rows(line, reasons(line) if why is None else why)
        ],
    }
