"""What a collective and a step cost on a machine, in microseconds.

A collective's cost comes from its row in the table: the bytes it sends and the messages that follow
one another, on links with a latency and a bandwidth. Three algorithms are priced and the cheapest
is taken. All formulas take numbers, or sympy symbols for n and the bytes:

    >>> import sympy
    >>> n, b = sympy.symbols("n b", positive=True)
    >>> link = Link(latency_us=1, gb_per_s=100)
    >>> sympy.sstr(ring(COLLECTIVES["all_gather_into_tensor"], n, b, link))
    'b*(n - 1)/(100000*n) + n - 1'
"""

from __future__ import annotations

import bisect
import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import sympy

from fcoll.collectives import COLLECTIVES, Collective, Expr
from fcoll.errors import BadMachineFile, MissingSize, NotCalibrated, UnknownMachine

PRESETS = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Link:
    """A rank's way to its peers: time of a message, and bytes per second in one direction.

    ``message_us`` is what each further message costs that a rank sends at the same time.
    ``efficiency`` is the part of ``gb_per_s`` that collectives reach.
    """

    latency_us: Expr
    gb_per_s: Expr
    message_us: Expr = 0
    efficiency: Expr = 1

    @property
    def us_per_byte(self) -> Expr:
        return _ratio(1, 1000 * self.gb_per_s * self.efficiency)


@dataclass(frozen=True)
class Machine:
    """What the model knows of the ranks that a program runs on.

    ``flops``: TFLOP/s of matrix products by dtype; the efficiencies are the parts of the peaks that
    good kernels reach. ``launch_us`` is the fixed cost of a kernel, ``collective_us`` that of a
    collective. ``measured`` has, by the name of the collective, (bytes, us) found on
    ``measured_ranks`` ranks, which go before the formulas.
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
    note: str = ""

    @staticmethod
    def of(machine: Machine | str | Path) -> Machine:
        """A machine as it is, by the name of a preset, or from a TOML file."""
        if isinstance(machine, Machine):
            return machine
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
        except (OSError, tomllib.TOMLDecodeError, TypeError, ValueError, KeyError) as error:
            raise BadMachineFile(path=str(path), why=f"{error}") from error

    def to_toml(self) -> str:
        """The file that from_toml reads."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        tables = {k: plain.pop(k) for k in ("flops", "measured")}
        links = {k: vars(plain.pop(k)) for k in ("intra", "inter")}
        lines = [f"{k} = {_toml(v)}" for k, v in plain.items() if v is not None]
        for title, table in {**tables, **links}.items():
            lines += ["", f"[{title}]", *(f"{k} = {_toml(v)}" for k, v in table.items())]
        return "\n".join(lines) + "\n"

    def links(self, n: Expr, per_node: Expr, personal: bool) -> tuple[Link, Link, Link]:
        """The links that a ring, a tree and one shot see among n ranks, per_node on each node.

        Across nodes a ring's rate is that of its slowest part, but the ranks of a node share what
        crosses: each sends its part of it. Bytes that are personal cannot be shared so.
        """
        if per_node == n:
            return (self.intra,) * 3
        if per_node == 1:
            return (self.inter,) * 3
        near, far = self.intra, self.inter
        crossing = _ratio(n - per_node, n - 1)
        if personal:
            beta = _most(near.us_per_byte * (1 - crossing), far.us_per_byte * crossing)
        else:
            beta = _most(near.us_per_byte, _ratio(far.us_per_byte, per_node))
        rate = _ratio(1, 1000 * beta)
        in_ring = _ratio(near.latency_us * (per_node - 1) + far.latency_us, per_node)
        rounds, near_rounds = log2(n), log2(per_node)
        in_tree = near.latency_us * near_rounds + far.latency_us * _most(rounds - near_rounds, 0)
        in_tree = _ratio(in_tree, rounds)
        return (
            Link(in_ring, rate),
            Link(in_tree, rate),
            Link(far.latency_us, rate, far.message_us),
        )


