"""Which elements of one device's parameters a rank has, and which results are comparable.

A rank's part of a parameter is an index into the flattened whole. A DTensor says it by its
placements; a plain shard is found by its initial values, where these are distinct, else by its
shape and its rank's place on an axis.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fcoll.errors import BadOption
from fcoll.proving import _torch
from fcoll.proving.exact_mode import Refused
from fcoll.tracing.fakes import Reachable, reachable

Data = Mapping[str, "str | tuple[str, int]"]  # an argument's name: the axis, and a dim unless 0


@dataclass
class Held:
    """What a program holds after build: its parameters by name, and all other tensors."""

    found: Reachable
    parameters: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def by(roots: Any, named: Callable[[str], str]) -> Held:
        held = Held(reachable(*roots))
        names = dict(_names_in_modules(held.found))
        tensors = held.found.tensors
        for key in sorted(tensors, key=lambda key: key not in names):  # modules' own first
            x, name = tensors[key]
            is_parameter = isinstance(x, torch.nn.Parameter) or (x.requires_grad and x.is_leaf)
            into = held.parameters if is_parameter else held.others
            into[_unused(named(names.get(key, name)), into)] = x
        return held


def namer(rename: Mapping[str, str]) -> Callable[[str], str]:
    """One device's name of a path: without wrappers, and with the longest beginning replaced.

    >>> named = namer({"blocks": "layers", "blocks.0.proj": "layers.0.out"})
    >>> named("module.blocks.1.norm.weight"), named("blocks.0.proj.weight")
    ('layers.1.norm.weight', 'layers.0.out.weight')
    """
    longest_first = sorted(rename.items(), key=lambda pair: -len(pair[0]))

    def named(path: str) -> str:
        name = _torch.plain_name(path)
        for start, instead in longest_first:
            if name == start or name.startswith(f"{start}."):
                return instead + name[len(start) :]
        return name

    return named


def _names_in_modules(found: Reachable) -> Iterator[tuple[int, str]]:
    """An optimizer has a parameter, too, as one of a list: a module's name says more."""
    for module, path in found.modules.items():
        for name, x in (*module._parameters.items(), *module._buffers.items()):
            yield id(x), f"{path}.{name}" if path else name


def _unused(name: str, taken: dict[str, Any]) -> str:
    """Two modules may both have a weight: the second is weight#2."""
    names = itertools.chain([name], (f"{name}#{i}" for i in itertools.count(2)))
    return next(n for n in names if n not in taken)


# -- where parts are ---


@dataclass(frozen=True)
class HeldParameter:
    """A parameter as a rank has it before the step: its initial values, and for a DTensor its
    index."""

    values: Tensor
    index: Tensor | None = None

    @staticmethod
    def of(x: Tensor) -> HeldParameter:
        with _torch.raw():
            if _torch.is_dtensor(x):
                index = _torch.index_of_shard(x).clone()
                return HeldParameter(_torch.local_of(x).detach().clone(), index)
            return HeldParameter(x.detach().clone())


@dataclass(frozen=True)
class Mesh:
    """The axes of the mesh; ranks are numbered along the last first."""

    axes: dict[str, int]

    @property
    def size(self) -> int:
        return math.prod(self.axes.values())

    def place(self, rank: int, axis: str) -> int:
        names = list(self.axes)
        inner = math.prod([self.axes[a] for a in names[names.index(axis) + 1 :]])
        return rank // inner % self.axes[axis]

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """The ranks that differ only along these axes, together."""
        found: dict[tuple[int, ...], list[int]] = {}
        others = [a for a in self.axes if a not in axes]
        for rank in range(self.size):
            found.setdefault(tuple(self.place(rank, a) for a in others), []).append(rank)
        return list(found.values())

    def subsets(self, of: Iterable[str] | None = None) -> Iterator[tuple[str, ...]]:
        """Sets of axes that have more than one rank, small ones first."""
        names = [a for a in (self.axes if of is None else of) if self.axes[a] > 1]
        for k in range(1, len(names) + 1):
            yield from itertools.combinations(names, k)


def own_parts(
    whole: Tensor, got: Sequence[Tensor | None], mesh: Mesh
) -> Iterator[list[Tensor | None]]:
    """What ranks should have, by the shape of what they have: all of it, or each its own part,
    along one axis for each dim that is cut."""
    shapes = {x.shape for x in got if x is not None}
    if len(shapes) != 1 or len(shape := next(iter(shapes))) != whole.dim():
        return
    cut = [d for d, (n, m) in enumerate(zip(whole.shape, shape, strict=True)) if n != m]
    axes = [a for a, n in mesh.axes.items() if n > 1]
    for chosen in itertools.permutations(axes, len(cut)):
        pairs = list(zip(cut, chosen, strict=True))
        if any(whole.shape[d] != shape[d] * mesh.axes[a] for d, a in pairs):
            continue
        want: list[Tensor | None] = []
        for rank, x in enumerate(got):
            part = whole
            for d, a in pairs:
                part = part.narrow(d, mesh.place(rank, a) * shape[d], shape[d])
            want.append(None if x is None else part)
        yield want


