"""Run an op or a function for all ranks: on the stack, under vmap, or rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch, elementwise, matrix_products, rank_memory, rng, rows
from fcoll.local.elementwise import NotStackable
from fcoll.local.errors import RanksDiffer
from fcoll.local.ints import int_on_rank, is_local_int, local_int
from fcoll.local.local_tensor import LocalTensor, apart, stacked
from fcoll.local.op_kinds import Kind, kind
from fcoll.local.scan import Seen, mapped

Order = tuple[int, ...]
# What a call on stacks may raise though the ranks' own calls are right, or wrong in other words: it
# cannot be made so, or torch has no such kernel, or complains of the stack's shapes. Anything else
# is a defect of this package and must be seen.
_NOT_ON_STACKS = (NotStackable, RuntimeError, IndexError, ValueError, TypeError)
aten = torch.ops.aten


def run(func: Any, args: Any, kwargs: dict[str, Any], seen: Seen, order: Order) -> Any:
    """The op for every rank of ``order``; ``seen`` is what its arguments hold."""
    how = kind(func)
    if special := _SPECIAL.get(func):
        result = special(args, kwargs, order)
        if result is not None:
            return result
    if how.way != "loop" and not seen.local_ints and seen.locals:
        try:
            return _on_stacks(func, args, kwargs, seen, order, how)
        except _NOT_ON_STACKS:
            pass  # the loop runs it, or says what is wrong in one rank's shapes
    if not seen.locals and not seen.local_ints:
        return _factory(func, args, kwargs, order, how)
    return loop(func, args, kwargs, order, how)


def _on_stacks(
    func: Any, args: Any, kwargs: dict[str, Any], seen: Seen, order: Order, how: Kind
) -> Any:
    stacks = {id(x): _stack(x, how) for x in seen.locals}
    if all(map(rows.rows_overlap, stacks.values())):  # never of a view or a write
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
    stack = x._as_stack(limit=rows.STACK_BYTES)
    if stack is None:
        raise NotStackable
    # most stacks have no dim of size 1: asked here, since all the rest takes 2 us an input
    if 1 in stack.shape and rows.reorders(stack.shape[1:], stack.stride()[1:], stack.stride(0)):
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
    expand = lambda v: rows.expanded(v, n) if isinstance(v, Tensor) else v  # noqa: E731
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

    return rank_memory.view(call, stack)


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
            rows.empty_stack(one, t.shape[0]).copy_(t) if isinstance(t, Tensor) else t
            for t, one in zip(flat, ones, strict=True)
        ]
    return type(results)(flat) if isinstance(results, (tuple, list)) else flat[0]


def _plain_rows(stack: Tensor) -> bool:
    return not rows.rows_overlap(stack) and stack[0].is_contiguous()


# ---- rank by rank


def on_rank(value: Any, rank: int) -> Any:
    """An argument as one rank has it."""
    if isinstance(value, LocalTensor):
        return value._tensors()[rank]
    if is_local_int(value):
        return int_on_rank(value.node, rank)
    return value


def loop(func: Any, args: Any, kwargs: dict[str, Any], order: Order, how: Kind) -> Any:
    """The op once for each rank."""
    if plain := _plain_targets(args, kwargs, how):
        return _onto_plain(func, args, kwargs, order, how, plain)
    if how.outs:
        return _to_out(func, args, kwargs, order, how)
    if how.moves:
        return _moved(func, args, kwargs, order, how)
    if how.placed and not how.mutates:
        args, kwargs = (
            mapped(matrix_products.in_own_memory, args),
            mapped(matrix_products.in_own_memory, kwargs),
        )
    results = each_rank(func, args, kwargs, order, random=how.random)
    fill = None
    if func is aten.split.Tensor:
        fill = lambda t: t.narrow(args[2] if len(args) > 2 else 0, 0, 0)  # noqa: E731
    combined = combine(results, fill=fill, owned=not how.view and not how.mutates)
    return _named(func, args, kwargs, combined, how)


def _named(func: Any, args: Any, kwargs: dict[str, Any], combined: Any, how: Kind) -> Any:
    """The results, with the arguments themselves where the op returns what it wrote."""
    if any(how.written):
        found = [
            w if w is None else (args[w[0]] if w[0] < len(args) else kwargs[w[1]])
            for w in how.written
        ]
        if len(found) == 1:
            return found[0]
        return tuple(c if f is None else f for c, f in zip(combined, found, strict=True))
    return _torch.correct_aliasing(func, args, kwargs, combined) if how.view else combined


def _moved(func: Any, args: Any, kwargs: dict[str, Any], order: Order, how: Kind) -> Any:
    """transpose_, resize_, ...: each rank's tensor changes, and then the wrapper's shape."""
    target = args[0]
    call = rank_memory.with_room(func) if func.overloadpacket in rank_memory.RESIZING else func
    results = each_rank(call, args, kwargs, order, random=False)
    if isinstance(target, LocalTensor):
        target._take_meta(apart(results))
    return target


def _plain_targets(args: Any, kwargs: dict[str, Any], how: Kind) -> list[Tensor]:
    """The plain tensors that the op would write to."""
    found: list[Tensor] = []
    for position, name in how.writes:
        given = args[position] if position < len(args) else kwargs.get(name)
        for t in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(t, Tensor) and not isinstance(t, LocalTensor):
                found.append(t)
    return found


def _onto_plain(
    func: Any, args: Any, kwargs: dict[str, Any], order: Order, how: Kind, targets: list[Tensor]
) -> Any:
    """A plain tensor is the same on all ranks: what they write to it must be, too."""
    written: dict[int, list[Tensor]] = {}
    for r in order:
        copies = {id(t): t.clone() for t in targets}
        put = lambda v: copies.get(id(v), v)  # noqa: E731, B023
        each_rank(func, mapped(put, args), mapped(put, kwargs), (r,), random=how.random)
        written[r] = list(copies.values())
    first = written[order[0]]
    for r in order[1:]:
        if not all(map(_same_values, written[r], first)):
            what = f"{func} writes the values of ranks {order[0]} and {r} to one plain tensor"
            hint = "Make it in the LocalTensorMode, or by LocalTensor({rank: tensor})."
            raise RanksDiffer(what=what, hint=hint)
    for target, value in zip(targets, first, strict=True):
        target.copy_(value)
    return _named(func, args, kwargs, None, how)


def _same_values(a: Tensor, b: Tensor) -> bool:
    if a.is_floating_point() or a.is_complex():
        return bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())
    return torch.equal(a, b)


def _to_out(func: Any, args: Any, kwargs: dict[str, Any], order: Order, how: Kind) -> Any:
    """New tensors, then written to ``out=``, or put in its place if of another size."""
    targets = [kwargs[name] for name in how.outs]
    local = [n for n, t in zip(how.outs, targets, strict=True) if isinstance(t, LocalTensor)]

    def call(*given: Any, **named: Any) -> Any:
        return func(*given, **{**named, **{n: named[n].new_empty(0) for n in local}})

    results = each_rank(call, args, kwargs, order, random=how.random)
    for i, target in enumerate(targets):
        if isinstance(target, LocalTensor):
            new = {r: v if isinstance(v, Tensor) else v[i] for r, v in results.items()}
            if all(t.shape == target._tensors()[r].shape for r, t in new.items()):
                for r, t in new.items():
                    target._tensors()[r].copy_(t)
            else:
                target._take_meta(apart(new, owned=True))
    if not func._schema.returns:
        return None
    return targets[0] if len(targets) == 1 else tuple(targets)


def each_rank(
    func: Callable[..., Any], args: Any, kwargs: Any, order: Sequence[int], *, random: bool
) -> dict[int, Any]:
    """``func`` on each rank's arguments, each rank with its own random state."""
    results = {}
    states = rng.ranks_states(order) if random else None
    for r in order:
        put = lambda v: on_rank(v, r)  # noqa: E731, B023
        given, named = mapped(put, args), mapped(put, kwargs)
        if states is None:
            results[r] = func(*given, **named)
        else:
            with states.of(r):
                results[r] = func(*given, **named)
    return results


