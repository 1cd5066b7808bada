"""The forms of a collective: ways to carry it out, and what each costs on a link.

| form | what happens | bytes that a rank sends for an all-reduce |
|---|---|---|
| ring | parts go round, each rank adds its own | 2 b (n-1)/n in 2 (n-1) messages |
| tree | up a tree and down again, in chunks | the same, in 2 log2(n) rounds |
| one-shot | every rank reads all of the others | b (n-1) in one message |
| two-shot | every rank adds up its share and sends it to all | 2 b (n-1)/n in two messages |
| multimem, nvls | the switch adds up and sends to all | b (n+1)/n |

`nvls` is what NCCL calls NVLink SHARP, `multimem` the same switch used by a kernel; across nodes
`nvls` exchanges shares of 1/n of a node's ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fcoll.costs.machine import Form, Link, Machine, least, log2, most, sqrt
from fcoll.table.row import Collective, Expr


def moved_us(nbytes: Expr, link: Link) -> Expr:
    """The time of bytes on a link, and of the pipeline that they are sent in.

    With k chunks it takes transfer / k to fill the pipeline and k chunk_us to cut them: the best k
    gives twice the root of both.
    """
    return _ramped(nbytes * link.us_per_byte, link)


def _ramped(transfer: Expr, link: Link) -> Expr:
    if link.chunk_us == 0:
        return transfer
    ramp = 2 * sqrt(link.chunk_us * transfer)
    return transfer + (ramp if link.fill_us == math.inf else least(ramp, link.fill_us))


def ring(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """Every rank passes parts on to the next: the fewest bytes, the most messages in a row."""
    return row.steps(n) * link.latency_us + moved_us(row.wire_bytes(n, b), link)


def tree(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """log2(n) rounds, the message in as many chunks as is best.

    Where the link does not say what a chunk costs, it costs the latency: with k chunks it takes
    (rounds + k) (latency + bytes / k / rate), and the best k gives the square of a sum of roots.
    Personal bytes travel once in every round.
    """
    rounds = least(row.steps(n), row.steps(2) * log2(n))
    nbytes = row.wire_bytes(2, b) * log2(n) if row.personal else row.wire_bytes(n, b)
    latency = rounds * link.latency_us
    if link.chunk_us:
        return latency + moved_us(nbytes, link)
    transfer = nbytes * link.us_per_byte
    return latency + transfer + 2 * sqrt(latency * transfer)


def one_shot(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """Everything goes to its place at once: one latency, the most bytes."""
    nbytes = (row.one_shot_bytes or row.wire_bytes)(n, b)
    return link.latency_us + (n - 2) * link.message_us + moved_us(nbytes, link)


def two_shot(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """Every rank reads its share of all, adds it up and sends it to all: two latencies."""
    return 2 * link.latency_us + moved_us(row.wire_bytes(n, b), link)


def in_switch(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """The switch reads a share from all, adds it up and sends it to all; each rank does a share."""
    return 2 * link.latency_us + moved_us(b * (n + 1) / n, link)


Formula = Callable[[Collective, Expr, Expr, Link], Expr]
#: The plain algorithms, in the order of Machine.links.
ALGORITHMS: dict[str, Formula] = {"ring": ring, "tree": tree, "one-shot": one_shot}
#: Those that a machine may have constants of its own for, all of them of all-reduce.
KERNELS: dict[str, Formula] = {
    "one-shot": one_shot,
    "two-shot": two_shot,
    "multimem": in_switch,
    "nvls": in_switch,
}


def forms_us(
    row: Collective, n: Expr, b: Expr, machine: Machine, per_node: Expr
) -> dict[str, Expr]:
    """The whole time of a collective by each form that the machine has for it."""
    links = dict(zip(ALGORITHMS, machine.links(n, per_node, row.personal), strict=True))
    times: dict[str, Expr] = {}
    for name in library_forms(row, n, machine, per_node):
        if name in ALGORITHMS:
            times[name] = machine.collective_us + ALGORITHMS[name](row, n, b, links[name])
    for name, form in machine.forms.items() if is_all_reduce(row) else ():
        if per_node == n:
            formula = KERNELS[form.like or name]
            times[name] = form.launch_us + formula(row, n, b, form.link)
        elif name == "nvls":
            times[name] = form.launch_us + _across(n, b, form, machine.inter, per_node)
    return times


def _across(n: Expr, b: Expr, form: Form, far: Link, per_node: Expr) -> Expr:
    """In the switches of all nodes at once, then shares between the nodes, in a pipeline."""
    nodes = n / per_node
    inside = b * (per_node + 1) / per_node * form.link.us_per_byte
    between = 2 * b * (nodes - 1) / n * far.us_per_byte
    return 2 * log2(nodes) * far.latency_us + _ramped(most(inside, between), far)


def library_forms(row: Collective, n: Expr, machine: Machine, per_node: Expr) -> tuple[str, ...]:
    """The forms that the machine's library chooses from."""
    carrier = machine.carrier
    if not carrier.chained:
        return carrier.forms
    if row.personal or row.is_p2p:
        return ("one-shot",)
    if is_all_reduce(row):
        inside = per_node == n
        available = {"ring", "tree", *(f for f in machine.forms if inside or f == "nvls")}
        return tuple(form for form in carrier.forms if form in available)
    return ("ring", "tree") if per_node == 1 else ("ring",)


def is_all_reduce(row: Collective) -> bool:
    """Does it reduce, and give all of the result to all ranks?"""
    return row.steps(2) == 2 and row.one_shot_bytes is not None
