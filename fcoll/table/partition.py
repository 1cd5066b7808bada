"""The groups of one collective as all W ranks see them, and how stacked tensors are cut by them.

A stacked tensor holds one tensor of each rank: ``x_W`` is [W, ...], the leading dim is the rank.
Where groups are rows or columns of a mesh, cutting is a view; other groups go through an index.

Shape suffixes: W all ranks; n ranks of a group; A, S the groups before and behind them in the
order of ranks, so that W = A * n * S. ``members`` puts n first: [n, A, S, ...].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fcoll import _torch
from fcoll.errors import UnknownGroup
from fcoll.transport.native import build

_CACHE_BYTES, _CACHE_ENTRIES = 1 << 16, 64  # of starts of sums, and how many
_FEW = 1 << 13  # elements whose strides do not matter
_SMALL = 1 << 18  # elements that are sooner copied than added one slice after the other
_LARGE_BYTES = 32 << 20  # glibc takes fresh memory for every block from here on


@dataclass(frozen=True)
class Partition:
    """Every rank in one group: ``groups`` are global ranks, each group in the order of its own.

    >>> tp = Partition.along((4, 2), 1)  # of a mesh with dp=4, tp=2
    >>> tp.groups
    ((0, 1), (2, 3), (4, 5), (6, 7))
    >>> tp.n, tp.grid, Partition.of([[0, 1, 3], [2]]).is_even
    (2, (4, 2, 1), False)
    """

    groups: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, groups: Partition | Sequence[Sequence[int]], world: int | None = None) -> Partition:
        """Checked: every rank 0 to W - 1 is in just one group."""
        if isinstance(groups, Partition):
            return groups
        members = tuple(tuple(int(r) for r in ranks) for ranks in groups)
        listed = sorted(r for ranks in members for r in ranks)
        size = len(listed) if world is None else world
        if not members or listed != list(range(size)) or not all(members):
            hint = f"Every rank 0 to {size - 1} must be in one of them, once. "
            raise UnknownGroup(group=[list(g) for g in members], hint=hint)
        return cls(members)

    @classmethod
    def whole(cls, world: int) -> Partition:
        return cls((tuple(range(world)),))

    @classmethod
    def along(cls, shape: Sequence[int], *axes: int) -> Partition:
        """The groups of a mesh of this shape that span one axis, or several at once."""
        ranks = _cpu_range(shape).movedim(axes, tuple(range(-len(axes), 0)))
        rows = ranks.reshape(-1, ranks[(0,) * (len(shape) - len(axes))].numel())
        return cls(tuple(map(tuple, rows.tolist())))

    @cached_property
    def world(self) -> int:
        return sum(map(len, self.groups))

    @cached_property
    def n(self) -> int:
        """The size of the first group; of each, if they are even."""
        return len(self.groups[0])

    @cached_property
    def is_even(self) -> bool:
        """Have all groups the same size?"""
        return all(len(g) == self.n for g in self.groups)

    @cached_property
    def in_order(self) -> bool:
        """Have the members of each group the order of their global ranks?"""
        return all(g == tuple(sorted(g)) for g in self.groups)

    @cached_property
    def sums_at_once(self) -> bool:
        """Can all groups be summed rank by rank in the order of global ranks?"""
        return self.is_even and self.n > 1 and self.in_order

    @cached_property
    def grid(self) -> tuple[int, int, int] | None:
        """(A, n, S) if rank = (a * n + i) * S + s is member i of group (a, s), else None."""
        if not self.is_even:
            return None
        n, first = self.n, self.groups[0]
        S = first[1] - first[0] if n > 1 else 1
        if S < 1 or self.world % (n * S):
            return None
        A = self.world // (n * S)
        regular = (
            tuple(range(start, start + n * S, S))
            for a in range(A)
            for start in range(a * n * S, a * n * S + S)
        )
        same = all(g == r for g, r in zip(sorted(self.groups), regular, strict=True))
        return (A, n, S) if same else None

    @cached_property
    def by_size(self) -> list[tuple[list[int], Partition]]:
        """Groups of one size each: their ranks, and their partition counted within these."""
        sizes: dict[int, list[tuple[int, ...]]] = {}
        for g in self.groups:
            sizes.setdefault(len(g), []).append(g)
        partitions = []
        for groups in sizes.values():
            ranks = sorted(r for g in groups for r in g)
            place = {r: i for i, r in enumerate(ranks)}
            partitions.append((ranks, Partition(tuple(tuple(place[r] for r in g) for g in groups))))
        return partitions

    @cached_property
    def rank_in_group(self) -> list[int]:
        """By global rank."""
        group_of = [0] * self.world
        for g in self.groups:
            for i, r in enumerate(g):
                group_of[r] = i
        return group_of

    # -- stacked tensors, cut by even groups ---

    def members(self, x_W: Tensor) -> Tensor:
        """[W, ...] -> [n, A, S, ...]: a view of a mesh, else a copy."""
        if self.grid is not None:
            A, n, S = self.grid  # by view and transpose: unflatten and movedim take 10 us more
            if A == 1:
                return x_W.view(n, 1, S, *x_W.shape[1:])
            return x_W.view(A, n, S, *x_W.shape[1:]).transpose(0, 1)
        ordered = x_W.index_select(0, self._index("members", x_W))
        return ordered.unflatten(0, (self.n, len(self.groups), 1))

    def placed(self, parts: Tensor) -> Tensor:
        """[n, A, S, ...] -> [W, ...], a new tensor: what ``members`` cut, put back."""
        if self.grid is not None:
            x = parts.transpose(0, 1)
            return _contiguous(x).view(self.world, *x.shape[3:])
        return parts.flatten(0, 2).index_select(0, self._index("place", parts))

    def spread(self, y: Tensor) -> Tensor:
        """[A, S, ...] -> [W, ...]: what a group has, on each of its ranks.

        One group of all ranks is expanded, not copied: W=64 x 1 MiB all_gather 682 ms -> 20 ms.
        """
        if len(self.groups) == 1:
            return y[0].expand(self.world, *y.shape[2:])
        if self.grid is not None and _torch.tracing():
            A, n, S = self.grid
            return y.unsqueeze(1).expand(A, n, S, *y.shape[2:]).reshape(A * n * S, *y.shape[2:])
        return y.flatten(0, 1).index_select(0, self._index("group", y))

    def summed(self, x_W: Tensor, zero: complex) -> Tensor:
        """[W, ...] -> [groups, ...]: each group's sum, added rank by rank, of groups that sum at
        once, on a CPU and in no trace. The zeros that it starts from are cached if small.

        index_add adds one slice after the other: 64 x 1 KiB in 8 us, by torch.add 112.
        """
        back: list[int] = []
        if x_W.numel() > _FEW and not x_W.is_contiguous():
            x_W, back = _dense(x_W)
        shape, dtype = (len(self.groups), *x_W.shape[1:]), x_W.dtype
        start = self._cache.get((shape, dtype))
        if start is None:
            with torch.inference_mode(False):
                start = torch.full(shape, zero, dtype=dtype, device="cpu")
            if start.nbytes <= _CACHE_BYTES and len(self._cache) < _CACHE_ENTRIES:
                self._cache[shape, dtype] = start
        total = start.index_add(0, self.group_index(x_W), x_W)
        return total.permute(back).contiguous() if back else total

    def group_index(self, like: Tensor) -> Tensor:
        """The group of each rank; in no trace."""
        index = self._cache.get(("group", like.device))
        return self._index("group", like) if index is None else index

    def only_on(self, rank: int, y: Tensor) -> Tensor:
        """[A, S, ...] -> [W, ...]: on this rank of each group, zeros elsewhere."""
        if self.grid is not None:
            out = y.new_zeros((self.world, *y.shape[2:]))
            self.members(out)[rank].copy_(y)
            return out
        none = y.new_zeros((1, *y.shape[2:]))
        group = torch.tensor(self._indices["group"], device=y.device)
        on = torch.tensor(self.rank_in_group, device=y.device) == rank
        at = group.where(on, len(self.groups))
        return torch.cat([y.flatten(0, 1), none]).index_select(0, at)

    # -- indices ---

    @cached_property
    def _indices(self) -> dict[str, list[int]]:
        members = [g[i] for i in range(self.n) for g in self.groups]
        place, group = [0] * self.world, [0] * self.world
        for at, r in enumerate(members):
            place[r] = at
        for at, g in enumerate(sorted(self.groups) if self.grid else self.groups):
            for r in g:
                group[r] = at
        return {"members": members, "place": place, "group": group}

    @cached_property
    def _cache(self) -> dict[Any, Tensor]:
        return {}

    def _index(self, which: str, like: Tensor) -> Tensor:
        """Kept as a tensor, except in a trace, where it would be one of the trace's own."""
        if _torch.tracing():
            return torch.tensor(self._indices[which], device=like.device)
        key = which, like.device
        if key not in self._cache:
            with torch.inference_mode(False):
                self._cache[key] = torch.tensor(self._indices[which], device=like.device)
        return self._cache[key]


