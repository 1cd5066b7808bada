"""What a LocalTensorMode changes in torch while it is entered, and puts back when it is left."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fcoll import groups as fcoll_groups
from fcoll.local import _torch, direct, groups, modes, reduce, rng
from fcoll.local.ints import RankNode, formatted, local_int, rank_hash
from fcoll.local.mesh import _LocalDeviceMesh

_lock = threading.Lock()
_entered = 0
_saved: list[tuple[Any, str, Any]] = []
# DTensor may have bound functions of torch's own module before this one was put in its place.
_TORCHS = "torch.distributed._local_tensor"
_torchs_module = sys.modules.get(_TORCHS)


_REDUCING = (
    "all_reduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
)  # fmt: skip


def enter() -> None:
    """A mode was entered: the first one patches."""
    global _entered
    with _lock:
        _entered += 1
        if _entered == 1:
            for owner, name, new in _new_names():
                _saved.append((owner, name, getattr(owner, name)))
                setattr(owner, name, new)


def leave() -> None:
    """A mode was left: the last one puts everything back."""
    global _entered
    with _lock:
        _entered -= 1
        if _entered == 0:
            while _saved:
                owner, name, old = _saved.pop()
                setattr(owner, name, old)


def _new_names() -> list[tuple[Any, str, Any]]:
    at = _torch.patched_modules()
    found = []
    for name in ("get_coordinate", "get_local_rank", "get_rank", "_is_current_rank_part_of_mesh",
                 "_sym_get_coordinate"):  # fmt: skip
        found.append((at["mesh"], name, getattr(_LocalDeviceMesh, name)))
    for place in ("torch", "random"):
        found += [(at[place], "manual_seed", rng.manual_seed)]
        found += [(at[place], "initial_seed", rng.initial_seed)]
    for name, new in (("get_rank", get_rank), ("gather", gather), ("scatter", scatter)):
        found.append((at["dist"], name, new))
    found.append((at["dist"], "all_reduce", direct.all_reduce))
    found.append((at["dist"], "broadcast", direct.broadcast))
    for name in ("reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(dist, name):
            found.append((at["dist"], name, direct.reduce_scatter))
    for name in _REDUCING:
        if hasattr(dist, name):
            found.append((at["dist"], name, reduce.noting_factor))
    found.append((at["funcol"], "permute_tensor", permute_tensor))
    found.append((fcoll_groups, "rank_asked", rank_asked))
    found.append((at["mesh"], "_get_all_submeshes", all_submeshes))
    found.append((at["SymInt"], "__hash__", rank_hash))
    found.append((at["SymInt"], "__format__", formatted))
    patched = [(o, n, _in_a_mode(getattr(o, n), new)) for o, n, new in found]
    return [*patched, (at["mesh"], "get_group", _remembering(at["mesh"].get_group)), *_adopted()]


def _in_a_mode(old: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """``new`` where a mode is enabled, else ``old``; new may ask for the old function."""
    takes_old = new in _TAKE_OLD

    @functools.wraps(old)
    def either(*args: Any, **kwargs: Any) -> Any:
        if modes.enabled_local_tensor_mode() is None:
            return old(*args, **kwargs)
        return new(old, *args, **kwargs) if takes_old else new(*args, **kwargs)

    return either


def _remembering(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def get_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        groups.remember(self)
        return old(self, *args, **kwargs)

    return get_group


def _adopted() -> list[tuple[Any, str, Any]]:
    """torch's own module, if DTensor is bound to it: its names become ours for the while."""
    import fcoll.local as ours

    theirs = {id(m): m for m in (_torchs_module, sys.modules.get(_TORCHS)) if m is not None}
    names = [*ours.__all__, "_for_each_rank_run_func"]
    return [
        (module, name, getattr(ours, name))
        for module in theirs.values()
        if module is not ours
        for name in names
        if hasattr(module, name)
    ]


# ---- what stands in for functions of torch.distributed


def get_rank(group: Any = None) -> Any:
    """dist.get_rank: an int of each rank; in a group, its place there."""
    mode = modes.enabled_local_tensor_mode()
    assert mode is not None
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch._logging"):
        return 0  # the prefix of torch's log lines: the process is rank 0
    if group is None:
        return local_int({r: r for r in mode.order}, RankNode)
    return local_int(groups.rank_in(group, mode.order), RankNode)


def rank_asked(name: str) -> Any:
    """fcoll.rank and fcoll.axis_index: an int of each rank, too."""
    mode = modes.enabled_local_tensor_mode()
    assert mode is not None
    return local_int(groups.rank_in(_torch.resolve_group(name), mode.order), RankNode)


def _root(group: Any, rank: int | None, group_rank: int | None) -> int:
    if group_rank is not None:
        return group_rank
    return 0 if rank is None else dist.get_group_rank(group, rank)


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    """dist.gather: only the root of each group gets something written to its list."""
    group = group or _torch.default_group()
    options = dist.GatherOptions()
    options.rootRank = _root(group, dst, group_dst)
    options.asyncOp = async_op
    work = group.gather([gather_list] if gather_list else [], [tensor], options)
    return work if async_op else None


def scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Any:
    """dist.scatter: the list is that of each group's root."""
    group = group or _torch.default_group()
    if not scatter_list:
        raise ValueError("Argument ``scatter_list`` must be specified on source rank.")
    options = dist.ScatterOptions()
    options.rootRank = _root(group, src, group_src)
    options.asyncOp = async_op
    work = group.scatter([tensor], [scatter_list], options)
    return work if async_op else None


def permute_tensor(old: Any, self: Any, src_dst: list[int], group: Any, tag: str = "") -> Any:
    """The functional permute: torch's asks for one rank, and here are all."""
    from fcoll.local.functional import permuted
    from fcoll.local.tensor import LocalTensor

    if not isinstance(self, LocalTensor):
        return old(self, src_dst, group, tag)
    return permuted(self, src_dst, _torch.funcol_group(group, tag))


def all_submeshes(old: Any, mesh: Any, dim: str) -> Any:
    """torch asks in which of them its rank is; the process is rank 0."""
    mode = modes.enabled_local_tensor_mode()
    assert mode is not None
    with mode.disable():
        return old(mesh, dim)


_TAKE_OLD = {
    reduce.noting_factor, permute_tensor, all_submeshes, rank_hash,
    direct.all_reduce, direct.broadcast, direct.reduce_scatter,
}  # fmt: skip
