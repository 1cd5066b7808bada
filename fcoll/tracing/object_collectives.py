"""Collectives of Python objects in a trace: all_gather_object, broadcast_object_list and the like.

A trace has no bytes to make an object of. The calls are recorded with objects of a nominal size;
what comes out is what the sender has, if it is run for it (see peers.py), or this rank's own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.tracing.fake_world import publish, request
from fcoll.tracing.values import user_line

NOMINAL_BYTES = 1024  # of an object; only a run knows them


def call(name: str, notes: list[str], *args: Any, **kwargs: Any) -> Any:
    """A call of torch's function of this name; notes say what was assumed."""
    notes.append(f"{user_line()}: {name} is taken to send objects of {NOMINAL_BYTES} bytes")
    return globals()[name](*args, **kwargs)


def _bytes(objects: int = 1) -> Tensor:
    return torch.empty(objects * NOMINAL_BYTES, dtype=torch.uint8)


def _sizes(objects: int = 1) -> Tensor:
    return torch.empty(objects, dtype=torch.long)


def _me(group: Any) -> tuple[int, int]:
    """This rank's place in the group, and how many there are."""
    return dist.get_rank(group), dist.get_world_size(group)


def _place(rank: int | None, in_group: int | None, group: Any, default: int | None = 0) -> Any:
    """A peer's place in the group, given as a global rank or as that."""
    if in_group is not None:
        return in_group
    if rank is None:
        return default
    return dist.get_group_rank(group, rank) if group is not None else rank


def _ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    me, n = _me(group)
    if me < 0:
        return
    for part in (_sizes, _bytes):
        dist.all_gather([part() for _ in range(n)], part(), group=group)
    object_list[:n] = [obj] * n


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
) -> None:
    me, n = _me(group)
    if me < 0:
        return
    to = _place(dst, group_dst, group)
    dist.all_gather([_sizes() for _ in range(n)], _sizes(), group=group)
    mine = [_bytes() for _ in range(n)] if me == to else None
    dist.gather(_bytes(), mine, group=group, group_dst=to)
    if me == to and object_gather_list is not None:
        object_gather_list[:n] = [obj] * n


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    me, _ = _me(group)
    if me < 0:
        return
    place = _place(src, group_src, group)
    for part in (_sizes, _bytes):
        dist.broadcast(part(len(object_list)), group=group, group_src=place)
    object_list[:] = _from(place, me, list(object_list), group)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
) -> None:
    me, n = _me(group)
    if me < 0:
        return
    place = _place(src, group_src, group)
    dist.broadcast(_sizes(), group=group, group_src=place)
    for part in (_bytes, _sizes):
        parts = [part() for _ in range(n)] if me == place else None
        dist.scatter(part(), parts, group=group, group_src=place)
    scatter_object_output_list[0] = _from(place, me, scatter_object_input_list, group)[me]


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: Any = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    me, _ = _me(group)
    to = _place(dst, group_dst, group)
    for part in (_sizes, _bytes):
        dist.send(part(len(object_list)), group=group, group_dst=to)
    ranks = _ranks(group)
    publish(("objects", ranks[me], ranks[to]), list(object_list))


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    me, _ = _me(group)
    place = _place(src, group_src, group)
    for part in (_sizes, _bytes):
        dist.recv(part(len(object_list)), group=group, group_src=place)
    ranks = _ranks(group)
    what = "objects that it sends"
    object_list[:] = request(("objects", ranks[place], ranks[me]), ranks[place], what)
    return ranks[place]


def _from(place: int, me: int, mine: list[Any] | None, group: Any) -> list[Any]:
    """The sender's objects: it publishes them, the others request them once a call."""
    ranks = _ranks(group)
    about = ("objects", tuple(ranks), place)
    if me == place:
        assert mine is not None
        publish(about, mine)
        return mine
    return request(about, ranks[place], "objects that it sends")
