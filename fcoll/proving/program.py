"""A program run in an algebra, on simulated ranks or on one: what it gave and did."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fcoll import reductions
from fcoll.errors import FcollError, RankFailed
from fcoll.proving import _torch
from fcoll.proving.algebra import Algebra, Unlucky
from fcoll.proving.correspondence import Data, Held, HeldParameter, Layout, Mesh, cut_along, namer
from fcoll.proving.escapes import KnownNumber, active, current, no_escapes
from fcoll.proving.exact_mode import ExactMode, Refused, Wide
from fcoll.proving.lists import at_once
from fcoll.proving.module_outputs import CutElsewhere, CutOutputs, ModuleValues, cut_at, watched
from fcoll.proving.optimizer_rules import cut_around_steps
from fcoll.proving.shared_tensors import check_unwritten, shared_with_others
from fcoll.proving.state import State, as_elements, buffers_of, optimizer_states
from fcoll.reductions import Reduction
from fcoll.simulation.baton import this_rank
from fcoll.simulation.ranks import simulate_ranks
from fcoll.source import line_of
from fcoll.tracing._torch import around_backward
from fcoll.tracing.trace import backward_of

LONGEST_S = 3600.0  # of all trials: a deep program on many ranks takes minutes
Build = Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclass
class Observation:
    """What one rank gave and did: raw elements, by name."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # at each optimizer step
    left: set[str] = field(default_factory=set)  # whose gradient no optimizer has taken
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the step
    state: State = field(default_factory=State)  # likewise
    lines: dict[str, str] = field(default_factory=dict)  # where each parameter was first used
    of_modules: ModuleValues = field(default_factory=ModuleValues)


@dataclass
class Survey:
    """What one rank holds after build."""

    parameters: dict[str, HeldParameter]
    data: dict[str, HeldParameter]
    has_optimizer: bool
    inputs: dict[str, Tensor]  # floats among the arguments of the step


@dataclass(frozen=True)
class Cuts:
    """Where values are replaced by uninterpreted functions of themselves, in both programs."""

    modules: frozenset[str] = frozenset()  # their outputs
    steps: bool = False  # what optimizers take and leave
    outputs: CutOutputs | None = None  # to see what is cut

    def __bool__(self) -> bool:
        return bool(self.modules) or self.steps


Watch = Callable[[int, Any], Any]  # of a rank and its mesh: a mode in which its step runs
Turn = tuple[Algebra, Cuts] | tuple[Algebra, Cuts, Watch]
Plan = Generator[Turn, Any, None]  # is sent list[Observed]


