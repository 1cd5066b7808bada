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
``irecv`` wants a header, so it takes from ``isend`` only.
"""

from __future__ import annotations

import atexit
import struct
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.errors import CollectiveMismatch
from fcoll.groups import Group

TAGS = 2**29  # tags of users are below; headers and answers have those above
_HEADER_TAG, _ANSWER_TAG = TAGS, 2 * TAGS
_LOOK_S = 0.0005  # how often the thread looks for headers


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
    made = CollectiveMismatch(
        message=f"rank {sender} sends {sent} to rank {receiver}, which expects {expected}"
    )
    return made


class Message(dist.Work):
    """One side of a message; its wait raises again what it raised once."""

    def __init__(self) -> None:
        super().__init__()
        self._finish: Callable[[], CollectiveMismatch | None] | None = self.finish
        self._error: Exception | None = None

    def finish(self) -> CollectiveMismatch | None:
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self._error = finish()
            except Exception as error:  # gloo's: the peer died, or did not come in time
                self._error = error
        if self._error is not None:
            raise self._error
        return True


class Sent(Message):
    """A message that is under way. Its buffers live until the peer has taken it."""

    def __init__(self, buf: Tensor, data: Tensor, peer: int, tag: int, g: Group) -> None:
        super().__init__()
        self.mine, self.peer, self.rank = header_of(buf), peer, g.rank
        self.answer = _room()
        header = _packed(self.mine)
        # the answer's place first: then it is sent as soon as the header has come
        self.works = [
            g.pg.recv([self.answer], peer, tag + _ANSWER_TAG),
            g.pg.send([header], peer, tag + _HEADER_TAG),
            g.pg.send([data], peer, tag),
        ]
        self.buffers = [header, data]

    def finish(self) -> CollectiveMismatch | None:
        self.works[2].wait()
        expected = _unpacked(self.answer)  # none from a plain dist.recv
        self.works, self.buffers = [], []
        if expected in (None, self.mine):
            return None
        return _mismatch(self.rank, self.mine, self.peer, expected)


class Received(Message):
    """A message that is expected."""

    def __init__(self, buf: Tensor, data: Tensor, peer: int, tag: int, g: Group) -> None:
        super().__init__()
        self.mine, self.peer, self.tag, self.g = header_of(buf), peer, tag, g
        self.data, self.header = data, _room()
        self.sent: Header | None = None  # what the sender says, once it is known
        self.works: list[dist.Work] = []
        self.header_work = g.pg.recv([self.header], peer, tag + _HEADER_TAG)
        _expected.add(self)

    def arrived(self) -> bool:
        return _unpacked(self.header) is not None

    def accept(self) -> None:
        """Answer the header, and take the data; away, if it is not what was expected."""
        self.sent = _unpacked(self.header)
        assert self.sent is not None
        if self.sent != self.mine:
            self.data = torch.empty(self.sent.bytes, dtype=torch.uint8)
        self.answer = _packed(self.mine)
        self.works = [
            self.g.pg.send([self.answer], self.peer, self.tag + _ANSWER_TAG),
            self.g.pg.recv([self.data], self.peer, self.tag),
        ]

    def finish(self) -> CollectiveMismatch | None:
        if self.sent is None:
            self.header_work.wait()
            _expected.accept_through(self)
        for work in self.works:
            work.wait()
        self.works = []
        if self.sent == self.mine:
            return None
        assert self.sent is not None
        return _mismatch(self.peer, self.sent, self.g.rank, self.mine)


class Expected:
    """All messages whose header has not come, and the thread that looks for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.queues: dict[Any, deque[Received]] = {}  # by process group, peer and tag
        self.thread: threading.Thread | None = None
        self.ended = threading.Event()

    def add(self, message: Received) -> None:
        with self.lock:
            self.queues.setdefault(self._key(message), deque()).append(message)
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, name="fcoll-p2p", daemon=True)
                self.thread.start()

    def accept_through(self, message: Received) -> None:
        """Accept this one and all before it: data of one tag is taken in the order of headers."""
        with self.lock:
            while message.sent is None:
                self._accept_first(self._key(message))

    def _key(self, message: Received) -> Any:
        return message.g.pg, message.peer, message.tag

    def _accept_first(self, key: Any) -> None:
        queue = self.queues[key]
        queue.popleft().accept()
        if not queue:
            del self.queues[key]

    def _run(self) -> None:
        while not self.ended.wait(_LOOK_S):
            with self.lock:
                for key in [k for k, queue in self.queues.items() if queue[0].arrived()]:
                    self._accept_first(key)
                if not self.queues:
                    self.thread = None
                    return

    def end(self) -> None:
        """At the process's exit: no thread may be in gloo then."""
        self.ended.set()
        thread = self.thread
        if thread is not None:
            thread.join(timeout=5)


_expected = Expected()
atexit.register(_expected.end)
