"""Why a step is where it is, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fcoll.errors import BadOption
from fcoll.graph.steps import Step
from fcoll.units import show_bytes

if TYPE_CHECKING:
    from fcoll.scheduling.splits import Split
    from fcoll.scheduling.verified_plan import Plan


def explain(plan: Plan, name: str) -> str:
    """Where the step stands, when it runs, what it waited for and what comes of moving it."""
    by_name = {step.name: step for step in plan.steps}
    if name not in by_name and (text := _of_change(plan, name)):
        return text
    if name not in by_name:
        some = tuple(by_name)[:5]
        raise BadOption(op="explain", arg="step", value=name, known=f"the steps, such as {some}")
    step = by_name[name]
    place = {s.name: i for i, s in enumerate(plan.steps)}
    was = {s.name: i for i, s in enumerate(plan.original_steps)}
    moved = place[name] - was.get(name, place[name])
    how = f"{abs(moved)} steps {'later' if moved > 0 else 'earlier'}" if moved else "not moved"
    lines = [f"{name}: {_what(step)}", f"step {place[name]} of {len(plan.steps)}, {how}"]
    lines += [_part_of(plan, name)]
    lines += [_when(plan, step), _bound_by(plan, step, place), _needed_by(plan, step, place)]
    return "\n".join(line for line in lines if line)


def _what(step: Step) -> str:
    if step.kind == "compute":
        return f"{step.op}{_from(step)}"
    verb = "starts" if step.kind == "start" else "waits for"
    on = f" on {step.stream}" if step.kind == "start" else ""
    return f"{verb} {step.op}{on}{_from(step)}"


def _from(step: Step) -> str:
    return f" at {step.source}" if step.source else ""


def _when(plan: Plan, step: Step) -> str:
    """Its time on its stream; of a collective also how much of it is exposed."""
    line = plan.timeline
    span = next((s for s in line.spans if s.step == step.name), None)
    if step.kind == "wait" and step.collective in line.waited_us:
        return f"passed at {line.waited_us[step.collective]:,.1f} us"
    if span is None:
        return "takes no time"
    text = f"runs from {span.start_us:,.1f} to {span.end_us:,.1f} us"
    if step.collective is None:
        return text
    issued, exposed = line.issued_us[step.collective], line.exposed_us[step.collective]
    queued = span.start_us - issued
    behind = f", queued {queued:,.1f} us behind others on {step.stream}" if queued > 0 else ""
    return f"{text}, issued at {issued:,.1f}{behind}, exposed {exposed:,.1f} us"


def _bound_by(plan: Plan, step: Step, place: dict[str, int]) -> str:
    """The last thing that it needs, and what lies between."""
    needs = [name for name in step.inputs if name in place]
    if not needs:
        return "it needs only the graph's inputs" + _held_back(plan, step, -1, place)
    last = max(needs, key=place.__getitem__)
    return f"it needs {last}, step {place[last]}" + _held_back(plan, step, place[last], place)


def _held_back(plan: Plan, step: Step, earliest: int, place: dict[str, int]) -> str:
    """Why it does not stand right behind what it needs."""
    between = plan.steps[earliest + 1 : place[step.name]]
    if not between:
        return ", right before it"
    if step.kind == "wait":
        return "; a wait stands where its result, or the memory of what was sent, is needed"
    others = [s for s in between if s.stream == step.stream and s.kind == step.kind]
    us = sum(plan.us.get(s.name, 0.0) for s in others)
    reason = f"; {len(others)} more urgent steps of its stream ({us:,.1f} us) go before it"
    if step.out_bytes and plan.cap_bytes is not None:
        reason += f", and it holds {show_bytes(step.out_bytes)} from where it stands"
    return reason


def _needed_by(plan: Plan, step: Step, place: dict[str, int]) -> str:
    users: list[Any] = [s for s in plan.steps if step.name in s.inputs]
    if not users:
        return "nothing needs it but the graph's output"
    first = min(users, key=lambda s: place[s.name])
    return f"first needed by {first.name}, step {place[first.name]}"


# -- buckets and splits ---


def _of_change(plan: Plan, name: str) -> str:
    """Of a node that came in and is in chunks or in a bucket now, or left out."""
    for reuse in plan.reuses:
        if (instead := dict(reuse.nodes).get(name)) is not None:
            return f"{name}: left out, {instead} has its value\n{explain(plan, instead)}"
    for split in plan.splits:
        if name in (*split.members, *split.sums):
            return _chunks(plan, split, name)
    for bucket in plan.buckets:
        if name in (*bucket.members, *bucket.waits):
            others = len(bucket.members) - 1
            how = f"{name}: sent in {bucket.name} with {others} more, {show_bytes(bucket.bytes)}"
            return f"{how}\n{explain(plan, bucket.name)}"
    return ""


def _chunks(plan: Plan, split: Split, name: str) -> str:
    by_name = {step.name: step for step in plan.steps}
    chunks = [by_name[f"{name}_c{j}"] for j in range(split.chunks) if f"{name}_c{j}" in by_name]
    if not chunks:
        return f"{name}: in {split.chunks} chunks, takes no time"
    lines = [f"{name}: {chunks[0].op} in {split.chunks} chunks, of {split.name}"]
    lines += [f"  {chunk.name} {_when(plan, chunk)}" for chunk in chunks]
    place = {s.name: i for i, s in enumerate(plan.steps)}
    ends = [s for s in plan.steps if s.kind == "wait" and s.collective == chunks[0].collective]
    if chunks[0].kind == "start" and ends and len(chunks) > 1:
        user = _first_user(plan, ends[0].name, place)
        if user is not None and place[user] < place[_last_wait(plan, chunks[-1])]:
            lines.append(f"{user} starts after its first chunk, before the last is there")
        elif user is not None:
            lines.append(f"{user} starts after its first chunk")
    return "\n".join(lines)


def _first_user(plan: Plan, name: str, place: dict[str, int]) -> str | None:
    users = [s.name for s in plan.steps if name in s.inputs]
    return min(users, key=place.__getitem__, default=None)


def _last_wait(plan: Plan, start: Step) -> str:
    waits = (s.name for s in plan.steps if s.kind == "wait" and s.collective == start.collective)
    return next(waits, start.name)


def _part_of(plan: Plan, name: str) -> str:
    for split in plan.splits:
        of, _, chunk = name.rpartition("_c")
        if of in split.sums and chunk.isdigit():
            return f"adds chunk {int(chunk) + 1} of {split.chunks} to {of}"
        if of in split.members and chunk.isdigit():
            return f"chunk {int(chunk) + 1} of {split.chunks} of {of}"
        if name in (f"{of}_whole" for of in split.members):
            return f"puts the chunks of {name.removesuffix('_whole')} together"
    for bucket in plan.buckets:
        if name == bucket.name:
            return f"sends {', '.join(bucket.members)} as one"
    return ""