class Program:
    """A build on a mesh, run as often as there are trials, always from the same random state."""

    isolate: Sequence[str] | None = None  # modules whose globals each rank has for itself

    def __init__(
        self,
        build: Build,
        mesh: Mesh,
        allow: frozenset[str],
        label: str,
        rename: Mapping[str, str] = MappingProxyType({}),
        data: Data = MappingProxyType({}),
    ) -> None:
        self.build, self.mesh, self.allow, self.label = build, mesh, allow, label
        self.named, self.data = namer(rename), data
        self.state = torch.get_rng_state()
        self.surveys: list[Survey] = []

    def run(self, plan: Plan, locate: Callable[[list[Survey]], Layout]) -> None:
        """The plan's trials: each yields an algebra and where to cut, and is sent what ranks gave
        and did. Parameters get the algebra's values by name, those at the layout's indices. All in
        one simulation: torch's caches for DTensor are a thread's own, and cost seconds to fill."""
        surveys: dict[int, Survey] = {}
        seen: dict[int, Observation] = {}
        turns: list[Turn | None] = []
        lifted: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        ran_backward: set[int] = set()
        holders: dict[int, Held] = {}

        def note(is_derivative: bool) -> None:
            if (me := this_rank()) is not None and not is_derivative:
                ran_backward.add(me.number)

        def turn(i: int) -> Turn | None:
            """The i-th of the plan: the first rank to ask tells it of the one before."""
            if i == len(turns):
                ranks = [seen[r] for r in range(self.mesh.size)] if i else None
                try:
                    turns.append(plan.send(ranks))
                except StopIteration:
                    turns.append(None)
            return turns[i]

        def one(rank: int) -> None:
            shape, names = tuple(self.mesh.axes.values()), tuple(self.mesh.axes)
            mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
            surveys[rank] = _survey(*self._built(mesh), self.named)
            dist.barrier()
            self.surveys = [surveys[r] for r in range(self.mesh.size)]
            layout = locate(self.surveys)
            for i in itertools.count():
                if (now := turn(i)) is None:
                    return
                dist.barrier()  # all know of this turn: what they saw in the last may go
                seen[rank] = trial(rank, mesh, layout, *now)
                dist.barrier()

        def trial(
            rank: int,
            mesh: Any,
            layout: Layout,
            algebra: Algebra,
            cuts: Cuts,
            watch: Watch | None = None,
        ) -> Observation:
            fn, args = self._built(mesh)
            held = Held.by((fn, args), self.named)
            mode = ExactMode(algebra, rank, self.allow, self.label)
            with _torch.raw():
                _fill(held, algebra, layout, rank, mode)
                holders[rank] = held
                dist.barrier()  # what ranks share is lifted when all have built, once
                _lift(held, algebra, lifted)
                shared = shared_with_others(rank, holders)
                before = buffers_of(held, self.named, algebra)
            observed = Observation(lines=mode.lines)
            ran_backward.discard(rank)
            # of a wrapper and what it wraps, which have one name, the inner one
            modules = {self.named(path): module for module, path in held.found.modules.items()}
            if cuts:
                noted = cut_at(cuts.modules, modules, algebra, cuts.outputs)
            else:
                noted = watched(modules, algebra, observed.of_modules)
            steps = cut_around_steps(held.found.optimizers if cuts.steps else (), algebra)
            with _gradients_noted(held, observed), noted, steps, active(mode):
                versions = {x: x._version for x in held.parameters.values()}
                with watch(rank, mesh) if watch else nullcontext() as watching:
                    out = fn(*args)
                    if watching is not None:
                        watching.ends(out)
                has_updated = any(x._version > version for x, version in versions.items())
                if rank not in ran_backward and not has_updated:
                    backward_of(out)
                _collect(held, out, observed, algebra)
            with _torch.raw():
                check_unwritten(shared)
                now = buffers_of(held, self.named, algebra)
                written = {k for k, x in now.items() if not torch.equal(x, before.get(k, x))}
                observed.state = State(now, written, optimizer_states(held, algebra))
            dist.barrier()
            with _torch.raw():
                _restore(algebra, lifted)
            dist.barrier()
            return observed

        with around_backward(note):
            self._simulated(one)

    def _built(self, mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        torch.set_rng_state(self.state)
        if (me := this_rank()) is not None:  # libraries are set up anew in each build
            me.settings.modules.begin_again()
        with Wide():
            fn, args = self.build(mesh)
            return fn, cut_along(fn, tuple(args), self.data, mesh)

    def _simulated(self, fn: Callable[[int], Any]) -> list[Any]:
        before = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, before)
            # the fused kernels of attention compute with floats of their own
            stack.enter_context(sdpa_kernel([SDPBackend.MATH]))
            stack.enter_context(no_escapes())
            stack.enter_context(_torch.as_on_devices())
            try:
                arithmetic, isolate = Folding(), self.isolate
                return simulate_ranks(
                    fn, self.mesh.size, timeout=LONGEST_S, isolate=isolate, arithmetic=arithmetic
                )
            except RankFailed as error:
                if (meant := self._meant(error)) is None:
                    raise
                raise meant from error

    def _meant(self, error: RankFailed) -> BaseException | None:
        """What a rank raised, as an answer; None if it is the error: calls that do not match."""
        cause = error.__cause__
        if isinstance(cause, (Refused, Unlucky, CutElsewhere)):
            return cause
        if cause is None or isinstance(cause, FcollError):
            return None
        text = f"{type(cause).__name__}: {cause}".partition("\n")[0]
        where = f", at {line}" if (line := line_of(cause)) else ""
        return Refused(f"{self.label} raised {text}{where}, on rank {error.rank}")


class Folding:
    """What reductions of simulated ranks are made by: the algebra of the step that runs."""

    def current(self) -> Any:
        """None while a program is built: on floats as they are."""
        mode = current()
        return None if mode is None else mode.algebra

    def fold(self, row: Reduction, parts: list[Tensor]) -> Tensor:
        return (self.current() or reductions).fold(row, parts)

    def scaled(self, op: str, x: Tensor, factor: float) -> Tensor:
        return (self.current() or reductions).scaled(op, x, factor)


# -- before the step ---


