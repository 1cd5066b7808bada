"""What would mend the step? Changes of calls that are suspect are made, each in a trial: what makes
the results one device's is said, with its line; else the first line that is not one device's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor

from fcoll.proving import repairs, repairs_of_elements, substitutes
from fcoll.proving.correspondence import Layout, Mesh
from fcoll.proving.judgement import Compared
from fcoll.proving.lines import CallSite, CallsOfRank, Changing, Recording, in_backward
from fcoll.proving.program import Cuts, Observation, Plan, Program, Survey
from fcoll.proving.repairs import (
    FIRST,
    LIKELY,
    POSSIBLE,
    RARE,
    Repair,
    Site,
    has_number,
    only_at,
    scaled,
    sites,
)
from fcoll.proving.ring import Ring
from fcoll.proving.suspects import (
    CallOnRanks,
    events,
    is_given_own,
    suspects,
    suspects_of_backward,
    suspects_of_gradients,
    suspects_of_update,
    way_back,
)
from fcoll.proving.verdict import Difference, counted

MOST = 200  # changes that are tried
SECONDS = 20.0  # of CPU that they may take
FEW = 40  # calls that are given one device's values
SIMPLE = 2**11  # numerators and denominators of a factor
RESTARTS = 30  # a change that raises ends its simulation

Locate = Callable[[list[Survey]], Layout]
Judge = Callable[[Observation, list[Observation]], list[Compared]]


@dataclass
class Investigation:
    """Of a trial that found a difference: the program is run again in the same ring."""

    ring: Ring
    parallel: Program
    alone: Program
    locate: Locate
    locate_alone: Locate
    judge: Judge  # what is wrong, of one device's and the ranks' results
    one: Observation
    wrong: list[Compared]
    gradients: int
    tried: int = 0
    started: float = field(default_factory=time.process_time)
    ranks: list[CallsOfRank] = field(default_factory=list)
    found: list[CallOnRanks] = field(default_factory=list)

    def first_difference(self) -> Difference | None:
        """What would mend the step, of changes of its calls; else where it goes wrong."""
        if not self._is_recorded():
            return None
        kinds = {v.kind for v in self.wrong}
        is_forward = "loss" in kinds
        if is_forward:
            doubtful = suspects(self.found, self.ranks)
        elif any(kind.startswith("gradient") for kind in kinds):
            doubtful = suspects_of_backward(self.found)
        else:
            doubtful = suspects_of_update(self.found, self.ranks)
        if not doubtful:
            return None
        at = sites(doubtful)
        origin = self._origin(at)
        candidates = list(self._repairs(at, sites(self.found)))
        near = {e.place for e in self._way(origin[0].place, at)} if origin else set()
        groups = [
            [r for r in candidates if r.likely == FIRST],
            [r for r in candidates if r.place in near],
            self._once(origin[0].place, at, candidates) if origin else [],
            candidates,
        ]
        tried: set[int] = set()
        for group in groups:
            of_these = [r for r in group if id(r) not in tried]
            tried.update(map(id, of_these))
            with_factors = is_forward and group is groups[-1]
            if (mended := self._best(of_these, at, with_factors)) is not None:
                return self._told(mended, [])
        if origin is not None:
            return self._told_of(*origin, at)
        compared = [s for s in at if s.events[0].one is not None or s.is_float()]
        return _first_result(compared[0]) if is_forward and compared else None

    def _once(
        self, place: CallSite, at: Sequence[Site], candidates: Sequence[Repair]
    ) -> list[Repair]:
        """Changes of the first execution that is wrong, where others are right."""
        first = self._way(place, at)[-1]
        if sum(e.place == first.place for e in self.found) < 2:
            return []
        return [only_at(r, first.execution) for r in candidates if r.place == first.place]

    def _way(self, place: CallSite, at: Sequence[Site]) -> list[CallOnRanks]:
        """Back to the call that is given one device's values, and gives others."""
        event = next(site for site in at if site.place == place).events[0]
        return way_back(self.ring, event, self.ranks, self.found, self.parallel.mesh)

    def _told_of(self, origin: Repair, left: Sequence[Compared], at: Sequence[Site]) -> Difference:
        """Where one device's value mends the step: what it is made of may be wrong already."""
        first = self._way(origin.place, at)[-1]
        is_here = first.place == origin.place
        if is_here and is_given_own(self.ring, first, self.parallel.mesh):
            return self._told(origin, left)
        return _first_result(Site(first.place, [first]))

    def first_gradient(self) -> Difference | None:
        """Where the gradients of results go wrong, on the way back to parameters."""
        if not any(v.kind.startswith("gradient") for v in self.wrong) or not self._is_recorded():
            return None
        doubtful = suspects_of_gradients(self.ring, self.found, self.ranks, self.parallel.mesh)
        if not doubtful:
            return None
        at = sites(doubtful)[:FEW]
        mesh = self.parallel.mesh
        repeated = {e.place for e in self.found if e.execution}
        candidates = []
        for site in at:
            of_site = list(substitutes.gradients(site, self.ring, mesh))
            candidates += of_site
            if site.place in repeated:
                candidates += [only_at(r, site.events[0].execution) for r in of_site]
        if (mended := self._first_that_mends(candidates)) is not None:
            return self._told(mended, [])
        what = "the first gradient that is not one device's, on the way back to what differs"
        name = f"gradient of the {_name(at[0].place)}"
        return Difference(name, what, at[0].place.shown, "")

    def _origin(self, at: Sequence[Site]) -> tuple[Repair, list[Compared]] | None:
        """The first call with which all goes right, or the results do, if it gives one device's
        value: here the step goes wrong."""
        ring, mesh = self.ring, self.parallel.mesh
        with_those = [r for site in at for r in substitutes.one_devices(site, ring, mesh)]
        for repair, left in self._tried(with_those[:FEW]):
            if left is not None and self._is_better(left):
                return repair, left
        return None

    def _best(
        self, candidates: Sequence[Repair], at: Sequence[Site], with_factors: bool
    ) -> Repair | None:
        """The likeliest that mends all."""
        places = {r.place for r in candidates}
        for likely in (FIRST, LIKELY, POSSIBLE, RARE):
            of_these = [r for r in candidates if r.likely == likely]
            if (mended := self._first_that_mends(of_these)) is not None:
                return mended
            if likely == LIKELY and with_factors:
                scalars = [site for site in at if site.place in places]
                if (mended := self._by_a_factor(scalars)) is not None:
                    return mended
        return None

    # -- what was recorded ---

    def _is_recorded(self) -> bool:
        """False for a program that does not run when it is watched: nothing more to say."""
        if self.ranks:
            return True
        try:
            single = self._record(self.alone, self.locate_alone)[0]
            self.ranks = self._record(self.parallel, self.locate)
        except Exception:
            return False
        self.found = events(self.ring, single, self.ranks, self.parallel.mesh)
        return True

    def _record(self, program: Program, locate: Locate) -> list[CallsOfRank]:
        recorded = [CallsOfRank() for _ in range(program.mesh.size)]

        def plan() -> Plan:
            yield self._fresh(), Cuts(), lambda rank, mesh: Recording(recorded[rank])

        with in_backward():
            program.run(plan(), locate)
        return recorded

    def _fresh(self) -> Ring:
        """Of the same values, without what the other has noted of them."""
        return Ring(self.ring.p, self.ring.seed)

    # -- what is tried ---

    def _repairs(self, at: Sequence[Site], every: Sequence[Site]) -> Iterator[Repair]:
        bodies: dict[tuple[Any, ...], list[Site]] = {}
        all_of = {site.place: site for site in every}
        for site in every:
            bodies.setdefault(_body(site), []).append(site)
        for site in every:
            yield from repairs.gathers(site, self.parallel.mesh)
        mesh = self.parallel.mesh
        for site in at:
            yield from repairs.collectives(site, self.ring, mesh)
        for site in at:
            yield from repairs.added_by_all(all_of[site.place], self.ring, mesh)
            for kind in _KINDS:
                yield from kind(site, self.ring, mesh)
            body = bodies[_body(site)]
            yield from repairs_of_elements.offsets(site, body, self.ring, mesh)

    def _first_that_mends(self, candidates: Sequence[Repair]) -> Repair | None:
        """All that is compared."""
        tried = self._tried(candidates)
        return next((repair for repair, left in tried if left is not None and not left), None)

    def _is_better(self, left: Sequence[Compared]) -> bool:
        """Without the first kind of what was wrong, and nothing new."""
        before = {(v.kind, v.name) for v in self.wrong}
        after = {(v.kind, v.name) for v in left}
        first = {(v.kind, v.name) for v in self.wrong if v.kind == "loss"}
        return after < before and not after & first

    def _tried(self, candidates: Sequence[Repair]) -> Iterator[tuple[Repair, Any]]:
        for repair, ranks in self._run_each(candidates):
            left = None
            if ranks is not None:
                try:
                    left = self.judge(self.one, ranks)
                except Exception:  # what is left of a changed step need not make sense
                    left = None
            yield repair, left

    def _run_each(
        self, candidates: Sequence[Repair]
    ) -> Iterator[tuple[Repair, list[Observation] | None]]:
        """What ranks gave with each, None if that raised. All in one simulation, as far as none
        raises."""
        rest, restarts = list(candidates), 0
        while rest and restarts <= RESTARTS:
            done: list[list[Observation]] = []

            def plan(rest: list[Repair] = rest, done: list[list[Observation]] = done) -> Plan:
                for repair in rest:
                    if self.tried >= MOST or time.process_time() - self.started > SECONDS:
                        return
                    self.tried += 1
                    changes = repair.changes
                    done.append(
                        (
                            yield self._fresh(), Cuts(), lambda r, m, c=changes: Changing(c, r, m)  # type: ignore[misc]
                        )
                    )

            try:
                with in_backward():
                    self.parallel.run(plan(), self.locate)
                raised = False
            except Exception:  # a change may well be none that this program can run with
                raised = True
            yield from zip(rest, done, strict=False)
            rest = rest[len(done) + 1 :] if raised else []
            restarts += 1

    # -- a factor that the results tell ---

    def _by_a_factor(self, at: Sequence[Site]) -> Repair | None:
        """Where results are linear in what a call gives, or a power of it, the factor that mends
        them is known from one trial with twice of it."""
        found = []
        probes = [
            scaled(s, 2.0, "", "")
            for s in at
            if s.is_float() and (has_number(s) or s.value.numel() == 1)
        ]
        for probe, ranks in self._run_each(probes):
            by = None if ranks is None else self._factor(ranks)
            if by is not None and by not in (0, 1):
                site = next(s for s in at if s.place == probe.place)
                what = f"{1 / by} times what it should be"
                found.append(scaled(site, float(by), what, f"multiplying {site.its} by {by}"))
        return self._first_that_mends(found)

    def _factor(self, ranks: list[Observation]) -> Fraction | None:
        value = next(v for v in self.wrong if v.kind == "loss")
        twice = [o.outputs[value.name] for o in ranks]
        ring = self.ring
        for read in (_first, _mean, _sum):
            once_, twice_ = read(ring, value.got), read(ring, twice)
            wanted = value.whole.flatten()[0]
            slope = ring.add(twice_, ring.neg(once_))
            missing = ring.add(wanted, ring.neg(once_))
            if (
                float(slope) % ring.p
                and (by := _simple(ring, ring.div(missing, slope))) is not None
            ):
                return 1 + by
        return None

    # -- what is said ---

    def _told(self, repair: Repair, left: Sequence[Compared]) -> Difference:
        remedy = f"right after {repair.remedy}: then {self._agreement(left)}"
        return Difference(_name(repair.place, repair.of), repair.what, repair.place.shown, remedy)

    def _agreement(self, left: Sequence[Compared]) -> str:
        wrong = sum(v.kind.startswith("gradient") for v in left)
        results = "the results" if any(v.kind == "loss" for v in self.wrong) else ""
        if not self.gradients:
            return "all updated parameters agree"
        of = counted(self.gradients, "gradient")
        if wrong:
            rest = f"{wrong} of {of} still differ"
            return f"{results} agree, {rest}" if results else rest
        if any(not v.kind.startswith("gradient") for v in left):
            return f"{counted(len(left), 'updated parameter')} still differ"
        return f"{results} and all {of} agree" if results else f"all {of} agree"


