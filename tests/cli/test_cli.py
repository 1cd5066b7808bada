"""Commands as a user types them: what they print, what they write, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

import fcoll
from fcoll.cli import demos, main
from fcoll.cli import programs as target
from fcoll.cli.commands import COMMANDS, FAILED, FINE, FOUND
from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us
from fcoll.errors import BadTarget, UnusedAxis
from fcoll.profiling import calibration

PROGRAM = """
import torch
import fcoll

def build(mesh):
    def step(x):
        y = fcoll.all_reduce(x @ x, "sum", mesh)
        return (y * 2).sum()
    return step, (torch.empty(64, 64, device="meta"),)

def more(mesh):
    def step(x):
        return fcoll.all_reduce(build(mesh)[0](x), "sum", mesh)
    return step, (torch.empty(64, 64, device="meta"),)

def broken(mesh):
    first = mesh.get_local_rank() == 0
    def step(x):
        return fcoll.all_reduce(x, "max" if first else "sum", mesh)
    return step, (torch.empty(8, device="meta"),)

def only_even(mesh):
    if mesh["tp"].size() % 2:
        raise ValueError("odd")
    return build(mesh)

def gathered(mesh):
    def step(x):
        n = x.sum().long().item()
        rows = torch.empty(n, 4)
        return fcoll.all_reduce(rows, "sum", mesh).sum()
    return step, (torch.ones(8),)

