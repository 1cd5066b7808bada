"""What the ranks of a group have to say to one another, and where it differs.

The first words, who is there, go through the group's store, so that a rank that does not come is
named when the group's timeout is over, and one that died sooner. A group without a store is asked
to gather them. Later ones go by collectives (eager/small_messages.py).

What must agree of a call is named by its row and travels with the call, at no message's cost. Of
all else, what a graph issues, a sharded tensor's layout, a model's parameters, it is a view:
properties by name. Its digest is told first, and the view only where digests differ.
"""

from __future__ import annotations

import hashlib
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fcoll import _torch
from fcoll.errors import from_lobby
from fcoll.groups import Group
from fcoll.lobby import Absent, Lobby, NotMet, Process, processes_of
from fcoll.transport import process_group

View = Mapping[Any, Any]  # what a rank knows: a property's name -> its value, plain data

#: Gives every rank's text for this rank's
Exchange = Callable[[str], list[str]]

TEXT_BYTES = 1024  # of a text, where a process group gathers them


@contextmanager
def meeting(g: Group, about: str = "", purpose: str = "join the group") -> Iterator[Exchange]:
    """What the ranks say to one another, round by round, while they set up the group. ``about``
    tells another meeting of theirs from that one, ``purpose`` is for messages.

    Ranks that do not come are a CollectiveTimeout or PeerDied here, and on those that come late.
    """
    store = _torch.group_store(g.pg)
    if store is None:
        yield lambda text: _gathered(text, g)
        return
    lobby = lobby_of(g, store, about, purpose)
    with meeting_in(lobby, lambda why: give_up(lobby, why, g)) as exchange:
        yield exchange
    processes_of(dist.group.WORLD).update({g.ranks[r]: p for r, p in lobby.processes.items()})


@contextmanager
def meeting_in(lobby: Lobby, give_up: Callable[[NotMet], object]) -> Iterator[Exchange]:
    """The same in a lobby, for ranks that have no group yet."""
    try:
        yield lobby.exchange
    except NotMet as why:
        give_up(why)
        raise from_lobby(why) from None
    except BaseException as error:  # also Ctrl-C: the others need not wait for their timeout
        who = lobby.names[lobby.rank]
        give_up(Absent(f"{who} left the meeting by {type(error).__name__}", [lobby.rank]))
        raise
    lobby.leave()


def lobby_of(g: Group, store: dist.Store, about: str = "", purpose: str = "meet") -> Lobby:
    """Where the ranks of a group have the meeting that is ``about`` this."""
    known, timeout_s = processes_of(dist.group.WORLD), _torch.group_timeout_s(g.pg)
    return lobby_in(store, g.rank, g.ranks, timeout_s, prefix_of(g) + about, known, purpose)


def lobby_in(
    store: dist.Store,
    rank: int,
    ranks: Sequence[int],
    timeout_s: float,
    prefix: str,
    known: dict[int, Process],
    purpose: str = "join the group",
) -> Lobby:
    """Where these ranks meet; their processes are ``known`` by global rank."""
    plain = tuple(ranks) == tuple(range(len(ranks)))
    return Lobby(
        store,
        rank,
        len(ranks),
        timeout_s,
        prefix=prefix,
        names=[f"rank {r}" if plain else f"rank {r} ({x} of all)" for r, x in enumerate(ranks)],
        processes={r: known[x] for r, x in enumerate(ranks) if x in known},
        purpose=purpose,
    )


def prefix_of(g: Group) -> str:
    """Of the group's keys: split_group gives sibling groups one name, and so one store."""
    return "fcoll_group/" + "_".join(map(str, g.ranks))


def give_up(lobby: Lobby, why: NotMet, g: Group, goes: bool = True) -> None:
    """Leave word that this rank does not come, for as long as there is the group. One that ``goes``
    may end the store with it, and waits until the others have heard."""
    lobby.give_up(why, goes)
    weakref.finalize(g.pg, lobby.forget).atexit = False


# -- groups without a store ---


def _gathered(text: str, g: Group) -> list[str]:
    """Every rank's text, through the process group."""
    raw = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    everyone = torch.empty(g.n * TEXT_BYTES, dtype=torch.uint8)
    work = process_group.all_gather(everyone, mine, g)
    work.wait()  # type: ignore[union-attr]
    rows = everyone.view(g.n, TEXT_BYTES)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in rows]


# -- where it differs ---


def digest(text: str) -> int:
    """A number, at least 1, that is another one where the text is."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) + 1


class Disagreement(NamedTuple):
    """A property on which ranks do not agree, and its value on each; None where it has none."""

    name: Any
    values: list[Any]

    def other_than(self, rank: int) -> int:
        """The first rank that has another value than this one."""
        return next(r for r, value in enumerate(self.values) if value != self.values[rank])

    def odd(self) -> tuple[int, int]:
        """The first rank that has another value than most, and one of those."""
        usual = self.values.index(Counter(self.values).most_common(1)[0][0])
        return self.other_than(usual), usual


def first_difference(
    views: Sequence[View], same: Callable[[Any, Any], bool] = operator.eq
) -> Disagreement | None:
    """The first property that is not the same in the views of all ranks.

    >>> from fcoll.transport.handshake import first_difference
    >>> first_difference([{"size": 3}, {"size": 3, "dtype": "int64"}])
    Disagreement(name='dtype', values=[None, 'int64'])
    """
    names: dict[Hashable, None] = dict.fromkeys(chain.from_iterable(views))
    for name in names:
        values = [view.get(name) for view in views]
        if not all(same(values[0], value) for value in values):
            return Disagreement(name, values)
    return None
