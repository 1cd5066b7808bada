"""The arguments of ``fcoll ...`` and the help that teaches them. Nothing here needs torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from fcoll.imports import VERSION

# What each command does; its function is in commands.py.
COMMANDS = {
    "report": (
        "Trace a step and show its collectives: bytes, time, exposed or hidden, from which line."
    ),
    "check": (
        "Prove that all ranks issue matching collectives in the same order; no processes needed."
    ),
    "prove": (
        "Prove that a parallel step computes what one device does: loss, gradients, parameters."
    ),
    "scale": "Step time, bytes and exposed share as one axis of the world grows.",
    "timeline": (
        "Run the ranks of a mesh against each other: pipeline bubbles, stragglers, imbalance."
    ),
    "schedule": "Plan the order of a step by several schedulers, and compare what they are worth.",
    "calibrate": "Measure this machine (about a minute), so that --machine local predicts it.",
    "diff": "Compare the collectives of two saved traces; exit code 1 if they differ.",
    "why": ("Say from flight records which rank waits for which, and the first call that differs."),
    "machines": (
        "List the machines that --machine knows; with --prices what collectives cost on one."
    ),
    "collectives": "List the table: every collective, its schema and what it sends.",
    "build": "Compile the C++ part now, instead of at the first collective.",
}

_TARGET = """
what to run:
  pkg.mod:build       a function of a module: build(mesh) returns (fn, args)
  path/file.py:build  the same, of a file
  trace.json          a trace that `fcoll report --save` wrote (report only)
  --demo llama3-8b    a model that comes with fcoll; --demo list names them all

    def build(mesh):                          # a DeviceMesh with the axes of --mesh, no processes
        model = MyModel(tp=mesh["tp"])        # put it on the meta device: nothing is computed
        def step(x): return model(x).sum()
        return step, (torch.empty(8, 1024, device="meta"),)
"""


def _mesh(text: str) -> dict[str, int]:
    """
    >>> _mesh("dp=4,tp=2")
    {'dp': 4, 'tp': 2}
    """
    try:
        pairs = [part.split("=") for part in text.split(",")]
        mesh = {axis.strip(): int(n) for axis, n in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like dp=4,tp=2") from None
    if min(mesh.values()) < 1 or len(mesh) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: each axis once, each at least 1")
    return mesh


def _modules(text: str) -> tuple[str, ...]:
    """
    >>> _modules("megatron.core.parallel_state,train"), _modules("")
    (('megatron.core.parallel_state', 'train'), ())
    """
    return tuple(filter(None, map(str.strip, text.split(","))))


def _sizes(text: str) -> dict[str, int]:
    """
    >>> _sizes("u0=64,moe.py:31=128")
    {'u0': 64, 'moe.py:31': 128}
    """
    try:
        return {name.strip(): int(n) for name, n in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like u0=64,u1=16") from None


def _ranks(text: str) -> str | list[int]:
    """
    >>> _ranks("all"), _ranks("0,4-6")
    ('all', [0, 4, 5, 6])
    """
    if text == "all":
        return text
    try:
        ends = [[int(x) for x in part.split("-")] for part in text.split(",")]
        return [rank for end in ends for rank in range(end[0], end[-1] + 1)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like all or 0,13,64-71") from None


def _slow(text: str) -> dict[int, float]:
    """
    >>> _slow("3=1.2,5=2")
    {3: 1.2, 5: 2.0}
    """
    try:
        found = {int(r): float(x) for r, x in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 3=1.2,5=2") from None
    if min(found.values()) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: 1.2 is a rank that takes 1.2 times as long")
    return found


def _share(text: str) -> float:
    """
    >>> _share("30%"), _share("0.3")
    (0.3, 0.3)
    """
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 30% or 0.3") from None


def _noise(text: str) -> float:
    """
    >>> _noise("30%")
    0.3
    """
    noise = _share(text)
    if not 0 <= noise < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: times are off by less than themselves, 30%")
    return noise


class _Demo(argparse.Action):
    """--demo list prints the names and ends."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        if values == "list":
            from fcoll.cli.demos import DEMOS, about

            width = max(map(len, DEMOS))
            print("\n".join(f"{name:{width}}  {about(name)}" for name in DEMOS))
            parser.exit()
        namespace.demo = values