def machine_dir() -> Path:
    """Where the files of measured and of the user's own machines are."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("FCOLL_MACHINE_DIR") or Path(config) / "fcoll")


def presets() -> list[str]:
    """The names that Machine.preset knows here."""
    return sorted({p.stem for d in (PRESETS, machine_dir()) for p in d.glob("*.toml")})


# -- collectives ---


def ring(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """Every rank passes parts on to the next: the fewest bytes, the most messages in a row."""
    return row.steps(n) * link.latency_us + row.wire_bytes(n, b) * link.us_per_byte


def tree(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """log2(n) rounds, the message in as many chunks as is best.

    With k chunks it takes (rounds + k) (latency + bytes / k / rate); the best k gives the square
    of a sum of roots. Personal bytes travel once in every round.
    """
    rounds = _least(row.steps(n), row.steps(2) * log2(n))
    nbytes = row.wire_bytes(2, b) * log2(n) if row.personal else row.wire_bytes(n, b)
    latency, transfer = rounds * link.latency_us, nbytes * link.us_per_byte
    return latency + transfer + 2 * _sqrt(latency * transfer)


def one_shot(row: Collective, n: Expr, b: Expr, link: Link) -> Expr:
    """Everything goes to its place at once: one latency, the most bytes."""
    nbytes = (row.one_shot_bytes or row.wire_bytes)(n, b)
    return link.latency_us + (n - 2) * link.message_us + nbytes * link.us_per_byte


ALGORITHMS: dict[str, Callable[[Collective, Expr, Expr, Link], Expr]] = {
    "ring": ring,
    "tree": tree,
    "one-shot": one_shot,
}


def collective_us(
    op_row: Collective | str,
    n: Expr,
    bytes: Expr,
    machine: Machine,
    ranks: Sequence[int] | None = None,
) -> Expr:
    """The time of a collective of ``bytes`` on n ranks, by the best algorithm.

    ``ranks`` are the group's global ranks: they say on how many nodes it lies. Without them it
    takes the first n. An expression if n or bytes is one.
    """
    row = COLLECTIVES[op_row] if isinstance(op_row, str) else op_row
    if row.steps(2) == 0 or (not _symbolic(n) and n <= 1):
        return 0 * bytes  # a wait, or nobody to talk to
    if (known := _measured(row, n, bytes, machine)) is not None:
        return known
    if not _symbolic(n):
        return _formulas(row, n, bytes, machine, _per_node(n, machine, ranks))
    size = machine.ranks_per_node
    return sympy.Piecewise(
        (0, sympy.Le(n, 1)),
        (_formulas(row, n, bytes, machine, n), sympy.Le(n, size)),
        (_formulas(row, n, bytes, machine, size), True),
    )


def algorithms_us(
    op_row: Collective | str,
    n: Expr,
    bytes: Expr,
    machine: Machine,
    per_node: Expr,
) -> dict[str, Expr]:
    """The time of each algorithm, without the fixed cost of a collective."""
    row = COLLECTIVES[op_row] if isinstance(op_row, str) else op_row
    links = machine.links(n, per_node, row.personal)
    return {
        name: formula(row, n, bytes, link)
        for (name, formula), link in zip(ALGORITHMS.items(), links, strict=True)
    }


def _formulas(row: Collective, n: Expr, b: Expr, machine: Machine, per_node: Expr) -> Expr:
    return machine.collective_us + _least(*algorithms_us(row, n, b, machine, per_node).values())


def _per_node(n: int, machine: Machine, ranks: Sequence[int] | None) -> Expr:
    ranks = ranks if ranks is not None else range(n)
    nodes = len({rank // machine.ranks_per_node for rank in ranks})
    return n if nodes == 1 else 1 if nodes >= n else n / nodes


def _measured(row: Collective, n: Expr, b: Expr, machine: Machine) -> float | None:
    """What calibration found, between its sizes along straight lines of the logarithms."""
    points = machine.measured.get(_functional(row.name))
    if not points or n != machine.measured_ranks or _symbolic(b):
        return None
    b = max(float(b), 1.0)
    sizes = [size for size, _ in points]
    if b <= sizes[0]:
        return points[0][1]
    if b >= sizes[-1]:
        return points[-1][1] * b / sizes[-1]
    i = bisect.bisect_left(sizes, b)
    (b0, t0), (b1, t1) = points[i - 1], points[i]
    part = math.log(b / b0) / math.log(b1 / b0)
    return math.exp(math.log(t0) + part * math.log(t1 / t0))


def _functional(name: str) -> str:
    """The row that sends the same: of one in place, into a given tensor, or of a list.

    >>> _functional("all_reduce_coalesced_"), _functional("all_gather_into_tensor_out")
    ('all_reduce', 'all_gather_into_tensor')
    """
    return name.removesuffix("_out").rstrip("_").removesuffix("_coalesced")


# -- compute ---


def compute_us(step: Any, machine: Machine) -> Expr:
    """The time that a step holds the compute stream: by its flops or its bytes, whichever is more.

    A kernel's fixed cost goes to the first step of a fusion group. Starts and waits take none.
    """
    if step.kind != "compute":
        return 0
    first = step.fused_with in (None, step.name)
    moved = step.read_bytes + step.write_bytes
    if moved == 0 and step.flops == 0 and (not first or step.fused_with is None):
        return 0  # all of it stays in registers, or it only allocates
    peak = machine.flops.get(step.dtype) or min(machine.flops.values())
    by_flops = _ratio(step.flops, 1e6 * peak * machine.flops_efficiency)
    by_bytes = _ratio(moved, 1e3 * machine.memory_gb_per_s * machine.memory_efficiency)
    return _most(by_flops, by_bytes) + (machine.launch_us if first else 0)


def number(expr: Expr, sizes: Mapping[str, int] | None = None) -> float:
    """An expression's value, with the symbols of shapes replaced by their sizes."""
    if not _symbolic(expr):
        return float(expr)
    found = {s: (sizes or {}).get(str(s)) for s in expr.free_symbols}
    missing = sorted(str(s) for s, value in found.items() if value is None)
    if missing:
        raise MissingSize(symbols=", ".join(missing), first=missing[0])
    return float(expr.subs(found))


