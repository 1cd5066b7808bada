"""``fcoll.prove``: the step on simulated ranks and on one device, in exact arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fcoll.errors import BadMesh, BadOption
from fcoll.proving.algebra import Unlucky
from fcoll.proving.constants import primes
from fcoll.proving.correspondence import Layout, Mesh, data_axes, locate
from fcoll.proving.degrees import Degrees, degree_of
from fcoll.proving.diagnosis import diagnose
from fcoll.proving.exact_mode import Refused
from fcoll.proving.judgement import Compared, agrees, gradients_and_parameters, results
from fcoll.proving.program import Build, Observed, Program, Survey
from fcoll.proving.ring import Ring
from fcoll.proving.shared_state import watch_modules
from fcoll.proving.verdict import Difference, Verdict
from fcoll.simulation.rank_settings import isolated

MOST_RANKS = 64  # threads, each with a model of its own
ATTEMPTS = 4  # at a trial whose random values make a divisor zero
ALLOWED = frozenset(("rng",))

Progress = Callable[[int, int], None]


def prove(
    build: Build,
    mesh: Mapping[str, int],
    *,
    single: Build | None = None,
    trials: int = 3,
    allow: Iterable[str] = (),
    seed: int = 0,
    isolate: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> Verdict:
    """Is the step on this mesh the function that it is on one device? Loss, every gradient and
    every updated parameter are compared, without tolerance.

    ``build(mesh)`` gives ``(step, args)``, small and real; it is run on simulated ranks and once
    more on a mesh of ones, or ``single(mesh)`` there. Numbers are residues modulo p^3: sums,
    products, quotients and exp are exact, other functions are uninterpreted, parameters are drawn
    at random by their names, inputs are what build makes. ``trials`` are run with other primes and
    values; ``verdict.error_bound`` is the chance that different functions agree in all of them.

    What could not be told has ``equal`` None and says why: an op without a rule, a value that
    leaves the tensors, random numbers (unless ``allow={"rng"}``). Calls that do not match raise, as
    in ``fcoll.check``. ``isolate``: modules whose globals each rank has for itself, as in
    ``fcoll.simulate_ranks``.

    >>> def build(mesh):
    ...     w = torch.nn.Parameter(torch.randn(4))
    ...     def step(x):
    ...         loss = (w * x).sum()
    ...         loss.backward()
    ...         return loss
    ...     return step, (torch.arange(4.0) + mesh.get_rank(),)
    >>> print(fcoll.prove(build, mesh={"dp": 1}))  # doctest: +ELLIPSIS
    proved equal to one device: loss, 1 gradient, 1 updated parameter, 3 trials, error ≤ ...
    """
    axes = dict(mesh)
    if not axes:
        raise BadMesh(what="no axes", hint='Say of how many ranks: mesh={"dp": 2, "tp": 2}.')
    unknown = set(allow) - ALLOWED
    if unknown:
        known = ", ".join(ALLOWED)
        raise BadOption(op="prove", arg="allow", value=sorted(unknown), known=known)
    if (size := math.prod(axes.values())) > MOST_RANKS:
        hint = f"Up to {MOST_RANKS} are run: a smaller mesh shows the same faults."
        raise BadMesh(what=f"{size} simulated ranks", hint=hint)
    if trials < 1:
        raise BadOption(op="prove", arg="trials", value=trials, known="1, 2, ...")
    parallel = Program(build, Mesh(axes), frozenset(allow), "the parallel program")
    ones = Mesh(dict.fromkeys(axes, 1))
    alone = Program(single or build, ones, frozenset(allow), "the program of one device")
    parallel.isolate = alone.isolate = isolated(isolate, "prove")
    proof = _Proof(parallel, alone, random.Random(seed), progress or (lambda done, of: None))
    with_hint = watch_modules()
    try:
        return with_hint(proof.verdict(trials))
    except Refused as refused:
        verdict = Verdict(None, 1.0, len(proof.trials), proof.compared, why=str(refused))
        return with_hint(verdict)


@dataclass
class _Proof:
    parallel: Program
    alone: Program
    random: random.Random
    tell: Progress
    compared: dict[str, int] = field(default_factory=dict)
    uninterpreted: set[str] = field(default_factory=set)
    trials: list[_Trial] = field(default_factory=list)
    degree: float = 0.0  # of a compared difference and of an argument to be told from others
    layout: Layout | None = None
    data: tuple[str, ...] = ()

    def verdict(self, trials: int) -> Verdict:
        for attempt in range(ATTEMPTS):
            try:
                self._run(trials)
                break
            except Unlucky as error:  # these values make a divisor zero
                if attempt == ATTEMPTS - 1:
                    raise Refused(str(error)) from error
        if self.trials[-1].wrong:
            return self._verdict(False, 0.0, self.trials[-1].differences())
        if not any(self.compared.values()):
            raise Refused("there is nothing to compare: the step returns no loss and has no module")
        bound = math.prod(min(1.0, self.degree / trial.ring.p) for trial in self.trials)
        if bound >= 1.0:
            why = f"its degree, up to {self.degree:.0f}, is more than the primes of the arithmetic"
            raise Refused(f"no difference in {trials} trials, but {why}: prove fewer layers")
        return self._verdict(True, bound, ())

    def _verdict(self, equal: bool, bound: float, differences: Any) -> Verdict:
        names = tuple(sorted(self.uninterpreted))
        return Verdict(equal, bound, len(self.trials), self.compared, differences, names)

    def _run(self, trials: int) -> None:
        """So many trials with new primes and values, and the degrees."""
        drawn = [(self.random.choice(primes()), self.random.getrandbits(62)) for _ in range(trials)]
        rings, degrees = [Ring(p, seed) for p, seed in drawn], Degrees()
        self.trials = []
        one = self.alone.run([*rings, degrees], self._locate_alone)

        def judge(i: int, many: list[Observed]) -> bool:
            if i == trials:
                self.degree = _highest(one[i]) + _highest(many) + degrees.deepest
                return False
            self.trials.append(self._trial(rings[i], one[i][0], many))
            self.tell(i + 1, trials)
            return not self.trials[-1].wrong

        self.parallel.run([*rings, degrees], self._locate, judge)

    def _locate_alone(self, surveys: list[Survey]) -> Layout:
        whole = surveys[0].parameters
        return locate(whole, [whole], self.alone.mesh)

    def _locate(self, surveys: list[Survey]) -> Layout:
        if self.layout is None:
            mesh, whole = self.parallel.mesh, self.alone.surveys[0].parameters
            self.layout = locate(whole, [s.parameters for s in surveys], mesh)
            self.data = data_axes([s.data for s in surveys], mesh)
            _check_whole(self.layout)
        return self.layout

    def _trial(self, ring: Ring, one: Observed, many: list[Observed]) -> _Trial:
        assert self.layout is not None
        self.uninterpreted |= ring.uninterpreted
        wrong = self._differences(ring, one, many, self.layout)
        lines = {**one.lines, **{k: v for o in many for k, v in o.lines.items()}}
        return _Trial(ring, wrong, lines, self.parallel.mesh, self.compared["gradients"])

    def _differences(
        self, ring: Ring, one: Observed, many: list[Observed], layout: Layout
    ) -> list[Compared]:
        wrong = []
        counts = dict.fromkeys(("losses", "gradients", "updated parameters"), 0)
        for value, reading in results(ring, one, many, self.parallel.mesh, self.data):
            counts["losses"] += 1
            if not reading:
                wrong.append(value)
        for value in gradients_and_parameters(one, many, layout):
            counts["gradients" if value.kind.startswith("gradient") else "updated parameters"] += 1
            if not agrees(ring, value):
                wrong.append(value)
        self.compared = counts
        return wrong


@dataclass
class _Trial:
    ring: Ring
    wrong: list[Compared]
    lines: dict[str, str]
    mesh: Mesh
    gradients: int  # that were compared

    def differences(self) -> tuple[Difference, ...]:
        return diagnose(self.ring, self.wrong, self.lines, self.mesh, self.gradients)


def _highest(observed: list[Observed]) -> float:
    """The highest degree of all that is compared."""
    named = (x for o in observed for x in (o.outputs, *o.gradients, o.parameters))
    return max((degree_of(x) for values in named for x in values.values()), default=0.0)


def _check_whole(layout: Layout) -> None:
    """Elements that no rank has cannot be compared."""
    for name, size in layout.sizes.items():
        parts = [index[name].flatten() for index in layout.index if name in index]
        held = torch.cat(parts).unique().numel() if parts else 0
        if held < size:
            raise Refused(f"{size - held} of {size} elements of {name} are on no rank")