def _survey(fn: Any, args: tuple[Any, ...], named: Callable[[str], str]) -> Survey:
    held = Held.by((fn, args), named)
    buffers = {id(x) for m in held.found.modules for x in m._buffers.values()}
    data = {k: x for k, x in held.others.items() if id(x) not in buffers}
    return Survey(
        {k: HeldParameter.of(x) for k, x in held.parameters.items()},
        {k: HeldParameter.of(x) for k, x in data.items()},
        bool(held.found.optimizers),
        {
            f"args{_torch.keystr(path)}": HeldParameter.of(x).values
            for path, x in _torch.tree_flatten_with_path(args)[0]
            if isinstance(x, Tensor) and x.is_floating_point()
        },
    )


def _fill(held: Held, algebra: Algebra, layout: Layout, rank: int, mode: ExactMode) -> None:
    for name, x in held.parameters.items():
        local = _torch.local_of(x).detach()
        if local.dtype != torch.float64:
            hint = "make it in build(); one that is loaded there: model.double()"
            raise Refused(f"{name} is of {local.dtype}: {hint}")
        local.copy_(algebra.draw(name, layout.sizes[name])[layout.index[rank][name]])
        mode.parameters[local.data_ptr()] = name


def _lift(held: Held, algebra: Algebra, lifted: dict[Any, tuple[Tensor, Tensor]]) -> None:
    """All other floats, once a storage: tensors may share one, also those of several ranks."""
    filled = {_storage(_torch.local_of(x)) for x in held.parameters.values()}
    for x in held.others.values():
        local = _torch.local_of(x).detach()
        if local.dtype not in (torch.float64, torch.complex128) or local.is_meta:
            continue  # others are lifted where they are used
        key = _storage(local)
        if key in filled or (id(algebra), key) in lifted or not key:
            continue
        storage = torch.empty(0, dtype=torch.float64).set_(local.untyped_storage())
        lifted[id(algebra), key] = storage, storage.clone()
        storage.copy_(algebra.lift(storage.clone()))
        if local.dim() == 0 and local.is_floating_point():
            algebra.note(float(local), float(lifted[id(algebra), key][1][local.storage_offset()]))


def _restore(algebra: Algebra, lifted: dict[Any, tuple[Tensor, Tensor]]) -> None:
    """What was made outside of build keeps its numbers."""
    for key in [k for k in lifted if k[0] == id(algebra)]:
        storage, before = lifted.pop(key)
        storage.copy_(before)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


# -- after it ---


@contextmanager
def _gradients_noted(held: Held, observed: Observation) -> Iterator[None]:
    """Gradients are final when an optimizer takes them."""

    def take(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        its = {id(p) for group in optimizer.param_groups for p in group["params"]}
        observed.gradients.append(_gradients(held, lambda x: id(x) in its))

    handles = [o.register_step_pre_hook(take) for o in held.found.optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gradients(held: Held, of: Callable[[Tensor], bool]) -> dict[str, Tensor]:
    found = {}
    for name, x in held.parameters.items():
        grad = x.grad
        if grad is None or not of(x):
            continue
        if _torch.is_dtensor(grad) and grad.placements != x.placements:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=x.placements)  # type: ignore[attr-defined]
        with _torch.raw():
            found[name] = _torch.local_of(grad).detach().clone()
    return found


def _collect(held: Held, out: Any, observed: Observation, algebra: Algebra) -> None:
    taken = {name for of_a_step in observed.gradients for name in of_a_step}
    left = {k: x for k, x in _gradients(held, lambda x: True).items() if k not in taken}
    observed.left = set(left)
    observed.gradients[-1:] = [{**(observed.gradients or [{}])[-1], **left}]
    for path, x in _torch.tree_flatten_with_path(out)[0]:
        name = f"result{_torch.keystr(path)}" if path else "loss"
        if (element := _number(x, algebra)) is not None:
            observed.outputs[name] = element
    with _torch.raw():
        parts = [_torch.local_of(x).detach() for x in held.parameters.values()]
        whole = at_once(algebra.uncut, parts)
        observed.parameters = dict(zip(held.parameters, whole, strict=True))


def _number(x: Any, algebra: Algebra) -> Tensor | None:
    """A number or numbers that the step returns, as elements."""
    if isinstance(x, float) and x != x:
        raise Refused("the step returns NaN, or a value that was computed with where no op sees it")
    if isinstance(x, (int, KnownNumber)):
        return algebra.number(float(x))
    if not isinstance(x, Tensor):
        return None
    whole = x.full_tensor() if hasattr(x, "full_tensor") else x
    with _torch.raw():
        return as_elements(_torch.plain(_torch.local_of(whole)).detach(), algebra)