_ISOLATE = "modules whose globals each rank has for itself (Megatron's, accelerate's always)"

_EXAMPLES = {
    "report": """
examples:
  fcoll report --demo llama3-8b --mesh dp=8,tp=8
  fcoll report train.py:build --mesh dp=4,tp=2 --machine a100 --html report.html
  fcoll report train.py:build --mesh dp=64 --perfetto out.json    # open in ui.perfetto.dev
  fcoll report train.py:build --mesh dp=64 --fail-above 30%       # in CI: exit code 1 above it
  fcoll report train.py:build --mesh dp=64 --before old.json --html compare.html
  fcoll report train.py:build --mesh dp=64 --scheduler overlap --html planned.html
  fcoll report train.py:build --mesh dp=64 --against trace.json   # beside a profile of a real run
""",
    "check": """
examples:
  fcoll check --demo llama3-8b --mesh dp=128,tp=8
  fcoll check train.py:build --mesh pp=4,dp=2         # exit code 1 and the two lines if not
  fcoll check train.py:build --mesh dp=2,tp=2 --values  # and run it, small, on simulated ranks
  fcoll check train.py:build --mesh dp=2,tp=2 --prove   # and prove it equal to one device
""",
    "prove": """
examples:
  fcoll prove train.py:build --mesh dp=2,tp=2         # build makes small real tensors, on the CPU
  fcoll prove train.py:build --mesh tp=4 --single plain.py:build
  fcoll prove train.py:build --mesh tp=2 --isolate mylib.state    # its globals are a rank's own
  fcoll prove train.py:build --mesh tp=2 --html verdict.html

exit codes: 0 proved; 1 it differs, and where; 2 it could not be told, and why not
""",
    "scale": """
examples:
  fcoll scale --demo tiny --axis dp=1..4096 --mesh tp=8
  fcoll scale train.py:build --axis tp=1,2,4,8 --svg plot.svg
""",
    "timeline": """
examples:
  fcoll timeline --demo tiny-pipeline --mesh pp=4
  fcoll timeline train.py:build --mesh pp=4,dp=2 --slow 3=1.2 --html ranks.html
""",
    "schedule": """
examples:
  fcoll schedule --demo llama3-8b --mesh dp=8,tp=8
  fcoll schedule train.py:build --mesh dp=8 --schedulers safe,overlap,search --memory +0%,+5%,none
  fcoll schedule train.py:build --mesh dp=8 --machine h100,a100 --noise 0.3 --svg plan.svg
""",
    "calibrate": """
example:
  fcoll calibrate && fcoll report train.py:build --mesh dp=2 --machine local
""",
    "diff": """
example:
  fcoll report train.py:build --mesh dp=8 --save before.json    # change the model, save after.json
  fcoll diff before.json after.json
""",
    "why": """
examples:
  TORCH_FR_DUMP_TEMP_FILE=/tmp/job/rank_ torchrun --nproc-per-node 2 train.py
  fcoll why /tmp/job                                             # exit code 1 if it found something
  fcoll why /tmp/job --program train.py:build --mesh dp=2        # and which call is expected there
""",
}


