"""``fcoll.simulate``: an SPMD program on N ranks, as one batched program in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten, tree_unflatten

from fcoll.errors import BadMesh, ran
from fcoll.simulation.batched import _torch, compiled_call, kernels
from fcoll.simulation.batched.refusals import CAUGHT, explained
from fcoll.simulation.batched.stacked_arguments import Given, only_tensors
from fcoll.simulation.batched.stage import Stage

Fn = Callable[..., Any]


def simulate(
    fn: Fn,
    *,
    mesh_shape: Mapping[str, int] | None = None,
    world_size: int | None = None,
    in_dims: Any = 0,
    randomness: str = "different",
    device: str = "cpu",
) -> Simulated:
    """Run fn on all ranks of a mesh at once: what comes in and goes out is stacked by rank.

    ``simulate(fn, world_size=W)(x_W)[r] == fn(x_W[r])`` on rank r of W real ranks

    Ranks are a leading dim that ``torch.func.vmap`` hides from fn; collectives, fcoll's and torch's
    functional ones, see all of it. A group is an axis' name, several at once (``("dp", "tp")``), a
    mesh's, the lists of ranks of all groups, or None. ``in_dims`` is as vmap's: None for arguments
    that are the same on all ranks and given once. Gradients, optimizers and random numbers (for
    each rank its own; the same on all with ``randomness="same"``) are as on real ranks; the
    gradient of stacked leaves is that of the sum of all ranks' losses.

    What depends on the rank in Python (a branch, a shape) cannot run in a batch and raises an error
    that names the line: use :func:`fcoll.simulate_ranks` for such programs.

    >>> def step(x):
    ...     return fcoll.all_reduce(x, "sum", "tp") + fcoll.axis_index("dp")
    >>> fcoll.simulate(step, mesh_shape={"dp": 2, "tp": 2})(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([3., 3., 8., 8.])
    """
    if (mesh_shape is None) == (world_size is None):
        hint = 'Write mesh_shape={"dp": 4, "tp": 2} or world_size=8.'
        raise BadMesh(what="both or neither of mesh_shape and world_size", hint=hint)
    axes: dict[str, Any] = {"world": world_size} if mesh_shape is None else dict(mesh_shape)
    return Simulated(fn, Stage(axes, device), in_dims, randomness)


class Simulated:
    """What :func:`simulate` returns: call it with stacked arguments."""

    def __init__(self, fn: Fn, stage: Stage, in_dims: Any, randomness: str) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.stage = fn, stage
        self.in_dims, self.randomness = in_dims, randomness
        self.name = stage.name

    @property
    def mesh(self) -> DeviceMesh:
        """The simulation's mesh, for use inside fn."""
        return self.stage.mesh

    @property
    def world_size(self) -> int:
        return self.stage.size

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return compiled_call.call(self, args, kwargs)
        kernels.teach()
        try:
            return self.stage.run(self.mapped, args, kwargs, self.stage.size)
        except CAUGHT as error:
            if (found := explained(error)) is None:
                raise
            raise found from error

    def mapped(self, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Any:
        """fn, vmapped over the ranks. Inside the stage only."""
        given = Given.of(args, kwargs, self.in_dims, size)
        shape: list[Any] = []

        def on_ranks(*mapped: Tensor) -> list[Tensor]:
            a, k, restore = given.filled(mapped)
            try:
                out = self.fn(*a, **k)
                if not is_compiling():
                    ran("simulate", out)
            finally:
                restore()
            leaves, rebuilt = _flat(out)
            shape[:] = leaves, rebuilt
            return [x for x in leaves if isinstance(x, Tensor)]

        outs = iter(self._vmap(on_ranks, given, size))
        leaves, rebuilt = shape
        return rebuilt([next(outs) if isinstance(x, Tensor) else x for x in leaves])

    def _vmap(self, on_ranks: Fn, given: Given, size: int) -> Any:
        if not is_compiling():
            return _torch.mapped(on_ranks, given.mapped, given.dims, size, self.randomness)
        ranks = torch.arange(size)  # so that there is something to map
        mapped = torch.func.vmap(
            lambda ranks, *xs: on_ranks(*xs),
            in_dims=(0, *given.dims),
            randomness=self.randomness,
        )
        return mapped(ranks, *given.mapped)


def _flat(out: Any) -> tuple[list[Any], Fn]:
    """The leaves of what fn returns, and what makes the same of others."""
    if isinstance(out, Tensor):
        return [out], _only
    if type(out) in (list, tuple) and only_tensors(out):
        return list(out), type(out)
    leaves, spec = tree_flatten(out)
    return leaves, lambda leaves: tree_unflatten(leaves, spec)


def _only(leaves: list[Any]) -> Any:
    return leaves[0]
