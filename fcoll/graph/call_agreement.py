"""Are the ranks of a group about to issue the same collectives? They compare in the store.

What a plan or a compiled graph issues on a group is a list of calls; all ranks of the group must
have the same list, or they wait for each other for ever. ``compare`` exchanges a digest of it, and
where that differs the lists, so that the error names the first call that does.

The ranks come to it at the same point of their programs, and wait for one another no longer than
the group's timeout. A list on which they have agreed is not compared again: a rank that compiles
its graph once more, for reasons of its own, need not find the others there.

So a rank may come with a new list while another runs one that was agreed on, which waits for the
first. Each counts the lists that it has begun since the last comparison, and a rank that comes says
its count. One that has begun more than that is past the point: ``turn_away`` says so to those who
wait (it is called beside the run, which is stuck itself).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from fcoll import _torch
from fcoll.errors import OtherGraph, PlanMismatch
from fcoll.graph.issued import Issued, describe
from fcoll.groups import Group
from fcoll.lobby import Elsewhere, NotMet
from fcoll.transport import shared_memory
from fcoll.transport.handshake import digest, first_difference, give_up, lobby_of, meeting

#: A call as JSON: what must be the same on all ranks, and the call for people.
Call = tuple[Any, str]
UNKNOWN = "?"  # a size that only a run knows: it goes with any other


def calls_by_group(
    calls: Iterable[Issued], how: Mapping[str, str] | None = None
) -> dict[str, list[Call]]:
    """By the names of groups: what each of their ranks must issue, in order. Messages between two
    ranks are no such calls. ``how``, by the name of a start, is something more that must agree."""
    by_group: dict[str, list[Call]] = {}
    for call in calls:
        if not call.row.is_p2p:
            more = (how or {}).get(call.start, "")
            shown = describe(call) + (f" ({more})" if more else "")
            by_group.setdefault(call.group, []).append((_signature(call, more), shown))
    return by_group


def _signature(call: Issued, how: str) -> Any:
    args, shapes = call.agreed()
    plain = sorted((name, _plain(x)) for name, x in args.items())
    return [call.row.message, list(call.dtypes), _plain(shapes), plain, how]


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else UNKNOWN


@dataclass
class ComparedCalls:
    """A group's comparisons so far: their number, the digests on which its ranks agreed, and
    how many lists this rank has begun since the last one (who runs a list counts it)."""

    times: int = 0
    agreed: set[int] = field(default_factory=set)
    begun: int = 0


_compared: WeakKeyDictionary[Any, ComparedCalls] = WeakKeyDictionary()


def compare(g: Group, calls: Sequence[Call], settings: str = "") -> None:
    """Raise PlanMismatch on all ranks of the group unless all have the same calls. ``settings`` is
    what the calls were planned with: the error says if that differs.

    A rank that does not come is a CollectiveTimeout, one that died a PeerDied, on every rank that
    comes. A fake group, one of one rank and one without a store have nothing to compare."""
    history = compared(g)
    mine = digest(json.dumps([what for what, _ in calls]))
    if history is None or mine in history.agreed:
        return
    history.times += 1  # also if it fails: all ranks fail, and meet elsewhere if they try again
    begun, history.begun = history.begun, 0
    lists: list[tuple[list[Call], str]] = []
    first = calls[0][1] if calls else "none"
    purpose = f"compare what it is about to issue on the group, which begins with {first}"
    try:
        with meeting(g, _about(history.times), purpose) as exchange:
            cards = exchange(json.dumps((mine, begun, first)))
            if len({json.loads(card)[0] for card in cards}) > 1:
                lists = [json.loads(card) for card in exchange(json.dumps((calls, settings)))]
                with suppress(NotMet):  # one rank may serve the store: till all have read it
                    exchange("")
    except OtherGraph as error:
        shared_memory.fail(g, str(error.args[0]))  # the others wait in a call for this rank
        raise
    if lists:
        _raise_at_the_first_difference(g, lists)
    history.agreed.add(mine)


def compared(g: Group) -> ComparedCalls | None:
    """The history of a group; None if it has nothing to compare."""
    if not g.serves or g.n < 2 or _torch.group_store(g.pg) is None:
        return None
    return _compared.setdefault(g.pg, ComparedCalls())


def turn_away(g: Group, what: str) -> str:
    """Tell ranks that wait to compare that this one does not come: it runs ``what``, and has begun
    more than they had when they came. The message to them; empty if nobody waits in vain."""
    history, store = compared(g), _torch.group_store(g.pg)
    if history is None:
        return ""
    lobby = lobby_of(g, store, _about(history.times + 1))
    waiting = {r: json.loads(card) for r, card in lobby.present().items()}
    waiting = {r: card for r, card in waiting.items() if card[1] < history.begun}
    if not waiting:
        return ""
    theirs = [
        f"{lobby.names[r]} has a new graph, which begins with {c[2]}" for r, c in waiting.items()
    ]
    message = f"{lobby.names[g.rank]} runs {what}; {'; '.join(theirs)}"
    give_up(lobby, Elsewhere(message, [g.rank]), g, goes=False)
    return message


def _about(times: int) -> str:
    return f"/compare/{times}"


def _raise_at_the_first_difference(g: Group, lists: Sequence[tuple[list[Call], str]]) -> None:
    difference = first_difference([dict(enumerate(calls)) for calls, _ in lists], _fit)
    if difference is None:
        return
    i, at = difference
    lines = [f"  {who}: {what}" for who, what in _by_call(g, at)]
    alike = len({settings for _, settings in lists}) == 1
    raise PlanMismatch(
        group=g.label,
        step=i,
        number=i + 1,
        ranks=tuple(r for r, x in zip(g.ranks, at, strict=True) if not _fit(at[0], x)),
        lines="\n".join(lines),
        hint=(_SAME + _COMPILED * bool(lists[0][1])) if alike else _OTHERS,
    )


_SAME = (
    "All ranks of a group must make the same calls in the same order: look for a branch that only "
    "some of them take."
)
_COMPILED = (
    " If the programs do, the compiler has left out, merged or moved calls by what each rank does "
    "with their results: set inductor_ext.config.schedule = None on all ranks."
)
_OTHERS = (
    "Their settings differ: give all ranks the same schedule and the same machine, whose prices "
    "decide the order."
)


def _by_call(g: Group, at: Sequence[Call | None]) -> list[tuple[str, str]]:
    """(ranks, the call that they have)."""
    groups: dict[str, list[int]] = {}
    for rank, call in zip(g.ranks, at, strict=True):
        groups.setdefault(call[1] if call else "makes no more calls", []).append(rank)
    shown = {what: ", ".join(map(str, ranks)) for what, ranks in groups.items()}
    return [
        (f"rank {who}" if len(groups[what]) == 1 else f"ranks {who}", what)
        for what, who in shown.items()
    ]


def _fit(a: Call | None, b: Call | None) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or _alike(a[0], b[0]))


def _alike(a: Any, b: Any) -> bool:
    """Are they equal, but for sizes that only a run knows?"""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return a == b or UNKNOWN in (a, b)
