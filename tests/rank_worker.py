"""The worker's side of ranks.py: a process that is one rank and runs what it is sent."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

GLOO_S = 30.0  # how long a collective waits for its peers


class Unpicklable(Exception):
    """Stands for an exception of a rank that could not be pickled."""


@dataclass(frozen=True)
class Answer:
    value: Any = None
    error: BaseException | None = None
    traceback: str = ""


def work() -> None:
    fd, parent, init, once = map(int, sys.argv[1:])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends us
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    os.set_inheritable(fd, False)  # else a child of ours would keep the connection open
    connection = Connection(fd)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])

    reply, error = _attempt(join, init)
    connection.send_bytes(reply)
    while error is None or not once:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):  # the parent closed the pool, or died
            if dist.is_initialized():
                dist.destroy_process_group()
            return
        reply, error = _attempt(_call, rank, request, once)
        connection.send_bytes(reply)
        if once:
            break
    if error is not None:
        raise error  # the process ends as a script would


def _attempt(fn: Callable, *args: Any) -> tuple[bytes, BaseException | None]:
    """A pickled Answer, and the exception in it as it was raised here."""
    try:
        return pickle.dumps(Answer(fn(*args))), None
    except BaseException as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        shown = traceback.format_exception(type(error), error, frames or error.__traceback__)
        return pickle.dumps(Answer(None, _portable(error), "".join(shown))), error


def _portable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return Unpicklable(f"{type(error).__qualname__}: {error}")


def _call(rank: int, request: bytes, once: bool) -> Any:
    path, call = pickle.loads(request)
    sys.path.extend(entry for entry in path if entry not in sys.path)
    filters, fn, args = pickle.loads(call)
    world = dist.group.WORLD
    _destroy_subgroups(world)
    torch.manual_seed(rank)
    with warnings.catch_warnings():
        warnings.filters[:] = filters  # type: ignore[index]
        value = fn(rank, *args)
    if not once and dist.group.WORLD is not world:
        raise RuntimeError("the function replaced the pool's process group: use launch() for it")
    return value


def _destroy_subgroups(world: Any) -> None:
    # Each costs 7 file descriptors and 3 threads a rank until it is destroyed. Not done at the
    # end of the function that made them: its peers may be in their last collective.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)


def join(init: bool) -> None:
    if init:
        dist.init_process_group("gloo", timeout=timedelta(seconds=GLOO_S))


def count_ranks(rank: int) -> float:
    count = torch.ones(1)
    dist.all_reduce(count)
    return count.item()


def die_with(parent: int) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