def locate(
    whole: dict[str, HeldParameter], ranks: Sequence[dict[str, HeldParameter]], mesh: Mesh
) -> Layout:
    """The index of every part on every rank."""
    sizes = {name: part.values.numel() for name, part in whole.items()}
    layout = Layout(mesh, sizes, [{} for _ in ranks])
    votes: Counter[str] = Counter()
    unclear = []
    for name in dict.fromkeys(name for parts in ranks for name in parts):
        if name not in whole:
            raise Refused(f"one device has no parameter {name!r}: give single= with its names")
        full = whole[name].values
        for rank, parts in enumerate(ranks):
            if name in parts:
                layout.index[rank][name] = _index(full, parts[name])
        found = [index.get(name) for index in layout.index]
        if any(i is None for i, parts in zip(found, ranks, strict=True) if name in parts):
            unclear.append(name)
        elif any(i.numel() != full.numel() for i in found if i is not None):
            votes.update(_axes_of(found, full, mesh))
    for name in unclear:
        _by_shape(name, whole[name].values, ranks, layout, votes)
    return layout


@dataclass
class Layout:
    """``index[rank][name]``: the elements of the whole parameter that the rank has."""

    mesh: Mesh
    sizes: dict[str, int]  # of the whole parameters
    index: list[dict[str, Tensor]]


def _index(full: Tensor, part: HeldParameter) -> Tensor | None:
    values = part.values
    if part.index is not None and torch.equal(full.flatten()[part.index], values):
        return part.index
    if values.shape == full.shape and torch.equal(values, full):
        return torch.arange(full.numel()).view(full.shape)
    ordered, order = full.flatten().sort()
    if full.numel() > 1 and bool((ordered[1:] == ordered[:-1]).any()):
        return part.index  # not distinct: ones, zeros
    place = torch.searchsorted(ordered, values.contiguous()).clamp(max=full.numel() - 1)
    return order[place] if torch.equal(ordered[place], values) else part.index


def _axes_of(found: Sequence[Tensor | None], full: Tensor, mesh: Mesh) -> Iterator[str]:
    """The axes along which ranks have different parts."""
    for axis in mesh.axes:
        for group in mesh.groups([axis]):
            first, *others = (found[r] for r in group)
            if any(x is None or first is None or not torch.equal(first, x) for x in others):
                yield axis
                break


def _by_shape(
    name: str,
    full: Tensor,
    ranks: Sequence[dict[str, HeldParameter]],
    layout: Layout,
    votes: Counter[str],
) -> None:
    for rank, parts in enumerate(ranks):
        if name not in parts:
            continue
        shape = parts[name].values.shape
        if shape == full.shape:
            _check_alike(name, [p[name].values for p in ranks if name in p])
            layout.index[rank][name] = torch.arange(full.numel()).view(full.shape)
            continue
        cuts = [(d, n) for d, (n, m) in enumerate(zip(full.shape, shape, strict=False)) if n != m]
        if len(shape) != full.dim() or len(cuts) != 1 or cuts[0][1] % shape[cuts[0][0]]:
            why = f"it is {tuple(shape)} on rank {rank} and {tuple(full.shape)} on one device"
            raise Refused(f"where is rank {rank}'s part of {name}? {why}")
        dim, size = cuts[0][0], shape[cuts[0][0]]
        axes = [a for a, n in layout.mesh.axes.items() if n == full.shape[dim] // size]
        if not axes:
            raise Refused(f"no axis cuts {name} from {tuple(full.shape)} to {tuple(shape)}")
        axis = max(axes, key=lambda a: (votes[a], list(layout.mesh.axes).index(a)))
        whole = torch.arange(full.numel()).view(full.shape)
        at = layout.mesh.place(rank, axis) * size
        layout.index[rank][name] = whole.narrow(dim, at, size)


def _check_alike(name: str, values: Sequence[Tensor]) -> None:
    if any(x.shape == values[0].shape and not torch.equal(x, values[0]) for x in values):
        why = "its initial values differ between ranks: seed them alike, or broadcast them"
        raise Refused(f"{name}: {why}")


# -- data ---


def cut_along(fn: Callable[..., Any], args: tuple[Any, ...], data: Data, mesh: Any) -> Any:
    """The arguments of the step with those of ``data`` cut by this rank's place on an axis."""
    names = list(inspect.signature(fn).parameters)
    cut = list(args)
    for name, where in data.items():
        axis, dim = (where, 0) if isinstance(where, str) else where
        if name not in names[: len(args)] or axis not in (mesh.mesh_dim_names or ()):
            known = f"arguments {names[: len(args)]} and axes {mesh.mesh_dim_names}"
            raise BadOption(op="prove", arg="data", value={name: where}, known=known)
        i, n = names.index(name), mesh[axis].size()
        if args[i].shape[dim] % n:
            known = f"the dims that {n} divides: {name} is {tuple(args[i].shape)}"
            raise BadOption(op="prove", arg="data", value={name: where}, known=known)
        cut[i] = args[i].chunk(n, dim)[mesh[axis].get_local_rank()].clone()
    return tuple(cut)


def data_axes(ranks: Sequence[dict[str, HeldParameter]], mesh: Mesh) -> tuple[str, ...]:
    """The axes along which ranks hold different tensors that are no parameters."""

    def differ(x: HeldParameter | None, y: HeldParameter | None) -> bool:
        if x is None or y is None:
            return x is not y
        return x.values.shape != y.values.shape or not torch.equal(x.values, y.values)

    return tuple(
        axis
        for axis in mesh.axes
        if any(
            differ(ranks[group[0]].get(name), ranks[r].get(name))
            for group in mesh.groups([axis])
            for r in group[1:]
            for name in ranks[group[0]]
        )
    )
