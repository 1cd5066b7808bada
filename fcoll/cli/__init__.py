"""``fcoll ...`` and ``python -m fcoll ...``: parser, commands, programs and demos."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fcoll.cli.parser import parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code. Help and mistakes in the arguments are told without torch."""
    made = parser()
    args = made.parse_args(argv)
    if args.command is None:  # as git, ruff and uv do: the help, and the code of a mistake
        made.print_help(sys.stderr)
        return 2

    from fcoll.cli.commands import run

    return run(args)


def script() -> NoReturn:
    """``main``, and the end of the process: without a last look for garbage, which with torch and
    Triton in it takes up to a second."""
    code = main()
    atexit._run_exitfuncs()  # those of the program that was looked at
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
