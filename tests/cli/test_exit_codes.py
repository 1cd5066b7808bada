"""0 fine, 1 found, 2 could not tell; what could not be told is said in a line, with the user's."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace

import pytest

from fcoll.cli import commands, main, programs
from fcoll.cli.commands import COMMANDS, FAILED, FINE, FOUND
from fcoll.errors import BadTraceFile, NotWritable

PROGRAM = """\
import torch, fcoll

print("importing")

def build(mesh):
    def step(x):
        print("running")
        return fcoll.all_reduce(x, "sum", mesh)
    return step, (torch.ones(8),)

def raises(mesh):
    raise RuntimeError("a bug.\\nand more")  # line 12

def wrong_axis(mesh):
    tp = mesh["tp"]  # line 15
    return fcoll.all_reduce, ()

def exits(mesh):
    raise SystemExit(3)  # line 19

def step_raises(mesh):
    def step(x):
        return x @ x.new_ones(3, 3)  # line 23
    return step, (torch.ones(2, 2),)

def nothing(mesh):  # line 26
    torch.ones(1)

def only_a_function(mesh):
    return torch.sin

def three(mesh):
    return torch.sin, (torch.ones(1),), {}

def no_tuple_of_arguments(mesh):
    return torch.sin, torch.ones(1)

def library_raises(mesh):
    import json
    return json.loads("{")  # line 40

def found(mesh):
    return lambda x: fcoll.all_reduce(x, "sum", mesh), (torch.ones(1 + mesh.get_rank()),)

def by_value(mesh):
    def step(x):
        if x.sum() > 3:  # line 47
            return fcoll.all_reduce(x, "sum", mesh)
    return step, (torch.ones(8),)

def read_size(mesh):
    def step(x, n):
        return fcoll.all_reduce(x.expand(n.item(), 8) * 2, "sum", mesh)
    return step, (torch.ones(1, 8), torch.empty((), device="meta").long())
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    (tmp_path / "train_it.py").write_text(PROGRAM)
    (tmp_path / "syntax.py").write_text("def build(mesh):\n    return (\n")
    (tmp_path / "imports.py").write_text("import torch\nimport nowhere_to_be_found\n")
    (tmp_path / "no_trace.json").write_text('{"rank": 0}')
    (tmp_path / "no_json.json").write_text("{")
    (tmp_path / "a_list.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FCOLL_MACHINE_DIR", str(tmp_path / "machines"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(capsys, *args: str) -> tuple[int, str, str]:
    code = main(args)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


FAILURES = {
    "raises": "RuntimeError: a bug, at train_it.py:12. --debug",
    "wrong_axis": "at train_it.py:15. The axes are those of --mesh",
    "exits": "SystemExit: 3, at train_it.py:19",
    "step_raises": "at train_it.py:23",
    "nothing": "the function at train_it.py:26 returned None, not (fn, args)",
    "only_a_function": "returned a builtin_function_or_method, not (fn, args)",
    "three": "returned (builtin_function_or_method, tuple, dict), not (fn, args)",
    "no_tuple_of_arguments": "returned (builtin_function_or_method, Tensor), not (fn, args)",
    "library_raises": "JSONDecodeError: Expecting property name enclosed in double quotes, "
    "at train_it.py:40",
    "by_value": "decides by the value of a tensor, at train_it.py:47",
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("command", ["report", "check", "scale"])
def test_a_program_that_fails_could_not_be_told(capsys, command, name):
    axes = ["--axis", "dp=2"] if command == "scale" else ["--mesh", "dp=2"]
    code, out, err = run(capsys, command, f"train_it.py:{name}", *axes, "-q")
    assert (code, out) == (FAILED, "")
    said = [line for line in err.splitlines() if line not in ("importing", "running")]
    assert len(said) == 1 and said[0].startswith("fcoll: ") and FAILURES[name] in said[0]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["report", "syntax.py:build"], "SyntaxError: '(' was never closed, at syntax.py:2"),
        (["report", "imports.py:build"], "No module named 'nowhere_to_be_found', at imports.py:2"),
        (["report", "imports:build"], "No module named 'nowhere_to_be_found', at imports.py:2"),
        (["report", "no_trace.json"], "cannot read the trace no_trace.json: KeyError"),
        (["report", "no_json.json"], "cannot read the trace no_json.json: JSONDecodeError"),
        (["report", "a_list.json"], "cannot read the trace a_list.json: TypeError"),
        (["diff", "no_json.json", "gone.json"], "cannot read the trace no_json.json"),
        (["check", "train_it.py:build"], "--mesh dp=4,tp=2"),
        (["report", "--demo", "tiny-moe", "--mesh", "dp=2"], "has no axis ep"),
        (["report", "train_it.py:read_size", "--mesh", "dp=2"], "depends on u0"),
    ],
)
def test_what_cannot_be_read_or_run(capsys, args, why):
    code, out, err = run(capsys, *args, "-q")
    assert (code, out) == (FAILED, "")
    assert why in err and "Traceback" not in err


