"""What a step leaves besides parameters: buffers of modules that are saved, and what optimizers
keep for a parameter. A fault there shows in the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fcoll.proving import _torch
from fcoll.proving.algebra import Algebra
from fcoll.proving.correspondence import Held, Layout, Mesh, own_parts
from fcoll.proving.exact_mode import Refused


@dataclass
class State:
    """Of one rank: raw elements, by name."""

    buffers: dict[str, Tensor] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)  # the buffers that the step has changed
    of_optimizers: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # what, of which


def as_elements(x: Tensor, algebra: Algebra) -> Tensor:
    """Integers as elements, too; complex numbers as pairs."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return x.clone() if x.is_floating_point() else algebra.lift(x)


def buffers_of(held: Held, named: Callable[[str], str], algebra: Algebra) -> dict[str, Tensor]:
    """The buffers that state_dict() has, each once."""
    found: dict[str, Tensor] = {}
    for module, path in held.found.modules.items():
        for key, x in module._buffers.items():
            if x is not None and key not in module._non_persistent_buffers_set:
                name = named(f"{path}.{key}" if path else key)
                found.setdefault(name, as_elements(_torch.local_of(x).detach(), algebra))
    return found


def optimizer_states(held: Held, algebra: Algebra) -> dict[tuple[str, str], Tensor]:
    names = {id(x): name for name, x in held.parameters.items()}
    return {
        (key, names[id(p)]): algebra.uncut(_torch.local_of(x).detach().clone())
        for optimizer in held.found.optimizers
        for p, state in optimizer.state.items()
        if id(p) in names and isinstance(state, dict)
        for key, x in state.items()
        if isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta
    }


Wanted = tuple[str, str, list[Tensor | None], list[Tensor | None], Tensor]


def wanted_states(one: State, ranks: Sequence[State], layout: Layout) -> Iterator[Wanted]:
    """Kind and name, what each rank has and what it should have, and one device's whole; of what
    optimizers keep for parameters, where it is as large as these, or one number."""
    for (key, name), full in one.of_optimizers.items():
        got = [o.of_optimizers.get((key, name)) for o in ranks]
        want = [
            _part(full, layout.sizes[name], index.get(name), x)
            for index, x in zip(layout.index, got, strict=True)
        ]
        got = [None if w is None else x for x, w in zip(got, want, strict=True)]
        yield f"optimizer's {key}", name, got, want, full


def _part(full: Tensor, size: int, index: Tensor | None, got: Tensor | None) -> Tensor | None:
    if got is None or index is None:
        return None
    if full.numel() == size and got.shape == index.shape:
        return full.flatten()[index]
    return full if full.numel() == 1 and got.shape == full.shape else None


def wanted_buffers(one: State, ranks: Sequence[State], mesh: Mesh) -> Iterator[Wanted]:
    """Likewise of the buffers that a program has changed: ranks have all of one, or parts."""
    for name in sorted(one.written.union(*(o.written for o in ranks))):
        got = [o.buffers.get(name) for o in ranks]
        if (full := one.buffers.get(name)) is None or all(x is None for x in got):
            continue
        readings = list(own_parts(full, got, mesh))
        if not readings:
            shapes = sorted({tuple(x.shape) for x in got if x is not None})
            whole = f"{tuple(full.shape)} on one device"
            raise Refused(f"where are the ranks' parts of the buffer {name}? {shapes}, {whole}")
        right = [want for want in readings if _equal(got, want)]
        yield "updated buffer", name, got, (right or readings)[0], full


def _equal(got: Sequence[Tensor | None], want: Sequence[Tensor | None]) -> bool:
    pairs = zip(got, want, strict=True)
    return all(x is None or y is None or torch.equal(x, y) for x, y in pairs)
