"""On a version of torch that is not known: one warning, no error at import, and what needs a name
that is gone says so."""

from __future__ import annotations

import importlib
import operator
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from test_layout import PACKAGES, files, names_in

import fcoll
from fcoll import imports

ROOT = Path(__file__).parent.parent

UNKNOWN = """
import warnings
import torch, torch.distributed as dist, torch.distributed.tensor  # it needs them itself
torch.__version__ = "2.99.0"
warnings.simplefilter("error")

def raises(fn, *args):
    try:
        fn(*args)
    except imports.MissingInTorch as error:
        return str(error)
    raise AssertionError("it did not raise")
"""

IMPORT_ALL = """
import importlib, pkgutil

def import_all():
    for package in (fcoll, inductor_ext):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith(("__main__", ".wheel", ".backend")):
                importlib.import_module(found.name)
"""


def run(program: str) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_names_that_are_gone_are_told_when_they_are_used():
    """Taken out of torch: what is imported, what is asked for in a function, a class's base."""
    run(
        UNKNOWN
        + """
del torch._C._distributed_c10d.FakeWork, torch._C._current_graph_task_id
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import fcoll
    from fcoll import imports
    import fcoll.training._torch, fcoll.local
ours = [w for w in told if "fcoll is tested with" in str(w.message)]
assert len(ours) == 1 and "this is 2.99.0" in str(ours[0].message), told

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert fcoll.all_reduce(torch.ones(2)).tolist() == [1, 1]  # what does not need them works
dist.destroy_process_group()

said = raises(fcoll.training._torch.backward_pass)
assert said.startswith("torch 2.99.0 has no torch._C._current_graph_task_id"), said
assert "2.13 to 2.15" in said
assert "torch._C._distributed_c10d.FakeWork" in raises(fcoll._torch.completed_work)
"""
    )


def test_a_version_with_all_names_works_after_one_warning():
    run(
        UNKNOWN
        + """
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import fcoll
    with fcoll.fake_world(tp=2) as mesh:
        trace = fcoll.trace(lambda x: fcoll.all_reduce(x @ x, "sum", mesh), torch.ones(4, 4))
        plan = fcoll.schedule(trace, machine="h100")
    assert [c.op for c in trace.collectives] == ["all_reduce"] and plan.makespan_us > 0
    step = lambda x: fcoll.all_reduce(x, "sum", "tp")
    assert fcoll.simulate(step, mesh_shape={"tp": 2})(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2
    ranks = fcoll.simulate_ranks(lambda rank: fcoll.all_reduce(torch.ones(1)).item(), 2)
    assert list(ranks) == [2, 2], ranks
ours = [w for w in told if "fcoll is tested with" in str(w.message)]
assert len(ours) == 1, [str(w.message) for w in told]
"""
    )


def test_without_any_of_the_names_everything_imports():
    run(
        IMPORT_ALL
        + """
import fcoll  # without torch, so that nothing else is imported yet
from fcoll import imports

def gone(module, name="", instead=None):
    asked.append(name)
    return imports._Missing(f"{module}.{name}") if instead is None else instead

asked, imports.private = [], gone
import torch, inductor_ext
import_all()
assert len(asked) > 60, len(asked)
"""
    )


def test_a_stand_in():
    gone = imports.private("torch._C", "_no_such_name")
    assert imports.is_missing(gone) and not imports.is_missing(imports.private("torch", "Tensor"))
    assert not isinstance(1, gone) and not isinstance(1, (str, gone))
    for use in (lambda: gone(1), lambda: gone.attribute, lambda: type("A", (Base,), {})()):
        with pytest.raises(imports.MissingInTorch, match=r"has no torch\._C\._no_such_name"):
            use()
    assert not hasattr(gone, "__wrapped__")
    assert imports.private("torch._C", "_no_such_name", instead=3) == 3


class Base(imports.private("torch._C", "_no_such_name")):
    """A class may have a base that is gone; it has no instances then."""


def test_errors_of_others_stay_as_they_are():
    for error in (AttributeError("x", name="x", obj=3), ImportError("y", name="numpy.nix")):
        assert imports._name_in_torch(error) is None


def test_the_versions_stand_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = [name for name in project["dependencies"] if name.startswith("torch")]
    last = int(imports.TESTED[-1].split(".")[1])
    assert asked == f"torch>={imports.TESTED[0]},<2.{last + 1}"
    assert re.search(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)[1] == "2.13.0"


def test_known_versions_are_not_warned_of(recwarn):
    for version in ("2.13.0", "2.14.1+cu130", "2.15.0a0"):
        imports.warn_of_untested(version)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"torch 2\.13 to 2\.15, this is 2\.16\.0"):
        imports.warn_of_untested("2.16.0")


