"""``fcoll ...`` and ``python -m fcoll ...``.

Results go to stdout; progress, errors and what the program prints to stderr. Exit codes: 0 fine; 1
something was found (a mismatch, a difference, more exposed time than allowed); 2 it could not be
told: a mistake in the arguments, a program that raises or cannot be traced.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fcoll import source
from fcoll.cli import demos, programs
from fcoll.cli.terminal import drawn_tables, now_and_then, progress
from fcoll.costs.machine import Machine, machine_dir, presets
from fcoll.costs.model import number
from fcoll.errors import BadMesh, BadOption, CollectiveMismatch, FcollError, NotWritable, RankFailed
from fcoll.plugins import plugin
from fcoll.scheduling.timeline import Timeline
from fcoll.table.collectives import COLLECTIVES
from fcoll.tracing._torch import FAKE_TENSOR_LOG

FINE, FOUND, FAILED = 0, 1, 2

# -- commands ---


def _report(args: argparse.Namespace) -> int:
    from fcoll.report import against, html, observed, perfetto, summary, svg, text, why
    from fcoll.report.advice import advice
    from fcoll.scheduling.planner import schedule
    from fcoll.scheduling.scheduler_registry import scheduler_of
    from fcoll.scheduling.timeline import timeline

    # before the work: a name may be misspelt
    machine = Machine.of(args.machine)
    scheduler_of(args.scheduler or "original")
    before = programs.read_trace(args.before) if args.before else None
    run = observed.read(args.against) if args.against else None
    with _traced_in(args) as traced, progress("timing its steps", args.quiet):
        first = line = _numbered(timeline(traced, machine, waits=_waits(args)), traced)
        second = plan = None
        if before is not None:
            first, second = _numbered(timeline(before, machine, waits=_waits(args)), before), line
        elif args.scheduler:
            plan = schedule(traced, machine, scheduler=args.scheduler, memory_cap=None)
            planned = replace(plan.timeline, mesh=first.mesh, rank=first.rank)
            line = second = _numbered(planned, traced)
        with progress("looking for what would help", args.quiet):
            if plan is None:
                told = advice(traced, machine, waits=_waits(args))
            else:  # what is left to do when the step is planned
                told = advice((plan.steps, plan.collectives), machine, plan=False, waits="in place")
    real = against.against(line, run) if run else None
    names = ("as it came in", f"{args.scheduler}") if args.scheduler else ("before", "after")
    with progress("writing", args.quiet):
        _write(args.save, traced.to_json)
        page = partial(html.render, first, second, title=_title(args), names=names, advice=told)
        _write(args.html, partial(page, run=real, layouts=traced.layouts))
        _write(args.perfetto, lambda: perfetto.render(first, second))
        _write(args.svg, lambda: svg.render(first, second))
        if args.png:
            svg.save_png(args.png, first, second)
    causes = why.reasons(line)
    found = summary.as_dict(line, causes)
    if second is not None:
        found["before"] = summary.as_dict(first)
        found["moved"] = list(map(asdict, summary.moves(first, second)))
    found["advice"] = list(map(asdict, told))
    if notes := _notes(args, traced):
        found["notes"] = notes
    shown = [text.render(first, second, top=args.top, advice=told, why=causes)]
    if real is not None:
        found["against"] = real.as_dict()
        shown.append(against.render(real, args.top))
    _print(args, found, lambda: "\n\n".join(shown))
    if args.fail_above is not None and line.exposed_share > args.fail_above:
        share = f"{line.exposed_share:.1%} of the step is exposed"
        print(f"fcoll: {share}, more than --fail-above {args.fail_above:.1%}", file=sys.stderr)
        return FOUND
    return FINE


def _check(args: argparse.Namespace) -> int:
    from fcoll.checking.check import check

    if not args.mesh:
        raise BadMesh(what="no axes", hint="Say of how many ranks: --mesh dp=4,tp=2.")
    build = _build_of(args)
    try:
        what = "tracing the ranks, then running them" if args.values else "tracing the ranks"
        with progress(what, args.quiet) as tell, redirect_stdout(sys.stderr):
            done = now_and_then(tell)
            result = check(
                build,
                args.mesh,
                ranks=args.ranks,
                values=args.values,
                given=args.sizes,
                isolate=args.isolate,
                progress=done,
            )
    except (CollectiveMismatch, RankFailed) as mismatch:
        text = str(mismatch)
        _print(args, {"ok": False, "error": text}, lambda: text)
        return FOUND
    found, shown, code = result.to_dict(), str(result), FINE if result.ok else FOUND
    if args.prove and result.ok:
        code, found["prove"], text = _proved(args, build)
        shown = f"{shown}\n{text}"
    _print(args, found, lambda: shown)
    return code


def _prove(args: argparse.Namespace) -> int:
    if not args.mesh:
        raise BadMesh(what="no axes", hint="Say of how many ranks: --mesh dp=2,tp=2.")
    build = _build_of(args)
    with redirect_stdout(sys.stderr):
        single = programs.load(args.single) if args.single else None
    allow = ("rng",) if args.allow_rng else ()
    how = {"trials": args.trials, "allow": allow, "diagnose": not args.no_diagnose}
    code, found, text = _proved(args, build, single=single, **how)
    _print(args, found, lambda: text)
    return code


def _proved(
    args: argparse.Namespace, build: programs.Build, **options: Any
) -> tuple[int, Any, str]:
    """The exit code, the verdict for programs and for people; its files are written."""
    from fcoll.proving.prove import prove
    from fcoll.report import proof_page

    what = "running in exact arithmetic"
    try:
        with progress(what, args.quiet) as tell, redirect_stdout(sys.stderr):
            done = now_and_then(tell)
            verdict = prove(build, args.mesh, isolate=args.isolate, progress=done, **options)
    except (CollectiveMismatch, RankFailed) as mismatch:
        return FOUND, {"equal": False, "error": str(mismatch)}, str(mismatch)
    title = f"{_title(args)}, {', '.join(f'{axis}={n}' for axis, n in args.mesh.items())}"
    for option in ("html", "svg"):
        _write(getattr(args, option, None), partial(getattr(proof_page, option), verdict, title))
    code = {True: FINE, False: FOUND, None: FAILED}[verdict.equal]
    return code, verdict.to_dict(), str(verdict)


def _calibrate(args: argparse.Namespace) -> int:
    from fcoll.profiling.calibration import calibrate

    name = "local-gloo.toml" if args.gloo else "local.toml"
    path = Path(args.out) if args.out else machine_dir() / name
    if args.gloo:
        os.environ["FCOLL_NATIVE"] = "0"  # of the ranks that are started
    machine = calibrate(args.ranks, path, quiet=args.quiet, quick=args.quick)
    one_shot_bytes = None if args.quick or args.gloo else _one_shot_bytes(args.ranks)
    flops = ", ".join(f"{dtype} {1000 * x:.0f}" for dtype, x in machine.flops.items())
    small = {op: points[0][1] for op, points in machine.measured.items()}
    lines = [
        f"{path}: {machine.note}",
        f"matrix products, GFLOP/s a rank: {flops}",
        f"memory: {machine.memory_gb_per_s:.1f} GB/s a rank",
        "smallest messages, us: " + ", ".join(f"{op} {us:.1f}" for op, us in small.items()),
        f"largest messages: {machine.intra.gb_per_s:.1f} GB/s a rank",
    ]
    if one_shot_bytes is not None:
        lines.append(f"compiled collectives are read in place up to {one_shot_bytes} bytes")
    facts = {"path": str(path), "one_shot_bytes": one_shot_bytes, **asdict(machine)}
    _print(args, facts, lambda: "\n".join(lines))
    return FINE


def _one_shot_bytes(ranks: int) -> int | None:
    """What the compiler half measures for itself, where it is installed."""
    measure = plugin("calibrate")
    return None if measure is None else measure(ranks)


def _diff(args: argparse.Namespace) -> int:
    before, after = (programs.read_trace(path) for path in (args.before, args.after))
    found = before.diff(after)
    _print(args, {"same": found.same, "text": str(found)}, lambda: str(found))
    return FINE if found.same else FOUND


def _why(args: argparse.Namespace) -> int:
    from fcoll.checking.hangs import why

    build = _build_of(args) if args.target else None
    with progress("reading", args.quiet), redirect_stdout(sys.stderr):
        found = why(args.dumps, build, args.mesh)
    _print(args, found.to_dict(), lambda: str(found))
    return FINE if found.ok else FOUND


def _scale(args: argparse.Namespace) -> int:
    from fcoll.report import scaling
    from fcoll.report.scale import scale, sizes_from

    axis, _, text = args.axis.partition("=")
    machine, sizes, build = Machine.of(args.machine), sizes_from(text), _build_of(args)
    with progress(f"tracing {len(sizes)} worlds", args.quiet) as tell, redirect_stdout(sys.stderr):
        points = scale(
            build,
            axis,
            sizes,
            mesh=args.mesh,
            machine=machine,
            mode=args.mode,
            waits=_waits(args),
            given=args.sizes,
            progress=tell,
        )
    title = f"{_title(args)} on {Path(args.machine).stem}"
    _write(args.svg, lambda: scaling.plot(points, axis, title))
    _print(args, points.to_dict(), lambda: str(points))
    for size, why in points.failed.items():
        print(f"fcoll: {axis}={size} failed: {why}", file=sys.stderr)
    return FAILED if points.failed else FINE


def _timeline(args: argparse.Namespace) -> int:
    from fcoll.report.all_ranks import timeline

    if not args.mesh:
        raise BadMesh(what="no axes", hint="Say of how many ranks: --mesh pp=4,dp=2.")
    machine, build = Machine.of(args.machine), _build_of(args)
    with progress("tracing the ranks", args.quiet) as tell, redirect_stdout(sys.stderr):
        line = timeline(
            build,
            args.mesh,
            machine,
            slow=args.slow,
            waits=_waits(args),
            mode=args.mode,
            given=args.sizes,
            progress=tell,
        )
    _write(args.html, lambda: line.html(_title(args)))
    _write(args.svg, line.svg)
    _print(args, line.as_dict(), lambda: str(line))
    return FINE


def _schedule(args: argparse.Namespace) -> int:
    from fcoll.report import experiments
    from fcoll.scheduling.scheduler_registry import scheduler_of

    names, machines = args.schedulers.split(","), args.machine.split(",")
    for check, given in ((scheduler_of, names), (Machine.of, machines)):
        list(map(check, given))  # before the work: a name may be misspelt
    with _traced_in(args) as traced, progress("planning", args.quiet) as tell:
        found = experiments.compare(
            traced, names, args.memory.split(","), machines, args.noise, progress=tell
        )
    _write(args.csv, lambda: experiments.as_csv(found))
    _write(args.html, lambda: experiments.html(found, _title(args), args.noise))
    _write(args.svg, lambda: experiments.plot(found, _title(args)))
    table = experiments.render(found, args.noise)
    _print(args, {"results": list(map(asdict, found))}, lambda: table)
    return FINE


def _collectives(args: argparse.Namespace) -> int:
    import sympy

    n, b = sympy.symbols("n b", positive=True)
    table = {
        row.name: {
            "schema": row.schema,
            "sends": sympy.sstr(row.wire_bytes(n, b)),
            "steps": str(row.steps(n)),
            "targets": row.targets,
        }
        for row in COLLECTIVES.values()
    }

    def text() -> str:
        lines = []
        for name, row in table.items():
            also = ", ".join(row["targets"])
            cost = f"    sends {row['sends']} bytes in {row['steps']} steps"
            lines += [f"{name}{row['schema']}", cost + (f"; also {also}" if also else "")]
        return "\n".join(lines)

    _print(args, table, text)
    return FINE


def _machines(args: argparse.Namespace) -> int:
    if args.prices:
        from fcoll.report import form_prices

        machine = Machine.of(args.prices)
        n = machine.ranks_per_node if args.ranks is None else args.ranks
        if n < 2:
            raise BadOption(op="machines", arg="--ranks", value=n, known="2, 3, ...")
        found = form_prices.by_form(machine, n)
        _print(args, found, lambda: form_prices.render(machine, found))
        return FINE
    known = {name: Machine.preset(name).note for name in presets()}
    width = max(map(len, known))
    _print(args, known, lambda: "\n".join(f"{k:{width}}  {v}" for k, v in known.items()))
    return FINE


def _build(args: argparse.Namespace) -> int:
    from fcoll.transport.native import build

    try:
        path = str(build.build())
    except build.BuildFailed as error:
        print(f"fcoll: {error}", file=sys.stderr)
        return FAILED
    _print(args, {"path": path}, lambda: path)
    return FINE


# -- what they have in common ---


def _build_of(args: argparse.Namespace) -> programs.Build:
    with redirect_stdout(sys.stderr):  # what the program's file prints
        return programs.demo(args.demo) if args.demo else programs.load(args.target)


@contextmanager
def _traced_in(args: argparse.Namespace) -> Iterator[Any]:
    """The trace of the program that the arguments name, and the world that it was traced in: what
    changes its graph needs the world's groups."""
    from fcoll.tracing.peers import Board

    if args.target and args.target.endswith(".json"):
        saved = programs.read_trace(args.target)
        saved.take(args.sizes or {})
        yield saved
        return
    build, axes = _build_of(args), args.mesh or {"dp": 1}
    with ExitStack() as world:
        with progress("tracing", args.quiet, ticks=True), redirect_stdout(sys.stderr):
            board = Board(build, axes, args.mode, args.sizes or {})
            traced = world.enter_context(board.traced(args.rank))
            _ = traced.steps  # made here: they need the world's groups
        with _set_apart():  # a million objects, all in use until the end
            yield traced


