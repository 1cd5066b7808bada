"""The table as ops: ``torch.ops.fcoll.*`` with eager and fake kernels, autograd and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fcoll import _torch, bare, rules
from fcoll.collectives import COLLECTIVES, Collective
from fcoll.errors import NoGradient
from fcoll.groups import by_name
from fcoll.symm_mem import handle_of

_lib = torch.library.Library("fcoll", "DEF")

_pg_lib = torch.library.Library("fcoll_pg", "DEF")


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
        _lib.impl(row.name, _wait_kernel(row), "CompositeImplicitAutograd")
    else:
        _lib.impl(row.name, _eager_kernel(row), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fcoll::{row.name}", _fake_kernel(row), lib=_lib)
        if row.adjoint:
            _lib.impl(row.name, _autograd_kernel(row), "Autograd")
    if row.batched:
        torch.library.register_vmap(f"fcoll::{row.name}", _vmap(row), lib=_lib)


# -- kernels ---


def _eager_kernel(row: Collective) -> Callable[..., Any]:
    check, run = row.check, row.run

    def kernel(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return run(*args, **kwargs)

    return kernel


def run_plain(row: Collective, *args: Any) -> Any:
    """The kernel for plain tensors, without the dispatcher."""
    if bare.has_kernel(row.name, args[0]):
        return bare.kernel(row.name, *args)
    row.check(*args)
    return row.run(*args)


def _fake_kernel(row: Collective) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        _torch.teach_partitioner(_FUNCTIONAL)
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


def _arguments(row: Collective) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """A call's arguments by name, defaults filled in; tensors left out."""
    positional = [a for a in _op(row)._schema.arguments if not a.kwarg_only]
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
            outs: tuple[Tensor, ...] = (run_plain(row, *args),)
        else:
            # grad mode on: under torch.func.grad the levels outside this one differentiate too
            with torch.enable_grad(), _torch.below_autograd():
                outs = tuple(tree_leaves(_op(row)(*args, **kwargs)))
        ctx.call = SimpleNamespace(
            op=row.name, saved_input=None, saved_output=None, **arguments(args)
        )
        ctx.call.input_shape = [x.shape for x in tensors] if row.on_lists else tensors[0].shape
        values = {"input": tensors, "output": outs}
        needed = row.saves(ctx.call) if row.saves else ()
        ctx.save_for_backward(*(x for which in needed for x in values[which]))
        if row.mutates:
            ctx.mark_dirty(*outs)
        return outs

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call = SimpleNamespace(**vars(ctx.call))
        xs, ys = ctx.saved_tensors[: len(grads)], ctx.saved_tensors[len(grads) :]
        if xs:
            call.saved_input = xs if row.on_lists else xs[0]
        if ys:
            ys = list(map(bare.wait, ys))
            call.saved_output = ys if row.on_lists else ys[0]
        assert row.adjoint is not None
        found = row.adjoint(list(grads) if row.on_lists else grads[0], call)
        return (None, None, *(found if row.on_lists else [found]))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"fcoll_{row.name}_", (_torch.SingleLevelFunction,), methods)


def _autograd_kernel(row: Collective) -> Callable[..., Any]:
    """Not torch.library.register_autograd, which torch.func.grad cannot differentiate."""
    function = _functions[row.name] = _function(row)
    is_list = row.schema.endswith(("Tensor[]", "Tensor[](a!)"))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(map(_torch.has_tangent, tensors)):
            why = "forward-mode AD (jvp, make_dual) is not implemented"
            raise NoGradient(op=row.name, why=why, hint="Use reverse mode: backward, grad or vjp.")
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            with _torch.single_level_functions():
                outs = function.apply(args, kwargs, *tensors)
            return list(outs) if is_list else outs[0]
        with _torch.below_autograd():
            return _op(row)(*args, **kwargs)

    return kernel


_functions: dict[str, Any] = {}


def run_eager(name: str, *args: Any) -> Any:
    """``torch.ops.fcoll.<name>(*args)``; without the dispatcher, in 30 us less, for tensors that
    are ordinary and, in a list, need no gradient."""
    x, row = args[0], COLLECTIVES[name]
    if type(x) is list:
        if x and all(map(_torch.plain, x)):
            return run_plain(row, *args)
    elif _torch.ordinary(x):
        if not (x.requires_grad and torch.is_grad_enabled()):
            return run_plain(row, *args)
        with _torch.single_level_functions():
            return _functions[name].apply(args, {}, x)[0]
    return getattr(torch.ops.fcoll, name)(*args)


def _wait_kernel(row: Collective) -> Callable[[Tensor], Tensor]:
    """torch's wait in a kernel for all dispatch keys; torch.func cannot differentiate torch's."""
    run, level = row.run, _autograd_kernel(row)
    return lambda tensor: level(tensor) if _torch.transforms_active() else run(tensor)


# -- vmap ---


def _vmap(row: Collective) -> Callable[..., Any]:
    """The mapped dim goes last: the dims that collectives name count from the front."""
    keeps_shape = row.shape in (rules.same, rules.same_each)
    out_dim = None if row.shape is rules.nothing else -1

    def behind(x: Tensor, in_dim: int | None) -> Tensor:
        if in_dim is None:
            return x
        x = x.movedim(in_dim, -1)
        return x if keeps_shape or x.dim() > 1 else x.unsqueeze(0)  # of a 0-dim tensor

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        first, dims = args[0], in_dims[0]
        if isinstance(first, Tensor):
            return _op(row)(behind(first, dims), *args[1:]), out_dim
        xs = [behind(x, d) for x, d in zip(first, dims, strict=True)]
        return _op(row)(xs, *args[1:]), [None if d is None else -1 for d in dims]

    return rule


for _row in COLLECTIVES.values():
    _define(_row)

_pg_lib.define("connect(str group_name) -> bool")
_pg_lib.impl("connect", lambda name: handle_of(by_name(name)) != 0, "CompositeExplicitAutograd")
for _name in bare.IN_CPP:
    _pg_lib.define(_name + COLLECTIVES[_name].schema)
    _pg_lib.impl(_name, _eager_kernel(COLLECTIVES[_name]), "CompositeExplicitAutograd")

_FUNCTIONAL = [
    _op(row) for row in COLLECTIVES.values() if not row.mutates and row.name != "wait_tensor"
]
