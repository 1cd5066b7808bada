"""A DeviceMesh of any size over groups that communicate nothing: no processes, no data; and
values that ranks publish for each other while they are traced."""

from __future__ import annotations

import functools
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fcoll._torch import fake_mesh, fresh_world
from fcoll.errors import BadMesh, NeedsPeers, NotOnSimulatedRanks
from fcoll.groups import on_simulated_rank
from fcoll.plugins import plugin
from fcoll.ranks.patches import patched, torchrun_variables
from fcoll.source import user_line as program_line
from fcoll.tracing._torch import all_groups_fake, around_axes, around_new_groups
from fcoll.tracing.values import user_line

_active: list[fake_world] = []


class fake_world:
    """A context manager that gives a DeviceMesh with these axes, as rank ``rank`` sees it.

    Inside, torch.distributed is initialized with a group for all ranks and one for each axis, and
    torchrun's variables (RANK, WORLD_SIZE, ...) are those of a world on one host. At the end all is
    as it was, another process group of the program included. Worlds nest.

    >>> with fcoll.fake_world(dp=4, tp=2, rank=3) as mesh:
    ...     mesh.get_coordinate(), mesh["tp"].size(), torch.distributed.get_world_size()
    ((1, 1), 2, 8)
    """

    def __init__(self, *, rank: int = 0, device: str = "cpu", **axes: int) -> None:
        self.axes, self.rank, self.device = axes, rank, device
        self.size = math.prod(axes.values())
        for axis, n in axes.items():
            if not isinstance(n, int) or n < 1:
                raise BadMesh(what=f"axis {axis!r} has size {n!r}", hint="A size is 1 or more.")
        if not axes:
            raise BadMesh(what="no axis", hint="Write fake_world(dp=4, tp=2).")
        if not 0 <= rank < self.size:
            raise BadMesh(what=f"rank {rank} of {self.size}", hint="Ranks count from 0.")

    def __enter__(self) -> DeviceMesh:
        if on_simulated_rank():
            hint = "Make it outside fcoll.simulate_ranks: a fake world is the whole process's."
            raise NotOnSimulatedRanks(what="fcoll.fake_world", hint=hint)
        with ExitStack() as stack:
            stack.enter_context(fresh_world())
            stack.enter_context(all_groups_fake())
            if not torch.cuda.is_available():  # Megatron's layers make buffers there
                names = {"current_device": lambda: torch.device(self.device)}
                stack.enter_context(patched("a fake world", torch.cuda, names))
            stack.enter_context(traceable_reducers())
            stack.enter_context(torchrun_variables(self.size, self.rank))
            mesh = self._mesh()
            _active.append(self)
            stack.callback(_active.pop)
            self._stack = stack.pop_all()
        return mesh

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _mesh(self) -> DeviceMesh:
        spans = next((axis for axis, n in self.axes.items() if n == self.size), None)
        desc = f"mesh_{spans}" if spans else "default_pg"
        names = {name: name for name in ("world", *self.axes)}
        return fake_mesh(self.axes, self.rank, self.device, names, desc)


@contextmanager
def traceable_reducers() -> Iterator[None]:
    """Inside, a DistributedDataParallel that is made has a reducer that can be traced, which
    fcoll.training brings (plugins.py) when this thread makes the first one."""
    thread, brought = threading.get_ident(), False
    with ExitStack() as stack:

        def bringing(method: Any) -> Any:
            @functools.wraps(method)
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal brought
                if not brought and threading.get_ident() == thread:
                    brought = True
                    stack.enter_context(plugin("reducers").installed())
                return method(*args, **kwargs)

            return call

        ddp = DistributedDataParallel
        make_one = {name: bringing(getattr(ddp, name)) for name in ("__init__", "__setstate__")}
        stack.enter_context(patched("a fake world", ddp, make_one))
        yield


@dataclass(frozen=True)
class NewGroup:
    """A call that makes a group; ``local``: only its members make it."""

    ranks: tuple[int, ...]
    local: bool
    source: str

    def __str__(self) -> str:
        local = ", use_local_synchronization=True" * self.local
        return f"new_group({list(self.ranks)}{local}) at {self.source}"


@contextmanager
def new_groups_noted() -> Iterator[list[NewGroup]]:
    """Inside, what makes groups is written down."""
    groups: list[NewGroup] = []

    def note(ranks: Sequence[int], local: bool) -> None:
        groups.append(NewGroup(tuple(map(int, ranks)), local, user_line()))

    with around_new_groups(note):
        yield groups


@contextmanager
def axes_asked_for() -> Iterator[set[str]]:
    """The axes that a program names while this is open: mesh["tp"], mesh.get_group("tp")."""
    axes: set[str] = set()

    def note(key: Any) -> None:
        names = key if isinstance(key, (tuple, list)) else (key,)
        axes.update(name for name in names if isinstance(name, str))

    with around_axes(note):
        yield axes


def current_axes() -> dict[str, int]:
    """The axes of the innermost fake world, none outside."""
    return dict(_active[-1].axes) if _active else {}


# -- values that traced ranks exchange, since groups communicate nothing ---

Key = tuple[Any, ...]

_exchanges: list[PeerValues] = []


class Published(BaseException):
    """A rank has published its target: it need not go on. No program catches it."""


class Requested(BaseException):
    """A rank needs what has not been published yet."""

    def __init__(self, key: Key, rank: int, source: int, what: str) -> None:
        super().__init__(what)
        self.key, self.rank, self.source, self.what = key, rank, source, what


@dataclass
class PeerValues:
    """One run of a rank: the published values, and the key that it is run to publish, if any."""

    published: dict[Key, Any]
    target: Key | None = None
    counts: Counter[Key] = field(default_factory=Counter)  # the same is published once for each use

    def key(self, about: Key, mine: bool) -> Key:
        self.counts[mine, about] += 1
        return *about, self.counts[mine, about]


@contextmanager
def exchanging(values: PeerValues) -> Iterator[None]:
    _exchanges.append(values)
    try:
        yield
    finally:
        _exchanges.pop()


def publish(about: Key, value: Any) -> None:
    """Publish a value for another rank; ``about`` is the key that both use."""
    if not _exchanges:
        return
    key = _exchanges[-1].key(about, mine=True)
    _exchanges[-1].published[key] = value
    if key == _exchanges[-1].target:
        raise Published


def request(about: Key, source: int, what: str) -> Any:
    """The value that a rank, by its global number, has published."""
    if not _exchanges:
        raise NeedsPeers(what=what, rank=source, line=program_line() or "")
    key = _exchanges[-1].key(about, mine=False)
    if key not in _exchanges[-1].published:
        raise Requested(key, dist.get_rank(), source, what)
    return _exchanges[-1].published[key]