def _numbered(line: Timeline, traced: Any) -> Timeline:
    """The same timeline; bytes that only a run knows are what it took them to be."""
    known = [replace(c, bytes=int(number(c.bytes, traced.sizes))) for c in line.collectives]
    return replace(line, collectives=tuple(known))


def _notes(args: argparse.Namespace, traced: Any) -> list[str]:
    """What is to be known of a report, said on stderr too."""
    about = [f"{args.demo}: {demos.about(args.demo)}"] if args.demo else []
    notes = [*about, *traced.notes]
    for note in notes if not args.quiet else ():
        print(f"fcoll: {note}", file=sys.stderr)
    return notes


def _waits(args: argparse.Namespace) -> str:
    """Eager waits at the first use; a compiled graph where the compiler put the wait."""
    default = "in place" if args.mode == "compiled" else "first use"
    return args.waits.replace("-", " ") if args.waits else default


def _title(args: argparse.Namespace) -> str:
    no_ddp = " (not torch's DDP)" if (args.demo or "").endswith("-ddp") else ""
    return f"{args.demo}{no_ddp}" if args.demo else args.target


_FILES = ("html", "perfetto", "svg", "png", "save", "out", "csv")


def check_files(args: argparse.Namespace) -> None:
    """Can the files be written that are asked for? Asked before the work."""
    for path in filter(None, (getattr(args, name, None) for name in _FILES)):
        folder = Path(path).parent
        if Path(path).is_dir():
            raise NotWritable(path=path, why="it is a folder")
        if not folder.is_dir():
            raise NotWritable(path=path, why=f"there is no folder {folder}")
        if not os.access(path if Path(path).exists() else folder, os.W_OK):
            raise NotWritable(path=path, why="it is write-protected")
    if getattr(args, "png", None) and find_spec("matplotlib") is None:
        raise NotWritable(path=args.png, why="a PNG needs matplotlib; --svg does not")


