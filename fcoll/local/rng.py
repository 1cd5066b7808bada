"""Random state: every rank has its own, as it has on a real machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch, active_mode
from fcoll.local.ints import LocalIntNode, local_int

State = tuple[Tensor, dict[int, Tensor]]  # of the CPU, and of the accelerator by its index


def get_state() -> State:
    """The random states of the CPU and of the current accelerator."""
    if not torch.accelerator.is_available():
        return torch.get_rng_state(), {}
    index = torch.accelerator.current_device_index()
    return torch.get_rng_state(), {index: torch.get_device_module().get_rng_state()}


def set_state(cpu: Tensor, accelerators: Mapping[int, Tensor]) -> None:
    torch.set_rng_state(cpu)
    for index, state in accelerators.items():
        with torch.accelerator.device_index(index):
            torch.get_device_module().set_rng_state(state)


class RanksStates:
    """The states that a random op of these ranks starts from, and where it leaves them."""

    def __init__(self, order: Sequence[int]) -> None:
        mode = active_mode.enabled_local_tensor_mode()
        self._order = order
        self._kept: dict[int, State] = mode._per_rank_rng_states if mode is not None else {}
        if not self._kept:  # no mode: all ranks start from the state of the process
            self._kept = dict.fromkeys(order, get_state())

    @property
    def differ(self) -> bool:
        first = self._kept[self._order[0]]
        others = (self._kept[r] for r in self._order[1:])
        return not all(s is first or _same(s, first) for s in others)

    @contextlib.contextmanager
    def of(self, rank: int) -> Iterator[None]:
        set_state(*self._kept[rank])
        yield
        self._kept[rank] = get_state()

    @contextlib.contextmanager
    def of_all(self) -> Iterator[None]:
        """One draw that is every rank's, as their states are the same."""
        set_state(*self._kept[self._order[0]])
        yield
        self._kept.update(dict.fromkeys(self._order, get_state()))


def ranks_states(order: Sequence[int]) -> RanksStates:
    return RanksStates(order)


def _same(a: State, b: State) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(a[1][i], b[1][i]) for i in a[1])


# ---- what stands in for torch's functions in a mode


def manual_seed(seed: Any) -> torch.Generator:
    """torch.manual_seed for all ranks; a SymInt gives each rank a seed of its own."""
    mode = active_mode.enabled_local_tensor_mode()
    own = isinstance(seed, torch.SymInt) and isinstance(seed.node, LocalIntNode)
    if mode is not None and own:
        for rank in sorted(mode.ranks):
            _torch.manual_seed(seed.node._local_ints[rank])
            mode._per_rank_rng_states[rank] = get_state()
        return torch.random.default_generator
    generator = _torch.manual_seed(seed)
    if mode is not None and mode._per_rank_rng_states:
        mode._per_rank_rng_states.update(dict.fromkeys(mode.ranks, get_state()))
    return generator


def initial_seed() -> int | torch.SymInt:
    """torch.initial_seed; an int of each rank if they have seeds of their own."""
    mode = active_mode.enabled_local_tensor_mode()
    if mode is None or not mode._per_rank_rng_states:
        return torch.random.default_generator.initial_seed()
    return local_int(on_each(mode, torch.random.default_generator.initial_seed))


def on_each(mode: Any, read: Any) -> dict[int, Any]:
    """``read()`` with each rank's state in place; the process's own is put back."""
    before = get_state()
    try:
        found = {}
        for rank in sorted(mode.ranks):
            set_state(*mode._per_rank_rng_states[rank])
            found[rank] = read()
        return found
    finally:
        set_state(*before)


def get_generator_seed_for_device_type(device_type: str) -> int | torch.SymInt:
    """The seed of a device's generator; an int of each rank if their seeds differ."""
    module = torch if device_type == "cpu" else torch.get_device_module(device_type)

    def read() -> int:
        return int(module.get_rng_state()[:8].view(torch.int64).item())

    mode = active_mode.enabled_local_tensor_mode()
    if mode is None or not mode._per_rank_rng_states:
        return read()
    return local_int(on_each(mode, read))
