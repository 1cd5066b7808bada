"""Files that each rank wrote with torch.save, read on other ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor

from fcoll.sharded import _torch, pickling
from fcoll.sharded.boxes import Box, first_gap
from fcoll.sharded.errors import BadShards
from fcoll.sharded.specs import box_of
from fcoll.sharded.tensor import ShardedTensor


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
    """What a file has of a sharded tensor."""

    state: tuple
    ProcessGroupState = pickling.ProcessGroupState

    @property
    def boxes(self) -> list[tuple[Box, Tensor]]:
        return [(box_of(shard.metadata), shard.tensor) for shard in self.state[0]]

    @property
    def size(self) -> torch.Size:
        return self.state[1].size


class _Unpickler(pickle.Unpickler):
    """Unpickles sharded tensors as pieces, whatever rank wrote them."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found in (ShardedTensor, _torch.TheirShardedTensor):
            return _Pieces
        if found is pickling.rebuilt:
            return lambda cls, state: cls(state)
        if found is _torch.rebuild_of_type:
            return _rebuilt
        return found


_PIECES = SimpleNamespace(Unpickler=_Unpickler, __name__="pickle", load=pickle.load)


def _rebuilt(func: Any, cls: type, args: tuple, state: Any) -> Any:
    return _Pieces(state) if cls is _Pieces else _torch.rebuild_of_type(func, cls, args, state)


def _fill(name: str, target: Tensor, found: list[Any]) -> None:
    """Copy what the target holds of the tensor."""
    saved: list[tuple[Box, Tensor]] = []
    for part in found:
        size = part.size if isinstance(part, _Pieces) else part.shape
        if tuple(size) != tuple(target.shape):
            why = f"{name!r} has size {tuple(size)} in the files and {tuple(target.shape)} here"
            raise BadShards(why=why, hint="Load into a tensor of that size.")
        saved += part.boxes if isinstance(part, _Pieces) else [(Box.whole(size), part)]
    if isinstance(target, ShardedTensor):
        wanted = [(box_of(shard.metadata), shard.tensor) for shard in target.local_shards()]
    else:
        wanted = [(Box.whole(target.shape), target)]
    for box, tensor in wanted:
        if gap := first_gap([have for have, _ in saved], box):
            why = f"no file has the block of {name!r} at {gap.offsets} of size {gap.sizes}"
            raise BadShards(why=why, hint="Pass the files of all ranks that saved.")
        for have, source in saved:
            if both := box.meet(have):
                tensor.detach()[both.within(box)].copy_(source.detach()[both.within(have)])
