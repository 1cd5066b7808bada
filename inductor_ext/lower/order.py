"""The order of the graph in the generated code: starts, waits, and the work between them.

Inductor's scheduler puts kernels where they need the least memory, so without more it would wait
right behind a start. Dependencies hold what the schedule has decided: a start or a wait comes after
the one before it and after the matrix products and other extern calls in between, and these after
it. Loops are free, so that they fuse as they did; only a wait also comes after large ones that the
schedule has put before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fcoll.graph.nodes import collectives, graphs_in, regions_of
from fcoll.table.collectives import row_of
from inductor_ext._torch import CollectiveKernel, V, WaitKernel, bytes_of, ir, is_view
from inductor_ext.choice import choice_of
from inductor_ext.config import config
from inductor_ext.lower.ir import ArenaKernel, ClaimKernel, compared_first
from inductor_ext.state import current, region_communicates


def ordered(lower: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of a collective or a wait, which stays where it is among those and the work
    around it. In graphs that the passes have not seen it does nothing more."""

    def in_place(*args: Any, **kwargs: Any) -> Any:
        state = current()
        if not state.ordered and _is_planned(V.graph.current_node):
            state.ordered = True
            if config.compare and getattr(V.graph, "parent", None) is None:
                state.last_held = compared_first()
                state.held_at = len(V.graph.operations)
        before = len(V.graph.operations)
        result = lower(*args, **kwargs)
        if state.ordered:
            _hold(V.graph.operations[before:])
        return result

    return in_place


def _is_planned(node: Any) -> bool:
    """Have the passes seen a collective, or those of the regions and branches of a call?"""
    graphs = [graph for region in regions_of(node) for graph in graphs_in(region)]
    inside = (start for graph in graphs for start, _ in collectives(graph))
    return any(choice_of(x) is not None for x in (node, *inside))


def _hold(operations: Sequence[Any]) -> None:
    """Put what was made of a collective or a wait into its place."""
    state, depends_on = current(), V.graph.additional_buffer_deps
    calls = [op for op in operations if _communicates(op)]
    if not calls:
        return  # it was complete: nothing is left of the wait
    since = [op for op in V.graph.operations[state.held_at :] if op not in calls]
    work = [op for op in since if _is_extern_work(op)]
    if state.last_held is not None:
        for op in work:
            depends_on[op.get_operation_name()].add(state.last_held)
    if any(map(_waits, calls)):
        work += [op for op in since if _is_large_loop(op)]
    for op in calls:
        before = [x.get_name() for x in work if x.get_name() != op.get_name()]
        depends_on[op.get_operation_name()].update(before)
        if state.last_held is not None:
            depends_on[op.get_operation_name()].add(state.last_held)
        state.last_held = op.get_name()
    state.held_at = len(V.graph.operations)


def _communicates(op: Any) -> bool:
    if isinstance(op, ArenaKernel):
        return not isinstance(op, ClaimKernel)
    is_call = isinstance(op, (CollectiveKernel, WaitKernel)) or _row(op) is not None
    return is_call or region_communicates(op)


def _waits(op: Any) -> bool:
    return isinstance(op, WaitKernel) or str(_called(op)) == "fcoll_native.collect.default"


def _is_extern_work(op: Any) -> bool:
    """Is it a matrix product or any other call that takes time by itself?"""
    if isinstance(op, ir.TemplateBuffer):
        return True
    calls = isinstance(op, (ir.ExternKernelOut, ir.ExternKernelAlloc))
    return calls and not isinstance(op, ClaimKernel) and not is_view(_called(op))


def _is_large_loop(op: Any) -> bool:
    return isinstance(op, ir.ComputedBuffer) and bytes_of(op) >= config.split_bytes


def _row(op: Any) -> Any:
    called = _called(op)
    return row_of(called) if called is not None else None


def _called(op: Any) -> Any:
    return getattr(op, "op_overload", None)
