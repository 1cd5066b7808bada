"""An op or a function once for each rank, and the ranks' results as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch, matrix_products, rank_stacks, rng
from fcoll.local.call_arguments import mapped
from fcoll.local.errors import RanksDiffer
from fcoll.local.ints import int_on_rank, is_local_int, local_int
from fcoll.local.local_tensor import LocalTensor, apart, stacked
from fcoll.local.op_kinds import Kind

Order = tuple[int, ...]
aten = torch.ops.aten


def on_rank(value: Any, rank: int) -> Any:
    """An argument as one rank has it."""
    if isinstance(value, LocalTensor):
        return value._tensors()[rank]
    if is_local_int(value):
        return int_on_rank(value.node, rank)
    return value


def by_rank(func: Any, args: Any, kwargs: dict[str, Any], order: Order, how: Kind) -> Any:
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
    call = _with_room(func) if func.overloadpacket in _RESIZING else func
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


def without_tensors(func: Any, args: Any, kwargs: dict[str, Any], order: Order, how: Kind) -> Any:
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
            return stacked(rank_stacks.expanded(value, len(order)), order)
        return combine(dict.fromkeys(order, value)) if isinstance(value, Tensor) else value

    return mapped(spread, result)


def _with_room(func: Any) -> Callable[..., Tensor]:
    """resize_ and resize_as_ of one rank's tensor, which is copied if its memory cannot grow."""

    def resized(t: Tensor, new: Any, **options: Any) -> Tensor:
        memory = t.untyped_storage()
        elements = memory.nbytes() // max(1, t.element_size())
        size = new.shape if isinstance(new, Tensor) else new
        if not memory.resizable() and t.storage_offset() + _torch.numel(size) > elements:
            copy = t.as_strided((elements,), (1,), 0).clone()
            t = copy.as_strided(t.shape, t.stride(), t.storage_offset())
        return func(t, new, **options)

    return resized


_RESIZING = (aten.resize_, aten.resize_as_)


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