# -- numbers and sympy alike ---


def _symbolic(x: Expr) -> bool:
    return isinstance(x, sympy.Basic) and not x.is_number


def log2(n: Expr) -> Expr:
    return sympy.log(n) / sympy.log(2) if isinstance(n, sympy.Basic) else math.log2(n)


def _sqrt(x: Expr) -> Expr:
    return sympy.sqrt(x) if isinstance(x, sympy.Basic) else math.sqrt(x)


def _ratio(a: Expr, b: Expr) -> Expr:
    """a / b, exact where an expression is made of whole numbers."""
    whole = isinstance(a, int) and isinstance(b, int)
    return sympy.Rational(a, b) if whole and a % b else a / b


def _least(*values: Expr) -> Expr:
    if any(_symbolic(v) for v in values):
        return sympy.Min(*values, evaluate=False)  # comparing them takes sympy seconds
    return min(values)


def _most(*values: Expr) -> Expr:
    if any(_symbolic(v) for v in values):
        return sympy.Max(*values, evaluate=False)
    return max(values)


# -- files ---


def _machine(name: str, data: dict[str, Any]) -> Machine:
    known = {f.name for f in fields(Machine)}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"it has no {unknown[0]!r}; the names are {', '.join(sorted(known))}")
    names = [k for k in ("intra", "inter") if k in data]
    links: dict[str, Link] = {k: Link(**data[k]) for k in names}
    links.setdefault("inter", links["intra"])
    measured = {op: tuple(map(tuple, points)) for op, points in data.get("measured", {}).items()}
    given: dict[str, Any] = {"name": name, **data, **links, "measured": measured}
    made = Machine(**given)
    if not made.flops or made.memory_gb_per_s <= 0:
        raise ValueError("flops and memory_gb_per_s must be positive")
    return replace(made, flops={k: float(v) for k, v in made.flops.items()})


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
