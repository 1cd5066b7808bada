"""LocalTensorMode: in it, new tensors are LocalTensors and the process is all ranks at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch  # noqa: F401  for the example
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fcoll.local import _torch, active_mode, mode_patches, op_dispatch, rng
from fcoll.local.errors import BadRanks
from fcoll.local.local_tensor import LocalTensor


class LocalTensorMode(TorchDispatchMode):
    """Simulate ranks in one process: ``ranks`` is their number, or a frozenset of them.

    In it, factory functions give LocalTensors, collectives on a fake process group exchange the
    ranks' values, DeviceMesh and ``dist.get_rank`` give an int of each rank, and every rank has
    a random state of its own. Ops that have no LocalTensor among their arguments are plain ops.

    >>> with LocalTensorMode(2) as mode:
    ...     x = mode.rank_map(lambda rank: torch.full((1,), float(rank)))
    ...     y = x + torch.ones(1)
    >>> y._local_tensors
    {0: tensor([1.]), 1: tensor([2.])}
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, ranks: int | frozenset[int]) -> None:
        super().__init__()
        if not isinstance(ranks, int | frozenset):
            raise BadRanks(ranks=ranks)
        self.ranks = frozenset(range(ranks)) if isinstance(ranks, int) else ranks
        self.order = tuple(sorted(self.ranks))
        self._disable = True
        self._per_rank_rng_states: dict[int, rng.State] = {}
        self._coordinate_cache: dict[int, Any] = {}
        self._coordinate_cache_lock = threading.Lock()

    def __enter__(self) -> LocalTensorMode:
        active_mode.get_local_tensor_mode_list().append(self)
        mode_patches.in_force.__enter__()
        self.enable_()
        if not _torch.is_faking():  # all ranks start from the same state
            self._per_rank_rng_states.update(dict.fromkeys(self.ranks, rng.get_state()))
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        active_mode.get_local_tensor_mode_list().pop()
        self.disable_()
        mode_patches.in_force.__exit__()
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return op_dispatch.dispatch(func, args, kwargs or {}, self)

    def disable_(self) -> None:
        self._disable = True

    def enable_(self) -> None:
        self._disable = False

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """In it, the process is a plain one: new tensors are plain, torch's names its own."""
        before, self._disable = self._disable, True
        try:
            yield
        finally:
            self._disable = before

    def rank_map(self, cb: Callable[[int], Tensor]) -> LocalTensor:
        """The LocalTensor of ``cb(rank)`` for each rank."""
        with self.disable():
            return LocalTensor({r: cb(r) for r in self.order})

    def tensor_map(
        self, tensor: LocalTensor, cb: Callable[[int, Tensor], Tensor | None]
    ) -> LocalTensor:
        """The LocalTensor of ``cb(rank, its tensor)``; ranks for which that is None have none."""
        with self.disable():
            found = {}
            for r in self.order:
                if r in tensor._ranks and (t := cb(r, tensor._tensors()[r])) is not None:
                    found[r] = t
            return LocalTensor(found)

    def _any_local_rng_state(self) -> rng.State:
        return self._per_rank_rng_states[self.order[0]]
