"""Pickles of sharded tensors: a rank's own shards, the metadata of all, and the rank that wrote it;
and files that all ranks wrote, read on other ranks.

The state has the fields of torch's ShardedTensor, so that its pickles load as ours where
``serve_torch()`` gives its name to ours.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from os import PathLike
from types import SimpleNamespace
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.groups import GroupLike
from fcoll.sharded import _torch
from fcoll.sharded.errors import BadShards, GroupAlreadySet, OtherRanks, WorldNeeded
from fcoll.sharded.ops.rules import is_sharded
from fcoll.sharded.specs import as_process_group, box_of
from fcoll.sharded.transfer_plan import Box, first_gap

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
        for name in (field.name for field in fields(self)):
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
    """The state of a tensor that is pickled."""
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
    _, metadata, _, spec, *_ = state
    st = cls._assemble(spec, metadata, [])
    st.__setstate__(state)
    return st


def deepcopied(st: Any, memo: dict[int, Any]) -> Any:
    """What copy.deepcopy makes: own shards and metadata on the same group."""
    if id(st) in memo:
        return memo[id(st)]
    shards = copy.deepcopy(st._local_shards, memo)
    metadata, spec = copy.deepcopy(st._metadata, memo), copy.deepcopy(st._sharding_spec, memo)
    copied = st._with(shards, spec=spec, metadata=metadata)
    if getattr(st, "_is_param", False):
        copied._is_param = True
    memo[id(st)] = copied
    return copied


# -- files of other ranks ---


def load_files(files: Sequence[str | PathLike | IO[bytes]], into: Mapping[str, Any]) -> None:
    """Read state dicts that torch.save wrote, a file for each rank that there was, into the
    tensors of a state dict on the ranks that there are now.

    The files are of torch's ShardedTensor or of ours; the tensors in ``into`` may be cut in any
    way, or whole. Each rank reads all files and keeps what it holds; nothing is sent. What is in
    the files is unpickled: load only what you trust.

    >>> import io
    >>> file = io.BytesIO()
    >>> torch.save({"table": torch.ones(n, 4)}, file); _ = file.seek(0)
    >>> table = fcoll.sharded.zeros(fcoll.sharded.chunk(0, n), n, 4)
    >>> fcoll.sharded.load_files([file], {"table": table})
    >>> table.local_tensor().tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    saved = [torch.load(file, "cpu", pickle_module=_PIECES, weights_only=False) for file in files]
    for name, target in into.items():
        if isinstance(target, Tensor):
            _fill(name, target, [state[name] for state in saved if name in state])


@dataclass
class _Pieces:
    """The shards of a sharded tensor that one file has."""

    state: tuple
    ProcessGroupState = ProcessGroupState

    @property
    def boxes(self) -> list[tuple[Box, Tensor]]:
        return [(box_of(shard.metadata), shard.tensor) for shard in self.state[0]]

    @property
    def size(self) -> torch.Size:
        return self.state[1].size


class _Unpickler(pickle.Unpickler):
    """Unpickles sharded tensors as pieces, whatever rank wrote them."""

    def find_class(self, module: str, name: str) -> Any:
        value = super().find_class(module, name)
        if value is _torch.TheirShardedTensor or hasattr(value, "_is_sharded_tensor"):
            return _Pieces
        if value is rebuilt:
            return lambda cls, state: cls(state)
        if value is _torch.rebuild_of_type:
            return _rebuilt_pieces
        return value


_PIECES = SimpleNamespace(Unpickler=_Unpickler, __name__="pickle", load=pickle.load)


def _rebuilt_pieces(func: Any, cls: type, args: tuple, state: Any) -> Any:
    return _Pieces(state) if cls is _Pieces else _torch.rebuild_of_type(func, cls, args, state)


def _fill(name: str, target: Any, parts: list[Any]) -> None:
    """Copy what the target holds of the tensor."""
    saved: list[tuple[Box, Tensor]] = []
    for part in parts:
        size = part.size if isinstance(part, _Pieces) else part.shape
        if tuple(size) != tuple(target.shape):
            why = f"{name!r} has size {tuple(size)} in the files and {tuple(target.shape)} here"
            raise BadShards(why=why, hint="Load into a tensor of that size.")
        saved += part.boxes if isinstance(part, _Pieces) else [(Box.whole(size), part)]
    if is_sharded(target):
        blocks = [(box_of(shard.metadata), shard.tensor) for shard in target.local_shards()]
    else:
        blocks = [(Box.whole(target.shape), target)]
    for box, tensor in blocks:
        if gap := first_gap([have for have, _ in saved], box):
            why = f"no file has the block of {name!r} at {gap.offsets} of size {gap.sizes}"
            raise BadShards(why=why, hint="Pass the files of all ranks that saved.")
        for have, source in saved:
            if both := box.meet(have):
                tensor.detach()[both.within(box)].copy_(source.detach()[both.within(have)])