def _dense(x_W: Tensor) -> tuple[Tensor, list[int]]:
    """The ranks' elements in the order of memory, and the permutation back, if it is one; else a
    copy if small. index_add of 64 transposed matrices of 2 KiB takes 54 us, of plain ones 7."""
    strides = x_W.stride()
    order = sorted(range(1, x_W.dim()), key=strides.__getitem__, reverse=True)
    moved = x_W.permute(0, *order)
    if moved.is_contiguous():
        return moved, [0, *(1 + order.index(d) for d in range(1, x_W.dim()))]
    return x_W.contiguous() if x_W.numel() < _SMALL else x_W, []


def _contiguous(x: Tensor) -> Tensor:
    """A copy. A large one lies in memory that was used before, where the C++ is compiled: a block
    costs page faults when it is fresh. An all-to-all of 64 ranks with 1 MiB each: 7 ms for 38."""
    large = x.is_cpu and x.numel() * x.element_size() >= _LARGE_BYTES
    if large and not _torch.tracing() and _torch.plain(x) and build.load_if_compiled():
        return torch.ops.fcoll_native.contiguous(x)
    return x.clone(memory_format=torch.contiguous_format)


def _cpu_range(shape: Sequence[int]) -> Tensor:
    size = 1
    for n in shape:
        size *= n
    return torch.arange(size, device="cpu").view(*shape)
