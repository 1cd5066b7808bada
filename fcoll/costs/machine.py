"""Machines that the cost model knows: their links, rates and libraries, and the files of them."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import sympy

from fcoll.errors import BadMachineFile, BadOption, NotCalibrated, UnknownMachine
from fcoll.table.row import Expr

PRESETS = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Link:
    """A rank's way to its peers: time of a message, and bytes per second in one direction.

    ``message_us`` is what each further message costs that a rank sends at the same time.
    ``efficiency`` is the part of ``gb_per_s`` that large collectives reach. Smaller ones reach
    less, as they are cut into few chunks: one more costs ``chunk_us``, and a pipeline of chunks as
    small as they can be takes ``fill_us`` to fill.
    """

    latency_us: Expr
    gb_per_s: Expr
    message_us: Expr = 0
    efficiency: Expr = 1
    chunk_us: Expr = 0
    fill_us: Expr = math.inf

    @property
    def us_per_byte(self) -> Expr:
        return ratio(1, 1000 * self.gb_per_s * self.efficiency)


@dataclass(frozen=True)
class Form:
    """A way to all-reduce that has constants of its own: a kernel, or the switch between the GPUs.

    ``launch_us`` is all that does not depend on the size, ``gb_per_s`` the rate of what it sends,
    ``chunk_us`` and ``fill_us`` as in a Link. ``like`` names the form that sends the same, if its
    own name is not that of one (fcoll/costs/forms.py).
    """

    launch_us: float
    gb_per_s: float
    chunk_us: float = 0.0
    fill_us: float = math.inf
    like: str = ""

    @property
    def link(self) -> Link:
        return Link(0, self.gb_per_s, chunk_us=self.chunk_us, fill_us=self.fill_us)


@dataclass(frozen=True)
class Library:
    """How a communication library carries collectives out that all ranks of a group take part in.

    ``chained``: its trees run along the ranks of a node and branch between nodes, and it has them
    for all-reduce, and for others only on groups of one rank a node.
    """

    forms: tuple[str, ...]
    chained: bool = False


LINKS = ("intra", "inter")
#: The forms that a machine may have constants of its own for.
KERNELS = ("one-shot", "two-shot", "multimem", "nvls")
LIBRARIES = {
    "": Library(("ring", "tree", "one-shot")),  # not said: the best of the plain algorithms
    "nccl": Library(("ring", "tree", "nvls"), chained=True),
    "rccl": Library(("ring", "tree", "one-shot"), chained=True),
}


@dataclass(frozen=True)
class Machine:
    """What the model knows of the ranks that a program runs on.

    ``flops``: TFLOP/s of matrix products by dtype; the efficiencies are the parts of the peaks that
    good kernels reach. ``launch_us`` is the fixed cost of a kernel, ``collective_us`` that of a
    collective. ``measured`` has, by the name of the collective, (bytes, us) found on
    ``measured_ranks`` ranks, which go before the formulas.

    ``library`` carries the collectives out, and ``forms`` are what else there is for all-reduce on
    this machine. A collective is priced as what the library does; ``form="one-shot"`` prices that
    form where there is one, ``form="best"`` the fastest of all.

    What runs at the same time (fcoll/scheduling/contention.py): compute takes ``slowdown`` times as
    long while a collective is in flight, groups share the ``shared_links`` ("intra", "inter"), and
    the host takes ``host_us`` to issue a kernel. As they are, nothing slows anything down.
    """

    name: str
    flops: Mapping[str, float]
    memory_gb_per_s: float
    intra: Link
    inter: Link
    ranks_per_node: int = 8
    launch_us: float = 0.0
    collective_us: float = 0.0
    flops_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    memory_gb: float | None = None
    measured: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    measured_ranks: int = 0
    library: str = ""
    forms: Mapping[str, Form] = field(default_factory=dict)
    form: str = ""
    slowdown: float = 1.0
    shared_links: Sequence[str] = ()
    host_us: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        if self.library not in LIBRARIES:
            libraries = ", ".join(filter(None, LIBRARIES))
            raise BadOption(op="Machine", arg="library", value=self.library, known=libraries)
        for link in self.shared_links:
            if link not in LINKS:
                raise BadOption(op="Machine", arg="shared_links", value=link, known=LINKS)
        if self.slowdown < 1 or self.host_us < 0:
            low = "numbers from 1 on (slowdown) and from 0 on (host_us)"
            value = (self.slowdown, self.host_us)
            raise BadOption(op="Machine", arg="slowdown, host_us", value=value, known=low)
        for name, form in self.forms.items():
            if (form.like or name) not in KERNELS:
                raise BadOption(op="Machine", arg="forms", value=name, known=", ".join(KERNELS))
        plain = [f for f in self.carrier.forms if not (self.carrier.chained and f in KERNELS)]
        allowed = ("", "best", *dict.fromkeys((*plain, *self.forms)))
        if self.form not in allowed:
            raise BadOption(op="Machine", arg="form", value=self.form, known=", ".join(allowed[1:]))

    def too_small_for(self, nbytes: float) -> str:
        """Words for a step that holds more than a rank's memory; empty if it fits, or if nothing is
        known of the memory. ``memory_gb`` is as data sheets have it, in units of 2^30 bytes.

        >>> Machine.of("h100").too_small_for(90 << 30), Machine.of("h100").too_small_for(80 << 30)
        ('more than the 80 GiB of h100', '')
        """
        if self.memory_gb is None or nbytes <= self.memory_gb * 2**30:
            return ""
        return f"more than the {self.memory_gb:g} GiB of {self.name}"

    @staticmethod
    def of(machine: Machine | str | Path) -> Machine:
        """A machine as it is, by the name of a preset, or from a TOML file.

        After a colon a name may say the form of all-reduces ("b300:one-shot", "b300:best").

        >>> Machine.of("b300:best").form
        'best'
        """
        if isinstance(machine, Machine):
            return machine
        name, colon, form = str(machine).partition(":")
        if colon and form:
            base = Machine.of(name)
            return replace(base, name=str(machine), form=form)
        path = Path(machine)
        return Machine.from_toml(path) if path.suffix == ".toml" else Machine.preset(str(machine))

    @staticmethod
    def preset(name: str) -> Machine:
        """A machine that comes with fcoll, or that ``fcoll calibrate`` measured ("local")."""
        for folder in (machine_dir(), PRESETS):
            if (path := folder / f"{name}.toml").is_file():
                return Machine.from_toml(path)
        if name == "local":
            raise NotCalibrated(folder=str(machine_dir()))
        raise UnknownMachine(machine=name, known=", ".join(presets()))

    @staticmethod
    def from_toml(path: str | Path) -> Machine:
        path = Path(path)
        try:
            return _machine(path.stem, tomllib.loads(path.read_text()))
        except (
            OSError, tomllib.TOMLDecodeError, TypeError, ValueError, KeyError, BadOption
        ) as error:  # fmt: skip
            raise BadMachineFile(path=str(path), why=f"{error}".rstrip(".")) from error

    def to_toml(self) -> str:
        """The file that from_toml reads."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        tables = {k: plain.pop(k) for k in ("flops", "measured")}
        links = {k: vars(plain.pop(k)) for k in ("intra", "inter")}
        forms = {f"forms.{name}": vars(form) for name, form in plain.pop("forms").items()}
        lines = [f"{k} = {_toml(v)}" for k, v in plain.items() if v is not None]
        for title, table in {**tables, **links, **forms}.items():
            lines += ["", f"[{title}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
        return "\n".join(lines) + "\n"

    def links(self, n: Expr, per_node: Expr, personal: bool) -> tuple[Link, Link, Link]:
        """The links that a ring, a tree and one shot see among n ranks, per_node on each node.

        Across nodes a ring's rate is that of its slowest part, but the ranks of a node share what
        crosses: each sends its part of it. Bytes that are personal cannot be shared so.
        """
        near, far = self.intra, self.inter
        if per_node == n:
            if not self.carrier.chained:
                return near, near, near
            hop = ratio(near.latency_us * (n - 1), log2(n))  # a tree's round, on a chain
            return near, replace(near, latency_us=hop), near
        if per_node == 1:
            return far, far, far
        crossing = ratio(n - per_node, n - 1)
        if personal:
            beta = most(near.us_per_byte * (1 - crossing), far.us_per_byte * crossing)
        else:
            beta = most(near.us_per_byte, ratio(far.us_per_byte, per_node))
        rate = ratio(1, 1000 * beta)
        in_ring = ratio(near.latency_us * (per_node - 1) + far.latency_us, per_node)
        rounds, far_rounds = log2(n), most(log2(n) - log2(per_node), 0)
        near_rounds = per_node - 1 if self.carrier.chained else log2(per_node)
        in_tree = ratio(near.latency_us * near_rounds + far.latency_us * far_rounds, rounds)
        ramp = {"chunk_us": far.chunk_us, "fill_us": far.fill_us}
        return (
            Link(in_ring, rate, **ramp),
            Link(in_tree, rate, **ramp),
            Link(far.latency_us, rate, far.message_us, **ramp),
        )

    def links_of(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """The links that a group of these ranks uses."""
        nodes = len({rank // self.ranks_per_node for rank in ranks})
        return LINKS[:1] if nodes == 1 else LINKS[1:] if nodes == len(ranks) else LINKS

    @property
    def carrier(self) -> Library:
        return LIBRARIES[self.library]


def machine_dir() -> Path:
    """Where the files of measured and of the user's own machines are."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("FCOLL_MACHINE_DIR") or Path(config) / "fcoll")


def presets() -> list[str]:
    """The names that Machine.preset knows here."""
    return sorted({p.stem for d in (PRESETS, machine_dir()) for p in d.glob("*.toml")})


# -- files ---


def _machine(name: str, data: dict[str, Any]) -> Machine:
    keys = {f.name for f in fields(Machine)}
    if unknown := sorted(set(data) - keys):
        raise ValueError(f"it has no {unknown[0]!r}; the names are {', '.join(sorted(keys))}")
    names = [k for k in ("intra", "inter") if k in data]
    links: dict[str, Link] = {k: Link(**data[k]) for k in names}
    links.setdefault("inter", links["intra"])
    measured = {op: tuple(map(tuple, points)) for op, points in data.get("measured", {}).items()}
    forms = {form: Form(**constants) for form, constants in data.get("forms", {}).items()}
    values: dict[str, Any] = {**data, **links, "measured": measured, "forms": forms}
    values["shared_links"] = tuple(data.get("shared_links", ()))
    values.setdefault("name", name)
    machine = Machine(**values)
    if not machine.flops or machine.memory_gb_per_s <= 0:
        raise ValueError("flops and memory_gb_per_s must be positive")
    return replace(machine, flops={k: float(v) for k, v in machine.flops.items()})


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# -- arithmetic of prices, on numbers and sympy expressions alike ---


def is_symbolic(x: Expr) -> bool:
    return isinstance(x, sympy.Basic) and not x.is_number


def log2(n: Expr) -> Expr:
    return sympy.log(n) / sympy.log(2) if isinstance(n, sympy.Basic) else math.log2(n)


def sqrt(x: Expr) -> Expr:
    return sympy.sqrt(x) if isinstance(x, sympy.Basic) else math.sqrt(x)


def ratio(a: Expr, b: Expr) -> Expr:
    """a / b, exact where an expression is made of whole numbers."""
    whole = isinstance(a, int) and isinstance(b, int)
    return sympy.Rational(a, b) if whole and a % b else a / b


def least(*values: Expr) -> Expr:
    if any(is_symbolic(v) for v in values):
        return sympy.Min(*values, evaluate=False)  # comparing them takes sympy seconds
    return min(values)


def most(*values: Expr) -> Expr:
    if any(is_symbolic(v) for v in values):
        return sympy.Max(*values, evaluate=False)
    return max(values)
