"""torch.distributed for simulated ranks: what a rank's thread sees is its own rank's world.

While a simulation runs, a few names of torch.distributed are replaced by ones that look whose
thread asks. Other threads get what they got before, and when the last simulation ends everything
is put back.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fcoll.errors import BadOption, NotOnSimulatedRanks
from fcoll.ranks.patches import Patches, SharedPatches, where
from fcoll.simulation import _torch
from fcoll.simulation.baton import this_rank
from fcoll.simulation.channel import Contribution
from fcoll.simulation.group import SimulatedGroup
from fcoll.simulation.work import wait_for_future
from fcoll.source import user_line

PREFIX = "simulated_"  # of groups' names: they are not those of real groups


class RankWorld(_torch.PYTHON_WORLD):  # type: ignore[misc, name-defined]
    """The groups of one rank. The world is there from the start: ``implied`` until the program
    makes it itself by init_process_group."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    pg_coalesce_state: Any = None
    pg_flight_recorder_hooks: Any = None  # from torch 2.15 on
    comms: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        for name in _DICTS:
            setattr(self, name, {})
        self.comms = []
        self.group_count = 0
        self.implied = False
        self.inits = 0
        self._default: SimulatedGroup | None = None

    @property
    def default_pg(self) -> Any:
        # init_process_group asks whether there is a world already: one that is implied gives way
        if self.implied and _torch.caller_is(_torch.INIT_CODE, 3):
            self.implied = False
            dist.destroy_process_group()
        return self._default

    @default_pg.setter
    def default_pg(self, pg: Any) -> None:
        self._default = pg
        if pg is None:
            self.implied = False  # the program has destroyed it itself


_DICTS = (
    "pg_map",
    "pg_names",
    "pg_group_ranks",
    "pg_backend_config",
    "tags_to_pg",
    "pg_to_tag",
    "pg_coalesce_state",
    "pg_flight_recorder_hooks",
)


class Worlds:
    """Stands for c10d's world: that of the rank whose thread asks, or the process's own."""

    def __init__(self, own: Any) -> None:
        object.__setattr__(self, "own", own)

    def __getattr__(self, name: str) -> Any:
        # A module's defaults (``group=dist.group.WORLD``) are for all ranks: not one rank's world
        at_import = name == "default_pg" and _torch.is_imported(sys._getframe(2))
        return getattr(self.own if at_import else self._mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mine(), name, value)

    def _mine(self) -> Any:
        me = this_rank()
        return self.own if me is None else me.world


# -- what ranks get instead ---