def is_there(path: str) -> bool:
    """Is there such a name in the torch that is installed?"""
    first, *parts = path.split(".")
    found = importlib.import_module(first)
    for i, part in enumerate(parts, 1):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join([first, *parts[:i]]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


# private("torch._C", "_name"), private_names("torch._guards", "A", "B")
PRIVATE = re.compile(r'private(?:_names)?\(\s*"([\w.]+)"((?:,\s*[*(]*"[\w.]+")*)')


def private_names() -> set[str]:
    """The names of torch in the files that may have private ones."""
    paths = [path for package in PACKAGES for path in files(package) if path.name == "_torch.py"]
    found = {name for path in paths for _, name in names_in(path) if name.startswith("torch.")}
    for path in paths:
        for module, names in PRIVATE.findall(path.read_text()):
            found |= {f"{module}.{name}" for name in re.findall(r'"([\w.]+)"', names)}
    return found


def test_this_torch_has_the_private_names():
    """What a new version lacks; where a name has another meaning, other tests fail."""
    names = private_names()
    assert len(names) > 250, len(names)
    assert sorted(name for name in names if not is_there(name)) == []


# -- what a version adds ---

WAITS = torch.ops._c10d_functional
from_2_15 = pytest.mark.skipif(
    not hasattr(WAITS, "wait_tensors"), reason="torch has wait_tensors from 2.15 on"
)


def waits_of(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "wait" in str(node.target)]


@from_2_15
def test_a_wait_for_a_list_is_traced_as_one_for_each():
    with fcoll.fake_world(tp=2) as mesh:
        group = mesh.get_group().group_name

        def step(x):
            a, b = WAITS.wait_tensors(WAITS.all_reduce_coalesced([x, x + 1], "sum", group))
            return a * b

        trace = fcoll.trace(step, torch.ones(4))
    assert waits_of(trace.graph_module.graph) == ["_c10d_functional.wait_tensor.default"] * 2


@from_2_15
def test_a_wait_for_a_list_is_compiled_as_one_for_each():
    from inductor_ext.passes.normalize import normalize

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    both = graph.call_function(WAITS.wait_tensors.default, ([x, y],))
    parts = [graph.call_function(operator.getitem, (both, i)) for i in (1, 0)]
    graph.output(parts)
    normalize(graph)
    assert waits_of(graph) == ["_c10d_functional.wait_tensor.default"] * 2
    (out,) = [node for node in graph.nodes if node.op == "output"]
    assert [wait.args[0] for wait in out.args[0]] == [y, x]
    graph.lint()


from_2_14 = pytest.mark.skipif(
    not hasattr(torch.distributed, "gather_single"), reason="torch has gather_single from 2.14 on"
)


def gathered(rank):
    """Rank 1's result of dist.gather_single to it."""
    dist = torch.distributed
    whole = torch.zeros(4) if rank == 1 else None
    dist.gather_single(torch.arange(2.0) + 10 * rank, whole, dst=1)
    return whole


@from_2_14
def test_gather_single_on_simulated_ranks():
    _, whole = fcoll.simulate_ranks(gathered, 2)
    assert whole.tolist() == [0, 1, 10, 11]


@from_2_14
def test_gather_single_in_a_trace():
    for rank in (0, 1):
        with fcoll.fake_world(tp=2, rank=rank):
            trace = fcoll.trace(gathered, rank)
        assert [c.op for c in trace.collectives] == ["gather"]


@from_2_14
def test_gather_single_of_local_tensors():
    from fcoll.local import LocalTensorMode, rank_map

    with fcoll.fake_world(tp=2), LocalTensorMode(2):
        x = rank_map(lambda r: torch.arange(2.0) + 10 * r)
        whole = torch.zeros(4)
        torch.distributed.gather_single(x, whole)
    assert [t.tolist() for t in whole._local_tensors.values()] == [[0, 1, 10, 11], [0] * 4]


@pytest.mark.skipif(
    not hasattr(torch.distributed.distributed_c10d._world, "_pg_flight_recorder_hooks"),
    reason="torch has hooks of groups from 2.15 on",
)
def test_hooks_of_groups_outlive_a_world_inside(solo):
    """destroy_process_group forgets the hooks of all groups, but not of the world around."""
    hooks = torch.distributed.distributed_c10d._world.pg_flight_recorder_hooks
    hooks[solo] = "a hook"
    with fcoll.fake_world(tp=2):
        torch.distributed.destroy_process_group()
    assert hooks == {solo: "a hook"}
