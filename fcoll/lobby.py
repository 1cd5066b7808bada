"""Rendezvous of the ranks of a group in its store, before they have anything else in common.

Every rank puts up a card and waits for those of the others, so that whoever does not come is known
by number, and whoever fails can say so to the rest. Cards carry a random number each: cards of an
earlier group with the same name are told from those of this one.

    lobby = Lobby(store, rank=0, n=2, timeout_s=5)
    cards = lobby.exchange("what rank 0 has to say")   # ["what rank 0 ...", "what rank 1 ..."]
    answers = lobby.exchange("what it makes of them")

A rank that gives up leaves word why. Ranks that come late read it and fail the same way, instead of
waiting for a rank that is not there any more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

FIRST_NAP_S, LONGEST_NAP_S = 0.0002, 0.02
# A rank that gives up waits so long for the others to hear of it: the store may end with it.
GOODBYE_S = 1.0
# How often a rank looks whether the processes it waits for are alive, and for newer cards.
LOOK_S = 0.1
# After that long it says whom it waits for: a group's timeout is often half an hour.
NOTICE_S = 60.0
log = logging.getLogger("fcoll")
# PID and start time: a process, though PIDs are given again
Process = tuple[int, str]


class NotMet(Exception):
    """The ranks did not come together; ``ranks`` are those that it is about."""

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Absent(NotMet):
    """Ranks did not come in time."""


class Died(NotMet):
    """A rank came, or was known, and its process ended; or the store does not answer."""


class Elsewhere(NotMet):
    """A rank that is waited for is past this meeting, in something that waits for those here."""


_WORDS = {kind.__name__: kind for kind in (Absent, Died, Elsewhere)}


class Lobby:
    """One meeting of the ranks of a group, of one round or more.

    ``processes`` are those of ranks that are known from other meetings: their end is noticed
    although they have not come. ``names`` are what messages call the ranks, ``purpose`` is what
    they come for.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        n: int,
        timeout_s: float,
        prefix: str = "fcoll",
        names: Sequence[str] = (),
        processes: dict[int, Process] | None = None,
        purpose: str = "join the group",
    ) -> None:
        self.store, self.rank, self.n = store, rank, n
        self.timeout_s = timeout_s
        self.prefix = prefix
        self.purpose = purpose
        self.names = names or [f"rank {r}" for r in range(n)]
        self.processes = dict(processes or {})
        self.meeting = ""  # made of all cards: two meetings have different ones
        self.rounds = 0
        self._nonce = ""  # of this rank's card
        self._gone = False  # has the store failed? Asked again, torch logs one more C++ backtrace
        self._cards: list[dict[str, Any]] = []
        self._missing = list(range(n))  # at the last look

    def exchange(self, text: str) -> list[str]:
        """Every rank's text, by rank. All ranks call it equally often."""
        try:
            return self._later_round(text) if self.meeting else self._first_round(text)
        except RuntimeError as error:  # torch's DistNetworkError and the like
            self._gone = True
            raise Died(self._without_store(error), ()) from error

    def give_up(self, why: NotMet, goes: bool = True) -> None:
        """Leave word for the others that this rank will not come any more; if it ``goes``, wait a
        little until they have heard."""
        if self._gone:
            return
        word = {"message": str(why), "ranks": why.ranks, "kind": type(why).__name__}
        try:
            self.store.set(self._key("gave_up"), json.dumps(word))
            if goes:
                self._until_heard()
        except RuntimeError:
            return  # no store, no word

    def forget(self) -> None:
        """Take back what give_up left: the group is gone, and its name may be given again."""
        try:
            self.store.delete_key(self._key("gave_up"))
        except RuntimeError:
            return

    def present(self) -> dict[int, str]:
        """The texts of the other ranks that are here now, for a rank that does not come itself."""
        if not self.store.check([self._key("someone")]):  # one question, however many ranks
            return {}
        return {r: card["text"] for r, card in self._others().items()}

    def _others(self) -> dict[int, dict[str, Any]]:
        """The cards of the other ranks that are there now."""
        keys = {r: key for r, key in enumerate(self._keys("card")) if r != self.rank}
        there = {r: key for r, key in keys.items() if self.store.check([key])}
        cards = {r: json.loads(self.store.get(key)) for r, key in there.items()}
        return {r: card for r, card in cards.items() if alive(card["by"])}

    def _until_heard(self) -> None:
        """Wait until those that are here have heard that this rank gave up, or are through."""
        self.leave()
        left_keys = [self._key(f"left/{card['nonce']}") for card in self._others().values()]
        until, nap = time.monotonic() + GOODBYE_S, FIRST_NAP_S
        while left_keys and not self.store.check(left_keys) and time.monotonic() < until:
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_S)

    def leave(self) -> None:
        """Say that this rank does not look at the store for this meeting any more."""
        if self._gone or not self._nonce:
            return
        try:
            self.store.set(self._key(f"left/{self._nonce}"), "")
        except RuntimeError:
            return  # its rank is through

    # -- the rounds ---

    def _first_round(self, text: str) -> list[str]:
        """Ends when all have seen the same cards."""
        self._nonce = secrets.token_hex(8)
        mine = {"by": process_of(os.getpid()), "text": text, "nonce": self._nonce}
        self.store.set(self._keys("card")[self.rank], json.dumps(mine))
        self.store.set(self._key("someone"), "")
        self._wait(self._not_here, ends=lambda: bool(self.meeting))
        return [card["text"] for card in self._cards]

    def _not_here(self, look: bool) -> list[int]:
        """The ranks that have no card, or have not seen the cards that this rank has."""
        if look or not self.meeting:
            if absent := self._without(self._keys("card"), look):
                return absent
            if absent := self._read_cards():
                return absent
        return self._without(self._keys(f"{self.meeting}/seen"), look)

    def _read_cards(self) -> list[int]:
        """Take all cards, and say that this rank has seen them; the ranks whose card is old."""
        self._cards = [json.loads(self.store.get(key)) for key in self._keys("card")]
        if old := [r for r, card in enumerate(self._cards) if not self._is_here(r, card["by"])]:
            return old
        nonces = "".join(card["nonce"] for card in self._cards)
        self.meeting = hashlib.sha256(nonces.encode()).hexdigest()[:16]
        self.store.set(self._keys(f"{self.meeting}/seen")[self.rank], "")
        return []

    def _later_round(self, text: str) -> list[str]:
        """Ends when all have read all texts: one may raise at once, and the store end with it."""
        self.rounds += 1
        keys = self._keys(f"{self.meeting}/{self.rounds}")
        self.store.set(keys[self.rank], text)
        self._wait(lambda look: self._without(keys, look))
        texts = [self.store.get(key).decode() for key in keys]
        read = self._keys(f"{self.meeting}/{self.rounds}/read")
        self.store.set(read[self.rank], "")
        self._wait(lambda look: self._without(read, look), ends=lambda: True)
        return texts

    # -- waiting ---

    def _wait(
        self, missing: Callable[[bool], list[int]], ends: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait until nobody is missing, or the store ends and ``ends`` says that it may: the rank
        that holds it is through, and so were all others."""
        try:
            self._poll(missing)
        except RuntimeError:
            self._gone = True
            if not ends():
                raise

    def _poll(self, missing: Callable[[bool], list[int]]) -> None:
        began = time.monotonic()
        nap, look_at, notice_at = FIRST_NAP_S, 0.0, NOTICE_S
        while True:
            waited = time.monotonic() - began
            look = waited >= min(look_at, self.timeout_s)
            ranks = missing(look)
            if not ranks:
                return
            if look:
                look_at = waited + LOOK_S
                self._look(ranks)
                if waited >= notice_at:
                    notice_at = float("inf")
                    log.warning("%s (timeout %g s)", self._waits(waited, ranks), self.timeout_s)
            if waited > self.timeout_s:
                self._late(ranks)
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_S)

    def _look(self, ranks: Sequence[int]) -> None:
        """Raise if the wait for these ranks is for nothing."""
        if self.store.check([self._key("gave_up")]):
            word = json.loads(self.store.get(self._key("gave_up")))
            self.leave()
            raise _WORDS[word["kind"]](word["message"], word["ranks"])
        for r in ranks:
            if r in self.processes and not alive(self.processes[r]):
                me = self.names[self.rank]
                raise Died(f"{self.names[r]} died; {me} waited for it to {self.purpose}", [r])

    def _without_store(self, error: RuntimeError) -> str:
        """The message when the store ends, whose process is unknown: mostly it is rank 0's."""
        me, them = self.names[self.rank], [r for r in self._missing if r != self.rank]
        others = ", ".join(self.names[r] for r in them) or "the others"
        return (
            f"the store of the group does not answer: {error}. {me} waited for {others} to "
            f"{self.purpose}, and the process that holds the store has ended, which is rank 0's "
            "unless a launcher holds it: look for an error there"
        )

    def _late(self, ranks: Sequence[int]) -> NoReturn:
        raise Absent(self._waits(self.timeout_s, ranks), ranks)

    def _waits(self, seconds: float, ranks: Sequence[int]) -> str:
        me, others = self.names[self.rank], ", ".join(self.names[r] for r in ranks)
        return f"{me} waited {round(seconds, 1):g} s for {others} to {self.purpose}"

    def _is_here(self, rank: int, by: Sequence[Any]) -> bool:
        """Is the card's process there? One that has never been seen alive left an old card."""
        process = (by[0], by[1])
        if alive(process):
            self.processes[rank] = process
        return self.processes.get(rank) == process

    # -- the store ---

    def _key(self, what: str) -> str:
        return f"{self.prefix}/{what}"

    def _keys(self, what: str) -> list[str]:
        return [f"{self.prefix}/{what}/{r}" for r in range(self.n)]

    def _without(self, keys: list[str], look: bool) -> list[int]:
        """The ranks whose key is not there yet; which they are is found out at a look."""
        if self.store.check(keys):
            return []
        if look:
            self._missing = [r for r, key in enumerate(keys) if not self.store.check([key])]
        return self._missing


# -- processes ---

_processes_of: WeakKeyDictionary[Any, dict[int, Process]] = WeakKeyDictionary()


def processes_of(world: Any) -> dict[int, Process]:
    """The processes known from all meetings in this world, by global rank."""
    return _processes_of.setdefault(world, {})


def process_of(pid: int) -> Process:
    """The process that has this PID now; its start is named by host, container and time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return pid, ""
    return pid, "" if state in "ZX" else f"{boot} {namespace} {fields[18]}"


def alive(process: Sequence[Any]) -> bool:
    """Does the process run? True where that cannot be said, as of one on another host.

    >>> pid, start = process_of(os.getpid())
    >>> alive((pid, start)), alive((pid, start + "0"))
    (True, False)
    """
    pid, start = process
    here = process_of(os.getpid())[1]
    if not start or start.rpartition(" ")[0] != here.rpartition(" ")[0]:
        return True
    now = process_of(pid)[1]
    return now == start if now else not _no_such_process(pid)


def _no_such_process(pid: int) -> bool:
    """It ended; other than a process of which this user may know nothing."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return True  # it waits for its parent to ask for its exit code
