"""Random ops of DTensor in a LocalTensorMode: each rank draws its own shard's numbers.

DTensor's rule for devices with a Philox generator (16 bytes of state: a seed and an offset): before
a random op, a rank moves its offset to where its shard begins; after it, all ranks have the offset
behind the whole tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch, active_mode, rng
from fcoll.local.ints import int_on_rank, local_int
from fcoll.local.local_tensor import LocalTensor, local


class _LocalDeviceHandle:
    """A device's module (torch.cuda) whose random state is a LocalTensor in a mode."""

    def __init__(self, device_handle: Any, device_type: str) -> None:
        self._device_handle = device_handle
        self._device_type = device_type

    def get_rng_state(self) -> Tensor:
        mode = active_mode.enabled_local_tensor_mode()
        if mode is None:
            return self._device_handle.get_rng_state()
        return LocalTensor(rng.on_each(mode, self._device_handle.get_rng_state))

    def set_rng_state(self, state: Tensor) -> None:
        if not isinstance(state, LocalTensor):
            self._device_handle.set_rng_state(state.to("cpu"))
            return
        mode = active_mode.needed_local_tensor_mode("set_rng_state of each rank")
        for rank, own in state._tensors().items():
            self._device_handle.set_rng_state(own.to("cpu"))
            mode._per_rank_rng_states[rank] = rng.get_state()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device_handle, name)


class _LocalPhiloxState:
    """The Philox states of all ranks; ``seed`` and ``offset`` are ints, of each rank if unequal."""

    def __init__(self, state: Tensor) -> None:
        own = local(state, "_LocalPhiloxState: its")._tensors()
        self._per_rank_states = {r: t.to("cpu").clone() for r, t in own.items()}

    @property
    def state(self) -> LocalTensor:
        return LocalTensor(self._per_rank_states)

    def _get(self, part: slice) -> Any:
        return local_int(
            {r: int(s[part].view(torch.int64)) for r, s in self._per_rank_states.items()}
        )

    def _set(self, part: slice, value: Any) -> None:
        node = value.node if isinstance(value, torch.SymInt) else int(value)
        for r, s in self._per_rank_states.items():
            s[part] = torch.tensor([int_on_rank(node, r)], dtype=torch.int64).view(torch.uint8)

    @property
    def seed(self) -> Any:
        return self._get(slice(0, 8))

    @seed.setter
    def seed(self, value: Any) -> None:
        self._set(slice(0, 8), value)

    @property
    def offset(self) -> Any:
        return self._get(slice(8, 16))

    @offset.setter
    def offset(self, value: Any) -> None:
        self._set(slice(8, 16), value)

    def apply_to_local_tensor_mode(self, device_handle: _LocalDeviceHandle) -> None:
        """Make these the states of the mode's ranks."""
        if active_mode.enabled_local_tensor_mode() is not None:
            device_handle.set_rng_state(self.state)


class _LocalOffsetBasedRNGTracker:
    """DTensor's tracker of random state, for all ranks."""

    def __init__(self, device_type: str = "cuda") -> None:
        self._device_type = device_type
        self._device_handle = _LocalDeviceHandle(_torch.device_handle(device_type), device_type)
        self.distribute_region_enabled = True

    @contextlib.contextmanager
    def _distribute_region(self, spec: Any, generator: Any = None) -> Iterator[None]:
        mode = active_mode.needed_local_tensor_mode("a random op on shards")
        if not self.distribute_region_enabled:
            yield
            return
        if generator is not None:
            given = generator.get_state()
            state = _LocalPhiloxState(LocalTensor({r: given.clone() for r in mode.order}))
        else:
            state = _LocalPhiloxState(self._device_handle.get_rng_state())
            first = state._per_rank_states[mode.order[0]]  # all start from the first rank's state
            state._per_rank_states = {r: first.clone() for r in mode.order}
        start = int(state.offset)
        steps = shard_offsets(spec, mode.order)
        state.offset = local_int({r: start + step for r, step in steps.items()})
        state.apply_to_local_tensor_mode(self._device_handle)
        try:
            yield
        finally:
            state.offset = start + _multiple_of_4(_torch.numel(spec.shape))
            state.apply_to_local_tensor_mode(self._device_handle)
        if generator is not None:
            generator.set_state(state._per_rank_states[mode.order[0]])


def _multiple_of_4(n: int) -> int:
    return (n + 3) // 4 * 4


def shard_offsets(spec: Any, ranks: tuple[int, ...]) -> Mapping[int, int]:
    """Rank -> how many numbers come before its shard of a DTensor, as a multiple of 4."""
    steps = {}
    for rank in ranks:
        index, size = _torch.shard_index_and_size(spec, _coordinate(spec.mesh, rank))
        steps[rank] = _multiple_of_4(index * size)
    return steps


def _coordinate(mesh: Any, rank: int) -> list[int]:
    return _torch.mesh_fibers(mesh).eq(rank).nonzero()[0, 1:].tolist()


def maybe_enable_local_tracker(
    device_type: str, distribute_region_enabled: bool, spec: Any, generator: Any
) -> Any:
    """DTensor's hook: the context of a random op in a LocalTensorMode, None outside of one."""
    if active_mode.enabled_local_tensor_mode() is None:
        return None
    tracker = _LocalOffsetBasedRNGTracker(device_type)
    tracker.distribute_region_enabled = distribute_region_enabled
    return tracker._distribute_region(spec, generator)
