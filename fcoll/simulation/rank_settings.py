"""What processes have of their own and threads share: changed whenever ranks take turns.

Threads have a grad mode, autocast, default device and stacks of modes of their own already.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fcoll.errors import BadOption
from fcoll.ranks.isolation import KNOWN, Globals
from fcoll.ranks.patches import RANK_VARIABLES
from fcoll.simulation import _torch


@dataclass(eq=False)
class RankSettings:
    """The settings of one rank, or of the caller of a simulation."""

    rng: torch.Tensor
    dtype: torch.dtype
    filters: list[Any]  # of warnings
    show_warning: Any
    env: dict[str, str | None]
    modules: Globals  # of isolated modules
    others: tuple[Any, ...] | None  # the states of `random` and of numpy.random, if they are kept

    @classmethod
    def now(cls, generators: bool = False, isolate: tuple[str, ...] = ()) -> RankSettings:
        """Those in force; ``generators``: also of ``random`` and numpy, which take 40 us a turn;
        ``isolate``: also the globals of these modules."""
        return cls(
            torch.default_generator.get_state(),
            torch.get_default_dtype(),
            warnings.filters,  # type: ignore[arg-type]
            warnings.showwarning,
            {name: os.environ.get(name) for name in RANK_VARIABLES},
            Globals(isolate),
            _other_generators() if generators else None,
        )

    def for_rank(self, number: int) -> RankSettings:
        """What a rank begins with: a copy of the caller's, as a forked process does."""
        env: dict[str, str | None] = dict.fromkeys(RANK_VARIABLES, str(number))
        filters = list(self.filters)
        modules = self.modules.copy()
        return RankSettings(
            self.rng, self.dtype, filters, self.show_warning, env, modules, self.others
        )

    def save(self) -> None:
        """Keep what is in force now."""
        self.rng = torch.default_generator.get_state()
        self.dtype = torch.get_default_dtype()
        self.filters = warnings.filters  # type: ignore[assignment]
        self.show_warning = warnings.showwarning
        self.env = {name: os.environ.get(name) for name in self.env}
        self.modules.save()
        if self.others is not None:
            self.others = _other_generators()

    def restore(self) -> None:
        """Put it in force."""
        torch.default_generator.set_state(self.rng)
        if torch.get_default_dtype() != self.dtype:
            torch.set_default_dtype(self.dtype)
        if warnings.filters is not self.filters:
            differs = warnings.filters != self.filters
            warnings.filters = self.filters
            if differs:  # else a warning would be shown again whenever ranks take turns
                _torch.forget_seen_warnings()
        warnings.showwarning = self.show_warning
        for name, value in self.env.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.modules.restore()
        if self.others is not None:
            random.setstate(self.others[0])
            if self.others[1] is not None:
                _numpy().set_state(self.others[1])


def isolated(isolate: Iterable[str] | None, op: str = "simulate_ranks") -> tuple[str, ...]:
    """The modules that ``isolate=`` means: those of known libraries and the given ones; an empty
    one means none.

    >>> isolated(()), isolated(["random"])[-1], isolated(None) == KNOWN
    ((), 'random', True)
    """
    if isolate is None:
        return KNOWN
    given = (isolate,) if isinstance(isolate, str) else tuple(isolate)
    for name in given:
        if name not in KNOWN and not _is_module(name):
            known = "the modules that can be imported, by name"
            raise BadOption(op=op, arg="isolate", value=name, known=known)
    return given and tuple(dict.fromkeys((*KNOWN, *given)))


def _is_module(name: Any) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError, TypeError):
        return False


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def _other_generators() -> tuple[Any, ...]:
    numpy = _numpy()
    return random.getstate(), None if numpy is None else numpy.get_state()
