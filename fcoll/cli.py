"""``fcoll ...`` and ``python -m fcoll ...``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import fcoll
from fcoll.collectives import COLLECTIVES


def _collectives(args: argparse.Namespace) -> int:
    """List the table: every collective, its schema, its gradient and its cost."""
    import sympy

    n, b = sympy.symbols("n b", positive=True)
    for row in COLLECTIVES.values():
        print(f"{row.name}{row.schema}")
        cost = f"sends {sympy.sstr(row.wire_bytes(n, b))} bytes in {row.steps(n)} steps"
        also = ", ".join(row.targets)
        print(f"    {cost}" + (f"; also {also}" if also else ""))
    return 0


def _build(args: argparse.Namespace) -> int:
    """Compile the C++ part now, instead of at the first collective."""
    from fcoll.native import build

    try:
        print(build.build())
    except build.BuildFailed as error:
        print(f"fcoll: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("fcoll", description=fcoll.__doc__)
    parser.add_argument("--version", action="version", version=f"fcoll {fcoll.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in {"collectives": _collectives, "build": _build}.items():
        command = commands.add_parser(name, help=(run.__doc__ or "").splitlines()[0])
        command.set_defaults(run=run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return args.run(args)
