"""``fcoll.prove``: the step on simulated ranks and on one device, in exact arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fcoll.errors import BadMesh, BadOption
from fcoll.proving.algebra import Algebra, Unlucky
from fcoll.proving.constants import primes
from fcoll.proving.correspondence import Data, Layout, Mesh, data_axes, locate
from fcoll.proving.degrees import Degrees, degree_of
from fcoll.proving.diagnosis import AGREE, differing, first_of_modules
from fcoll.proving.exact_mode import Refused
from fcoll.proving.judgement import (
    Compared,
    agrees,
    differ_alike,
    gradients_and_parameters,
    results,
)
from fcoll.proving.module_outputs import (
    CutElsewhere,
    CutOutputs,
    all_outputs,
    cuttable,
    without_cuts,
)
from fcoll.proving.program import Build, Cuts, Observation, Plan, Program, Survey
from fcoll.proving.ring import Ring
from fcoll.proving.shared_state import watch_modules
from fcoll.proving.state import Wanted, wanted_buffers, wanted_states
from fcoll.proving.verdict import Difference, Verdict
from fcoll.proving.what_if import Investigation
from fcoll.simulation.rank_settings import isolated

MOST_RANKS = 64  # threads, each with a model of its own
WEAK = 0.01  # a trial with a larger bound is worth another run, with cuts
ATTEMPTS = 4  # at a trial whose random values make a divisor zero
UNCUT = Cuts()
ALLOWED = frozenset(("rng",))

Progress = Callable[[int, int], None]


def prove(
    build: Build,
    mesh: Mapping[str, int],
    *,
    single: Build | None = None,
    trials: int = 3,
    allow: Iterable[str] = (),
    rename: Mapping[str, str] | None = None,
    data: Data | None = None,
    seed: int = 0,
    isolate: Iterable[str] | None = None,
    diagnose: bool = True,
    progress: Progress | None = None,
) -> Verdict:
    """Is the step on this mesh the function that it is on one device? Loss, every gradient and
    every updated parameter are compared, without tolerance.

    ``build(mesh)`` gives ``(step, args)``, small and real; it is run on simulated ranks and once
    more on a mesh of ones, or ``single(mesh)`` there. Numbers are residues modulo p^3: sums,
    products, quotients and exp are exact, other functions are uninterpreted, parameters are drawn
    at random by their names, inputs are what build makes. ``trials`` are run with other primes and
    values; ``verdict.error_bound`` is the chance that different functions agree in all of them.

    ``rename`` gives one device's names of modules or parameters that are called otherwise on the
    mesh, ``{"blocks": "layers"}``; ``data`` the arguments of step that are to be cut, if build
    makes them whole, ``{"x": "dp"}`` along dim 0, ``{"x": ("cp", 1)}`` along dim 1.

    What could not be told has ``equal`` None and says why: an op without a rule, a value that
    leaves the tensors, random numbers (unless ``allow={"rng"}``). Calls that do not match raise, as
    in ``fcoll.check``. ``isolate``: modules whose globals each rank has for itself, as in
    ``fcoll.simulate_ranks``. ``diagnose=False``: of a step that differs say only what its values
    tell, without trials of changes of its lines, which take up to 20 s of CPU.

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
    parallel = Program(
        build, Mesh(axes), frozenset(allow), "the parallel program", rename or {}, data or {}
    )
    ones = Mesh(dict.fromkeys(axes, 1))
    alone = Program(single or build, ones, frozenset(allow), "the program of one device")
    parallel.isolate = alone.isolate = isolated(isolate, "prove")
    tell = progress or (lambda done, of: None)
    proof = _Proof(parallel, alone, random.Random(seed), tell, diagnose)
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
    diagnose: bool = True  # may changes of the step's lines be tried?
    compared: dict[str, int] = field(default_factory=dict)
    uninterpreted: set[str] = field(default_factory=set)
    trials: list[_Trial] = field(default_factory=list)
    degree: float = 0.0  # of a compared difference and of an argument to be told from others
    cuts: Cuts = UNCUT
    layout: Layout | None = None
    data: tuple[str, ...] = ()
    is_idle: bool = False  # does the step do nothing that could be compared?

    def verdict(self, trials: int) -> Verdict:
        self._run(trials, may_cut=True)
        if self.cuts and self.trials[-1].wrong:  # by the cuts, or by the program: without them, too
            self.cuts = UNCUT
            self._run(trials, may_cut=False)
        if self.trials[-1].wrong and self.trials[-1].ring.poles:
            self._check_poles(trials)
        if self.trials[-1].wrong:
            _check_inputs(self.alone.surveys[0].inputs, [s.inputs for s in self.parallel.surveys])
            return self._verdict(False, 0.0, self._explained())
        if self.is_idle:
            why = "the step returns no number, leaves no gradient and changes nothing"
            raise Refused(f"there is nothing to compare: {why}")
        if (bound := self._bound()) >= 1.0:
            why = f"its degree, up to {self.degree:.0f}, is more than the primes of the arithmetic"
            raise Refused(f"no difference in {trials} trials, but {why}: prove fewer layers")
        return self._verdict(True, bound, ())

    def _check_poles(self, trials: int) -> None:
        """A quotient written in two ways differs where a divisor has no inverse: by chance, each
        time elsewhere."""
        before = self.trials[-1]
        self._run(trials, may_cut=False)
        now = self.trials[-1]
        if now.wrong and now.ring.poles and not differ_alike(before.wrong, now.wrong):
            raise Refused(f"no difference but by divisors that are multiples of p = {now.ring.p}")

    def _explained(self) -> tuple[Difference, ...]:
        """What differs. First what a trial with a change has told, or where a gradient of a
        parameter is mended by values; else the first line that is not one device's."""
        trial = self.trials[-1]
        modules, values = trial.of_modules(), trial.differences()
        if not self.diagnose:
            return (*modules, *values)
        investigation = self._investigation(trial)
        first = investigation.first_difference()
        if first is not None and first.remedy:
            return (first, *modules, *values)
        if values[0].remedy.endswith(AGREE):
            return (*values, *modules)
        first = first or investigation.first_gradient()
        if values[0].remedy and not (first and first.remedy):
            return (*values, *modules)
        return (first, *modules, *values) if first is not None else (*modules, *values)

    def _investigation(self, trial: _Trial) -> Investigation:
        layout, compared = self.layout, self.compared
        assert layout is not None

        def judge(one: Observation, many: list[Observation]) -> list[Compared]:
            try:
                return self._differences(trial.ring, one, many, layout)
            finally:
                self.compared = compared

        return Investigation(
            trial.ring, self.parallel, self.alone, self._locate, self._locate_alone, judge,
            trial.one, trial.wrong, compared["gradients"] // len(trial.one.gradients),
        )  # fmt: skip

    def _verdict(self, equal: bool, bound: float, differences: Any) -> Verdict:
        names = tuple(sorted(without_cuts(self.uninterpreted)))
        cuts = tuple(sorted(self.cuts.modules)) + ("optimizer steps",) * self.cuts.steps
        return Verdict(equal, bound, len(self.trials), self.compared, differences, names, cuts=cuts)

    def _bound(self) -> float:
        """Twice as much where the values of denominators that are 0 modulo p were drawn."""
        degrees = [self.degree * (2 if trial.ring.poles else 1) for trial in self.trials]
        return math.prod(
            min(1.0, d / trial.ring.p) for d, trial in zip(degrees, self.trials, strict=True)
        )

    def _run(self, trials: int, may_cut: bool) -> None:
        """So many trials with new primes and values, and the degrees."""
        for attempt in range(ATTEMPTS):
            self.trials = []
            try:
                return self._run_once(trials, may_cut)
            except Unlucky as error:  # these values make a divisor zero
                if attempt == ATTEMPTS - 1:
                    raise Refused(str(error)) from error

    def _run_once(self, trials: int, may_cut: bool, everywhere: bool = True) -> None:
        """A deep program is cut ``everywhere`` at once, or where a first trial tells."""
        rings = self._rings(trials)
        degrees = Degrees(rings)
        one: list[Observation] = []

        def plan() -> Plan:
            """Where one device's degree is high, ranks need not count theirs without cuts."""
            one.extend((yield degrees, UNCUT))
            self.degree = _highest(one) + degrees.deepest
            if may_cut and everywhere and self._is_weak(rings[0]):
                return
            for ring in rings:
                one.extend((yield ring, UNCUT))
            if any(ring.took_sigmoid_of_log for ring in rings):  # of which degrees are told
                one[:1] = yield degrees, UNCUT

        self.alone.run(plan(), self._locate_alone)
        if len(one) > 1:
            return self._run_uncut(rings, degrees, one, may_cut)
        if not self._run_cut(rings, all_outputs(one[0].of_modules)):
            self._run_once(trials, may_cut, everywhere=False)

    def _run_cut(self, rings: list[Ring], modules: frozenset[str]) -> bool:
        """The trials with cuts at all outputs of modules. False if they cannot be there: if ranks
        have others at one, or the first trial differs."""
        outputs, pieces = CutOutputs(), _CutTrials(rings)
        cuts = replace(self._cuts_at(modules), outputs=outputs)

        def plan() -> Plan:
            seen = yield rings[0], cuts
            pieces.seen.append(seen)
            if not self._differs(rings[0], first, seen, len(rings)):
                yield from pieces.plan(replace(cuts, outputs=None))

        self.trials, self.cuts = [], cuts
        try:
            (first,) = self._alone(rings[:1], cuts)
            outputs.compare()
            self.parallel.run(plan(), self._locate)
        except (CutElsewhere, Refused):
            outputs.other = outputs.other or "refused"
        if outputs.other or self.trials[0].wrong:
            self.trials, self.cuts = [], UNCUT
            return False
        self._judge(pieces, [first])
        return True

    def _run_uncut(
        self, rings: list[Ring], degrees: Degrees, one: list[Observation], may_cut: bool
    ) -> None:
        """The trials, and the degrees; the first tells where to cut, if it must be."""
        of_degrees, first, *others = one
        pieces = _CutTrials(self._rings(len(rings)))

        def plan() -> Plan:
            seen = yield rings[0], UNCUT
            if self._differs(rings[0], first, seen, len(rings)):
                return
            of_ranks = [o.of_modules for o in seen]

            def cuts() -> Cuts:
                if not may_cut or not self._is_weak(rings[0]):
                    return UNCUT
                return self._cuts_at(cuttable(rings[0], first.of_modules, of_ranks))

            self.cuts = cuts()
            if not self.cuts:
                self.degree = _highest([of_degrees, *(yield degrees, UNCUT)]) + degrees.deepest
                self.cuts = cuts()
            if self.cuts:
                yield from pieces.plan(self.cuts)
                return
            for ring, alone in zip(rings[1:], others, strict=True):
                if self._differs(ring, alone, (yield ring, UNCUT), len(rings)):
                    return

        self.degree = _highest([of_degrees]) + degrees.deepest
        self.parallel.run(plan(), self._locate)
        if self.cuts:
            self.trials = []
            self._judge(pieces)

    def _is_weak(self, ring: Ring) -> bool:
        return self.degree / ring.p > WEAK

    def _cuts_at(self, modules: frozenset[str]) -> Cuts:
        return Cuts(modules, self.alone.surveys[0].has_optimizer)

    def _judge(self, pieces: _CutTrials, known: Sequence[Observation] = ()) -> None:
        """The trials with cuts, those that one device has not run yet."""
        n, cuts = len(known), replace(self.cuts, outputs=None)
        one = [*known, *self._alone(pieces.algebras[n:], cuts)]
        self.degree = _highest([one[-1], *pieces.seen[-1]]) + pieces.degrees.deepest
        runs = list(zip(pieces.rings, one[:-1], pieces.seen[:-1], strict=True))
        for ring, alone, seen in runs[n:]:
            if self._differs(ring, alone, seen, len(pieces.rings)):
                return

    def _rings(self, trials: int) -> list[Ring]:
        drawn = [(self.random.choice(primes()), self.random.getrandbits(62)) for _ in range(trials)]
        return [Ring(p, seed) for p, seed in drawn]

    def _alone(self, algebras: Sequence[Algebra], cuts: Cuts = UNCUT) -> list[Observation]:
        """What one device gave and did in each algebra."""
        seen: list[Observation] = []

        def plan() -> Plan:
            for algebra in algebras:
                seen.extend((yield algebra, cuts))

        self.alone.run(plan(), self._locate_alone)
        return seen

    def _differs(self, ring: Ring, one: Observation, many: list[Observation], trials: int) -> bool:
        trial = self._trial(ring, one, many)
        self.trials.append(trial)
        self.tell(len(self.trials), trials)
        return bool(trial.wrong)

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

    def _trial(self, ring: Ring, one: Observation, many: list[Observation]) -> _Trial:
        assert self.layout is not None
        self.uninterpreted |= ring.uninterpreted
        wrong = self._differences(ring, one, many, self.layout)
        return _Trial(ring, wrong, one, many, self.parallel.mesh, self.compared)

    def _differences(
        self, ring: Ring, one: Observation, many: list[Observation], layout: Layout
    ) -> list[Compared]:
        read = list(results(ring, one, many, self.parallel.mesh, self.data))
        gradients, parameters = gradients_and_parameters(one, many, layout)
        wrong_parameters = [v for v in parameters if not agrees(ring, v)]
        wrong_gradients = [v for v in gradients if not agrees(ring, v)]
        updated = _updated_by_step(ring, one)
        left = one.left.union(*(o.left for o in many))
        scratch = left & updated & {v.name for v in wrong_gradients}
        scratch -= {v.name for v in wrong_parameters}
        gradients = [v for v in gradients if v.name not in scratch]
        wrong_gradients = [v for v in wrong_gradients if v.name not in scratch]
        states = [Compared(*wanted) for wanted in self._states(one, many, layout)]
        self.is_idle = not (read or gradients or updated or states)
        self.compared = {
            "losses": len(read),
            "gradients": len(gradients),
            "updated parameters": len(parameters),
        }
        wrong = [value for value, reading in read if not reading]
        told = {value.name for value in (*wrong_gradients, *wrong_parameters)}  # the states follow
        wrong_states = [v for v in states if v.name not in told and not agrees(ring, v)]
        return [*wrong, *wrong_gradients, *wrong_parameters, *wrong_states]

    def _states(
        self, one: Observation, many: list[Observation], layout: Layout
    ) -> Iterator[Wanted]:
        ranks = [o.state for o in many]
        yield from wanted_buffers(one.state, ranks, self.parallel.mesh)
        yield from wanted_states(one.state, ranks, layout)


