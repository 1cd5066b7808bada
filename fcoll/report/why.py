"""Why a collective is exposed: what needs it, what it had to wait for, what could run beside it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy

from fcoll.graph.steps import Step
from fcoll.scheduling.timeline import Span, Timeline
from fcoll.units import show_us

MOST = 1000  # exposed calls of which is asked what could run beside them, the most exposed first
NEAR_US = 1e-3

#: What is said in a word or two, and what it means.
CAUSES = {
    "a message": "when it comes is up to the rank that sends it: see fcoll timeline",
    "blocks others": "compute waits for another call, which is queued behind this one",
    "queued": "it stood in the queue of its stream for most of the time that it is exposed",
    "started late": "its input was ready long before it was started",
    "waits early": "the wait comes before the first step that uses the result",
    "little else to do": "nearly all other compute needs it or is needed by it",
    "used at once": "the result is used right behind the start; other compute could go between",
    "too little compute": "there is compute between start and first use, but not enough",
}


@dataclass(frozen=True)
class Why:
    """Of an exposed collective: a cause of ``CAUSES``, and the facts in sentences."""

    cause: str
    facts: tuple[str, ...]
    lead_us: float  # compute between its start and its first use
    queued_us: float  # from its issue until its stream began with it
    early_us: float  # from when its input was ready until it was issued
    beside_us: float | None  # compute that neither needs it nor is needed by it


def reasons(line: Timeline) -> dict[int, Why]:
    """{collective: why} of those that are exposed; of a timeline it is found out once."""
    known: dict[int, Why] | None = vars(line).get("_reasons")
    if known is None:
        found, exposed = _TimelineIndex(line), line.exposed_us.items()
        known = {i: found.why(i) for i, us in exposed if us > NEAR_US and i in found.at}
        vars(line)["_reasons"] = known
    return known


class _TimelineIndex:
    """What is looked up of a timeline."""

    def __init__(self, line: Timeline) -> None:
        self.line = line
        self.at = {s.collective: s for s in line.spans if s.collective is not None}
        self.spans = {s.step: s for s in line.spans}
        self.starts = {c.start: c.id for c in line.collectives}
        self.compute = sorted((s.start_us, s.end_us) for s in line.spans if s.stream == "compute")
        self.before = [0.0]  # compute before each span
        for begin, end in self.compute:
            self.before.append(self.before[-1] + end - begin)
        self.users = _users(line.steps, self.starts)
        self.ready = self._ready()
        self.beside = _beside(line, self.spans, self.starts)
        self.pieces: dict[int, list[int]] = {}
        for k, piece in enumerate(line.blocked):
            self.pieces.setdefault(piece.collective or 0, []).append(k)
        self.ends = {(s.stream, round(s.end_us, 6)): i for i, s in self.at.items()}

    def computed(self, us: float) -> float:
        """How much compute is done by then."""
        k = bisect_right(self.compute, (us, float("inf")))
        if not k:
            return 0.0
        begin, end = self.compute[k - 1]
        return self.before[k - 1] + min(us, end) - begin

    def _ready(self) -> dict[str, tuple[float, str]]:
        """Of each step: when its result is there, and the step that took the time."""
        found: dict[str, tuple[float, str]] = {}
        free: set[str] = set()  # what needs only the step's inputs, such as a cast of a parameter
        for step in self.line.steps:
            span = self.spans.get(step.name)
            if step.kind == "compute" and step.flops == 0 and free.issuperset(step.inputs):
                free.add(step.name)
                found[step.name] = (0.0, "")
            elif span is not None:
                found[step.name] = (span.end_us, step.name)
            else:
                inputs = (found[x] for x in step.inputs if x in found)
                found[step.name] = max(inputs, default=(0.0, ""))
        return found

    def why(self, i: int) -> Why:
        line, span, call = self.line, self.at[i], self.line.issued[i]
        issued, took, exposed = line.issued_us[i], span.us, line.exposed_us[i]
        waited = line.waited_us.get(i, span.end_us)
        lead = max(self.computed(waited) - self.computed(issued), 0.0)
        queued = max(span.start_us - issued, 0.0)
        step = line.by_step[call.start]
        ready, maker = max((self.ready[x] for x in step.inputs), default=(0.0, ""))
        early = max(issued - ready, 0.0)
        for_other = self.awaited_instead(i)
        beside = self.beside.get(i)
        facts = [f"It takes {show_us(took)}; compute stands still for {show_us(exposed)} of it."]
        facts += self.uses(i, lead, took, for_other)
        if queued > NEAR_US:
            facts.append(f"It begins {show_us(queued)} after its issue{self.ahead(span)}.")
        if call.row.is_p2p:
            facts.append(
                "Other ranks are taken to be as far as this one: fcoll timeline runs them."
            )
        facts += self.inputs(early, took, maker)
        facts += _room(beside, exposed)
        cause = self.cause(i, exposed, lead, queued, early, for_other)
        return Why(cause, tuple(facts), lead, queued, early, beside)

    def cause(
        self, i: int, exposed: float, lead: float, queued: float, early: float, other: int | None
    ) -> str:
        took = self.at[i].us
        if self.line.issued[i].row.is_p2p and other is None:
            return "a message"
        if other is not None:
            return "blocks others"
        if queued > 0.5 * exposed and lead > 0.5 * took:
            return "queued"
        if early > 0.5 * exposed:
            return "started late"
        if self.wait_is_early(i, 0.1 * took):
            return "waits early"
        beside = self.beside.get(i)
        if beside is not None and beside < 0.5 * exposed:
            return "little else to do"
        return "used at once" if lead < 0.1 * took else "too little compute"

    def awaited_instead(self, i: int) -> int | None:
        """The call that compute waits for while this one holds up its stream, if not for itself."""
        waited, blocked = self.line.waited_us, self.line.blocked
        end = self.at[i].end_us
        if i in waited and abs(waited[i] - end) < NEAR_US:
            return None
        k = self.pieces[i][-1]
        while k + 1 < len(blocked) and abs(blocked[k + 1].start_us - blocked[k].end_us) < NEAR_US:
            k += 1
            other = blocked[k].collective
            if other is not None and abs(waited.get(other, -1.0) - blocked[k].end_us) < NEAR_US:
                return other
        return None

    def wait_is_early(self, i: int, us: float) -> bool:
        """Does a wait that stands in the graph stop compute which does not use the result?"""
        call = self.line.issued[i]
        user, waited = self.users.get(call.start), self.line.waited_us.get(i)
        span = self.spans.get(user.name) if user is not None else None
        if span is None or waited is None or user is None or user.kind == "wait":
            return False
        return self.computed(span.start_us) - self.computed(waited) > us

    def uses(self, i: int, lead: float, took: float, other: int | None) -> list[str]:
        call = self.line.issued[i]
        if other is not None:
            which = self.name(other)
            return [f"Compute waits for {which}, which is queued behind it on {self.at[i].stream}."]
        user = self.users.get(call.start)
        if user is None:
            return ["No step of the program uses its result; something waits for it."]
        by = f"its first use, by {_where(user)}"
        if self.wait_is_early(i, 0.1 * took):
            early = "Compute waits for it earlier than that: the wait stands before other work."
            return [f"Its first use is by {_where(user)}.", early]
        if lead < 0.01 * took:
            return [f"Nothing is computed between its start and {by}."]
        return [f"Between its start and {by}, there are {show_us(lead)} of compute."]

    def ahead(self, span: Span) -> str:
        before = self.ends.get((span.stream, round(span.start_us, 6)))
        if before is None:
            return ": it needs the result of another collective"
        return f": {span.stream} was busy with {self.name(before)}"

    def inputs(self, early: float, took: float, maker: str) -> list[str]:
        made = self.line.by_step.get(maker)
        if made is None:
            text = "It needs nothing but inputs of the step"
            more = f", and is issued {show_us(early)} into the step" if early > NEAR_US else ""
            return [f"{text}{more}."]
        if early > 0.05 * took:
            by = f"Its input, from {_where(made)}, was ready {show_us(early)} before its issue"
            return [f"{by}: it could start earlier."]
        return [f"Its input comes from {_where(made)}, just before."]

    def name(self, i: int) -> str:
        call = self.line.issued[i]
        return call.op + (f" at {call.source}" if call.source else f" {call.start}")


def _room(beside: float | None, exposed: float) -> list[str]:
    if beside is None:
        return []
    if beside < 0.01 * exposed:
        return ["No compute could run beside it: all of it needs the result or comes before."]
    could = f"{show_us(beside)} of compute neither needs it nor is needed by it"
    return [f"{could}: {'enough' if beside >= exposed else 'not enough'} to hide it."]


def _where(step: Step) -> str:
    op = step.op.rpartition("::")[2] or step.name
    return op + (f" at {step.source}" if step.source else f" in {step.module}" * bool(step.module))


def _users(steps: Iterable[Step], starts: dict[str, int]) -> dict[str, Step]:
    """Of each start: the first step that uses its result."""
    of_wait: dict[str, list[str]] = {}  # wait -> the starts it waits for
    users: dict[str, Step] = {}
    for step in steps:
        used = [s for x in step.inputs for s in ([x] if x in starts else of_wait.get(x, []))]
        if step.kind == "wait":
            of_wait[step.name] = used
        else:
            for name in used:
                users.setdefault(name, step)
    return users


def _beside(line: Timeline, spans: dict[str, Span], starts: dict[str, int]) -> dict[int, float]:
    """Of the most exposed calls: compute that is neither before nor after them in the graph.

    A step's dependence on calls is a number with a bit for each call; steps with equal numbers are
    added up first."""
    worst = sorted((i for i in starts.values()), key=lambda i: -line.exposed_us.get(i, 0.0))[:MOST]
    bit = {line.issued[i].start: k for k, i in enumerate(worst)}
    after: dict[str, int] = {}
    for step in line.steps:
        after[step.name] = _union(after, step.inputs) | _bit(bit, step.name)
    before: dict[str, int] = {}
    for step in reversed(line.steps):
        before[step.name] = before.get(step.name, 0) | _bit(bit, step.name)
        for name in step.inputs:
            before[name] = before.get(name, 0) | before[step.name]
    groups: dict[int, float] = {}
    for step in line.steps:
        span = spans.get(step.name)
        if span is not None and span.collective is None:
            mask = after[step.name] | before[step.name]
            groups[mask] = groups.get(mask, 0.0) + span.us
    related = _bit_sums(groups, len(worst))
    return {i: max(line.compute_us - related[k], 0.0) for k, i in enumerate(worst)}


def _bit_sums(groups: Mapping[int, float], n: int) -> list[float]:
    """Of each bit: the sum of the values of all numbers that have it.

    >>> _bit_sums({0b101: 2.0, 0b001: 1.0}, 3)
    [3.0, 0.0, 2.0]
    """
    if not groups:
        return [0.0] * n
    width = -(-n // 8)
    packed = b"".join(mask.to_bytes(width, "little") for mask in groups)
    rows = numpy.frombuffer(packed, numpy.uint8).reshape(len(groups), width)
    bits = numpy.unpackbits(rows, axis=1, count=n, bitorder="little")
    total: list[float] = (numpy.array([*groups.values()]) @ bits).tolist()
    return total


def _bit(bit: dict[str, int], name: str) -> int:
    return 1 << bit[name] if name in bit else 0


def _union(masks: dict[str, int], names: Iterable[str]) -> int:
    found = 0
    for name in names:
        found |= masks.get(name, 0)
    return found


def main_cause(ids: Iterable[int], exposed_us: Mapping[int, float], why: Mapping[int, Why]) -> str:
    """Of calls that are shown as one: the cause of most of their exposed time."""
    total: dict[str, float] = {}
    for i in ids:
        if i in why:
            total[why[i].cause] = total.get(why[i].cause, 0.0) + exposed_us[i]
    return max(total, key=lambda cause: total[cause], default="")
