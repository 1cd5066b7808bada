"""Do the members of every new group make it together? Else they would wait in dist.new_group.

They find one another by the group's name. torch makes that of how many groups the rank has made
before, also those that it is not in; with ``use_local_synchronization=True``, where only members
call, of the group's ranks and how many groups the rank is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fcoll.checking.proofs import RankCalls
from fcoll.errors import GroupMismatch
from fcoll.tracing.fake_world import NewGroup


def groups_meet(programs: dict[int, RankCalls]) -> None:
    """Raise for the first group that a rank makes and another member does not, or of whose name
    another rank makes another group. A group of one rank meets nobody."""
    by_rank = {rank: dict(_names(rank, program.new_groups)) for rank, program in programs.items()}
    for rank, groups in by_rank.items():
        for name, group in groups.items():
            if rank not in group.ranks or len(group.ranks) == 1:
                continue
            for other in by_rank:
                theirs = by_rank[other].get(name)
                if theirs is not None and theirs.ranks == group.ranks:
                    continue
                if other in group.ranks or (theirs is not None and other in theirs.ranks):
                    _raise(programs, rank, group, other, theirs)


def _raise(
    programs: dict[int, RankCalls], rank: int, group: NewGroup, other: int, theirs: NewGroup | None
) -> None:
    same_ranks = [g for g in programs[other].new_groups if g.ranks == group.ranks]
    if theirs is not None:
        why, there = "groups are made in different orders", str(theirs)
    elif same_ranks:
        why, there = "as another one of its groups", f"{same_ranks[0]}, after other groups"
    else:
        why, there = "a member does not make it", "makes no more groups"
    lines = [f"on the new group of ranks {list(group.ranks)}: {why}"]
    lines += [f"  rank {rank}: {group}", f"  rank {other}: {there}", GroupMismatch.hint]
    error = GroupMismatch(message="\n".join(lines))
    error.ranks = rank, other
    raise error


def _names(rank: int, new_groups: Sequence[NewGroup]) -> Iterator[tuple[Any, NewGroup]]:
    """The groups with what stands for their names."""
    calls = inside = 0
    for group in new_groups:
        if group.local:
            yield ("local", group.ranks, inside), group
        else:
            yield ("number", calls), group
            calls += 1
        inside += rank in group.ranks
