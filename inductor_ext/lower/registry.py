"""Which lowering serves each row of fcoll's table, and Inductor's table with them in it.

Every row has a lowering: one of a user's (``@lowers(row)``), else the one that ``lowerings.py``
derives from the row. It serves all ops that the row stands for: the passes turn a call of any of
them into one of ``torch.ops.fcoll``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fcoll import symm_mem
from fcoll.eager.ops import op_of
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective
from inductor_ext._torch import (
    V,
    comm_buffers_on_cpu,
    ir,
    lowering,
    ops_on_functions,
    torchs_collectives,
    tree_map,
    wait_tensor,
)
from inductor_ext.errors import NoSuchArgument, UnknownRow
from inductor_ext.lower.ir import realize_as_symmetric_memory
from inductor_ext.lower.order import ordered
from inductor_ext.stock.inductor import add_rows

F = TypeVar("F", bound=Callable[..., Any])
Lower = Callable[..., Any]

_users: dict[str, Lower] = {}  # row -> the lowering that a user gave it
_before: dict[Any, Lower | None] = {}  # op -> what Inductor had for it before ``register``


def lowers(row: str) -> Callable[[F], F]:
    """Make a function the lowering of a row: it takes the op's arguments as Inductor's IR, and
    returns IR. The last one registered serves; ``lowering_of`` gives the one before, to call it.
    """
    _row(row)

    def register(fn: F) -> F:
        _users[row] = fn
        return fn

    return register


def lowering_of(row: str) -> Lower:
    """The lowering that serves a row."""
    from inductor_ext.lower.lowerings import lowering_for  # it is built on this file

    return _users.get(row) or lowering_for(_row(row))


def _row(row: str) -> Collective:
    if row not in COLLECTIVES:
        raise UnknownRow(row=row, known=", ".join(COLLECTIVES))
    return COLLECTIVES[row]


def register() -> None:
    """Give Inductor the lowerings of all rows that it has not yet: users may add rows between one
    compile and the next. For graphs that the passes have not seen they do what stock Inductor does.
    """
    from inductor_ext.lower.ir import register_shapes
    from inductor_ext.lower.lowerings import TORCHS, torchs_own

    add_rows()  # stock Inductor's come first: they are what ``unregister`` goes back to
    if symm_mem.load():
        register_shapes()
        comm_buffers_on_cpu(True)
    for row in COLLECTIVES.values():
        op = wait_tensor if row.is_wait else op_of(row)
        if op not in _before and not row.is_wait:
            lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
        _put(op, _dispatch(row.name))
    for op, lower in TORCHS.items():
        _put(op, lower)
    for op in torchs_collectives():  # of those nothing is changed but that they stay in order
        _put(op, torchs_own(op))
    for op in ops_on_functions():
        _put(op, lowering.lowerings[op])


def _put(op: Any, lower: Lower) -> None:
    if op not in _before:
        _before[op] = lowering.lowerings.get(op)
        lowering.register_lowering(op, type_promotion_kind=None)(ordered(lower))


def _dispatch(row: str) -> Lower:
    """The lowering that serves the row when a graph is lowered: users may change it."""

    def lower(*args: Any, **kwargs: Any) -> Any:
        return lowering_of(row)(*args, **kwargs)

    return lower


def stock(op: Any) -> Lower:
    """Inductor's own lowering of an op; of a wait with the order of point-to-point kept."""
    lower = _before[op]
    assert lower is not None, op
    return lower


def stock_wait(x: Any) -> Any:
    return stock(wait_tensor)(x)


def unregister() -> None:
    """Put back what was there before ``register``."""
    for op, before in _before.items():
        if before is None:
            lowering.lowerings.pop(op, None)
        else:
            lowering.lowerings[op] = before
    _before.clear()
    comm_buffers_on_cpu(False)


def requires_symmetric_memory(op: Any, arg: str, group: str = "group_name") -> None:
    """Have compiled graphs allocate an argument of an op in torch's symmetric memory.

    For ops of users that call ``torch.distributed._symmetric_memory.rendezvous`` on it: ``arg``
    names a tensor of its schema and ``group`` the argument that is the group's name. What computes
    the argument writes it there; what is not computed in the graph is copied there.
    """
    names = [a.name for a in op._schema.arguments]
    if missing := [name for name in (arg, group) if name not in names]:
        raise NoSuchArgument(op=op, missing=" or ".join(missing), known=", ".join(names))

    def lower(*args: Any, **kwargs: Any) -> Any:
        call = _by_name(names, args, kwargs)
        node = _by_name(names, V.graph.current_node.args, V.graph.current_node.kwargs)
        call[arg] = realize_as_symmetric_memory(call[arg], node[arg], call[group])
        return tree_map(ir.TensorBox.create, ir.FallbackKernel.create(op, **call))

    lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _by_name(names: list[str], args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs
