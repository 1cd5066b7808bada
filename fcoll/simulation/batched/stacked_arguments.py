"""The arguments of a simulated call: which of their tensors are stacked by rank, and along what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fcoll.errors import BadStack, fail
from fcoll.simulation.batched.stacked_modules import is_stacked, swap, tensors_of


@dataclass(frozen=True)
class Given:
    """``mapped`` tensors with their ``dims``; ``filled`` puts a rank's own in their places."""

    leaves: list[Any]
    spec: TreeSpec | None  # None: the tensors are all of the arguments
    places: list[int]
    modules: list[nn.Module]
    mapped: list[Tensor]
    dims: list[int]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], in_dims: Any, world: int) -> Given:
        if isinstance(in_dims, int) and not kwargs and only_tensors(args):
            # without a search, which of a small step takes a tenth of the time
            for i, x in enumerate(args):
                _check_stacked(x, in_dims, world, f"tensor {i} of the arguments")
            return cls([], None, [], [], list(args), [in_dims] * len(args))
        leaves, spec = tree_flatten((args, kwargs))
        by_leaf = tree_flatten((_dims_of_args(in_dims, args), _dims_of(0, kwargs, "kwargs")))[0]
        places, modules, mapped, dims = [], [], [], []
        for i, (leaf, dim) in enumerate(zip(leaves, by_leaf, strict=True)):
            if isinstance(leaf, Tensor) and dim is not _REPLICATED:
                _check_stacked(leaf, dim, world, f"tensor {i} of the arguments")
                places.append(i)
                mapped.append(leaf)
                dims.append(dim)
        for leaf in leaves:
            if isinstance(leaf, nn.Module) and is_stacked(leaf):
                modules.append(leaf)
                for name, x in tensors_of(leaf).items():
                    _check_stacked(x, 0, world, f"{type(leaf).__name__}.{name}")
                    mapped.append(x)
                    dims.append(0)
        return cls(leaves, spec, places, modules, mapped, dims)

    def filled(
        self, mapped: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Callable[[], None]]:
        """(args, kwargs) of a rank, and what puts the modules back."""
        if self.spec is None:
            return tuple(mapped), {}, _nothing
        leaves, rest = list(self.leaves), list(mapped)
        for place in self.places:
            leaves[place] = rest.pop(0)
        undo = []
        for module in self.modules:
            count = len(tensors_of(module))
            undo.append(swap(module, rest[:count]))
            rest = rest[count:]
        args, kwargs = tree_unflatten(leaves, self.spec)

        def restore() -> None:
            for put_back in reversed(undo):
                put_back()

        return args, kwargs, restore


def only_tensors(values: Sequence[Any]) -> bool:
    return all(isinstance(x, Tensor) for x in values)


def _nothing() -> None:
    pass


_REPLICATED = "replicated"  # in the place of a None, which is no leaf of a tree


def _dims_of_args(in_dims: Any, args: tuple[Any, ...]) -> Any:
    if not isinstance(in_dims, (tuple, list)):
        return tuple(_dims_of(in_dims, x, "all arguments") for x in args)
    if len(in_dims) != len(args):
        why = f"in_dims has {len(in_dims)} entries for {len(args)} arguments"
        fail(BadStack, why=why, hint="Give one for each argument, or one for all.")
    return tuple(_dims_of(d, x, f"argument {i}") for i, (d, x) in enumerate(zip(in_dims, args)))  # noqa: B905


def _dims_of(dim: Any, value: Any, what: str) -> Any:
    """The tree of value with a dim, or "replicated", in the place of each leaf."""
    leaves, spec = tree_flatten(value)
    if dim is None or isinstance(dim, int):
        each = [_REPLICATED if dim is None else dim] * len(leaves)
        return tree_unflatten(each, spec)
    if isinstance(value, dict) and isinstance(dim, dict) and dim.keys() == value.keys():
        return {k: _dims_of(dim[k], value[k], what) for k in value}
    in_lists = isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple))
    if in_lists and len(dim) == len(value):
        made = [_dims_of(d, v, what) for d, v in zip(dim, value)]  # noqa: B905
        return type(value)(made) if type(value) in (list, tuple) else type(value)(*made)
    hint = "It is an int, None, or has the structure of the argument, as vmap's in_dims."
    return fail(BadStack, why=f"in_dims for {what} is {dim!r}", hint=hint)


def _check_stacked(x: Tensor, dim: int, world: int, what: str) -> None:
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != world:
        why = f"{what} has shape {tuple(x.shape)}, which has not {world} ranks along dim {dim}"
        hint = "Stack the ranks' tensors, or pass in_dims=None for what is the same on all ranks."
        fail(BadStack, why=why, hint=hint)
