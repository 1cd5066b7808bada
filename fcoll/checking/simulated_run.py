"""A small program run on simulated ranks, with values: what no trace can see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from fcoll.errors import BadMesh, NoValues, RankFailed
from fcoll.simulation.baton import this_rank
from fcoll.simulation.ranks import simulate_ranks
from fcoll.source import line_of
from fcoll.tracing import _torch
from fcoll.tracing.fakes import Reachable, reachable
from fcoll.tracing.trace import backward_of

MOST_RANKS = 64  # threads, each with a model of its own


@dataclass(frozen=True)
class Ran:
    """The findings of a run on simulated ranks."""

    ranks: int = 0
    findings: tuple[tuple[int, str], ...] = ()  # (rank, what)
    notes: tuple[str, ...] = ()


def check_size(axes: dict[str, int]) -> None:
    """Raise if there are more ranks than can be run."""
    size = prod(axes.values())
    if size > MOST_RANKS:
        smaller = dict(axes)
        while prod(smaller.values()) > MOST_RANKS:
            largest = max(smaller, key=lambda axis: smaller[axis])
            smaller[largest] = (smaller[largest] + 1) // 2
        shown = ",".join(f"{axis}={n}" for axis, n in smaller.items())
        hint = f"Values are run on up to {MOST_RANKS}: take a smaller mesh, as {shown}."
        raise BadMesh(what=f"{size} simulated ranks", hint=hint)


def run_on_ranks(
    build: Callable[..., Any],
    axes: dict[str, int],
    mode: str = "joint",
    isolate: Iterable[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Ran:
    """Build and run the program on every rank of the mesh. What a rank raises is raised."""
    size = prod(axes.values())
    program = _ProgramOfRank(build, axes, mode)
    ended = 0

    def run(rank: int) -> tuple[list[str], list[Tensor]]:
        nonlocal ended
        result = program.run(rank)
        ended += 1
        if progress is not None:
            progress(ended, size)
        return result

    try:
        with _torch.around_backward(program.runs_backward):
            results = simulate_ranks(run, size, isolate=isolate)
    except RankFailed as error:
        if isinstance(error.__cause__, NoValues):
            raise error.__cause__ from None  # it could not be run: nothing was found
        error.add_note(f"while running rank {error.rank} of {axes}, simulated")
        raise
    findings = tuple((rank, what) for rank, (lines, _) in enumerate(results) for what in lines)
    return Ran(size, findings, _shared([leaves for _, leaves in results]))


@dataclass
class _ProgramOfRank:
    """What each simulated rank runs."""

    build: Callable[..., Any]
    axes: dict[str, int]
    mode: str
    ran_backward: set[int] = field(default_factory=set)  # the ranks whose step ran one

    def run(self, rank: int) -> tuple[list[str], list[Tensor]]:
        """The findings of a rank, and the leaves that its program has."""
        try:
            shape, names = tuple(self.axes.values()), tuple(self.axes)
            fn, args = self.build(dist.init_device_mesh("cpu", shape, mesh_dim_names=names))
            objects = reachable(fn, args)
            _check_real(objects)
            out = fn(*args)
            if self.mode != "forward" and rank not in self.ran_backward:
                backward_of(out)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            return [f"ended by SystemExit at {line_of(error)}, without a result"], []
        leaves = [x for x, _ in objects.tensors.values() if x.requires_grad and x.is_leaf]
        return list(_not_finite(out, objects)), leaves

    def runs_backward(self, is_derivative: bool) -> None:
        me = this_rank()
        if me is not None and not is_derivative:
            self.ran_backward.add(me.number)


def _check_real(objects: Reachable) -> None:
    for x, name in objects.tensors.values():
        if x.is_meta or isinstance(x, _torch.FakeTensor):
            hint = (
                "To run with values, build() must make real tensors of small sizes, on the CPU; "
                "the proofs alone take meta ones."
            )
            raise NoValues(what=f"the tensor {name!r} of the program", hint=hint)


def _not_finite(out: Any, objects: Reachable) -> Iterator[str]:
    """Which results and gradients have NaN or infinite elements."""
    for path, x in tree_flatten_with_path(out)[0]:
        if isinstance(x, Tensor) and (what := _bad(x)):
            yield f"the result{keystr(path)} has {what}"
    for x, name in objects.tensors.values():
        if x.is_leaf and x.grad is not None and (what := _bad(x.grad)):
            yield f"the gradient of {name} has {what}"


def _bad(x: Tensor) -> str:
    """ "2 NaN and 1 infinite of 8 elements", or nothing."""
    local = x.to_local() if hasattr(x, "to_local") else x
    if not (local.is_floating_point() or local.is_complex()) or local.is_nested:
        return ""
    local = local.detach()
    if local.layout is not torch.strided:
        local = local.to_dense()
    if local.itemsize == 1:  # float8, for which isnan has no kernel
        local = local.float()
    counts = {"NaN": int(local.isnan().sum()), "infinite": int(local.isinf().sum())}
    summary = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    return summary and f"{summary} of {local.numel()} elements"


def _shared(leaves: list[list[Tensor]]) -> tuple[str, ...]:
    """Parameters that were not made in build(): processes would have their own."""
    counts = Counter(id(x) for mine in leaves for x in mine)
    shared = sum(count > 1 for count in counts.values())
    if not shared:
        return ()
    tensors = f"{shared} tensor{'s' * (shared != 1)} that require{'s' * (shared == 1)} gradients"
    return (
        f"values: the simulated ranks share {tensors}, made outside build(): their gradients add "
        "up, as they would not in processes; make them in build()",
    )
