"""The first words between the ranks of a group: who is there, and what each has to say.

They go through the group's store, so that a rank that does not come is named when the group's
timeout is over, and one that died sooner. A group without a store is asked to gather them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fcoll import _torch
from fcoll.errors import from_lobby
from fcoll.groups import Group
from fcoll.lobby import Absent, Lobby, NotMet, processes_of
from fcoll.transport import process_group

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
    try:
        yield lobby.exchange
    except NotMet as why:
        give_up(lobby, why, g)
        raise from_lobby(why) from None
    except BaseException as error:  # also Ctrl-C: the others need not wait for their timeout
        who = lobby.names[g.rank]
        give_up(lobby, Absent(f"{who} left the meeting by {type(error).__name__}", [g.rank]), g)
        raise
    lobby.leave()
    processes_of(dist.group.WORLD).update({g.ranks[r]: p for r, p in lobby.processes.items()})


def lobby_of(g: Group, store: dist.Store, about: str = "", purpose: str = "meet") -> Lobby:
    """Where the ranks of a group have the meeting that is ``about`` this."""
    plain, known = g.ranks == tuple(range(g.n)), processes_of(dist.group.WORLD)
    return Lobby(
        store,
        g.rank,
        g.n,
        _torch.group_timeout_s(g.pg),
        prefix=prefix_of(g) + about,
        names=[f"rank {r}" if plain else f"rank {r} ({x} of all)" for r, x in enumerate(g.ranks)],
        processes={r: known[x] for r, x in enumerate(g.ranks) if x in known},
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