@pytest.mark.parametrize(
    "args",
    [
        ["--html", "gone/x.html"],
        ["--perfetto", "gone/x.json"],
        ["--svg", "gone/x.svg"],
        ["--png", "gone/x.png"],
        ["--save", "gone/x.json"],
        ["--save", "."],
        ["--before", "gone.json"],
        ["--machine", "abacus"],
        ["--machine", "gone.toml"],
    ],
)
def test_known_before_the_work_is_told_before_it(capsys, args):
    code, out, err = run(capsys, "report", "train_it.py:build", "--mesh", "dp=2", *args)
    assert (code, out) == (FAILED, "") and err.startswith("fcoll: ")
    assert "importing" not in err and "tracing" not in err
    if "gone/" in args[1]:
        assert f"cannot write {args[1]}: there is no folder gone" in err


def test_of_scale_and_calibrate_too(capsys):
    program = ("scale", "train_it.py:build", "--axis", "dp=2")
    for more in (["--machine", "abacus"], ["--svg", "gone/x.svg"]):
        code, out, err = run(capsys, *program, *more)
        assert (code, out) == (FAILED, "") and "importing" not in err
    code, _, err = run(capsys, "calibrate", "--out", "gone/local.toml")
    assert code == FAILED and "there is no folder gone" in err


def test_files_that_cannot_be_read_or_written(project):
    with pytest.raises(BadTraceFile, match="--save"):
        programs.read_trace("gone.json")
    for path in ("gone/x", ".", str(project / "train_it.py" / "x")):
        with pytest.raises(NotWritable, match="name another file"):
            commands.check_files(Namespace(html=path))
    commands.check_files(Namespace(html="x.html", save=None))


def test_found_is_one_and_fine_is_zero(capsys):
    assert run(capsys, "check", "train_it.py:found", "--mesh", "dp=2")[0] == FOUND
    assert run(capsys, "check", "train_it.py:build", "--mesh", "dp=2")[0] == FINE


def test_what_the_program_prints_is_no_result(capsys):
    for command in ("report", "check"):
        code, out, err = run(capsys, command, "train_it.py:build", "--mesh", "dp=2", "--json", "-q")
        assert code == FINE and json.loads(out)
        assert err.splitlines()[0] == "importing" and "running" in err


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_traceback(capsys, before):
    args = ["report", "train_it.py:raises", "--mesh", "dp=2", "-q"]
    code, _, err = run(capsys, *(["--debug", *args] if before else [*args, "--debug"]))
    assert code == FAILED
    assert "Traceback" in err and 'raise RuntimeError("a bug' in err
    assert err.splitlines()[-1].startswith("fcoll: RuntimeError: a bug")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_debug(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "--debug" in capsys.readouterr().out


def test_sizes_can_be_given(capsys):
    program = ("report", "train_it.py:read_size", "--mesh", "dp=2", "--json", "-q")
    code, out, _ = run(capsys, *program, "--sizes", "u0=64")
    assert code == FINE and json.loads(out)["rows"][0]["bytes"] == 64 * 8 * 4


def test_notes_are_told(capsys):
    code, out, err = run(capsys, "report", "--demo", "tiny-ddp", "--mesh", "dp=2", "--json")
    assert code == FINE
    assert "not torch's DDP" in err and "not torch's DDP" in json.loads(out)["notes"][0]


def test_the_command_itself_is_no_line_of_the_users():
    command = [sys.executable, "-m", "fcoll", "report", "--demo", "gone"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == FAILED
    assert done.stderr.startswith("fcoll: BadTarget") and " at " not in done.stderr


def test_what_the_program_left_for_the_end_is_done(tmp_path):
    """The process ends by itself, and at once: not as Python's do."""
    (tmp_path / "prog.py").write_text(
        f"import atexit\natexit.register(print, 'at the end')\n{PROGRAM}"
    )
    command = [sys.executable, "-m", "fcoll", "report", "prog.py:build", "--mesh", "dp=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == FINE, done.stderr
    assert done.stdout.endswith("at the end\n") and "all_reduce" in done.stdout


def test_the_bare_command_shows_the_help(capsys):
    code, out, err = run(capsys)
    assert (code, out) == (FAILED, "")
    assert all(command in err for command in COMMANDS) and "start with" in err
