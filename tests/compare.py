"""Run cases on the ranks of a pool and compare what comes out with the oracle.

Also: inputs are left alone, results are contiguous and plain, nothing stays outstanding, and where
all ranks get the same result they get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cases
import pytest
import torch
from cases import FORMS, ROWS, Case
from oracle import expected, rounding, wide

from fcoll._torch import work_registry_size

Tensor = torch.Tensor
SAME_ON_ALL = [op for op in ROWS if op.startswith(("all_reduce", "all_gather", "broadcast"))]


# -- on the ranks ---


@dataclass(frozen=True)
class Outcome:
    packed: list[tuple]  # torch pickles no tensors of the newer dtypes
    faults: list[str]

    @property
    def outputs(self) -> list[Tensor]:
        return [
            torch.tensor(list(raw), dtype=torch.uint8).view(dtype).reshape(shape)
            for shape, dtype, raw in self.packed
        ]


def bits(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def run_cases(rank: int, wanted: Sequence[Case]) -> dict[int, Outcome]:
    """The outcomes by position, of the cases whose group this rank is in."""
    outcomes = {}
    for i, case, xs, group in cases.each_case(rank, wanted):
        try:
            outcomes[i] = outcome(case, xs, group)
        except Exception as error:
            error.add_note(f"in {case}")
            raise
    return outcomes


def outcome(case: Case, xs: list[Tensor], group) -> Outcome:
    before, works = [bits(x) for x in xs], work_registry_size()
    outputs = cases.call(case, xs, group)
    faults = []
    if case.overwrites:
        # what comes back is the argument itself
        if any(y is not x for x, y in zip(xs, outputs, strict=True)):
            faults.append("the result of an in-place op is not its argument")
    else:
        if any(not torch.equal(bits(x), b) for x, b in zip(xs, before, strict=True)):
            faults.append("an input was changed")
        if case.op != "wait_tensor" and not all(y.is_contiguous() for y in outputs):
            faults.append(f"strides {[y.stride() for y in outputs]} are not contiguous")
    if any(type(y) is not Tensor for y in outputs):
        faults.append(f"types {[type(y).__name__ for y in outputs]} after the wait")
    if left := work_registry_size() - works:
        faults.append(f"{left} works left in the registry")
    packed = [(tuple(y.shape), y.dtype, bits(y).numpy().tobytes()) for y in outputs]
    return Outcome(packed, faults)


# -- in the test ---


def same(got: Tensor, want: Tensor, within: float = 0.0) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if within:
        return bool((wide(got) - wide(want)).abs().le(within).all())
    # by value, so that 0.0 is -0.0; integers by bits, since torch cannot compare all of them
    if got.dtype.is_floating_point or got.dtype.is_complex:
        return torch.equal(wide(got), wide(want))
    return torch.equal(bits(got), bits(want))


def tolerance(case: Case, inputs: dict[int, list[Tensor]], members: list[int]) -> list[float]:
    """How far each output may be from the oracle's."""
    op = case.args.get("reduce_op", "max")
    if op != "avg" and case.exact:
        op = "max"  # nothing is rounded
    return [rounding([inputs[r][i] for r in members], op) for i in range(len(inputs[members[0]]))]


def differences(case: Case, members: list[int], outcomes: dict[int, Outcome]) -> list[str]:
    """What is wrong with the outcomes of one group's ranks."""
    inputs = {r: cases.inputs_of(case, r, members) for r in members}
    want = expected(case.op, inputs, case.args, members)
    allowed = tolerance(case, inputs, members)
    found = []
    for r in members:
        got = outcomes[r]
        found += [f"rank {r}: {fault}" for fault in got.faults]
        if len(got.outputs) != len(want[r]):
            found.append(f"rank {r}: {len(got.outputs)} outputs, not {len(want[r])}")
        for i, (y, w) in enumerate(zip(got.outputs, want[r], strict=False)):
            if not same(y, w, allowed[i] if i < len(allowed) else 0.0):
                found.append(f"rank {r}, output {i}: {y} is not {w}")
        if case.op in SAME_ON_ALL:
            first = outcomes[members[0]].outputs
            equal = [torch.equal(bits(y), bits(f)) for y, f in zip(got.outputs, first, strict=True)]
            if not all(equal):
                found.append(f"rank {r}: other bits than rank {members[0]}: {got.outputs}, {first}")
    return found


def check(pool, wanted: Sequence[Case]) -> None:
    """Run the cases on the pool, all in one go, and compare with the oracle."""
    __tracebackhide__ = True
    by_rank = pool.run(run_cases, wanted)
    failures = []
    for i, case in enumerate(wanted):
        for members in FORMS[case.group].groups(pool.world_size):
            found = differences(case, members, {r: by_rank[r][i] for r in members})
            if found:
                failures.append("\n  ".join([str(case), *found]))
    if failures:
        pytest.fail(f"{len(failures)} of {len(wanted)} cases\n" + "\n".join(failures[:5]), False)