def _write(path: str | None, render: Callable[[], str]) -> None:
    if path:
        Path(path).write_text(render())


def _print(args: argparse.Namespace, data: Any, text: Callable[[], str]) -> None:
    print(json.dumps(data, default=str) if args.json else text())


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
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
    "collectives": _collectives,
    "build": _build,
}


def run(args: argparse.Namespace) -> int:
    """The exit code of a command; a mistake of the user's is a line on stderr."""
    if not args.debug:  # torch logs the traceback of what is raised
        logging.getLogger(FAKE_TENSOR_LOG).setLevel(logging.CRITICAL)
    try:
        with source.command(sys.argv[0]), _set_apart(), drawn_tables():
            check_files(args)
            code = COMMANDS[args.command](args)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # `fcoll report ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (Exception, SystemExit) as error:
        if args.debug:
            traceback.print_exception(error)
        print(f"fcoll: {_message(error)}", file=sys.stderr)
    return FAILED


@contextmanager
def _set_apart() -> Iterator[None]:
    """The garbage collector does not look through what there is by now, such as torch."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _message(error: BaseException) -> str:
    """An error in a line; if it is not one of fcoll's, with the user's line that raised it."""
    if isinstance(error, FcollError):
        return str(error)
    told = error.args[0] if isinstance(error, KeyError) and error.args else error
    text = str(getattr(error, "msg", None) or told).partition("\n")[0].rstrip(". ")
    line = programs.line_of(error)
    said = ": ".join(filter(None, [type(error).__name__, text]))
    hint = " The axes are those of --mesh." if "mesh_dim_name" in text else ""
    where = f"at {line}" if line else "in fcoll itself"
    return f"{said}, {where}.{hint} --debug shows the traceback."
