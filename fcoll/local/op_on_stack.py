"""An op on the stack of all ranks' tensors, in one call: as it is, or under vmap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch, elementwise, matrix_products, rank_stacks
from fcoll.local.call_arguments import Seen, mapped
from fcoll.local.elementwise import NotStackable
from fcoll.local.local_tensor import LocalTensor, stacked
from fcoll.local.op_kinds import Kind

Order = tuple[int, ...]


def on_stack(
    func: Any, args: Any, kwargs: dict[str, Any], seen: Seen, order: Order, how: Kind
) -> Any:
    """The op as one call for all ranks; NotStackable if it must go rank by rank."""
    stacks = {id(x): _stack(x, how) for x in seen.locals}
    if all(map(rank_stacks.rows_overlap, stacks.values())):  # never of a view or a write
        results = _same_on_all(func, args, kwargs, stacks)
    elif how.way == "view":
        results = _view(func, args, kwargs, stacks)
    elif how.way == "vmap":
        results = _vmapped(func, args, kwargs, stacks, order)
    elif how.way == "product":
        given = stacks | {id(t): t.expand(len(order), *t.shape) for t in seen.tensors}
        results = matrix_products.PRODUCTS[func](*_given(args, given), **kwargs)
    elif how.way == "shapeless":
        results = _shapeless(func, args, kwargs, stacks)
    else:
        results = _elementwise(func, args, kwargs, stacks, seen, how)
    return _wrapped(func, args, kwargs, results, order, how)


def _stack(x: LocalTensor, how: Kind) -> Tensor:
    if how.mutates or how.view:
        if x._stack is not None:
            return x._own_stack()
        if not x._owned:
            raise NotStackable  # its memory is somebody else's, too: write and view there
    stack = x._as_stack(limit=rank_stacks.STACK_BYTES)
    if stack is None:
        raise NotStackable
    # most stacks have no dim of size 1: asked here, since all the rest takes 2 us an input
    if 1 in stack.shape and rank_stacks.reorders(
        stack.shape[1:], stack.stride()[1:], stack.stride(0)
    ):
        raise NotStackable
    return stack


def _wrapped(
    func: Any, args: Any, kwargs: dict[str, Any], results: Any, order: Order, how: Kind
) -> Any:
    many = isinstance(results, (tuple, list))
    out = []
    for i, result in enumerate(results if many else (results,)):
        target = how.written[i] if i < len(how.written) else None
        if target is not None:
            position, name = target
            out.append(args[position] if position < len(args) else kwargs[name])
        else:
            out.append(stacked(result, order) if isinstance(result, Tensor) else result)
    made = type(results)(out) if many else out[0]
    return _torch.correct_aliasing(func, args, kwargs, made) if how.view else made


# ---- on the stack


def _same_on_all(func: Any, args: Any, kwargs: dict[str, Any], stacks: Mapping[int, Tensor]) -> Any:
    """All ranks have the same values: one call for all of them."""
    row = lambda v: stacks[id(v)][0] if id(v) in stacks else v  # noqa: E731
    n = next(iter(stacks.values())).shape[0]
    expand = lambda v: rank_stacks.expanded(v, n) if isinstance(v, Tensor) else v  # noqa: E731
    return mapped(expand, func(*mapped(row, args), **mapped(row, kwargs)))


def _elementwise(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    stacks: Mapping[int, Tensor],
    seen: Seen,
    how: Kind,
) -> Any:
    others = seen.tensors
    elementwise.check_promotion(list(stacks.values()), others)
    dims = max([s.dim() - 1 for s in stacks.values()] + [t.dim() for t in others])
    if how.mutates and (id(args[0]) not in stacks or stacks[id(args[0])].dim() - 1 != dims):
        raise NotStackable
    lined = {key: elementwise.aligned(s, dims) for key, s in stacks.items()}
    if _is_exact(how, (*lined.values(), *others)) or not _depends_on_place(lined.values(), others):
        return func(*_given(args, lined), **_given(kwargs, lined))
    return _padded(func, args, kwargs, lined, others, how)


def _is_exact(how: Kind, tensors: Sequence[Tensor]) -> bool:
    return how.exact_complex or (how.exact and not any(t.is_complex() for t in tensors))


def _depends_on_place(stacks: Any, others: Sequence[Tensor]) -> bool:
    tensors = (*stacks, *others)
    if not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return False
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    dense = all(t.is_contiguous() and t.shape == shape for t in stacks)
    return not (dense and elementwise.same_place(shape.numel()))


def _padded(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    lined: Mapping[int, Tensor],
    others: Sequence[Tensor],
    how: Kind,
) -> Any:
    tensors = {**lined, **{id(t): t for t in others if t.dim() > 0}}
    shape = torch.broadcast_shapes(*(t.shape for t in tensors.values()))
    if not all(s[0].is_contiguous() for s in lined.values()):
        raise NotStackable  # the results' strides are the ranks' own
    keys = list(tensors)

    def call(*wide: Tensor) -> Any:
        given = dict(zip(keys, wide, strict=True))
        return func(*_given(args, given), **_given(kwargs, given))

    operands = [t.expand(shape) for t in tensors.values()]
    results = elementwise.padded(call, operands, shape[1:])
    if how.mutates:
        lined[id(args[0])].copy_(results[0])
        return lined[id(args[0])]
    return results[0] if len(results) == 1 else results


def _given(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    """The arguments with tensors put in by identity; no lists inside (elementwise ops)."""
    if isinstance(value, dict):
        return {k: tensors.get(id(v), v) for k, v in value.items()}
    return [tensors.get(id(v), v) for v in value]


def _shapeless(
    func: Any, args: Any, kwargs: dict[str, Any], stacks: Mapping[int, Tensor]
) -> Tensor:
    if kwargs.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        raise NotStackable  # channels last counts dims
    return func(*_given(args, stacks), **_given(kwargs, stacks))


def _view(func: Any, args: Any, kwargs: dict[str, Any], stacks: Mapping[int, Tensor]) -> Any:
    if len(stacks) != 1:
        raise NotStackable
    ((key, stack),) = stacks.items()

    def call(row: Tensor) -> Any:
        put = lambda v: row if id(v) == key else v  # noqa: E731
        return func(*mapped(put, args), **mapped(put, kwargs))

    return _view_of_rows(call, stack)


def _view_of_rows(call: Callable[[Tensor], Any], stack: Tensor) -> Any:
    """A view op on the stack: ``call`` is it on the first rank's row, and all others lie alike."""
    inside, bits = rank_stacks.width(stack), (stack.dtype, stack.is_conj(), stack.is_neg())

    def of_all(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        offset, shape, strides = t.storage_offset(), t.shape, t.stride()
        if bits != (t.dtype, t.is_conj(), t.is_neg()) or not _torch.same_storage(t, stack):
            raise NotStackable
        if offset + rank_stacks.extent(shape, strides) > inside:  # in the next rank's memory
            raise NotStackable
        return stack.as_strided((stack.shape[0], *shape), (stack.stride(0), *strides), offset)

    return mapped(of_all, call(stack[0]))


# ---- under vmap


def _vmapped(
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    stacks: Mapping[int, Tensor],
    order: Order,
) -> Any:
    def call(batch: Callable[[Tensor], Tensor], unbatch: Callable[[Tensor], Tensor]) -> Any:
        lifted = {key: batch(s) for key, s in stacks.items()}
        put = lambda v: lifted.get(id(v), v)  # noqa: E731
        out = func(*mapped(put, args), **mapped(put, kwargs))
        return mapped(lambda v: unbatch(v) if isinstance(v, Tensor) else v, out)

    results = _torch.vmapped(len(order), call)

    def first_row() -> Any:
        put = lambda v: stacks[id(v)][0] if id(v) in stacks else v  # noqa: E731
        return func(*mapped(put, args), **mapped(put, kwargs))

    return _fresh(results, first_row)


def _fresh(results: Any, first_row: Callable[[], Any]) -> Any:
    """Results with rows of their own, whose strides are those of a call on one rank."""
    flat = results if isinstance(results, (tuple, list)) else [results]
    if any(isinstance(t, Tensor) and not _plain_rows(t) for t in flat):
        row = first_row()
        ones = row if isinstance(row, (tuple, list)) else [row]
        flat = [
            rank_stacks.empty_stack(one, t.shape[0]).copy_(t) if isinstance(t, Tensor) else t
            for t, one in zip(flat, ones, strict=True)
        ]
    return type(results)(flat) if isinstance(results, (tuple, list)) else flat[0]


def _plain_rows(stack: Tensor) -> bool:
    return not rank_stacks.rows_overlap(stack) and stack[0].is_contiguous()