@dataclass
class _CutTrials:
    """The trials of a program that is cut."""

    rings: list[Ring]
    seen: list[list[Observation]] = field(default_factory=list)  # of ranks, in each algebra

    def __post_init__(self) -> None:
        self.degrees = Degrees(self.rings)
        self.algebras = [*self.rings, self.degrees]

    def plan(self, cuts: Cuts) -> Plan:
        """Of those that were not run."""
        for algebra in self.algebras[len(self.seen) :]:
            self.seen.append((yield algebra, cuts))


@dataclass
class _Trial:
    ring: Ring
    wrong: list[Compared]
    one: Observation
    many: list[Observation]
    mesh: Mesh
    compared: dict[str, int]

    def differences(self) -> tuple[Difference, ...]:
        """Of what is compared; before a wrong result the gradients of an earlier optimizer step
        that it comes from."""
        lines = {k: v for o in (self.one, *self.many) for k, v in o.lines.items()}
        wrong = sorted(self.wrong, key=lambda value: value.kind not in self._earlier())
        of_a_step = self.compared["gradients"] // len(self.one.gradients)
        return differing(self.ring, wrong, lines, self.mesh, of_a_step)

    def _earlier(self) -> tuple[str, ...]:
        return tuple(f"gradient (step {k})" for k in range(1, len(self.one.gradients)))

    def of_modules(self) -> tuple[Difference, ...]:
        """The first module that is wrong: forward if a result is, backward if gradients are. There
        those of a mean over a part of the batch are larger by the number of parts."""
        one, ranks = self.one.of_modules, [o.of_modules for o in self.many]
        kinds = {value.kind for value in self.wrong}
        if not kinds.isdisjoint(self._earlier()):
            return ()
        if "loss" in kinds:
            first = first_of_modules(self.ring, one, ranks, "forward", [1], self.mesh)
        elif any(kind.startswith("gradient") for kind in kinds):
            sizes = [math.prod(self.mesh.axes[a] for a in axes) for axes in self.mesh.subsets()]
            scales = [1, *sorted(set(sizes))]
            first = first_of_modules(self.ring, one, ranks, "backward", scales, self.mesh)
        else:
            return ()
        return tuple(first)


