"""What the cost model knows of the ranks that a program runs on, and the files that keep it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fcoll.costs.numbers import log2, most, ratio
from fcoll.errors import BadMachineFile, NotCalibrated, UnknownMachine
from fcoll.table.row import Expr

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
        return ratio(1, 1000 * self.gb_per_s * self.efficiency)


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
        crossing = ratio(n - per_node, n - 1)
        if personal:
            beta = most(near.us_per_byte * (1 - crossing), far.us_per_byte * crossing)
        else:
            beta = most(near.us_per_byte, ratio(far.us_per_byte, per_node))
        rate = ratio(1, 1000 * beta)
        in_ring = ratio(near.latency_us * (per_node - 1) + far.latency_us, per_node)
        rounds, near_rounds = log2(n), log2(per_node)
        in_tree = near.latency_us * near_rounds + far.latency_us * most(rounds - near_rounds, 0)
        in_tree = ratio(in_tree, rounds)
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
