"""What a LocalTensorMode changes in torch while it is entered, and puts back when it is left."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fcoll import groups as fcoll_groups
from fcoll.local import _torch, active_mode, rank_groups, rng
from fcoll.local.ints import RankNode, formatted, local_int, rank_hash
from fcoll.local.mesh import _LocalDeviceMesh
from fcoll.ranks.patches import Patches, SharedPatches, where

# DTensor may have bound functions of torch's own module before this one was put in its place.
_TORCHS = "torch.distributed._local_tensor"
_torchs_module = sys.modules.get(_TORCHS)


def _apply(patches: Patches) -> None:
    from fcoll.local import group_methods  # not at import: this may be served early

    at = _torch.patched_modules()
    changes: list[tuple[Any, dict[str, Callable[..., Any]]]] = [
        (at["mesh"], _MESH),
        (at["torch"], _RANDOM),
        (at["random"], _RANDOM),
        (at["dist"], _DIST),
        (dist.ProcessGroup, group_methods.methods()),
        (at["funcol"], {"permute_tensor": permute_tensor}),
        (fcoll_groups, {"rank_asked": rank_asked}),
        (at["SymInt"], {"__hash__": rank_hash, "__format__": formatted}),
    ]
    for owner, names in changes:
        for name, new in names.items():
            if hasattr(owner, name):  # torch has some in some versions
                patches.wrap(owner, name, where(active_mode.enabled_local_tensor_mode, new))
    patches.wrap(at["mesh"], "get_group", _remembering)
    patches.apply(_adopted())


#: In force while any mode is entered.
in_force = SharedPatches("fcoll.local", _apply)


def _remembering(old: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(old)
    def get_group(self: Any, *args: Any, **kwargs: Any) -> Any:
        rank_groups.remember(self)
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


def _instead(new: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does not ask for the one whose place it takes."""
    return lambda original, *args, **kwargs: new(*args, **kwargs)


def get_rank(original: Any, group: Any = None) -> Any:
    """dist.get_rank: an int of each rank; in a group, its place there."""
    mode = active_mode.enabled_local_tensor_mode()
    assert mode is not None
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch._logging"):
        return 0  # the prefix of torch's log lines: the process is rank 0
    if group is None:
        return local_int({r: r for r in mode.order}, RankNode)
    return local_int(rank_groups.rank_in(group, mode.order), RankNode)


def rank_asked(original: Any, name: str) -> Any:
    """fcoll.rank and fcoll.axis_index: an int of each rank, too."""
    mode = active_mode.enabled_local_tensor_mode()
    assert mode is not None
    return local_int(rank_groups.rank_in(_torch.resolve_group(name), mode.order), RankNode)


def _root(group: Any, rank: int | None, group_rank: int | None) -> int:
    if group_rank is not None:
        return group_rank
    return 0 if rank is None else dist.get_group_rank(group, rank)


def gather(
    original: Any,
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
    original: Any,
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
    from fcoll.local.collective_calls import permuted
    from fcoll.local.local_tensor import LocalTensor

    if not isinstance(self, LocalTensor):
        return old(self, src_dst, group, tag)
    return permuted(self, src_dst, _torch.funcol_group(group, tag))


def all_submeshes(old: Any, mesh: Any, dim: str) -> Any:
    """torch asks in which of them its rank is; the process is rank 0."""
    mode = active_mode.enabled_local_tensor_mode()
    assert mode is not None
    with mode.disable():
        return old(mesh, dim)


_MESH: dict[str, Callable[..., Any]] = {
    name: _instead(getattr(_LocalDeviceMesh, name))
    for name in (
        "get_coordinate", "get_local_rank", "get_rank", "_is_current_rank_part_of_mesh",
        "_sym_get_coordinate",
    )
} | {"_get_all_submeshes": all_submeshes}  # fmt: skip
_RANDOM: dict[str, Callable[..., Any]] = {
    "manual_seed": _instead(rng.manual_seed),
    "initial_seed": _instead(rng.initial_seed),
}
_DIST: dict[str, Callable[..., Any]] = {
    "get_rank": get_rank,
    "gather": gather,
    "scatter": scatter,
}
