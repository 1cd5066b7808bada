"""Lowerings for stock Inductor: fcoll's collectives as the extern kernels that torch's own are.

As plain fallbacks the inputs of a collective in flight could be reused before its wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fcoll.eager.ops import op_of
from fcoll.table.collectives import COLLECTIVES, row_of
from fcoll.table.row import Collective
from inductor_ext._torch import (
    CollectiveKernel,
    V,
    WaitKernel,
    ir,
    lowering,
    ops_on_functions,
    torchs_collectives,
    tree_map,
    wait_tensor,
)
from inductor_ext.state import in_order, regions_in_order


def add_rows() -> None:
    """Give Inductor a lowering of each row's op that has none: users register more at any time."""
    _keep_in_order()
    for row in COLLECTIVES.values():
        op = op_of(row)
        if not row.mutates and not row.is_wait and op not in lowering.lowerings:
            lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
            lower = functools.partial(collective_kernel, row)
            lowering.register_lowering(op, type_promotion_kind=None)(lower)


def collective_kernel(row: Collective, *args: Any, **kwargs: Any) -> Any:
    """Lower a call of a row's op to an extern kernel, as Inductor does torch's own."""
    create = CollectiveKernel.create_out_of_place
    if not any(a.is_tensor for a in row.arguments):
        create = ir.FallbackKernel.create  # barrier: a collective kernel must have an input
    out = create(op_of(row), *args, **kwargs)
    in_order(last_kernel())
    return tree_map(ir.TensorBox.create, out)


def last_kernel(kind: type = ir.FallbackKernel) -> Any:
    """The last extern kernel that was added to the graph that is being lowered."""
    return next(op for op in reversed(V.graph.operations) if isinstance(op, kind))


@functools.cache
def _keep_in_order() -> None:
    """Keep a wait for a send or receive after all that has started before it, and torch's own
    collectives in one order with fcoll's and with regions and branches that communicate.

    Inductor keeps the order in which its collective kernels start, but not that of a wait and the
    starts before it: of two ranks that send to each other, each would wait before it starts to
    receive. And it knows of no communication but those kernels.
    """
    register = functools.partial(lowering.register_lowering, type_promotion_kind=None)
    for op in torchs_collectives():
        lower = lowering.lowerings[op]
        register(op)(_in_order(lower) if op is wait_tensor else _started_in_order(lower))
    for op in ops_on_functions():
        register(op)(regions_in_order(lowering.lowerings[op]))


def _started_in_order(lower: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(lower)
    def start(*args: Any, **kwargs: Any) -> Any:
        before = len(V.graph.operations)
        out = lower(*args, **kwargs)
        for operation in V.graph.operations[before:]:
            if isinstance(operation, CollectiveKernel) and not isinstance(operation, WaitKernel):
                in_order(operation)
        return out

    return start


def _in_order(stock_wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def wait(x: Any) -> Any:
        out = stock_wait(x)
        kernel = V.graph.operations[-1]
        if isinstance(kernel, WaitKernel) and _has_effect(kernel.inputs[0]):
            in_order(kernel)
        return out

    return wait


def _has_effect(started: Any) -> bool:
    """Is it an op of fcoll's that must run even if nobody uses its result?"""
    kernel = started.inputs[0] if isinstance(started, ir.MultiOutput) else started
    op = getattr(kernel, "op_overload", None)
    row = row_of(op)
    return row is not None and row.side_effect and op is op_of(row)
