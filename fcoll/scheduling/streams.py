"""The order in which an eager framework's own streams run its steps.

The host of an eager program is ahead of the GPU. FSDP2 copies parameters and gathers them on
streams of its own, which wait for the copy out of the gather before, not for compute: while a layer
computes, the next one is gathered, though the program asks for it only when that layer begins. So,
of a trace, each of its gathers in the forward pass belongs right behind the copy out of the one
before. (In the backward pass it asks for the next one there itself. Its copies stay on the compute
stream.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fcoll.graph.steps import Step

COPY_IN, COPY_OUT = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"


def as_streams_run(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same steps, gathers of FSDP2 in the forward pass where its streams begin them."""
    if not any(step.op == COPY_IN for step in steps):
        return steps
    place = {step.name: i for i, step in enumerate(steps)}
    ahead: dict[int, list[int]] = {}  # the place of a copy out -> what is moved behind it
    moved: set[int] = set()
    copied_out: int | None = None
    for i, step in enumerate(steps):
        if step.op == COPY_OUT:
            copied_out = i
        elif copied_out is not None and step.kind == "start" and step.phase == "fwd":
            needed = _needed(steps, place, i, copied_out)
            if needed and any(steps[k].op == COPY_IN for k in needed):
                ahead.setdefault(copied_out, []).extend(needed)
                moved.update(needed)
    order: list[Step] = []
    for i, step in enumerate(steps):
        if i not in moved:
            order.append(step)
        order += [steps[k] for k in ahead.get(i, ())]
    return freed_in_order(tuple(order)) if moved else steps


def _needed(steps: Sequence[Step], place: dict[str, int], start: int, after: int) -> list[int]:
    """The steps that a start needs since another one, and itself; none if they wait or compute."""
    found, todo = {start}, [start]
    while todo:
        step = steps[todo.pop()]
        for name in (*step.inputs, *step.uses):
            i = place.get(name, -1)
            if i > after and i not in found:
                if steps[i].kind != "compute" or steps[i].flops != 0 or steps[i].phase == "opt":
                    return []
                found.add(i)
                todo.append(i)
    return sorted(found)


def freed_in_order(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The steps with what each is now the last to use."""
    freed = {name for step in steps for name in step.last_use_of}
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        for name in (step.name, *(step.uses or step.inputs)):
            if name in freed:
                last[name] = i
    frees: dict[int, list[str]] = {}
    for name, i in last.items():
        frees.setdefault(i, []).append(name)
    freed_by = [tuple(frees.get(i, ())) for i in range(len(steps))]
    return tuple(
        s if s.last_use_of == names else replace(s, last_use_of=names)
        for s, names in zip(steps, freed_by, strict=True)
    )
