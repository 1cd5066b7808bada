"""What a collective and a step cost on a machine, in microseconds.

A collective's cost comes from its row in the table: the bytes it sends and the messages that follow
one another, on links with a latency and a bandwidth. Three algorithms are priced and the cheapest
is taken. All formulas take numbers, or sympy symbols for n and the bytes:

    >>> import sympy
    >>> n, b = sympy.symbols("n b", positive=True)
    >>> link = Link(latency_us=1, gb_per_s=100)
    >>> sympy.sstr(ring(COLLECTIVES["all_gather_into_tensor"], n, b, link))
    'b*(n - 1)/(100000*n) + n - 1'
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy

from fcoll.costs.machine import Link, Machine
from fcoll.costs.numbers import is_symbolic, least, log2, most, ratio, sqrt
from fcoll.errors import MissingSize
from fcoll.table.collectives import COLLECTIVES, single_row
from fcoll.table.row import Collective, Expr

# -- collectives ---


def ring(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """Every rank passes parts on to the next: the fewest bytes, the most messages in a row."""
    return row.steps(n) * link.latency_us + row.wire_bytes(n, b) * link.us_per_byte


def tree(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """log2(n) rounds, the message in as many chunks as is best.

    With k chunks it takes (rounds + k) (latency + bytes / k / rate); the best k gives the square
    of a sum of roots. Personal bytes travel once in every round.
    """
    rounds = least(row.steps(n), row.steps(2) * log2(n))
    nbytes = row.wire_bytes(2, b) * log2(n) if row.personal else row.wire_bytes(n, b)
    latency, transfer = rounds * link.latency_us, nbytes * link.us_per_byte
    return latency + transfer + 2 * sqrt(latency * transfer)


def one_shot(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """Everything goes to its place at once: one latency, the most bytes."""
    nbytes = (row.one_shot_bytes or row.wire_bytes)(n, b)
    return link.latency_us + (n - 2) * link.message_us + nbytes * link.us_per_byte


ALGORITHMS: dict[str, Callable[[Collective, Expr, Expr, Link], Expr]] = {
    "ring": ring,
    "tree": tree,
    "one-shot": one_shot,
}


def collective_us(
    op_row: Collective | str,
    n: Expr,
    bytes: Expr,
    machine: Machine,
    ranks: Sequence[int] | None = None,
) -> Expr:
    """The time of a collective of ``bytes`` on n ranks, by the best algorithm.

    ``ranks`` are the group's global ranks: they say on how many nodes it lies. Without them it
    takes the first n. An expression if n or bytes is one.
    """
    row = COLLECTIVES[op_row] if isinstance(op_row, str) else op_row
    if row.steps(2) == 0 or (not is_symbolic(n) and n <= 1):
        return 0 * bytes  # a wait, or nobody to talk to
    if (known := _measured(row, n, bytes, machine)) is not None:
        return known
    if not is_symbolic(n):
        return _formulas(row, n, bytes, machine, _per_node(n, machine, ranks))
    size = machine.ranks_per_node
    return sympy.Piecewise(
        (0, sympy.Le(n, 1)),
        (_formulas(row, n, bytes, machine, n), sympy.Le(n, size)),
        (_formulas(row, n, bytes, machine, size), True),
    )


def algorithms_us(
    op_row: Collective | str,
    n: Expr,
    bytes: Expr,
    machine: Machine,
    per_node: Expr,
) -> dict[str, Expr]:
    """The time of each algorithm, without the fixed cost of a collective."""
    row = COLLECTIVES[op_row] if isinstance(op_row, str) else op_row
    links = machine.links(n, per_node, row.personal)
    return {
        name: formula(row, n, bytes, link)
        for (name, formula), link in zip(ALGORITHMS.items(), links, strict=True)
    }


def _formulas(row: Collective, n: Expr, b: Expr, machine: Machine, per_node: Expr) -> Expr:
    return machine.collective_us + least(*algorithms_us(row, n, b, machine, per_node).values())


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
    found = {s: (sizes or {}).get(str(s)) for s in expr.free_symbols}
    missing = sorted(str(s) for s, value in found.items() if value is None)
    if missing:
        raise MissingSize(symbols=", ".join(missing), first=missing[0])
    return float(expr.subs(found))