_KINDS: Sequence[Callable[[Site, Ring, Mesh], Iterator[Repair]]] = (
    repairs.reductions,
    repairs.reduced_arguments,
    repairs.numbers,
    repairs.of_all_ranks,
    repairs_of_elements.masks,
    repairs_of_elements.orders,
    repairs_of_elements.exchanges,
    repairs_of_elements.factors_at_hand,
    repairs_of_elements.terms_at_hand,
)


def _first_result(site: Site) -> Difference:
    what = "the first result that is not one device's, nor a part of it, on the way to what differs"
    return Difference(_name(site.place), what, site.place.shown, "")


def _name(place: CallSite, of: str = "result") -> str:
    return f"{of} of {place.function.strip('_')}"


def _body(site: Site) -> tuple[Any, ...]:
    return site.place.file, site.call.body, site.place.caller


def _first(ring: Ring, got: Sequence[Tensor | None]) -> Tensor:
    return next(x for x in got if x is not None).flatten()[0]


def _sum(ring: Ring, got: Sequence[Tensor | None]) -> Tensor:
    done = ring.number(0)
    for x in got:
        if x is not None:
            done = ring.add(done, x.flatten()[0])
    return done


def _mean(ring: Ring, got: Sequence[Tensor | None]) -> Tensor:
    return ring.div(_sum(ring, got), ring.number(len(got)))


def _simple(ring: Ring, x: Tensor) -> Fraction | None:
    """The fraction of small numbers that a residue is, if it is one; of logarithms modulo p^2."""
    old, new, s_old, s_new = ring.modulus, int(x) % ring.modulus, 0, 1
    while new >= SIMPLE:
        q = old // new
        old, new, s_old, s_new = new, old - q * new, s_new, s_old - q * s_new
    return Fraction(new, s_new) if 0 < abs(s_new) < SIMPLE else None
