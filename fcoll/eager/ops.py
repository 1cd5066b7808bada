"""The table as ops: ``torch.ops.fcoll.*`` with eager and fake kernels, autograd and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fcoll import _torch
from fcoll.eager import dispatch
from fcoll.errors import NoGradient
from fcoll.groups import by_name
from fcoll.table import shapes
from fcoll.table.collectives import COLLECTIVES, functional_row, single_row
from fcoll.table.row import Call, Collective
from fcoll.transport.shared_memory import handle_of

_lib = torch.library.Library("fcoll", "DEF")

# The Python kernels of rows that have one in C++, under a name of their own: it sends them what it
# does not serve.
_pg_lib = torch.library.Library("fcoll_pg", "DEF")


def op_of(row: Collective) -> Any:
    return getattr(torch.ops.fcoll, row.name).default


def define(row: Collective) -> None:
    """Make the op of a row, with all that the row says of it."""
    tags = [torch.Tag.pt2_compliant_tag]
    if row.contiguous:
        tags.append(torch.Tag.needs_contiguous_strides)
    if row.has_out:
        tags.append(torch.Tag.out)
    _lib.define(row.name + row.schema, tags=tags)
    if row.side_effect:
        torch.fx.node.has_side_effect(op_of(row))
    if row.is_wait:
        _lib.impl(row.name, _wait_kernel(row), "CompositeImplicitAutograd")
    else:
        _lib.impl(row.name, _eager_kernel(row), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fcoll::{row.name}", _fake_kernel(row), lib=_lib)
        if row.adjoint:
            _lib.impl(row.name, _autograd_kernel(row), "Autograd")
    if row.functional:
        _lib.impl(row.name, _value_and_copy(row), "Functionalize")
    if row.batched:
        torch.library.register_vmap(f"fcoll::{row.name}", _vmap(row), lib=_lib)
    if row.native.kernel:
        _pg_lib.define(row.name + row.schema)
        _pg_lib.impl(row.name, _eager_kernel(row), "CompositeExplicitAutograd")


# -- kernels ---


def _eager_kernel(row: Collective) -> Callable[..., Any]:
    return lambda *args, **kwargs: dispatch.check_and_run(row, args, kwargs)


def _fake_kernel(row: Collective) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        row.check(*args, **kwargs)
        if row.mutates:
            return kwargs.get("out", args[0])
        for size in tree_leaves(args):
            if isinstance(size, torch.SymInt):
                torch._check(size >= 0)
        shape = row.shape(*args, **kwargs)
        if not row.on_lists:
            like = args[0] if isinstance(args[0], Tensor) else torch.empty(0)
            return like.new_empty(shape)
        likes = next(a for a in args if isinstance(a, (list, tuple)) and isinstance(a[0], Tensor))
        return [x.new_empty(s) for x, s in zip(likes, shape, strict=True)]

    return kernel


def _value_and_copy(row: Collective) -> Callable[..., Any]:
    """Functionalization of a row that writes: the functional op, then copies into the arguments.
    torch's own drops the copies where nothing reads them, and rejects ops that return them."""

    def kernel(input: Any, *args: Any, out: Any = None) -> Any:
        result = op_of(functional_row(row))(input, *args)
        written = input if out is None else out
        pairs = zip(written, result, strict=True) if row.on_lists else [(written, result)]
        for target, value in pairs:
            target.copy_(torch.ops.fcoll.wait_tensor(value))
        return written

    return kernel


def _wait_kernel(row: Collective) -> Callable[[Tensor], Tensor]:
    """torch's wait in a kernel for all dispatch keys; torch.func cannot differentiate torch's."""
    run, level = row.run, _autograd_kernel(row)
    return lambda tensor: level(tensor) if _torch.transforms_active() else run(tensor)


# -- autograd ---


def _arguments(row: Collective) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """A call's arguments by name, defaults filled in; tensors left out."""
    positional = [a for a in op_of(row)._schema.arguments if not a.kwarg_only]
    kept = [(i, a.name) for i, a in enumerate(positional) if "Tensor" not in str(a.type)]
    defaults = [a.default_value for a in positional]

    def named(args: Sequence[Any]) -> dict[str, Any]:
        values = [*args, *defaults[len(args) :]]
        return {name: values[i] for i, name in kept}

    return named


