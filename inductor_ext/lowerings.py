"""The lowering of every row, a short function each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fcoll._torch import collective_kernel
from fcoll.collectives import COLLECTIVES, Collective
from inductor_ext import one_shot
from inductor_ext._torch import V, ir, lowering
from inductor_ext.lowered import note
from inductor_ext.registry import lowers, op_of, stock_wait


def _form() -> str:
    """How the passes want the node that is being lowered to be done."""
    return V.graph.current_node.meta.get("fcoll_form", "kernel")


def _kernel(row: str) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        out = collective_kernel(op_of(row), *args, **kwargs)
        _noted(next(n for n in reversed(V.graph.operations) if isinstance(n, ir.FallbackKernel)))
        return out

    return lower


def _noted(kernel: Any) -> None:
    """Have a kernel of Inductor's own write the line about itself before its code."""
    line, codegen = note(V.graph.current_node), kernel.codegen

    def noted(wrapper: Any) -> None:
        wrapper.writeline(wrapper.comment + line)
        codegen(wrapper)

    kernel.codegen = noted


def _in_place(row: str, x: Any, reduce_op: str, group_name: str) -> Any:
    """A collective whose parts are read where they are, or None if it is done by its kernel."""
    form = _form()
    if form == "fused":
        return one_shot.fused(row, x, reduce_op, group_name)
    if form == "opaque":
        return one_shot.opaque(row, x, reduce_op, group_name)
    if form == "split":
        made = one_shot.announce(row, x, reduce_op, group_name)
        _announced()[made.token.get_name()] = made
        return made.token
    return None


def _announced() -> dict[str, one_shot.Announced]:
    """The collectives of the graph that is being lowered that have started and not ended."""
    return vars(V.graph).setdefault("fcoll_announced", {})


def _writing(row: Collective) -> Callable[..., Any]:
    """The in-place and out forms: the collective as a value, waited for, then written."""
    functional = op_of(row.name.removesuffix("_out").removesuffix("_"))

    def lower(x: Any, *args: Any, out: Any = None) -> Any:
        values = collective_kernel(functional, x, *args)
        targets = x if out is None else out
        pairs = zip(targets, values, strict=True) if row.on_lists else [(targets, values)]
        for target, value in pairs:
            lowering.mutate_to(target, stock_wait(value))
        return targets

    return lower


for _row in COLLECTIVES.values():
    lowers(_row.name)(_writing(_row) if _row.mutates else _kernel(_row.name))


@lowers("all_reduce")
def all_reduce(x: Any, reduce_op: str, group_name: str, grad: str = "sum") -> Any:
    made = _in_place("all_reduce", x, reduce_op, group_name)
    return made or _kernel("all_reduce")(x, reduce_op, group_name, grad)


@lowers("all_gather_into_tensor")
def all_gather(x: Any, n: int, group_name: str, dim: int = 0, sizes: Any = None) -> Any:
    made = _in_place("all_gather_into_tensor", x, "", group_name)
    return made or _kernel("all_gather_into_tensor")(x, n, group_name, dim, sizes)


@lowers("reduce_scatter_tensor")
def reduce_scatter(
    x: Any, reduce_op: str, n: int, group_name: str, dim: int = 0, sizes: Any = None
) -> Any:
    made = _in_place("reduce_scatter_tensor", x, reduce_op, group_name)
    return made or _kernel("reduce_scatter_tensor")(x, reduce_op, n, group_name, dim, sizes)


@lowers("wait_tensor")
def wait(x: Any) -> Any:
    started = _announced().pop(x.get_name(), None) if isinstance(x, ir.TensorBox) else None
    return one_shot.collect(started) if started else stock_wait(x)
