"""A sharded tensor as pickle writes it: a rank's own shards, the metadata of all, and who it was.

The state has the fields of torch's ShardedTensor, so that its pickles load as ours where
``serve_torch()`` gives its name to ours.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fcoll.groups import GroupLike
from fcoll.sharded import _torch
from fcoll.sharded.errors import GroupAlreadySet, OtherRanks, WorldNeeded
from fcoll.sharded.placements import process_group as as_process_group

# of a thread: simulated ranks are threads, and each loads for itself
_loading_for: ContextVar[Any] = ContextVar("the group that sharded tensors are loaded for")


@dataclass
class ProcessGroupState:
    """Which rank wrote it: within its group and of all, and of how many."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @classmethod
    def here(cls, pg: Any) -> ProcessGroupState:
        return cls(
            dist.get_rank(pg), dist.get_rank(), dist.get_world_size(pg), dist.get_world_size()
        )

    def check(self, pg: Any) -> None:
        """Raise unless this rank is to the group what the one that wrote was to its own."""
        now = ProcessGroupState.here(pg)
        for name in ("local_rank", "global_rank", "local_world_size", "global_world_size"):
            if getattr(self, name) != getattr(now, name):
                what = name.replace("_", " ").capitalize()
                raise OtherRanks(what=what, saved=getattr(self, name), now=getattr(now, name))


@contextmanager
def load_with_process_group(process_group: GroupLike) -> Iterator[Any]:
    """Inside, sharded tensors that are unpickled are of this group, not of all ranks.

    >>> import io
    >>> st = fcoll.sharded.ones(fcoll.sharded.chunk(0, n), n, process_group=list(range(n)))
    >>> file = io.BytesIO()
    >>> torch.save(st, file); _ = file.seek(0)
    >>> with fcoll.sharded.load_with_process_group(list(range(n))):
    ...     loaded = torch.load(file)
    >>> torch.equal(loaded.local_tensor(), st.local_tensor())
    True
    """
    if (outer := _loading_for.get(None)) is not None:
        raise GroupAlreadySet(group=outer)
    pg = as_process_group(process_group)
    token = _loading_for.set(pg)
    try:
        yield pg
    finally:
        _loading_for.reset(token)


def current_process_group() -> Any:
    """The group that is being loaded for; that of all ranks if none is set."""
    pg = _loading_for.get(None)
    return _torch.default_group() if pg is None else pg


def state_of(st: Any) -> tuple:
    """What is pickled of a tensor."""
    return (
        st._local_shards,
        st._metadata,
        ProcessGroupState.here(st._process_group),
        st._sharding_spec,
        st._init_rrefs,
        getattr(st, "_is_param", False),
    )


def restore(st: Any, state: tuple) -> None:
    """Fill a tensor that has only its size with what was pickled, by ours or by torch's."""
    if not dist.is_initialized():
        raise WorldNeeded(what="ShardedTensor")
    shards, metadata, saved_by, spec, init_rrefs, *is_param = state
    pg = current_process_group()
    saved_by.check(pg)
    st._local_shards, st._metadata, st._sharding_spec = shards, metadata, spec
    st._process_group, st._init_rrefs, st._anchor = pg, init_rrefs, None
    if any(is_param):
        st._is_param = True


def rebuilt(cls: Any, state: tuple) -> Any:
    """The tensor of a state: what unpickling calls."""
    if not dist.is_initialized():
        raise WorldNeeded(what="ShardedTensor")
    _, metadata, _, spec, *_ = state
    made = cls._made(spec, metadata, [])
    made.__setstate__(state)
    return made


def copied(st: Any, memo: dict[int, Any]) -> Any:
    """What copy.deepcopy makes: own shards and metadata on the same group."""
    if id(st) in memo:
        return memo[id(st)]
    shards = copy.deepcopy(st._local_shards, memo)
    metadata, spec = copy.deepcopy(st._metadata, memo), copy.deepcopy(st._sharding_spec, memo)
    made = st._with(shards, spec=spec, metadata=metadata)
    if getattr(st, "_is_param", False):
        made._is_param = True
    memo[id(st)] = made
    return made