def _function(row: Collective) -> Any:
    """The row as an autograd function of its tensors: ``apply(args, kwargs, *tensors)``."""
    arguments = _arguments(row)
    one_in_one_out = not row.on_lists and not row.mutates

    def forward(ctx: Any, args: Any, kwargs: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        if one_in_one_out and not kwargs and _torch.plain(tensors[0]):
            outs: tuple[Tensor, ...] = (dispatch.run(row, args),)
        else:
            # grad mode on: under torch.func.grad the levels outside this one differentiate too
            with torch.enable_grad(), _torch.below_autograd():
                outs = tuple(tree_leaves(op_of(row)(*args, **kwargs)))
        ctx.call = arguments(args)
        ctx.input_shape = [x.shape for x in tensors] if row.on_lists else tensors[0].shape
        values = {"input": tensors, "output": outs}
        ctx.needed = row.saves(Call(**ctx.call)) if row.saves else ()
        ctx.save_for_backward(*(x for which in ctx.needed for x in values[which]))
        if row.mutates:
            ctx.mark_dirty(*outs)
        return outs

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # Where nothing was saved, nothing is read: a second backward finds it freed.
        saved = ctx.saved_tensors if ctx.needed else ()
        xs, ys = saved[: len(grads)], saved[len(grads) :]
        ys = list(map(dispatch.wait, ys))
        call = Call(
            op=row.name,
            functional=row.functional,
            input_shape=ctx.input_shape,
            saved_input=(xs if row.on_lists else xs[0]) if xs else None,
            saved_output=(ys if row.on_lists else ys[0]) if ys else None,
            call=dispatch.call,
            identity=partial(dispatch.identity, group_name=ctx.call.get("group_name")),
            **ctx.call,
        )
        assert row.adjoint is not None
        grad_inputs = row.adjoint(list(grads) if row.on_lists else grads[0], call)
        return (None, None, *(grad_inputs if row.on_lists else [grad_inputs]))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"fcoll_{row.name}_", (_torch.SingleLevelFunction,), methods)


def _autograd_kernel(row: Collective) -> Callable[..., Any]:
    """Not torch.library.register_autograd, which torch.func.grad cannot differentiate."""
    function = dispatch.autograd_functions[row.name] = _function(row)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(map(_torch.has_tangent, tensors)):
            why = "forward-mode AD (jvp, make_dual) is not implemented"
            raise NoGradient(op=row.name, why=why, hint="Use reverse mode: backward, grad or vjp.")
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            with _torch.single_level_functions():
                outs = function.apply(args, kwargs, *tensors)
            return list(outs) if row.on_lists else outs[0]
        with _torch.below_autograd():
            return op_of(row)(*args, **kwargs)

    return kernel


# -- vmap ---


def _vmap(row: Collective) -> Callable[..., Any]:
    """The mapped dim goes last: the dims that collectives name count from the front."""
    keeps_shape = single_row(row).shape is shapes.same
    out_dim = None if row.shape is shapes.nothing else -1

    def behind(x: Tensor, in_dim: int | None) -> Tensor:
        if in_dim is None:
            return x
        x = x.movedim(in_dim, -1)
        return x if keeps_shape or x.dim() > 1 else x.unsqueeze(0)  # of a 0-dim tensor

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        first, dims = args[0], in_dims[0]
        if isinstance(first, Tensor):
            return op_of(row)(behind(first, dims), *args[1:]), out_dim
        xs = [behind(x, d) for x, d in zip(first, dims, strict=True)]
        return op_of(row)(xs, *args[1:]), [None if d is None else -1 for d in dims]

    return rule


for _row in COLLECTIVES.values():
    define(_row)

_pg_lib.define("connect(str group_name) -> bool")
_pg_lib.impl("connect", lambda name: handle_of(by_name(name)) != 0, "CompositeExplicitAutograd")
