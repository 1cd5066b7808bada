"""State that the lowerings of one graph share while Inductor lowers it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fcoll.graph.nodes import communicates
from inductor_ext._torch import V, regions_in


@dataclass
class Lowering:
    """The state of the graph that is being lowered, or whose code is being written."""

    #: Token -> the collective that was announced with it and has not been collected yet.
    announced: dict[str, Any] = field(default_factory=dict)
    #: Results that have a wait in the graph but are complete without it.
    complete: set[str] = field(default_factory=set)
    #: Lane of the arena -> the graph and the claim that used it last; of the outermost graph.
    lanes: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    #: The operation that the next collective must come after.
    last_in_order: str | None = None
    #: Have the passes seen the graph? Then its order is kept (lower/order.py).
    ordered: bool = False
    #: The last start or wait, and how many operations there were when it had its place.
    last_held: str | None = None
    held_at: int = 0


def current() -> Lowering:
    """The state of the graph at hand. An attribute of it, so that both go together: the state has
    nodes of the graph, and a table of weak references to graphs would keep them alive."""
    return _state_of(V.graph)


def lanes() -> dict[int, tuple[Any, Any]]:
    """The lanes of the whole program: a graph and those that are nested in it run in turns."""
    graph = V.graph
    while (parent := getattr(graph, "parent", None)) is not None:
        graph = parent
    return _state_of(graph).lanes


def _state_of(graph: Any) -> Lowering:
    return vars(graph).setdefault("fcoll", Lowering())


def regions_in_order(lower: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering of an op on functions: what communicates in them runs, and in its place, even
    if nobody uses what it gives."""

    @functools.wraps(lower)
    def lower_in_order(*args: Any, **kwargs: Any) -> Any:
        before = len(V.graph.operations)
        result = lower(*args, **kwargs)
        for operation in filter(region_communicates, V.graph.operations[before:]):
            operation.has_side_effects = lambda: True
            in_order(operation)
        return result

    return lower_in_order


def region_communicates(operation: Any) -> bool:
    """Does an operation run a graph with collectives in it?"""
    return any(map(communicates, regions_in(operation)))


def in_order(operation: Any) -> None:
    """Keep an operation of the graph at hand after the last one so marked."""
    state = current()
    if state.last_in_order is not None:
        V.graph.additional_buffer_deps[operation.get_operation_name()].add(state.last_in_order)
    state.last_in_order = operation.get_name()
