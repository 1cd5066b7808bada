"""``fcoll ...`` and ``python -m fcoll ...``: parser, commands, programs and demos."""

from fcoll.cli.commands import main as main
