"""The lowering of every row, a short function each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fcoll._torch import collective_kernel, in_order
from fcoll.collectives import COLLECTIVES, Collective
from inductor_ext import _torch, cuda, one_shot
from inductor_ext._torch import V, ir, lowering
from inductor_ext.lowered import note
from inductor_ext.registry import lowers, op_of, stock, stock_wait


def _form() -> str:
    """How the passes want the node that is being lowered to be done."""
    return V.graph.current_node.meta.get("fcoll_form", "kernel")


def _kernel(row: str) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        out = collective_kernel(op_of(row), *args, **kwargs)
        _noted()
        return out

    return lower


def _noted() -> Any:
    """Have the last kernel, of Inductor's own, write the line about itself before its code."""
    kernel = next(n for n in reversed(V.graph.operations) if isinstance(n, ir.FallbackKernel))
    line, codegen = note(V.graph.current_node), kernel.codegen

    def noted(wrapper: Any) -> None:
        wrapper.writeline(wrapper.comment + line)
        codegen(wrapper)

    kernel.codegen = noted
    return kernel


def _in_place(row: str, x: Any, reduce_op: str, group_name: str, dim: int = 0) -> Any:
    """A collective whose parts are read where they are, or None if it is done by its kernel."""
    form = _form()
    if form == "fused":
        return one_shot.fused(row, x, reduce_op, group_name, dim)
    if form == "opaque":
        return one_shot.opaque(row, x, reduce_op, group_name)
    if form == "split":
        made = one_shot.announce(row, x, reduce_op, group_name, dim)
        _announced()[made.token.get_name()] = made
        return made.token
    return None


def _announced() -> dict[str, one_shot.Announced]:
    """The collectives of the graph that is being lowered that have started and not ended."""
    return vars(V.graph).setdefault("fcoll_announced", {})


def _on_cuda(x: Any, reduce_op: str, group_name: str) -> Any:
    """An all-reduce by a Triton kernel, or None if x is elsewhere or it is left to others."""
    seen = "fcoll_form" in V.graph.current_node.meta  # by the passes, whose key caches have
    made = cuda.all_reduce(x, reduce_op, group_name) if seen and _is_on_cuda(x) else None
    if made is not None:
        in_order(_noted())
        _complete().add(made.get_name())
    return made


def _is_on_cuda(x: Any) -> bool:
    return x.get_device().type == "cuda"


def _complete() -> set[str]:
    """The results in the graph that is being lowered that have a wait, and nothing to wait for."""
    return vars(V.graph).setdefault("fcoll_complete", set())


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
    made = _in_place("all_reduce", x, reduce_op, group_name) or _on_cuda(x, reduce_op, group_name)
    return made or _kernel("all_reduce")(x, reduce_op, group_name, grad)


@lowers("all_gather_into_tensor")
def all_gather(x: Any, n: int, group_name: str, dim: int = 0, sizes: Any = None) -> Any:
    made = _in_place("all_gather_into_tensor", x, "", group_name, dim)
    return made or _kernel("all_gather_into_tensor")(x, n, group_name, dim, sizes)


@lowers("reduce_scatter_tensor")
def reduce_scatter(
    x: Any, reduce_op: str, n: int, group_name: str, dim: int = 0, sizes: Any = None
) -> Any:
    made = _in_place("reduce_scatter_tensor", x, reduce_op, group_name)
    return made or _kernel("reduce_scatter_tensor")(x, reduce_op, n, group_name, dim, sizes)


@lowers("wait_tensor")
def wait(x: Any) -> Any:
    name = x.get_name() if isinstance(x, ir.TensorBox) else ""
    if name in _complete():
        _complete().discard(name)
        return x
    started = _announced().pop(name, None)
    return one_shot.collect(started) if started else stock_wait(x)


# torch's own all-reduces, where the passes have left them to stock Inductor: on CUDA the group may
# have symmetric memory where it has none of fcoll's.


def _torchs_all_reduce(x: Any, reduce_op: str, group_name: str) -> Any:
    made = _on_cuda(x, reduce_op, group_name)
    return made or _stock_all_reduce(_torch.all_reduce, x, reduce_op, group_name)


def _torchs_all_reduce_(x: Any, reduce_op: str, group_name: str) -> Any:
    made = _on_cuda(x, reduce_op, group_name)
    if made is None:
        return _stock_all_reduce(_torch.all_reduce_, x, reduce_op, group_name)
    lowering.mutate_to(x, made)
    _complete().add(x.get_name())
    return x


def _stock_all_reduce(op: Any, x: Any, reduce_op: str, group_name: str) -> Any:
    made = stock(op)(x, reduce_op, group_name)
    if _is_on_cuda(x) and "fcoll_form" in V.graph.current_node.meta:
        _noted()
    return made


TORCHS = {_torch.all_reduce: _torchs_all_reduce, _torch.all_reduce_: _torchs_all_reduce_}
