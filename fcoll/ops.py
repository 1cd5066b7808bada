"""The table as ops: ``torch.ops.fcoll.*`` with eager and fake kernels, autograd and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fcoll import _torch, rules
from fcoll.collectives import COLLECTIVES, Collective

Tensor = torch.Tensor

_lib = torch.library.Library("fcoll", "DEF")


def _op(row: Collective) -> Any:
    return getattr(torch.ops.fcoll, row.name).default


def _define(row: Collective) -> None:
    tags = [torch.Tag.pt2_compliant_tag]
    if row.contiguous:
        tags.append(torch.Tag.needs_contiguous_strides)
    if "out)" in row.schema:
        tags.append(torch.Tag.out)
    _lib.define(row.name + row.schema, tags=tags)
    if row.side_effect:
        torch.fx.node.has_side_effect(_op(row))
    if row.name == "wait_tensor":
        _lib.impl(row.name, row.run, "CompositeImplicitAutograd")
        torch.library.register_vmap("fcoll::wait_tensor", _vmap(row), lib=_lib)
        return
    _lib.impl(row.name, _eager_kernel(row), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fcoll::{row.name}", _fake_kernel(row), lib=_lib)
    if row.mutates:
        _lib.impl(row.name, _refuse_gradient(row), "Autograd")
    elif row.adjoint:
        torch.library.register_autograd(
            f"fcoll::{row.name}", _backward(row), setup_context=_save(row), lib=_lib
        )
    if row.batched:
        torch.library.register_vmap(f"fcoll::{row.name}", _vmap(row), lib=_lib)


# -- kernels ---


def _eager_kernel(row: Collective) -> Callable[..., Any]:
    check, run = row.check, row.run

    def kernel(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return run(*args, **kwargs)

    return kernel


def _fake_kernel(row: Collective) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        _torch.teach_inductor(_FUNCTIONAL)
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


# -- autograd ---


def _call(row: Collective, inputs: Sequence[Any]) -> SimpleNamespace:
    """A call's arguments by name, defaults filled in; tensors left out."""
    arguments = _op(row)._schema.arguments
    values = [*inputs, *(a.default_value for a in arguments[len(inputs) :])]
    named = zip((a.name for a in arguments), values, strict=True)
    plain = {k: v for k, v in named if not any(isinstance(x, Tensor) for x in tree_leaves(v))}
    return SimpleNamespace(op=row.name, saved_input=None, saved_output=None, **plain)


def _save(row: Collective) -> Callable[..., None]:
    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.call = _call(row, inputs)
        first = inputs[0]
        ctx.call.input_shape = (
            first.shape if isinstance(first, Tensor) else [getattr(x, "shape", None) for x in first]
        )
        ctx.keeps = row.saves is not None and row.saves(ctx.call)
        if ctx.keeps:
            ctx.save_for_backward(*tree_leaves(first), *tree_leaves(output))

    return setup_context


def _backward(row: Collective) -> Callable[..., Any]:
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
        call = SimpleNamespace(**vars(ctx.call))
        if ctx.keeps:
            saved = ctx.saved_tensors
            half = len(saved) // 2
            xs, ys = saved[:half], [torch.ops.fcoll.wait_tensor(y) for y in saved[half:]]
            call.saved_input, call.saved_output = (xs, ys) if row.on_lists else (xs[0], ys[0])
        assert row.adjoint is not None
        # one a given argument: torch counts those left at their defaults only for single tensors
        return (row.adjoint(grad, call), *[None] * (len(ctx.needs_input_grad) - 1))

    return backward


class _Overwrite(torch.autograd.Function):
    """An in-place or out form in an autograd graph: its backward is an error that says why."""

    @staticmethod
    def forward(ctx: Any, row: Collective, args: Any, kwargs: Any, *tensors: Tensor) -> Any:
        ctx.row = row
        with _torch.below_autograd():
            out = _op(row)(*args, **kwargs)
        written = tuple(tree_leaves(out))
        ctx.mark_dirty(*written)
        return written

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.row.adjoint(grads, SimpleNamespace(op=ctx.row.name))


def _refuse_gradient(row: Collective) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            written = _Overwrite.apply(row, args, kwargs, *tensors)
            return list(written) if row.schema.endswith("Tensor[](a!)") else written[0]
        with _torch.below_autograd():
            return _op(row)(*args, **kwargs)

    return kernel


# -- vmap ---


def _vmap(row: Collective) -> Callable[..., Any]:
    """The mapped dim goes last: the dims that collectives name count from the front."""
    keeps_shape = row.shape in (rules.same, rules.same_each)

    def behind(x: Tensor, in_dim: int | None) -> Tensor:
        if in_dim is None:
            return x
        x = x.movedim(in_dim, -1)
        return x if keeps_shape or x.dim() > 1 else x.unsqueeze(0)  # of a 0-dim tensor

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        first, dims = args[0], in_dims[0]
        if isinstance(first, Tensor):
            return _op(row)(behind(first, dims), *args[1:]), -1
        xs = [behind(x, d) for x, d in zip(first, dims, strict=True)]
        return _op(row)(xs, *args[1:]), [None if d is None else -1 for d in dims]

    return rule


for _row in COLLECTIVES.values():
    _define(_row)

_FUNCTIONAL = [
    _op(row) for row in COLLECTIVES.values() if not row.mutates and row.name != "wait_tensor"
]
