"""``fcoll.prove``: the step on simulated ranks and on one device, in exact arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fcoll.checking.values import check_size
from fcoll.errors import BadMesh, BadOption
from fcoll.proving.algebra import Algebra, Unlucky
from fcoll.proving.correspondence import Layout, Mesh, data_axes, locate
from fcoll.proving.degrees import Degrees, degree_of
from fcoll.proving.diagnosis import diagnose
from fcoll.proving.judgement import Compared, agrees, gradients_and_parameters, results
from fcoll.proving.mode import Refused
from fcoll.proving.program import Build, Observed, Program
from fcoll.proving.ring import Ring, primes
from fcoll.proving.verdict import Verdict

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
    in ``fcoll.check``.

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
    check_size(axes)
    parallel = Program(build, Mesh(axes), frozenset(allow), "the parallel program")
    ones = Mesh(dict.fromkeys(axes, 1))
    alone = Program(single or build, ones, frozenset(allow), "the program of one device")
    proof = _Proof(parallel, alone, random.Random(seed), progress or (lambda done, of: None))
    try:
        return proof.verdict(trials)
    except Refused as refused:
        return Verdict(None, 1.0, proof.done, proof.compared, why=str(refused))


@dataclass
class _Proof:
    parallel: Program
    alone: Program
    random: random.Random
    tell: Progress
    compared: dict[str, int] = field(default_factory=dict)
    uninterpreted: set[str] = field(default_factory=set)
    done: int = 0

    def verdict(self, trials: int) -> Verdict:
        whole = self.alone.survey()[0].parameters
        ranks = self.parallel.survey()
        mesh = self.parallel.mesh
        layout = locate(whole, [r.parameters for r in ranks], mesh)
        self.sizes = {name: part.values.numel() for name, part in whole.items()}
        self.data = data_axes([r.data for r in ranks], mesh)
        self._check_whole(layout)
        self.tell(0, trials + 1)
        degree = self._degree(layout)
        bound = 1.0
        for trial in range(trials):
            self.tell(trial + 1, trials + 1)
            ring, one, many = self._trial(layout)
            if wrong := self._differences(ring, one, many, layout):
                lines = {**one.lines, **{k: v for o in many for k, v in o.lines.items()}}
                differences = diagnose(ring, wrong, lines, mesh)
                return self._verdict(False, 0.0, differences)
            self.done += 1
            bound *= min(1.0, degree / ring.p)
        if not any(self.compared.values()):
            raise Refused("there is nothing to compare: the step returns no loss and has no module")
        if bound >= 1.0:
            why = f"its degree, up to {degree:.0f}, is more than the primes of the arithmetic"
            raise Refused(f"no difference in {trials} trials, but {why}: prove fewer layers")
        return self._verdict(True, bound, ())

    def _verdict(self, equal: bool, bound: float, differences: Any) -> Verdict:
        names = tuple(sorted(self.uninterpreted))
        return Verdict(equal, bound, self.done, self.compared, differences, names)

    def _check_whole(self, layout: Layout) -> None:
        """Elements that no rank has cannot be compared."""
        for name, size in self.sizes.items():
            held = {int(i) for index in layout.index if name in index for i in index[name].flatten()}
            if len(held) < size:
                missing = size - len(held)
                raise Refused(f"{missing} of {size} elements of {name} are on no rank")

    def _degree(self, layout: Layout) -> float:
        """The highest degree of a compared difference, and of an argument that must be told from
        others: the chance to miss a difference is that over p."""
        degrees = Degrees()
        found = []
        for program, where in ((self.alone, None), (self.parallel, layout)):
            observed = program.run(degrees, self.sizes, where)
            values = (
                x
                for o in observed
                for named in (o.outputs, *o.gradients, o.parameters)
                for x in named.values()
            )
            found.append(max(map(degree_of, values), default=0.0))
        return sum(found) + degrees.deepest

    def _trial(self, layout: Layout) -> tuple[Ring, Observed, list[Observed]]:
        for attempt in range(ATTEMPTS):
            ring = Ring(self.random.choice(primes()), self.random.getrandbits(62))
            try:
                one = self.alone.run(ring, self.sizes)[0]
                many = self.parallel.run(ring, self.sizes, layout)
            except Unlucky as error:
                if attempt == ATTEMPTS - 1:
                    raise Refused(str(error)) from error
                continue
            self.uninterpreted |= ring.uninterpreted
            return ring, one, many
        raise AssertionError

    def _differences(
        self, ring: Ring, one: Observed, many: list[Observed], layout: Layout
    ) -> list[Compared]:
        wrong = []
        counts = dict.fromkeys(("loss", "gradients", "updated parameters"), 0)
        for value, reading in results(ring, one, many, self.parallel.mesh, self.data):
            counts["loss"] += 1
            if not reading:
                wrong.append(value)
        for value in gradients_and_parameters(one, many, layout):
            counts["gradients" if value.kind.startswith("gradient") else "updated parameters"] += 1
            if not agrees(ring, value):
                wrong.append(value)
        self.compared = counts
        return wrong