def _highest(observed: list[Observation]) -> float:
    """The highest degree of all that is compared."""
    named = (x for o in observed for x in (o.outputs, *o.gradients, o.parameters))
    return max((degree_of(x) for values in named for x in values.values()), default=0.0)


def _updated_by_step(ring: Ring, one: Observation) -> set[str]:
    """The parameters that the step itself has changed: gradients that it leaves may be of this rank
    alone, if it has reduced a copy of them."""
    return {
        name
        for name, x in one.parameters.items()
        if not torch.equal(ring.draw(name, x.numel()).view(x.shape), x)
    }


def _check_whole(layout: Layout) -> None:
    """Elements that no rank has cannot be compared."""
    for name, size in layout.sizes.items():
        parts = [index[name].flatten() for index in layout.index if name in index]
        held = torch.cat(parts).unique().numel() if parts else 0
        if held < size:
            raise Refused(f"{size - held} of {size} elements of {name} are on no rank")


def _check_inputs(one: dict[str, Tensor], ranks: list[dict[str, Tensor]]) -> None:
    """Of other numbers another result says nothing."""
    for rank, inputs in enumerate(ranks):
        for name in one.keys() & inputs.keys():
            if not bool(torch.isin(inputs[name], one[name]).all()):
                why = "has numbers that one device's has not: draw it from a generator of its own"
                raise Refused(f"{name} of the step {why} in build (rank {rank})")