def _rendezvous(
    original: Any, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Iterator[Any]:
    me = this_rank()
    assert me is not None
    _check_place(rank, world_size)
    yield me.session.store(url, me.world.inits), me.number, me.session.n


def _check_place(rank: int, world_size: int) -> None:
    me = this_rank()
    assert me is not None
    for arg, given, own in (("rank", rank, me.number), ("world_size", world_size, me.session.n)):
        if given not in (-1, own):
            raise BadOption(op="init_process_group", arg=arg, value=given, known=f"{own}, or none")


def _default_timeout(original: Any, backend: Any) -> timedelta:
    """torch warns where it was built without the backend, which does not matter here."""
    return _torch.DEFAULT_TIMEOUT


def _log_entry(original: Any, func_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """What torch logs of a call: its own asks NCCL for its version, which need not be there."""
    return {"func_name": func_name}


def _group_name(original: Any, ranks: Any, use_hashed_name: bool) -> Any:
    return type(name := original(ranks, use_hashed_name))(PREFIX + name)


def _new_group(
    original: Any,
    group_size: int,
    group_rank: int,
    global_ranks_in_group: Any,
    backend: Any,
    store: Any,
    group_name: str,
    backend_options: Any = None,
    timeout: timedelta | None = None,
    pg_tag: str | None = None,
    device_id: Any = None,
    group_desc: str | None = None,
    enable_reconfigure: bool = False,  # from torch 2.15 on
) -> tuple[Any, Any]:
    """What c10d makes every group by; members wait for one another, as gloo's do."""
    me = this_rank()
    assert me is not None
    if enable_reconfigure:
        what = "init_process_group(enable_reconfigure=True)"
        raise NotOnSimulatedRanks(what=what, hint="Leave it out: no rank joins later.")
    if _torch.is_fake(backend):  # it exchanges nothing: each rank may have any world of its own
        rest = backend_options, timeout, pg_tag, device_id, group_desc
        where = group_size, group_rank, global_ranks_in_group
        return original(*where, backend, store, group_name, *rest)
    _warn_of_replaced(backend)
    ranks = tuple(global_ranks_in_group)
    if not ranks:
        _check_place(group_rank, group_size)
        me.world.inits += 1
    if pg_tag and (existing := _torch.find_group(list(ranks), pg_tag)):
        return existing, me.world.pg_map[existing][1]
    if ranks and me.number not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER, None
    me.session.name_group(me, group_name, ranks or tuple(range(me.session.n)))
    pg = make_group(
        group_name,
        ranks or tuple(range(me.session.n)),
        group_desc or "undefined",
        backend,
        store,
        timeout,
    )
    named = (f"name {group_name.removeprefix(PREFIX)[:8]}",) if ranks else ()
    pg.start("new_group" if ranks else "init_process_group", named, Contribution()).wait()
    tags = {"pg_tag": f"user:{pg_tag}"} if pg_tag else {"add_to_default_tag": True}
    _register(pg, backend, **tags)
    return pg, pg.store


def _warn_of_replaced(backend: Any) -> None:
    for name in _torch.registered_backends(backend):
        message = (
            f"simulated ranks take the place of the backend {name!r} at {user_line()}, which was "
            "registered by dist.Backend.register_backend: it is not made, nor are its options used"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def make_group(
    name: str, ranks: tuple[int, ...], desc: str, backend: str, store: Any, timeout: Any = None
) -> SimulatedGroup:
    me = this_rank()
    assert me is not None
    channel, mailbox = me.session.channel(me, name, _label(desc, name, ranks), ranks, timeout)
    prefixed = dist.PrefixStore(f"{name}/", store)
    return SimulatedGroup(me, channel, mailbox, prefixed, str(backend), desc)


def _label(desc: str, name: str, ranks: tuple[int, ...]) -> str:
    if desc == "default_pg":
        return "world"
    return str(list(ranks)) if desc == "undefined" else desc.removeprefix("mesh_")


def _register(pg: SimulatedGroup, backend: str, **tags: Any) -> None:
    config = str(_torch.BackendConfig(dist.Backend(backend)))
    _torch.register_in_world(
        pg,
        backend_name=backend,
        store=pg.store,
        group_name=pg.group_name,
        backend_config=config,
        **tags,
    )


def begin_world(backend: str) -> None:
    """Give this thread's rank a world, as if init_process_group had been called."""
    me = this_rank()
    assert me is not None
    world = me.world = RankWorld()
    name = _torch.c10d._process_group_name([], use_hashed_name=False)
    ranks = tuple(range(me.session.n))
    store = dist.PrefixStore("default_pg", me.session.store("implied", 0))
    pg = make_group(name, ranks, "default_pg", backend, store)
    _register(pg, backend, rank_mapping={r: r for r in ranks}, add_to_default_tag=True)
    world.default_pg = pg
    world.implied = True


def end_world() -> None:
    """Let go of what this thread's rank has made."""
    me = this_rank()
    if me is None or me.world is None:
        return
    for work in me.session.unasked:
        if work.rank is me:
            work.abandoned = True
            _torch.forget_work(work.tensors)
    for pg in list(me.world.pg_names):
        if isinstance(pg, SimulatedGroup):
            pg.shutdown()
    _torch.unregister_all_groups()
    me.world = RankWorld()


def _split_group(
    original: Any,
    parent_pg: Any = None,
    split_ranks: Any = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> Any:
    """torch's wants an accelerator; ``split_ranks`` are ranks of the parent."""
    me = this_rank()
    assert me is not None
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    parent = parent_pg or dist.group.WORLD
    mine = [sorted(ranks) for ranks in split_ranks if parent.me in ranks]
    parent.start("split_group", (str([list(r) for r in split_ranks]),), Contribution()).wait()
    if not mine:
        return None
    ranks = tuple(parent.channel.ranks[r] for r in mine[0])
    # not torch's name, which counts the groups that this rank is in
    name = f"{parent.group_name}:split{parent.channel.counts[parent.me]}:{mine[0]}"
    desc = group_desc or f"{parent.group_desc}:split"
    kind, store = me.world.pg_map[parent]
    pg = make_group(name, ranks, desc, backend or kind, store, timeout)
    _register(pg, backend or kind, rank_mapping={x: i for i, x in enumerate(ranks)})
    return pg


def _current_device(original: Any) -> Any:
    """Simulated ranks compute on the CPU: code for GPUs (Megatron's) makes its buffers there."""
    return original() if torch.cuda.is_available() else torch.device("cpu")


def _backend_of_mesh(original: Any, *args: Any, **kwargs: Any) -> str:
    """DeviceMesh tells meshes of threads apart by the name of torch's own threaded backend."""
    return (
        "threaded" if sys._getframe(2).f_code.co_name == "__init__" else original(*args, **kwargs)
    )


def _store_class(original: Any) -> Any:
    """torch's class of stores, which makes one that ranks can wait in on simulated ranks."""

    class Meta(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            me = this_rank()
            if me is None:
                return original(*args, **kwargs)
            return me.session.store(f"{original.__name__}{args[:2]}", 0)

        def __instancecheck__(cls, x: Any) -> bool:
            return isinstance(x, original)

    return Meta(original.__name__, (original,), {})


# -- in and out of force ---


_OF_RANKS = {
    name: where(this_rank, of_ranks)
    for name, of_ranks in (
        ("rendezvous", _rendezvous),
        ("_process_group_name", _group_name),
        ("_new_process_group_helper", _new_group),
        ("split_group", _split_group),
        ("_get_default_timeout", _default_timeout),
    )
}
_OF_RANKS_ELSEWHERE = [
    (module, name, where(this_rank, of_ranks))
    for module, name, of_ranks in (
        (_torch.device_mesh, "get_backend", _backend_of_mesh),
        (_torch.c10d_logger, "_get_msg_dict", _log_entry),
        (_torch.Future, "wait", wait_for_future),
        (torch.cuda, "current_device", _current_device),
    )
]


def _apply(patches: Patches) -> None:
    c10d = _torch.c10d
    patches.replace(c10d, "_world", Worlds(c10d._world))
    at = [
        (module, name, make) for name, make in _OF_RANKS.items() for module in _torch.holders(name)
    ]
    for module, name, make in (*at, *_OF_RANKS_ELSEWHERE):
        patches.wrap(module, name, make)
    for name in ("TCPStore", "FileStore", "HashStore"):
        patches.wrap(dist, name, _store_class)
    for name in ("_backend", "_default_pg_init_method"):  # init_process_group writes these
        patches.replace(c10d, name, getattr(c10d, name))
    patches.replace(sys, "excepthook", sys.excepthook)
    before = dist.get_rank() if dist.is_initialized() else -1
    _torch.isolate_threads(True)
    patches.at_undo(lambda: _torch.isolate_threads(False))
    patches.at_undo(lambda: _torch.set_global_rank(before))


#: Inside, torch.distributed serves simulated ranks; all is as before when the last has left.
in_force = SharedPatches("fcoll.simulate_ranks", _apply)
