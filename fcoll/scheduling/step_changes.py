"""What a user could change about a step, as a change of its steps: what advice is computed from.

Each takes a program and some of its collectives and gives the changed program, or None where it
cannot be made. Whether it pays is not said here: the timeline of what comes out says it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from fcoll.graph.issued import Issued
from fcoll.graph.steps import Step
from fcoll.scheduling.buckets import MERGED, SATURATED, saturating_bytes
from fcoll.scheduling.step_program import Edits, StepProgram
from fcoll.table.collectives import functional_row
from fcoll.table.gather import ALL_GATHER_INTO_TENSOR
from fcoll.table.p2p import IRECV, ISEND

# -- started earlier ---


def prefetched(
    program: StepProgram, calls: Sequence[Issued], just_in_time: bool
) -> StepProgram | None:
    """Each start as early as its inputs allow; or, just in time, so early that there is compute for
    its time and that of the calls behind it."""
    edits, goal = Edits(program), float("inf")
    for call in sorted(calls, key=lambda c: program.at[c.start], reverse=True):
        goal = min(goal, program.compute_before_us[program.use_of(call)]) - program.us[call.start]
        wanted = max(bisect_right(program.compute_before_us, goal) - 1, 0) if just_in_time else 0
        there = max(program.earliest(call.start), wanted)
        if there < program.at[call.start]:
            edits.move(call.start, there)
    return edits.made() if edits.moved else None


# -- sent as one ---


def bucketed(program: StepProgram, calls: Sequence[Issued]) -> StepProgram | None:
    """Neighbours sent as one, up to the size that saturates the link. Copies are priced; what
    writes into a given tensor (FSDP2's) has them already, of a larger one."""
    edits = Edits(program)
    for run in _runs(program, calls):
        _merge(edits, run)
    return edits.made() if edits.calls else None


def _runs(program: StepProgram, calls: Sequence[Issued]) -> Iterator[list[Issued]]:
    """Calls that are alike and can be sent together."""

    def alike(c: Issued) -> Any:
        return c.op, c.group, c.dtypes, repr(sorted(c.args.items(), key=str))

    able = [c for c in calls if _merges(c) and isinstance(c.bytes, int) and c.wait]
    for _, same in groupby(sorted(able, key=lambda c: (alike(c), c.id)), alike):
        run: list[Issued] = []
        for call in same:
            if run and not _fits(program, [*run, call]):
                yield from [run] if len(run) > 1 else []
                run = []
            run.append(call)
        yield from [run] if len(run) > 1 else []


def _merges(call: Issued) -> bool:
    return functional_row(call.row) in MERGED or call.row in (ISEND, IRECV)


def _fits(program: StepProgram, run: Sequence[Issued]) -> bool:
    if run[0].row.is_p2p and not _side_by_side(program, run):
        return False
    most = SATURATED[0] * saturating_bytes(run[0], program.machine)
    ready = max(program.earliest(c.start) for c in run)
    return sum(c.bytes for c in run) <= most and ready <= _place(program, run)


def _side_by_side(program: StepProgram, run: Sequence[Issued]) -> bool:
    """Are messages issued one right after the other? What comes between them, on this rank or on
    the other, could be what the second one has to wait for."""
    at = [program.at[c.start] for c in run]
    between = program.steps[min(at) : max(at) + 1]
    starts = {c.start for c in run}
    alone = all(s.kind != "start" or s.name in starts for s in between)
    return alone and program.compute_before_us[max(at)] == program.compute_before_us[min(at)]


def _place(program: StepProgram, run: Sequence[Issued]) -> int:
    """Where a bucket is sent: with its last member, but before the first use of a result."""
    return min(max(program.at[c.start] for c in run), *(program.use_of(c) for c in run))


def _merge(edits: Edits, run: Sequence[Issued]) -> None:
    """A pack and one start instead of many; of a gather each part is copied out before its use.
    What is received, or written into a tensor that was given, is not packed."""
    program, place, last = edits.program, _place(edits.program, run), run[-1]
    starts = [program.steps[program.at[c.start]] for c in run]
    gathers = last.row is ALL_GATHER_INTO_TENSOR
    packs = last.row in MERGED or last.row is ISEND
    whole = replace(
        last,
        start=(name := f"bucket_{last.start}"),
        bytes=sum(c.bytes for c in run),
        shapes=tuple(shape for c in run for shape in c.shapes),
        dtypes=tuple(dtype for c in run for dtype in c.dtypes),
    )
    pack = _copy(f"{name}_pack", starts, whole.bytes // (last.n if gathers else 1))
    sends = replace(
        starts[-1],
        name=name,
        inputs=(pack.name,) if packs else _all(s.inputs for s in starts),
        uses=(pack.name,) if packs else _all(s.uses for s in starts),
        out_bytes=sum(s.out_bytes for s in starts),
        last_use_of=(pack.name,) if packs else (),
    )
    for c in run:
        edits.move(c.start, place)  # for what it needs: the start itself goes
        edits.steps[c.start], edits.calls[c.id] = None, None
    edits.calls[last.id] = whole
    if packs:
        edits.add(place, pack, program.model(pack))
    edits.add(place, sends, program.price_call(whole, run))
    keeps = any(c.start not in program.freed for c in run)
    for c, start in zip(run, starts, strict=True):
        _take_out(edits, c, start, sends, place, keeps)


def _take_out(
    edits: Edits, call: Issued, start: Step, sends: Step, place: int, keeps: bool
) -> None:
    """A member's wait, behind the bucket's start, and its part of the result."""
    program = edits.program
    wait = program.steps[program.at[call.wait or ""]]
    uses = (sends.name, *sends.uses)
    waits = replace(wait, inputs=(sends.name,), uses=uses, collective=sends.collective)
    waits = replace(waits, last_use_of=())
    if program.at[wait.name] < place:
        edits.steps[wait.name] = None
        edits.add(place, waits, 0.0)
    else:
        edits.steps[wait.name] = waits
    edits.inputs[call.start] = sends.name
    edits.memory[call.start] = "" if keeps else sends.name
    if call.row is ALL_GATHER_INTO_TENSOR:
        part = _copy(f"{sends.name}_{call.start}", [waits], start.out_bytes)
        part = replace(part, uses=(sends.name,), last_use_of=(sends.name,))
        behind = max(program.use_of(call), program.at[wait.name] + 1)
        edits.add(behind, part, program.model(part))
        edits.inputs |= {wait.name: part.name, call.start: part.name}
        edits.memory[call.start] = part.name if call.start in program.freed else ""


def _all(names: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for some in names for name in some))


def _copy(name: str, of: Sequence[Step], nbytes: int) -> Step:
    inputs = _all(s.inputs for s in of)
    if of[0].kind == "wait":
        inputs = (of[0].name,)
    return replace(
        of[0], name=name, kind="compute", inputs=inputs, stream="compute", flops=0,
        read_bytes=nbytes, write_bytes=nbytes, out_bytes=nbytes, last_use_of=(), collective=None,
        op="aten::cat", fused_with=None, effect="",
    )  # fmt: skip
