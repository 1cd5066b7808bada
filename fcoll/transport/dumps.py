"""When flight records are written, and where.

Where torch's variable ``TORCH_FR_DUMP_TEMP_FILE`` names a file, each rank appends its number to it
and writes there when a call of its fails: ranks that differ, a timeout, a peer that died. It asks
the other ranks of this host to write theirs too, since what it waits for is on them: a thread
listens for that, so that a rank answers that is in no call at all.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fcoll import errors
from fcoll.errors import (
    BadOption,
    CollectiveMismatch,
    CollectiveTimeout,
    FcollError,
    GroupClosed,
    PeerDied,
)
from fcoll.lobby import Process, process_of
from fcoll.transport import flight_records

log = logging.getLogger("fcoll")
_FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DEFAULT = "~/.cache/torch/comm_lib_trace_rank_"  # torch's
_SIGNAL = "FCOLL_DUMP_SIGNAL"
VARIABLES = (*_FILES, _SIGNAL)  # without one of them nothing is written unasked
_ENDS_A_GROUP = (CollectiveMismatch, CollectiveTimeout, GroupClosed, PeerDied)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_writing = threading.RLock()
_reasons: list[str] = []  # of the dumps that were written
_error = ""  # what this rank raised first, since a group was made
_failed = threading.Event()  # a call of this rank's or of a peer's, since a group was made


def dump_flight_records(path: str | os.PathLike[str] | None = None) -> str:
    """Write this rank's last calls now; the file's name, which ends with the rank.

    ``path`` is what all ranks' files begin with: the rank is appended. Without it the name is that
    of ``TORCH_FR_DUMP_TEMP_FILE``, or torch's default.

    >>> import tempfile
    >>> path = fcoll.dump_flight_records(tempfile.mkdtemp() + "/rank_")
    >>> path.endswith(f"/rank_{rank}")
    True
    """
    return _write("asked for by the program", path, in_call=False)


def dump_on_signal(signum: int = signal.SIGUSR1) -> None:
    """Write this rank's last calls when the process gets a signal: ``kill -USR1 PID``.

    A handler of the program's own is not replaced: then it raises. ``FCOLL_DUMP_SIGNAL=USR1`` does
    the same at the first group. Python runs handlers in the main thread, also while it waits in a
    collective.
    """
    before = signal.getsignal(signum)
    if before not in (signal.SIG_DFL, _on_signal):
        known = "those that have no handler yet"
        raise BadOption(op="dump_on_signal", arg="signum", value=signum, known=known)
    signal.signal(signum, _on_signal)


def _on_signal(signum: int, frame: Any) -> None:
    _written(f"{signal.Signals(signum).name}")


# -- files ---


def _prefix() -> str:
    return next(filter(None, map(os.environ.get, _FILES)), "")


def _write(reason: str, path: str | os.PathLike[str] | None = None, in_call: bool = True) -> str:
    rank = dist.get_rank() if flight_records.is_initialized() else int(os.environ.get("RANK", 0))
    to = Path(f"{os.fspath(path or _prefix() or _DEFAULT)}{rank}").expanduser()
    with _writing:
        _reasons.append(reason)
        found = flight_records.records(rank, list(_reasons), _error, in_call)
        to.parent.mkdir(parents=True, exist_ok=True)
        # hidden and then moved: who reads the folder meanwhile sees whole files only
        with tempfile.NamedTemporaryFile(dir=to.parent, prefix=".", delete=False) as file:
            file.write(flight_records.pickled(found))
        os.replace(file.name, to)
    return str(to)


def _written(reason: str) -> None:
    """The same where nothing may be raised: in handlers, and beside an error."""
    try:
        log.warning("flight records: %s (%s)", _write(reason), reason)
    except Exception as error:
        log.warning("flight records could not be written: %s: %s", type(error).__name__, error)


# -- failures ---


def _on_failure(error: FcollError) -> None:
    if not isinstance(error, _ENDS_A_GROUP) or not _prefix():
        return
    global _error
    _error = _error or str(error)
    if _written_once(str(error)) and flight_records.is_initialized():
        _ask_others(f"rank {dist.get_rank()} failed")


errors.on_failure.append(_on_failure)


def _written_once(why: str) -> bool:
    """For the first failure on this host: what fails later does so for that reason, and the ranks
    are somewhere else by then."""
    with _writing:
        first = not _failed.is_set()
        _failed.set()
        if first:
            _written(why)
    return first


def _ask_others(why: str) -> None:
    from fcoll.transport.backend import known_processes

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        for pid, start in known_processes().values():
            if pid != os.getpid() and process_of(pid) == (pid, start):  # of this host, and alive
                with contextlib.suppress(OSError):  # it does not listen
                    asking.sendto(why.encode(), _address((pid, start)))


def _address(process: Process) -> str:
    return f"\0fcoll-flight-records-{process[0]}-{process[1]}"[:100]


def attend() -> None:
    """A group is made: from now on failures are of this world. Listen for peers that ask for this
    process's records, and for the signal, where its environment says so."""
    global _error
    _error = ""
    _failed.clear()
    _attend_once(os.getpid())


@functools.cache
def _attend_once(pid: int) -> None:
    if name := os.environ.get(_SIGNAL):
        _attend_signal(name)
    if not _prefix() or sys.platform != "linux":
        return
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    try:
        listening.bind(_address(process_of(pid)))
    except OSError as error:
        log.warning("peers cannot ask for this rank's flight records: %s", error)
        return
    os.register_at_fork(after_in_child=listening.close)
    name = "fcoll-flight-records"
    threading.Thread(target=_listen, args=(listening,), name=name, daemon=True).start()


def _attend_signal(name: str) -> None:
    try:
        dump_on_signal(signal.Signals[f"SIG{name.upper().removeprefix('SIG')}"])
    except (KeyError, ValueError, FcollError) as error:  # no such signal, not the main thread
        log.warning("%s=%s has no effect: %s", _SIGNAL, name, error)


def _listen(listening: socket.socket) -> None:
    """Only processes of the same user are answered."""
    while True:
        why, told, *_ = listening.recvmsg(200, socket.CMSG_SPACE(_CREDENTIALS.size))
        _, uid, _ = _CREDENTIALS.unpack(told[0][2][: _CREDENTIALS.size])
        if uid == os.getuid():
            _written_once(why.decode(errors="replace"))
