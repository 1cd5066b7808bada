"""``fcoll ...`` and ``python -m fcoll ...``: parser, commands, programs and demos."""

from __future__ import annotations

from collections.abc import Sequence

from fcoll.cli.parser import parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. Help and mistakes in the arguments are told without torch."""
    args = parser().parse_args(argv)

    from fcoll.cli.commands import run

    return run(args)
