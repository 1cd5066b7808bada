"""What a collective and a step cost on a machine, in microseconds.

A collective's cost comes from its row in the table: the bytes it sends and the messages that follow
one another, on links with a latency and a bandwidth. The forms of fcoll/costs/forms.py that the
machine's library has are priced and the cheapest is taken: the library is taken to choose well.
All formulas take numbers, or sympy symbols for n and the bytes:

    >>> import sympy
    >>> from fcoll.costs.forms import ring
    >>> from fcoll.costs.machine import Link
    >>> n, b = sympy.symbols("n b", positive=True)
    >>> link = Link(latency_us=1, gb_per_s=100)
    >>> sympy.sstr(ring(COLLECTIVES["all_gather_into_tensor"], n, b, link))
    'b*(n - 1)/(100000*n) + n - 1'
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy

from fcoll.costs.forms import forms_us, library_forms
from fcoll.costs.machine import Machine, is_symbolic, least, most, ratio
from fcoll.errors import MissingSize
from fcoll.table.collectives import COLLECTIVES, single_row
from fcoll.table.row import Collective, Expr

# -- collectives ---


def collective_us(
    op_row: Collective | str,
    n: Expr,
    bytes: Expr,
    machine: Machine,
    ranks: Sequence[int] | None = None,
    form: str | None = None,
) -> Expr:
    """The time of a collective of ``bytes`` on n ranks, as the machine's library carries it out.

    ``ranks`` are the group's global ranks: they say on how many nodes it lies. Without them it
    takes the first n. ``form`` asks for another form than the machine's own. An expression if n or
    bytes is one.
    """
    row = COLLECTIVES[op_row] if isinstance(op_row, str) else op_row
    if form is not None:
        machine = replace(machine, form=form)
    if row.steps(2) == 0 or (not is_symbolic(n) and n <= 1):
        return 0 * bytes  # a wait, or nobody to talk to
    if (measured := _measured(row, n, bytes, machine)) is not None:
        return measured
    if not is_symbolic(n):
        us = _priced(row, n, bytes, machine, _per_node(n, machine, ranks))
        return us if is_symbolic(us) else float(us)
    size = machine.ranks_per_node
    return sympy.Piecewise(
        (0, sympy.Le(n, 1)),
        (_priced(row, n, bytes, machine, n), sympy.Le(n, size)),
        (_priced(row, n, bytes, machine, size), True),
    )


def form_of(
    op_row: Collective | str,
    n: int,
    bytes: float,
    machine: Machine,
    ranks: Sequence[int] | None = None,
) -> str:
    """The form that ``collective_us`` priced: "ring", "nvls", ..., "measured", "" if it is free.

    >>> from fcoll import Machine
    >>> form_of("all_reduce", 8, 1 << 30, Machine.of("h100"))
    'nvls'
    """
    row = COLLECTIVES[op_row] if isinstance(op_row, str) else op_row
    if row.steps(2) == 0 or n <= 1:
        return ""
    if _measured(row, n, bytes, machine) is not None:
        return "measured"
    times = _candidates(row, n, bytes, machine, _per_node(n, machine, ranks))
    return min(times, key=lambda form: float(times[form]))


def times_by_form(
    op_row: Collective | str,
    n: int,
    bytes: float,
    machine: Machine,
    ranks: Sequence[int] | None = None,
) -> dict[str, float]:
    """The time of a collective by each form that the machine has for it, the fastest first.

    >>> from fcoll import Machine
    >>> next(iter(times_by_form("all_reduce", 8, 1 << 18, Machine.of("b300"))))
    'one-shot'
    """
    row = COLLECTIVES[op_row] if isinstance(op_row, str) else op_row
    if row.steps(2) == 0 or n <= 1:
        return {}
    times = forms_us(row, n, bytes, machine, _per_node(n, machine, ranks))
    return dict(sorted(((k, float(v)) for k, v in times.items()), key=lambda item: item[1]))


def _candidates(
    row: Collective, n: Expr, b: Expr, machine: Machine, per_node: Expr
) -> dict[str, Expr]:
    """The forms among which the price is the least: those of the library, or the machine's ``form``
    where this collective has it."""
    times = forms_us(row, n, b, machine, per_node)
    if machine.form == "best":
        return times
    if machine.form in times:
        return {machine.form: times[machine.form]}
    return {form: times[form] for form in library_forms(row, n, machine, per_node)}


def _priced(row: Collective, n: Expr, b: Expr, machine: Machine, per_node: Expr) -> Expr:
    return least(*_candidates(row, n, b, machine, per_node).values())


def _per_node(n: int, machine: Machine, ranks: Sequence[int] | None) -> Expr:
    ranks = ranks if ranks is not None else range(n)
    nodes = len({rank // machine.ranks_per_node for rank in ranks})
    return n if nodes == 1 else 1 if nodes >= n else n / nodes


def _measured(row: Collective, n: Expr, b: Expr, machine: Machine) -> float | None:
    """What calibration found, between its sizes along straight lines of the logarithms."""
    points = machine.measured.get(single_row(row).name)
    if not points or n != machine.measured_ranks or is_symbolic(b):
        return None
    b = max(float(b), 1.0)
    sizes = [size for size, _ in points]
    if b <= sizes[0]:
        return points[0][1]
    if b >= sizes[-1]:
        return points[-1][1] * b / sizes[-1]
    i = bisect.bisect_left(sizes, b)
    (b0, t0), (b1, t1) = points[i - 1], points[i]
    part = math.log(b / b0) / math.log(b1 / b0)
    return math.exp(math.log(t0) + part * math.log(t1 / t0))


# -- compute ---


def compute_us(step: Any, machine: Machine) -> Expr:
    """The time that a step holds the compute stream: by its flops or its bytes, whichever is more.

    A kernel's fixed cost goes to the first step of a fusion group. Starts and waits take none.
    """
    if step.kind != "compute":
        return 0
    first = step.fused_with in (None, step.name)
    moved = step.read_bytes + step.write_bytes
    if moved == 0 and step.flops == 0 and (not first or step.fused_with is None):
        return 0  # all of it stays in registers, or it only allocates
    peak = machine.flops.get(step.dtype) or min(machine.flops.values())
    by_flops = ratio(step.flops, 1e6 * peak * machine.flops_efficiency)
    by_bytes = ratio(moved, 1e3 * machine.memory_gb_per_s * machine.memory_efficiency)
    return most(by_flops, by_bytes) + (machine.launch_us if first else 0)


def number(expr: Expr, sizes: Mapping[str, int] | None = None) -> float:
    """An expression's value, with the symbols of shapes replaced by their sizes."""
    if not is_symbolic(expr):
        return float(expr)
    values = {s: (sizes or {}).get(str(s)) for s in expr.free_symbols}
    missing = sorted(str(s) for s, value in values.items() if value is None)
    if missing:
        raise MissingSize(symbols=", ".join(missing), first=missing[0])
    return float(expr.subs(values))
