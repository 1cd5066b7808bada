"""The groups of all ranks, from the one group that a fake world has made for rank 0.

A program on rank 0 holds only the groups that rank 0 is in. Its other ranks would hold theirs: of
a mesh, the other fibers of the same dim; of a list of ranks, the same list moved along.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

from fcoll.local import _torch
from fcoll.local.errors import IncompleteGroup

Groups = tuple[tuple[int, ...], ...]

# Of groups that belong to a mesh, all fibers of the mesh's dim; of others, what is derived.
_known: weakref.WeakKeyDictionary[Any, Groups] = weakref.WeakKeyDictionary()
changes = 0  # how often what was known of a group has changed


def remember(mesh: Any) -> None:
    """Note the groups of all ranks for each dim of a mesh."""
    for dim, name in enumerate(_torch.mesh_group_names(mesh)):
        _note(_torch.resolve_group(name), _along(mesh, dim))


def _note(group: Any, found: Groups) -> None:
    global changes
    if _known.get(group) != found:
        changes += 1
        _known[group] = found


def _along(mesh: Any, dim: int) -> Groups:
    with _torch.no_modes():
        fibers = _torch.mesh_fibers(mesh)
        lists = fibers.movedim(dim + 1, -1).reshape(-1, fibers.shape[dim + 1]).tolist()
    return tuple(map(tuple, lists))


def groups_of(group: Any) -> Groups:
    """All ranks' groups where rank 0 (of a fake world) is in ``group``."""
    if group not in _known:
        _remember_all(group)
    return _known[group]


def _remember_all(group: Any) -> None:
    """Once for each group: a mesh does not register itself, but one that lives can be found."""
    ranks, world = tuple(_torch.group_ranks(group)), _torch.group_ranks(_torch.default_group())
    for mesh in _torch.living_meshes():
        names = _torch.mesh_group_names(mesh)
        if group.group_name in names:
            found = _along(mesh, names.index(group.group_name))
            # meshes outlive their world, and the next one has groups of the same names
            if ranks in found and {r for g in found for r in g} <= set(world):
                _note(group, found)
    if group not in _known:
        _note(group, derived(ranks, len(world)))


@cache
def derived(ranks: tuple[int, ...], world: int) -> Groups:
    """The translations of ``ranks`` that make up the world, in the same order of ranks.

    If there are none, the group stands alone and the other ranks are by themselves.

    >>> derived((0, 2), 4), derived((0, 1, 3), 4), derived((1, 0), 4)
    (((0, 2), (1, 3)), ((0, 1, 3), (2,)), ((1, 0), (3, 2)))
    """
    low, free, groups = min(ranks), set(range(world)), []
    while free:
        start = min(free)
        moved = tuple(r - low + start for r in ranks)
        if not free.issuperset(moved):
            break
        free -= set(moved)
        groups.append(moved)
    if free or ranks not in groups:
        return (ranks, *((r,) for r in range(world) if r not in ranks))
    return tuple(groups)


def calling(group: Any, order: tuple[int, ...]) -> Groups:
    """The groups that make a call together with ``group``, all of whose ranks are in ``order``."""
    found = _present(groups_of(group), order, group.size())
    if not found:
        like = _torch.group_ranks(group)
        raise IncompleteGroup(n=group.size(), like=like, ranks=list(order))
    return found


@cache
def _present(groups: Groups, order: tuple[int, ...], n: int) -> Groups:
    have = set(order)
    return tuple(g for g in groups if len(g) == n and have.issuperset(g))


def rank_in(group: Any, order: Sequence[int]) -> dict[int, int]:
    """Rank -> its place in its group (-1 if it is in none)."""
    alike = [g for g in groups_of(group) if len(g) == group.size()]  # the others are by themselves
    places = {r: i for g in alike for i, r in enumerate(g)}
    return {r: places.get(r, -1) for r in order}
