"""Messages between two ranks over gloo, which tell each other first how long they are.

gloo leaves the rest of a buffer as it is when a shorter message comes, and ends the process when a
longer one does. So a header goes ahead of every message:

    sender                                   receiver
    receive the answer (later)               receive the header (later)
    send the header, send the data  ------>  header: answer with what is expected, then
    wait: the answer came before the  <----  receive the data; into scratch if they differ
    data was taken; compare                  wait: compare

All starts return at once. The receiver cannot post the data's buffer before it has the header, and
a rank may be busy elsewhere when that comes: a thread looks for headers while any is awaited. It
looks into the buffer, as gloo has no other way to ask without waiting.

Header and answer have tags of their own, so that a plain ``dist.recv`` can take the data; but
``irecv`` wants a header, so it takes from ``isend`` only. The functions that stand in for torch's
(compat.py) go without one: the other end of such a message may be torch's own.
"""

from __future__ import annotations

import atexit
import os
import struct
import threading
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.errors import CollectiveMismatch
from fcoll.groups import Group

TAGS = 2**29  # tags of users are below; headers and answers have those above
_HEADER_TAG, _ANSWER_TAG = TAGS, 2 * TAGS
#: Added to a tag: a message as torch sends it, without a header, whose other end may be torch's.
PLAIN = 4 * TAGS
THREAD = "fcoll-p2p"  # what it does is part of calls that other threads made
_FIRST_NAP_S, _LONGEST_NAP_S = 0.0002, 0.005  # of the thread between two looks


class Header(NamedTuple):
    """What both sides of a message must agree on."""

    dtype: str
    length: int

    def __str__(self) -> str:
        return f"{self.length} {self.dtype}"

    @property
    def bytes(self) -> int:
        return self.length * getattr(torch, self.dtype).itemsize


_LAYOUT = struct.Struct("q32sq")
_END = 0x66636F6C6C503250  # comes last: when it is there, all is


def _packed(header: Header) -> Tensor:
    raw = _LAYOUT.pack(header.length, header.dtype.encode(), _END)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _unpacked(buf: Tensor) -> Header | None:
    """The header in the buffer; None if it has not come yet."""
    count, dtype, end = _LAYOUT.unpack(buf.numpy().tobytes())
    return Header(dtype.rstrip(b"\0").decode(), count) if end == _END else None


def _room() -> Tensor:
    return torch.zeros(_LAYOUT.size, dtype=torch.uint8)


def header_of(x: Tensor) -> Header:
    return Header(str(x.dtype).removeprefix("torch."), x.numel())


def _mismatch(sender: int, sent: Header, receiver: int, expected: Header) -> CollectiveMismatch:
    return CollectiveMismatch(
        message=f"rank {sender} sends {sent} to rank {receiver}, which expects {expected}"
    )


class PendingMessage(dist.Work):
    """One side of a message; its wait raises again what it raised once."""

    def __init__(self) -> None:
        super().__init__()
        self.complete = False
        self.error: Exception | None = None

    def finish(self) -> None:
        """Wait for the other side; raise if it differs."""
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.complete:
            self.complete = True  # gloo's works are waited for once
            try:
                self.finish()
            except Exception as error:
                self.error = error
        if self.error is not None:
            raise self.error
        return True


class Sent(PendingMessage):
    """A message that is under way. Its buffers live until the peer has taken it."""

    def __init__(self, buf: Tensor, data: Tensor, peer: int, tag: int, g: Group) -> None:
        super().__init__()
        self.mine, self.peer, self.rank = header_of(buf), peer, g.rank
        self.answer, header = _room(), _packed(self.mine)
        pg = g.pg
        # the answer's place first: then it is sent as soon as the header has come
        self.works = [
            pg.recv([self.answer], peer, tag + _ANSWER_TAG),
            pg.send([header], peer, tag + _HEADER_TAG),
            pg.send([data], peer, tag),
        ]
        self.buffers = [header, data]

    def finish(self) -> None:
        self.works[2].wait()
        expected = _unpacked(self.answer)  # none from a plain dist.recv
        self.works, self.buffers = [], []
        if expected not in (None, self.mine):
            raise _mismatch(self.rank, self.mine, self.peer, expected)


class Received(PendingMessage):
    """A message that is expected."""

    def __init__(self, buf: Tensor, data: Tensor, peer: int, tag: int, g: Group) -> None:
        super().__init__()
        self.mine, self.peer, self.tag, self.rank = header_of(buf), peer, tag, g.rank
        self.pg = g.pg
        self.data, self.header = data, _room()
        self.accepted = False
        self.works: list[dist.Work] = []
        self.header_work = self.pg.recv([self.header], peer, tag + _HEADER_TAG)
        _expected.add(self)

    def accept(self) -> None:
        """Answer the header, and take the data; away, if it is not what was expected."""
        self.accepted = True
        sent = _unpacked(self.header)
        assert sent is not None
        self.sent, self.answer = sent, _packed(self.mine)
        if sent != self.mine:
            self.data = torch.empty(sent.bytes, dtype=torch.uint8)
        try:
            self.works = [
                self.pg.send([self.answer], self.peer, self.tag + _ANSWER_TAG),
                self.pg.recv([self.data], self.peer, self.tag),
            ]
        except RuntimeError as error:  # the peer is gone: whoever waits is told
            self.error = error

    def finish(self) -> None:
        if not _expected.has_accepted(self):
            self.header_work.wait()
            _expected.accept_through(self)
        for work in self.works:
            work.wait()
        self.works = []
        if self.error is None and self.sent != self.mine:
            raise _mismatch(self.peer, self.sent, self.rank, self.mine)


class Expected:
    """All messages whose header has not come, and the thread that looks for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.queues: dict[Any, deque[Received]] = {}  # by process group, peer and tag
        self.thread: threading.Thread | None = None
        self.news = threading.Event()  # look often
        self.ended = False

    def add(self, message: Received) -> None:
        with self.lock:
            self.queues.setdefault(self._key(message), deque()).append(message)
            self.news.set()
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
                self.thread.start()

    def has_accepted(self, message: Received) -> bool:
        with self.lock:  # not while it is at it
            return message.accepted

    def accept_through(self, message: Received) -> None:
        """Accept this one and all before it: data of one tag is taken in the order of headers."""
        with self.lock:
            while not message.accepted:
                self._accept_first(self._key(message))

    def _key(self, message: Received) -> Any:
        return message.pg, message.peer, message.tag

    def _accept_first(self, key: Any) -> None:
        queue = self.queues[key]
        queue.popleft().accept()
        if not queue:
            del self.queues[key]

    def _run(self) -> None:
        nap = _FIRST_NAP_S
        while not self.ended:
            nap = _FIRST_NAP_S if self.news.wait(nap) else min(1.2 * nap, _LONGEST_NAP_S)
            self.news.clear()
            with self.lock:
                arrived = [k for k, queue in self.queues.items() if _unpacked(queue[0].header)]
                for key in arrived:
                    self._accept_first(key)
                if not self.queues:
                    self.thread = None
                    return
            if arrived:
                self.news.set()

    def end(self) -> None:
        """At the process's exit: no thread may be in gloo then."""
        self.ended = True
        self.news.set()
        thread = self.thread
        if thread is not None:
            thread.join(timeout=5)


_expected = Expected()
atexit.register(_expected.end)
os.register_at_fork(after_in_child=_expected.__init__)  # type: ignore[misc]
