"""Collectives on LocalTensors: on the stack by the table's rules, else group by group.

A call is made for all groups at once: the ranks' groups come from ``groups.py``. In a group that
not all ranks have a counterpart of, the other ranks make no call and keep what they have.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fcoll.local import groups, reduce, rows
from fcoll.local.tensor import LocalTensor, apart, stacked

# What each rank of a group gets from the ranks' tensors, in the group's order.
OnGroup = Callable[[list[Tensor], Mapping[str, Any]], list[Tensor]]


@dataclass(frozen=True)
class Result:
    """What the ranks that made the call get: rows of a stack, or a tensor each."""

    ranks: tuple[int, ...]
    stack: Tensor | None = None
    parts: Mapping[int, Tensor] | None = None

    def items(self) -> Any:
        if self.parts is not None:
            return self.parts.items()
        assert self.stack is not None
        return zip(self.ranks, rows.unbound(self.stack), strict=True)


@dataclass(frozen=True)
class Calling:
    """Who makes a call together: the groups, their ranks, and the groups as rows of a stack."""

    groups: groups.Groups
    ranks: tuple[int, ...]
    partition: Any


# group -> ranks of a tensor -> (all groups that it was made from, Calling)
_calling: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def calling(group: Any, order: tuple[int, ...]) -> Calling:
    """Kept: to sort 64 ranks and look them up would take as long as the rest of a collective."""
    everyone, kept = groups.groups_of(group), _calling.setdefault(group, {})
    found = kept.get(order)
    if found is None or found[0] is not everyone:  # a mesh of this group was made since
        from fcoll.table.partition import Partition  # not at import: this may be served early

        made = groups.calling(group, order)
        ranks = tuple(sorted(r for g in made for r in g))
        place = {r: i for i, r in enumerate(ranks)}
        partition = Partition(tuple(tuple(place[r] for r in g) for g in made))
        found = kept[order] = everyone, Calling(made, ranks, partition)
    return found[1]


def run(name: str, x: LocalTensor, group: Any, **args: Any) -> Result:
    """The collective of this row of the table, for all ranks of ``x``."""
    local(x)
    who = calling(group, x._order)
    x, args = _reducing(x, args)
    stack = x._as_stack()
    if stack is not None and not _ragged(args) and stack.layout is torch.strided:
        _check(name, stack.shape[1:], len(who.groups[0]), args)
        if who.ranks != x._order:
            stack = stack[[x._order.index(r) for r in who.ranks]]
        return Result(who.ranks, stack=_rule(name)(stack, args, who.partition))
    if name not in ON_GROUP or args.get("dim"):
        from fcoll.errors import RaggedRanks

        raise RaggedRanks(op=name, why="the ranks' tensors have different shapes")
    parts: dict[int, Tensor] = {}
    for g in who.groups:
        mine = [x._tensors()[r] for r in g]
        for t in mine:
            _check(name, t.shape, len(g), args)
        given = {k: _of_ranks(v, g) for k, v in args.items()}
        parts |= zip(g, ON_GROUP[name](mine, given), strict=True)
    return Result(who.ranks, parts=parts)


def local(x: Any, what: str = "Input") -> LocalTensor:
    if not isinstance(x, LocalTensor):
        raise AssertionError(f"{what} tensor must be a LocalTensor")
    return x


def _rule(name: str) -> Callable[..., Tensor]:
    from fcoll.table.collectives import COLLECTIVES

    rule = COLLECTIVES[name].stacked
    assert rule is not None, name
    return rule


def _reducing(x: LocalTensor, args: dict[str, Any]) -> tuple[LocalTensor, dict[str, Any]]:
    if "reduce_op" not in args:
        return x, args
    name = reduce.name_of(args["reduce_op"])
    if name == "premul_sum":
        scaled = {}
        for r, t in x._tensors().items():
            scaled[r], name = reduce.prepared(t, args["reduce_op"])
        x = apart(scaled, owned=True)
    return x, {**args, "reduce_op": name}


def _ragged(args: Mapping[str, Any]) -> bool:
    """Do splits or sizes make results of different shapes, or differ between ranks?"""
    given = (args.get(name) for name in ("input_split_sizes", "output_split_sizes", "sizes"))
    splits = [n for sizes in given for n in sizes or ()]
    return any(isinstance(s, torch.SymInt) for s in splits) or len(set(splits)) > 1


def _of_ranks(value: Any, ranks: Sequence[int]) -> Any:
    """Splits as each rank of a group has them."""
    from fcoll.local.over_ranks import on_rank

    if isinstance(value, (list, tuple)) and any(isinstance(v, (int, torch.SymInt)) for v in value):
        return [[int(on_rank(v, r)) for v in value] for r in ranks]
    return value


def _check(name: str, shape: Sequence[int], n: int, args: Mapping[str, Any]) -> None:
    """A scattered dim must be divisible: torch's own simulation drops the rest."""
    if (name == "reduce_scatter_tensor" and not args.get("sizes")) or (
        name == "all_to_all_single" and not args.get("input_split_sizes")
    ):
        size = shape[0] if shape else 0
        if not shape or size % n:
            from fcoll.errors import UnevenShard

            facts = {"group": n, "dim": 0, "size": size, "n": n, "padded": -(-size // n) * n}
            raise UnevenShard(op=name, remedy="output_split_sizes= and input_split_sizes=", **facts)


# ---- what comes out


def fresh(result: Result, x: LocalTensor) -> LocalTensor:
    """A new LocalTensor of the result; ranks that made no call have a copy of theirs."""
    if result.ranks == x._order and result.stack is not None:
        return stacked(result.stack, x._order)
    parts = {r: t.clone() for r, t in result.items()}
    others = {r: t.clone() for r, t in x._tensors().items() if r not in parts}
    return apart({r: parts[r] if r in parts else others[r] for r in x._order})


def cut(result: Result, outs: Sequence[LocalTensor]) -> list[Result]:
    """The result cut up into one for each of these tensors, one behind the other."""
    if len(outs) == 1:
        return [result]
    if result.stack is not None:
        flat = result.stack.flatten(1)
        return [Result(result.ranks, x) for x in flat.split([out.numel() for out in outs], 1)]
    cuts = {}
    for r, t in result.items():
        cuts[r] = t.reshape(-1).split([local(out, "Output")._tensors()[r].numel() for out in outs])
    return [
        Result(result.ranks, None, {r: c[i] for r, c in cuts.items()}) for i in range(len(outs))
    ]


def write(
    result: Result, out: LocalTensor, only: Sequence[int] | None = None, take: bool = True
) -> None:
    """Write the result into the tensors of the ranks that made the call (of ``only`` these); where
    it has memory of its own, they may take that instead."""
    local(out, "Output")
    whole = only is None and result.ranks == out._order
    if whole and out._stack is not None and result.stack is not None:
        if not take or not out._replace_stack(result.stack):
            own = out._own_stack()
            own.copy_(result.stack.reshape(own.shape))
        return
    for r, t in result.items():
        if only is None or r in only:
            target = out._tensors()[r]
            target.copy_(t.reshape(target.shape))


# ---- group by group, where shapes differ


def _all_reduce(xs: list[Tensor], args: Mapping[str, Any]) -> list[Tensor]:
    return [t.clone() for t in [_folded(xs, args)] * len(xs)]


def _folded(xs: list[Tensor], args: Mapping[str, Any]) -> Tensor:
    from fcoll.reductions import fold, reduction

    return fold(reduction("all_reduce", args["reduce_op"]), torch.stack(xs))


def _all_gather(xs: list[Tensor], args: Mapping[str, Any]) -> list[Tensor]:
    whole = torch.cat([t.reshape(1) if t.dim() == 0 else t for t in xs])
    return [whole.clone() for _ in xs]


def _reduce_scatter(xs: list[Tensor], args: Mapping[str, Any]) -> list[Tensor]:
    whole, sizes = _folded(xs, args), args.get("sizes")  # the same on all ranks
    return [t.clone() for t in (whole.split(sizes[0]) if sizes else whole.chunk(len(xs)))]


def _all_to_all(xs: list[Tensor], args: Mapping[str, Any]) -> list[Tensor]:
    n = len(xs)
    splits = args.get("input_split_sizes") or [[x.shape[0] // n] * n for x in xs]
    sent = [x.split(s) for x, s in zip(xs, splits, strict=True)]
    for i, wanted in enumerate(args.get("output_split_sizes") or ()):
        found = [sent[j][i].shape[0] for j in range(n)]
        if list(wanted) != found:
            raise ValueError(
                f"all_to_all: rank {i} of the group waits for {list(wanted)} rows, and the chunks "
                f"sent to it have {found}"
            )
    return [torch.cat([sent[j][i] for j in range(n)]) for i in range(n)]


def _shard_dim_alltoall(xs: list[Tensor], args: Mapping[str, Any]) -> list[Tensor]:
    whole, dim = torch.cat(xs, args["gather_dim"]), args["shard_dim"]
    step = whole.shape[dim] // len(xs)
    return [whole.narrow(dim, i * step, step).clone() for i in range(len(xs))]


def _broadcast(xs: list[Tensor], args: Mapping[str, Any]) -> list[Tensor]:
    return [xs[args["src"]].clone() for _ in xs]


def _permute(xs: list[Tensor], args: Mapping[str, Any]) -> list[Tensor]:
    dst = list(args["dst"])
    return [
        xs[dst.index(i)].clone() if i in dst else torch.zeros_like(xs[i]) for i in range(len(xs))
    ]


ON_GROUP: dict[str, OnGroup] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "shard_dim_alltoall": _shard_dim_alltoall,
    "broadcast": _broadcast,
    "permute": _permute,
}
