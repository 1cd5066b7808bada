"""Tensors that were made outside of build, and so are one for all simulated ranks.

On real ranks each has its own: a shared gradient adds up what nobody has reduced. Those that a step
only reads do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fcoll.proving import _torch
from fcoll.proving.correspondence import Held
from fcoll.proving.exact_mode import Refused

_HINT = "on real ranks each has its own. Make it in build()"
Shared = tuple[str, Tensor, Tensor]  # name, tensor, and what was in it before the step


def shared_with_others(rank: int, ranks: Mapping[int, Held]) -> Sequence[Shared]:
    """This rank's tensors that another has, too. Parameters are refused: they get gradients."""
    elsewhere: dict[int, list[Tensor]] = {}
    for other, held in ranks.items():
        for _, x in _elements(held) if other != rank else ():
            elsewhere.setdefault(_storage(x), []).append(x)
    shared = []
    for name, x in _elements(ranks[rank]):
        if any(_overlap(x, y) for y in elsewhere.get(_storage(x), ())):
            if name in ranks[rank].parameters:
                raise Refused(f"simulated ranks share the parameter {name}: {_HINT}")
            shared.append((name, x, x.clone()))
    return shared


def check_unwritten(shared: Sequence[Shared]) -> None:
    for name, x, before in shared:
        if not torch.equal(x, before):
            raise Refused(f"simulated ranks share {name}, which the step writes: {_HINT}")


def _elements(held: Held) -> Iterator[tuple[str, Tensor]]:
    for name, x in (*held.parameters.items(), *held.others.items()):
        local = _torch.local_of(x).detach()
        if local.numel() and not local.is_meta:
            yield name, local


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Of one storage: do they lie together?"""
    return x.data_ptr() < _end(y) and y.data_ptr() < _end(x)


def _end(x: Tensor) -> int:
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size()
