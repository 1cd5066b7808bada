"""What was found out, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass

from fcoll.errors import NotEqual
from fcoll.graph.proof_result import ProofResult


@dataclass(frozen=True)
class Difference:
    """One value that is not one device's."""

    name: str  # "gradient of layers.0.norm.weight"
    what: str  # what is wrong with it, as far as it is known
    line: str  # where the parameter is used; or empty
    remedy: str  # what would mend it; or empty

    def __str__(self) -> str:
        where = f", at {self.line}" if self.line else ""
        told = [f"{self.name}{where}", *filter(None, [self.what, self.remedy])]
        return "\n  ".join(told)


@dataclass(frozen=True)
class Verdict(ProofResult):
    """Is the parallel step the function of one device? ``equal`` is None where it could not be
    told, and ``why`` says why not. ``bool(verdict)`` is ``equal is True``."""

    error = NotEqual

    error_bound: float  # the chance that different functions have agreed in all trials
    trials: int
    compared: dict[str, int]  # {"losses": 1, "gradients": 34, "updated parameters": 34}
    differences: tuple[Difference, ...] = ()
    uninterpreted: tuple[str, ...] = ()
    why: str = ""
    cuts: tuple[
        str, ...
    ] = ()  # modules whose outputs were taken for uninterpreted functions; steps

    def __str__(self) -> str:
        if self.equal is None:
            return f"could not tell: {self.why}"
        if not self.equal:
            more = len(self.differences) - 1
            rest = [f"and {counted(more, 'more difference')}"] if more else []
            return "\n".join([f"differs first: {self.differences[0]}", *rest])
        found = [_shown(what, n) for what, n in self.compared.items() if n]
        tries = counted(self.trials, "trial")
        cuts = f"cut at {counted(len(self.cuts), 'place')}"
        return (
            f"proved equal to one device: {', '.join(found)}, {tries}, "
            f"error ≤ {self.error_bound:.0e}" + (f", {cuts}" if self.cuts else "")
        )


def _shown(what: str, n: int) -> str:
    if what == "losses":
        return "loss" if n == 1 else f"{n} results"
    return counted(n, what.removesuffix("s"))


def counted(n: int, what: str) -> str:
    """
    >>> counted(1, "trial"), counted(3, "trial")
    ('1 trial', '3 trials')
    """
    return f"{n} {what}{'s' * (n != 1)}"