_DEBUG = "show the traceback of an error"
_CODES = """
exit codes: 0 fine; 1 something was found; 2 it could not be told (an error, a program that raises)
"""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; which one was given is in ``command``."""
    about = "Functional collectives for PyTorch: a tensor in, a new tensor out.\n\n"
    about += "See every collective of a step before it runs: start with\n"
    about += "  fcoll report --demo llama3-8b --mesh dp=8,tp=8\n"
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser("fcoll", description=about, epilog=_CODES, formatter_class=raw)
    made.add_argument("--version", action="version", version=f"fcoll {VERSION}")
    made.add_argument("--debug", action="store_true", help=_DEBUG)
    subparsers = made.add_subparsers(dest="command", metavar="command")
    for name, text in COMMANDS.items():
        more = (
            _TARGET if name in ("report", "check", "prove", "scale", "timeline", "schedule") else ""
        ) + _EXAMPLES.get(name, "")
        command = subparsers.add_parser(
            name, help=text, description=text, epilog=more, formatter_class=raw
        )
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        # before or after the command: here without a default, which would undo the other
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=_DEBUG)
        command.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
        if name in _ARGUMENTS:
            _ARGUMENTS[name](command)
    return made


def _program(command: argparse.ArgumentParser) -> None:
    """The arguments of all commands that run a program."""
    command.add_argument("target", nargs="?", help="pkg.mod:build or file.py:build")
    command.add_argument("--demo", action=_Demo, metavar="NAME", help="a built-in model, or `list`")
    command.add_argument(
        "--mesh", type=_mesh, metavar="dp=4,tp=2", help="axes of the world and their sizes"
    )
    sizes = "values of sizes that only a run knows, by symbol or by the line that reads them"
    command.add_argument("--sizes", type=_sizes, metavar="u0=64,moe.py:31=128", help=sizes)


def _check(command: argparse.ArgumentParser) -> None:
    _program(command)
    values = "then run it on simulated ranks (up to 64): build must make small real tensors"
    command.add_argument("--values", action="store_true", help=values)
    also = "then prove that it computes what one device does, as `fcoll prove`"
    command.add_argument("--prove", action="store_true", help=also)
    command.add_argument("--isolate", type=_modules, metavar="NAMES", help=_ISOLATE)
    which = "trace all ranks or these, 0,13,64-71 (default: one of each kind)"
    command.add_argument("--ranks", type=_ranks, metavar="all|LIST", help=which)


def _prove(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", nargs="?", help="pkg.mod:build or file.py:build")
    command.add_argument("--mesh", type=_mesh, metavar="dp=2,tp=2", help="axes and their sizes")
    other = "the program of one device, where it is another: file.py:build"
    command.add_argument("--single", metavar="TARGET", help=other)
    trials = "with other primes and values (default 3)"
    command.add_argument("--trials", type=int, default=3, metavar="N", help=trials)
    rng = "take random numbers of the step as they are drawn"
    command.add_argument("--allow-rng", action="store_true", help=rng)
    command.add_argument("--isolate", type=_modules, metavar="NAMES", help=_ISOLATE)
    without = "where it differs, try no changes of its lines (up to 20 s of CPU)"
    command.add_argument("--no-diagnose", action="store_true", help=without)
    command.add_argument("--html", metavar="FILE", help="write a page: what differs, with lines")
    command.add_argument("--svg", metavar="FILE", help="write a picture")
    command.set_defaults(demo=None)


def _priced(command: argparse.ArgumentParser) -> None:
    """The arguments of those that say how long it takes."""
    _program(command)
    command.add_argument("--mode", default="joint", choices=("joint", "compiled", "forward"))
    command.add_argument(
        "--machine",
        default="h100",
        help="h100, a100, b200, ..., local, or a .toml file; b300:best prices the best form",
    )


def _timed(command: argparse.ArgumentParser) -> None:
    """The arguments of those that take the order as it is."""
    _priced(command)
    command.add_argument(
        "--waits",
        choices=("first-use", "in-place"),
        help="where compute waits: first-use as eager does (default), or as in the graph",
    )


def _report(command: argparse.ArgumentParser) -> None:
    _timed(command)
    command.add_argument("--rank", type=int, default=0, help="the rank to trace (default 0)")
    command.add_argument("--top", type=int, default=20, help="lines of the table (default 20)")
    for option, what in {
        "html": "a page: table, zoomable timeline, memory; needs no network",
        "perfetto": "a trace for ui.perfetto.dev or chrome://tracing",
        "svg": "a picture",
        "png": "a picture; needs matplotlib",
        "save": "the trace as JSON, for `fcoll diff` and `fcoll report FILE`",
    }.items():
        command.add_argument(f"--{option}", metavar="FILE", help=f"write {what}")
    compared = command.add_mutually_exclusive_group()
    compared.add_argument("--before", metavar="FILE", help="a saved trace to compare with")
    compared.add_argument("--scheduler", metavar="NAME", help="also show the step as it plans it")
    real = "a profile of a real run to lay over it: torch.profiler's JSON (.gz), or nsys' sqlite"
    command.add_argument("--against", metavar="FILE", help=real)
    more = "exit code 1 if more of the step than this is exposed"
    command.add_argument("--fail-above", type=_share, metavar="SHARE", help=more)


def _scale(command: argparse.ArgumentParser) -> None:
    _timed(command)
    command.add_argument("--axis", required=True, metavar="dp=1..4096", help="the axis that grows")
    command.add_argument("--svg", metavar="FILE", help="write a plot")


def _timeline(command: argparse.ArgumentParser) -> None:
    _timed(command)
    slow = "ranks that compute so many times as long"
    command.add_argument("--slow", type=_slow, metavar="3=1.2", help=slow)
    command.add_argument("--html", metavar="FILE", help="write a page: the lanes and a table")
    command.add_argument("--svg", metavar="FILE", help="write a picture")


def _schedule(command: argparse.ArgumentParser) -> None:
    _priced(command)
    command.add_argument("--rank", type=int, default=0, help="the rank to trace (default 0)")
    names = "original, safe, sink_waits, raise_comms, reorder_compute, torch, overlap, search"
    command.add_argument(
        "--schedulers", default="safe,overlap", help=f"of {names} (default safe,overlap)"
    )
    command.add_argument(
        "--memory", default="+0%", help="caps: +0%%,+5%%,none or bytes (default +0%%)"
    )
    command.add_argument(
        "--noise", type=_noise, default=0.0, metavar="0.3", help="also with times that are off"
    )
    command.add_argument("--html", metavar="FILE", help="write a page: the table and the plot")
    command.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    command.add_argument("--svg", metavar="FILE", help="write a plot of time against memory")


def _calibrate(command: argparse.ArgumentParser) -> None:
    command.add_argument("--ranks", type=int, default=2, help="local ranks (default 2)")
    command.add_argument("--quick", action="store_true", help="few sizes, one pass: rough")
    command.add_argument(
        "--gloo", action="store_true", help="collectives of gloo, for plans: local-gloo.toml"
    )
    command.add_argument("--out", metavar="FILE", help="instead of ~/.config/fcoll/local.toml")


def _diff(command: argparse.ArgumentParser) -> None:
    command.add_argument("before")
    command.add_argument("after")


def _why(command: argparse.ArgumentParser) -> None:
    command.add_argument("dumps", nargs="+", help="the folder, or the files, that ranks wrote")
    what = "the program that ran, pkg.mod:build or file.py:build"
    command.add_argument("--program", dest="target", metavar="TARGET", help=what)
    command.add_argument("--mesh", type=_mesh, metavar="dp=4,tp=2", help="its axes and their sizes")
    command.set_defaults(demo=None)


def _machines(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prices", metavar="NAME", help="times of a machine's collectives by form"
    )
    command.add_argument("--ranks", type=int, help="of the group (default: those of a node)")


_ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "report": _report,
    "check": _check,
    "prove": _prove,
    "scale": _scale,
    "timeline": _timeline,
    "schedule": _schedule,
    "calibrate": _calibrate,
    "diff": _diff,
    "why": _why,
    "machines": _machines,
}