number = 3
"""


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """The user's project is the working directory; nothing is read from the real home."""
    (tmp_path / "train_it.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FCOLL_MACHINE_DIR", str(tmp_path / "machines"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train_it", raising=False)
    return tmp_path


@pytest.fixture
def fcoll_(capsys):
    """fcoll_("report", ...) -> (exit code, stdout, stderr)."""

    def run(*args: str) -> tuple[int, str, str]:
        try:
            code = main(args)
        except SystemExit as end:  # argparse
            code = end.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


# -- report ---


@pytest.mark.parametrize("target", ["train_it.py:build", "train_it:build"])
def test_report_names_the_users_line(fcoll_, target):
    code, out, err = fcoll_("report", target, "--mesh", "tp=4")
    assert code == FINE
    assert out.splitlines()[0] == "h100, tp=4, rank 0: 1 collective"
    assert "largest: train_it.py:7" in out.splitlines()[-1]
    assert "fcoll: tracing" in err


def test_report_as_json_is_alone_on_stdout(fcoll_):
    code, out, err = fcoll_("report", "train_it:build", "--mesh", "tp=4", "--json", "-q")
    assert (code, err) == (FINE, "")
    found = json.loads(out)
    assert found["mesh"] == {"tp": 4} and found["collectives"] == 1
    assert found["rows"][0]["source"] == "train_it.py:7"
    assert found["rows"][0]["bytes"] == 64 * 64 * 4


def test_report_writes_files(fcoll_, project):
    files = {"html": "a.html", "perfetto": "a.json", "svg": "a.svg", "save": "t.json"}
    options = [x for option, file in files.items() for x in (f"--{option}", file)]
    assert fcoll_("report", "train_it:build", "--mesh", "tp=4", *options)[0] == FINE
    assert "train_it.py:7" in (project / "a.html").read_text()
    assert json.loads((project / "a.json").read_text())["traceEvents"]
    ElementTree.fromstring((project / "a.svg").read_text())
    again = fcoll_("report", "t.json", "-q")
    assert again == fcoll_("report", "train_it:build", "--mesh", "tp=4", "-q")


def test_report_before_and_after(fcoll_):
    fcoll_("report", "train_it:build", "--mesh", "tp=4", "--save", "old.json")
    more = ("report", "train_it:more", "--mesh", "tp=4", "--before", "old.json", "-q")
    code, out, _ = fcoll_(*more)
    assert code == FINE and "after:" in out and "x as fast" in out
    found = json.loads(fcoll_(*more, "--json")[1])
    assert (found["before"]["collectives"], found["collectives"]) == (1, 2)


def test_report_fails_above_a_share(fcoll_):
    program = ("report", "train_it:build", "--mesh", "tp=4", "-q", "--fail-above")
    code, _, err = fcoll_(*program, "1%")
    assert code == FOUND and "more than --fail-above 1.0%" in err
    assert fcoll_(*program, "99%")[0] == FINE


def test_machines_make_a_difference(fcoll_, project):
    def step_us(machine: str) -> float:
        program = ("report", "train_it:build", "--mesh", "tp=4", "--json", "-q")
        return json.loads(fcoll_(*program, "--machine", machine)[1])["step_us"]

    h100 = Machine.preset("h100")  # without the switch: its launch is another one
    slow = replace(h100, collective_us=h100.collective_us + 495, forms={})
    (project / "slow.toml").write_text(slow.to_toml())
    assert step_us("slow.toml") == pytest.approx(step_us("h100") + 495)
    listed = json.loads(fcoll_("machines", "--json")[1])
    assert {"a100", "b200", "b300", "h100", "h20", "mi300x"} <= set(listed)
    assert all(listed.values()), "each has a note"


def test_waits_where_they_are_used_or_where_they_stand(fcoll_):
    def exposed(*more: str) -> float:
        program = ("report", "--demo", "tiny", "--mesh", "dp=2,tp=2", "--json", "-q")
        return json.loads(fcoll_(*program, *more)[1])["exposed_us"]

    assert exposed() == exposed("--waits", "first-use") < exposed("--waits", "in-place")


# -- check, diff, scale ---


def test_check(fcoll_):
    assert fcoll_("check", "train_it:build", "--mesh", "tp=4", "-q")[0] == FINE
    code, out, _ = fcoll_("check", "train_it:broken", "--mesh", "tp=4", "-q")
    assert code == FOUND and "train_it.py:19" in out
    code, out, _ = fcoll_("check", "train_it:broken", "--mesh", "tp=4", "-q", "--json")
    assert code == FOUND and json.loads(out)["ok"] is False


def test_diff(fcoll_):
    for name in ("build", "more"):
        fcoll_("report", f"train_it:{name}", "--mesh", "tp=4", "--save", f"{name}.json")
    assert fcoll_("diff", "build.json", "build.json")[0] == FINE
    code, out, _ = fcoll_("diff", "build.json", "more.json")
    assert code == FOUND and "+" in out and "all_reduce" in out
    assert json.loads(fcoll_("diff", "build.json", "more.json", "--json")[1])["same"] is False


def test_scale(fcoll_, project):
    program = ("scale", "train_it:build", "--axis", "dp=1..64")
    code, out, err = fcoll_(*program, "--svg", "plot.svg")
    assert code == FINE
    assert [int(row.split()[0]) for row in out.splitlines()[1:8]] == [1, 2, 4, 8, 16, 32, 64]
    assert "dp=32" in err
    ElementTree.fromstring((project / "plot.svg").read_text())
    points = json.loads(fcoll_(*program, "--json", "-q")[1])["points"]
    machine = Machine.preset("h100")
    for point in points:  # nothing of this program can be hidden
        want = collective_us("all_reduce", point["size"], 64 * 64 * 4, machine)
        assert point["exposed_us"] == pytest.approx(float(want))
    assert points[-1]["exposed_share"] > points[0]["exposed_share"] == 0


def test_scale_keeps_the_other_axes(fcoll_):
    code, out, _ = fcoll_(
        "scale", "--demo", "tiny", "--axis", "dp=2,4", "--mesh", "tp=2", "--json", "-q"
    )
    assert code == FINE
    assert [(p["size"], p["ranks"]) for p in json.loads(out)["points"]] == [(2, 4), (4, 8)]


def test_scale_keeps_the_points_that_are_done(fcoll_):
    code, out, err = fcoll_("scale", "train_it:only_even", "--axis", "tp=2,3,4", "-q")
    assert code == FAILED and "tp=3 failed: ValueError: odd" in err
    assert [row.split()[0] for row in out.splitlines()[1:3]] == ["2", "4"] and "tp=3 failed" in out
    found = json.loads(fcoll_("scale", "train_it:only_even", "--axis", "tp=2,3", "-q", "--json")[1])
    assert [p["size"] for p in found["points"]] == [2] and list(found["failed"]) == ["3"]
    code, _, err = fcoll_("scale", "train_it:only_even", "--axis", "tp=3,5", "-q")
    assert code == FAILED and "ValueError: odd" in err and "train_it.py" in err


def test_scale_along_an_axis_that_the_program_does_not_know(fcoll_):
    code, _, err = fcoll_("scale", "--demo", "tiny", "--axis", "td=2,4", "-q")
    assert code == FAILED and "nothing runs along the axis 'td'" in err
    with pytest.raises(UnusedAxis, match="nothing runs along the axis 'td'"):
        fcoll.scale(demos.DEMOS["tiny"], "td", [2, 4])


@pytest.mark.parametrize("key", ["u0", "train_it.py:{line}"])
@pytest.mark.parametrize("command", ["report", "scale", "check", "schedule", "timeline"])
def test_sizes_that_only_a_run_knows(fcoll_, command, key):
    """By symbol or by line; of a size without a bound the command asks for one."""
    line = next(i for i, text in enumerate(PROGRAM.splitlines(), 1) if ".item()" in text)
    mesh = ["--axis", "tp=2"] if command == "scale" else ["--mesh", "tp=2"]
    program = [command, "train_it:gathered", *mesh, "-q"]
    given = ["--sizes", f"{key.format(line=line)}=64"]
    code, _, err = fcoll_(*program, *given)
    assert code == FINE, err
    code, _, err = fcoll_(*program, "--sizes", "nowhere.py:3=64")
    assert code == FAILED and "u0 (" in err and f"train_it.py:{line}" in err


# -- calibrate ---


def test_timeline_of_all_ranks(fcoll_, project):
    more = ("--mesh", "tp=4", "--slow", "2=3", "--html", "w.html", "--svg", "w.svg", "-q")
    code, out, err = fcoll_("timeline", "train_it:build", *more)
    assert (code, err) == (FINE, "") and out.startswith("tp=4: step ")
    assert "█" in out and "░" in out
    ElementTree.fromstring((project / "w.svg").read_text())
    assert "train_it:build" in (project / "w.html").read_text()
    late = json.loads(fcoll_("timeline", "train_it:build", *more, "--json")[1])
    even = json.loads(fcoll_("timeline", "train_it:build", "--mesh", "tp=4", "--json", "-q")[1])
    assert late["step_us"] > even["step_us"] and len(late["ranks"]) == 4
    assert late["ranks"][2]["compute_us"] == pytest.approx(3 * even["ranks"][2]["compute_us"])


@pytest.mark.slow
def test_calibrate_measures_this_machine(fcoll_, project):
    code, out, _ = fcoll_("calibrate", "--quick", "--json")
    assert code == FINE
    machine = Machine.preset("local")
    assert json.loads(out)["path"] == str(project / "machines" / "local.toml")
    assert machine.measured_ranks == 2 and machine.memory_gb_per_s > 0
    assert set(machine.measured) == set(calibration.CALLS)
    for op, points in machine.measured.items():
        sizes = [size for size, _ in points]
        assert sizes == sorted(set(sizes)) and len(sizes) >= 2
        assert all(microseconds > 0 for _, microseconds in points)
        assert collective_us(op, 2, sizes[0], machine) == pytest.approx(points[0][1])
    assert fcoll_("report", "train_it:build", "--mesh", "tp=2", "--machine", "local")[0] == FINE


# -- mistakes and help ---


@pytest.mark.parametrize(
    "args, why",
    [
        (["report"], "no program was named"),
        (["report", "train_it"], "no :function"),
        (["report", "train_it:gone"], "train_it has no function 'gone'"),
        (["report", "nowhere:build"], "No module named 'nowhere'"),
        (["report", "nowhere.py:build"], "No such file"),
        (["report", "train_it:number"], "not a function"),
        (["report", "gone.json"], "No such file"),
        (["report", "--demo", "gpt9"], "the demos are llama3-8b"),
        (["report", "train_it:build", "--machine", "abacus"], "Use one of a100"),
        (["report", "train_it:build", "--machine", "local"], "fcoll calibrate"),
        (["report", "train_it:build", "--rank", "9", "--mesh", "tp=2"], "rank 9"),
        (["scale", "train_it:build", "--axis", "dp=x"], "doubling"),
        (["diff", "a.json", "b.json"], "No such file"),
    ],
)
def test_mistakes_are_told_in_a_line(fcoll_, args, why):
    code, out, err = fcoll_(*args, "-q")
    assert (code, out) == (FAILED, "")
    assert why in err and err.startswith("fcoll: ") and "Traceback" not in err


@pytest.mark.parametrize(
    "args, why",
    [
        (["report", "x:y", "--mesh", "dp"], "is not like dp=4,tp=2"),
        (["report", "x:y", "--mesh", "dp=0"], "at least 1"),
        (["report", "x:y", "--mesh", "dp=2,dp=3"], "each axis once"),
        (["report", "x:y", "--fail-above", "much"], "is not like 30%"),
        (["scale", "x:y"], "--axis"),
        (["dance"], "invalid choice"),
    ],
)
def test_mistakes_in_arguments(fcoll_, args, why):
    code, _, err = fcoll_(*args)
    assert code == FAILED and why in err


@pytest.mark.parametrize(
    "more, why",
    [
        (("--mesh", "tp=2", "--slow", "7=2"), "slow rank 7"),
        (("--mesh", "tp=2", "--slow", "fast"), "is not like 3=1.2"),
        (("--mesh", "tp=2", "--slow", "1=0"), "takes 1.2 times as long"),
        ((), "--mesh pp=4,dp=2"),
    ],
)
def test_mistakes_in_timeline(fcoll_, more, why):
    code, _, err = fcoll_("timeline", "train_it:build", *more)
    assert code == FAILED and why in err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(fcoll_, command):
    code, out, _ = fcoll_(command, "--help")
    assert code == FINE and "--json" in out
    if command in ("report", "check", "scale", "calibrate", "diff"):
        assert "example" in out


def test_demos_can_be_listed(fcoll_):
    code, out, _ = fcoll_("report", "--demo", "list")
    assert code == FINE and "llama3-8b" in out.split()
    for line in out.splitlines():  # "-ddp" is short for what it does, not for torch's module
        assert ("not torch's DDP" in line) == line.split()[0].endswith("-ddp")


def test_a_reader_that_stops_early_is_no_error():
    """`fcoll collectives | head -1`"""
    code = "import sys; from fcoll.cli import main; sys.exit(main(['collectives']))"
    command = f'{sys.executable} -c "{code}" | head -c 1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""


@pytest.mark.parametrize("name", [None, "no_colon", "nowhere:build", "fcoll.errors:_NATIVE"])
def test_what_is_no_program_is_said_to_be_none(name):
    with pytest.raises(BadTarget, match="cannot run"):
        target.load(name)


def test_prices_of_a_machine_by_form(fcoll_):
    found = json.loads(fcoll_("machines", "--prices", "b300", "--json")[1])
    small, large = found["all_reduce"][2], found["all_reduce"][-1]
    assert next(iter(small["us"])) == "one-shot" and small["form"] == "ring"
    assert next(iter(large["us"])) == large["form"] == "nvls"
    assert list(found["all_gather_into_tensor"][0]["us"]) == ["ring"]
    text = fcoll_("machines", "--prices", "b300:one-shot")[1]
    row = next(line for line in text.splitlines() if line.startswith("256 KiB"))
    assert row.split()[3] == "us*", "the first form, one-shot, is what is paid"
    across = fcoll_("machines", "--prices", "b300", "--ranks", "16")[1]
    assert "nvls" in across and "one-shot" not in across.partition("all_gather")[0]
    assert fcoll_("machines", "--prices", "b300:three-shot")[0] == FAILED
    assert fcoll_("machines", "--prices", "b300", "--ranks", "1")[0] == FAILED


def test_a_report_says_which_form_was_priced(fcoll_, project):
    program = ("report", "train_it:build", "--mesh", "tp=4", "-q", "--json")
    forms, us = {}, {}
    for machine in ("b300", "b300:best"):
        report = json.loads(fcoll_(*program, "--machine", machine)[1])
        forms[machine] = {row["form"] for row in report["rows"]}
        us[machine] = report["communication_us"]
    assert forms == {"b300": {"ring"}, "b300:best": {"one-shot"}}
    assert us["b300:best"] < us["b300"]