def _factory(func: Any, args: Any, kwargs: dict[str, Any], order: Order, how: Kind) -> Any:
    """A call without tensors: all ranks get the same."""
    if how.random and rng.ranks_states(order).differ:
        return combine(each_rank(func, args, kwargs, order, random=True), owned=True)
    if how.random:
        with rng.ranks_states(order).of_all():
            result = func(*args, **kwargs)
    else:
        result = func(*args, **kwargs)

    def spread(value: Any) -> Any:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            return stacked(rows.expanded(value, len(order)), order)
        return combine(dict.fromkeys(order, value)) if isinstance(value, Tensor) else value

    return mapped(spread, result)


# ---- results of ranks


def combine(
    results: Mapping[int, Any],
    *,
    fill: Callable[[Tensor], Tensor] | None = None,
    owned: bool = False,
) -> Any:
    """One result a rank -> one: tensors to LocalTensors, ints to ints of each rank."""
    first = next(iter(results.values()))
    if isinstance(first, (list, tuple)):
        return _combined_lists(results, first, fill, owned)
    if isinstance(first, dict):
        return {
            k: combine({r: v[k] for r, v in results.items()}, fill=fill, owned=owned) for k in first
        }
    if isinstance(first, Tensor):
        if any(t.requires_grad for t in results.values()):
            return LocalTensor(results)  # it says what to do
        return apart(_waited(results), owned=owned)
    if isinstance(first, (int, torch.SymInt)):
        return local_int(results)
    if isinstance(first, torch.device):
        if any(v.type != first.type for v in results.values()):
            what = f"results are on {sorted({v.type for v in results.values()})}"
            raise RanksDiffer(what=what, hint="Use one type of device on all ranks.")
        return first
    if not all(v == first for v in results.values()):
        what = f"results that are no tensor or int must be equal, and are {dict(results)}"
        raise RanksDiffer(what=what, hint="Return tensors or ints.")
    return first


def _waited(results: Mapping[int, Any]) -> dict[int, Tensor]:
    wait = _torch.AsyncCollectiveTensor
    return {r: t.wait() if isinstance(t, wait) else t for r, t in results.items()}


def _combined_lists(
    results: Mapping[int, Any], first: Any, fill: Callable[[Tensor], Tensor] | None, owned: bool
) -> Any:
    length = max(len(v) for v in results.values())

    def item(values: Any, i: int) -> Any:
        if i < len(values):
            return values[i]
        if fill is None or not values:
            what = f"they return {length} and {len(values)} values"
            raise RanksDiffer(what=what, hint="Return as many on each rank.")
        return fill(values[0])

    out = [
        combine({r: item(v, i) for r, v in results.items()}, fill=fill, owned=owned)
        for i in range(length)
    ]
    return type(first)(*out) if hasattr(first, "_fields") else type(first)(out)


# ---- ops with a shorter way


def _scalar(args: Any, kwargs: dict[str, Any], order: Order) -> Any:
    stack = args[0]._stack
    if stack is None:
        return None
    return combine(dict(zip(order, stack.reshape(-1).tolist(), strict=True)))


_SPECIAL: dict[Any, Callable[[Any, dict[str, Any], Order], Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.set_.source_Storage: rank_memory.check_storage,
    aten.set_.source_Storage_storage_offset: rank_memory.check_storage,
}
