"""``@lowers(row)``: what each row of fcoll's table becomes in Inductor.

Every row has a lowering: one of ``lowerings.py``, one of a user's, or that of stock Inductor's
collectives. It serves all the ops that the row stands for: the passes turn a call of any of them
into one of ``torch.ops.fcoll``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fcoll import symm_mem
from fcoll.collectives import COLLECTIVES

F = TypeVar("F", bound=Callable[..., Any])

_LOWERINGS: dict[str, Callable[..., Any]] = {}
_registered: dict[Any, Any] = {}


def lowers(row: str) -> Callable[[F], F]:
    """Make a function the lowering of a row: it takes the op's arguments as Inductor's IR, and
    returns IR. The last one registered serves; ``lowering_of`` gives the one before, to call it.
    """
    if row not in COLLECTIVES:
        raise ValueError(f"{row} is no row of the table: it has {', '.join(COLLECTIVES)}")

    def register(fn: F) -> F:
        _LOWERINGS[row] = fn
        return fn

    return register


def lowering_of(row: str) -> Callable[..., Any]:
    """The lowering that serves a row."""
    return _LOWERINGS[row]


def op_of(row: str) -> Any:
    return getattr(torch.ops.fcoll, row).default


def register() -> None:
    """Give Inductor the lowerings of all rows. They do for graphs that the passes have not seen
    what stock Inductor does."""
    if _registered:
        return
    from inductor_ext import fakes, lowerings
    from inductor_ext._torch import lowering, wait_tensor

    if symm_mem.load():
        fakes.register()

    for name in COLLECTIVES:
        op = wait_tensor if name == "wait_tensor" else op_of(name)
        _registered[op] = lowering.lowerings.get(op)
        if name != "wait_tensor":
            lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
        lowering.register_lowering(op, type_promotion_kind=None)(_dispatch(name))
    for op, lower in lowerings.TORCHS.items():
        _registered[op] = lowering.lowerings.get(op)
        lowering.register_lowering(op, type_promotion_kind=None)(lower)


def stock(op: Any) -> Callable[..., Any]:
    """Inductor's own lowering of an op; of a wait with the order of point-to-point kept."""
    return _registered[op]


def stock_wait(x: Any) -> Any:
    from inductor_ext._torch import wait_tensor

    return stock(wait_tensor)(x)


def unregister() -> None:
    """Put back what was there before ``register``."""
    from inductor_ext._torch import lowering

    for op, before in _registered.items():
        if before is None:
            lowering.lowerings.pop(op, None)
        else:
            lowering.lowerings[op] = before
    _registered.clear()


def requires_symmetric_memory(op: Any, arg: str, group: str = "group_name") -> None:
    """Have compiled graphs allocate an argument of an op in torch's symmetric memory.

    For ops of users that call ``torch.distributed._symmetric_memory.rendezvous`` on it: ``arg``
    names a tensor of its schema and ``group`` the argument that is the group's name. What computes
    the argument writes it there; what is not computed in the graph is copied there.
    """
    from inductor_ext._torch import V, ir, lowering, tree_map
    from inductor_ext.ir import realize_as_symmetric_memory

    names = [a.name for a in op._schema.arguments]
    if arg not in names or group not in names:
        raise ValueError(f"{op} has no argument {arg} or {group}: it has {', '.join(names)}")

    def lower(*args: Any, **kwargs: Any) -> Any:
        call = dict(zip(names, args, strict=False)) | kwargs
        node = (
            dict(zip(names, V.graph.current_node.args, strict=False)) | V.graph.current_node.kwargs
        )
        call[arg] = realize_as_symmetric_memory(call[arg], node[arg], call[group])
        return tree_map(ir.TensorBox.create, ir.FallbackKernel.create(op, **call))

    lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _dispatch(row: str) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        return _LOWERINGS[row](*args, **kwargs)

    return lower
