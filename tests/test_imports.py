"""What ``import fcoll`` and ``fcoll --help`` import, and what they leave for later."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fcoll

ROOT = Path(__file__).parent.parent

# Each takes longer to import than all that fcoll needs for a collective.
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "torch.onnx")

FRESH = f"""
import sys
def there(*names): return [name for name in names if name in sys.modules]
HEAVY = {HEAVY}
"""

COLLECTIVE = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert fcoll.all_reduce(torch.ones(2)).tolist() == [1, 1]
assert not there(*HEAVY), there(*HEAVY)
dist.destroy_process_group()
"""


def run(program: str) -> None:
    """In a process of its own, which has imported nothing yet."""
    command = [sys.executable, "-c", FRESH + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_fcoll_alone_does_not_import_torch():
    run("import fcoll\nassert dir(fcoll) and fcoll.__version__\nassert not there('torch')")


@pytest.mark.parametrize("order", ["fcoll, torch", "torch, fcoll"])
def test_collectives_need_nothing_heavy(order):
    """And the ops are there without a name of fcoll's having been asked for."""
    run(f"import {order}\nassert callable(torch.ops.fcoll.all_reduce.default)" + COLLECTIVE)


def test_torch_does_not_know_that_it_was_waited_for():
    run(
        "before = list(sys.meta_path)\n"
        "import fcoll, torch, pkgutil\n"
        "assert type(torch.__loader__) is type(torch.__spec__.loader) is type(pkgutil.__loader__)\n"
        "assert fcoll.all_reduce is fcoll.functions.all_reduce\n"
        "import torch._dynamo.symbolic_convert as dynamo\n"
        "import torch._functorch.partitioners, torch._inductor.compile_fx\n"
        "assert sys.meta_path == before\n"
        "assert dynamo.is_stdlib(fcoll.functions) and not dynamo.is_stdlib(torch)\n"
    )


@pytest.mark.parametrize("module", ["transport.native.build", "eager.dispatch", "report.advice"])
def test_any_module_may_be_the_first(module):
    """Also those that import torch, at the end of which they are wanted whole."""
    run(f"import fcoll.{module}, torch\nassert callable(torch.ops.fcoll.all_reduce.default)")


@pytest.mark.parametrize("options", [["--help"], ["report", "--help"], ["--version"], ["reprot"]])
def test_help_and_mistakes_need_no_torch(options):
    run(
        "from fcoll.cli import main\n"
        f"try: main({options})\n"
        "except SystemExit: pass\n"
        "assert not there('torch', 'numpy')"
    )


def test_a_trace_of_ddp_finds_its_reducer_by_itself():
    run(
        "import torch, fcoll\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "with fcoll.fake_world(dp=2) as mesh:\n"
        "    model = DDP(torch.nn.Linear(2, 2))\n"
        "    trace = fcoll.trace(lambda x: model(x).sum(), torch.ones(1, 2))\n"
        "assert [c.op for c in trace.collectives] == ['all_reduce_'], trace\n"
    )


def test_names_that_are_first_used_by_threads_or_in_a_compiled_function():
    run(
        "import torch, fcoll\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    traces = list(pool.map(lambda _: fcoll.trace, range(8)))\n"
        "assert len(set(map(id, traces))) == 1\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "fn = torch.compile(lambda x: fcoll.permute(x, [0]) + 1, backend='eager', fullgraph=True)\n"
        "assert fn(torch.ones(2)).tolist() == [2, 2]\n"
        "dist.destroy_process_group()\n"
    )


# -- the table of names ---


def imported_for_types() -> Iterator[tuple[str, str]]:
    """(module, name) of all that type checkers see."""
    tree = ast.parse(inspect.getsource(fcoll))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            names = fcoll.functions.__all__ if alias.name == "*" else [alias.name]
            yield from ((node.module or "", name) for name in names)


def test_names_are_where_type_checkers_see_them():
    for module, name in imported_for_types():
        exec(f"from {module} import {name}", found := {})
        assert getattr(fcoll, name) is found[name]
    assert {name for _, name in imported_for_types()} == set(fcoll.__all__)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="'fcoll' has no attribute 'all_reduced'"):
        fcoll.all_reduced  # noqa: B018
    assert not hasattr(fcoll, "__wrapped__")


def test_public_classes_can_be_pickled():
    for name in fcoll.__all__:
        value = getattr(fcoll, name)
        if isinstance(value, type) or inspect.isfunction(value):
            assert pickle.loads(pickle.dumps(value)) is value, name


@pytest.mark.parametrize("package", ["fcoll", "inductor_ext"])
def test_dir_shows_public_names_only(package):
    """What an editor proposes after the dot, also once the modules behind the names are there."""
    run(
        f"import {package} as package, fcoll\nfcoll.all_reduce\n"
        "shown = {name for name in dir(package) if not name.startswith('__')}\n"
        "assert shown == set(package.__all__) - {'__version__'}, shown ^ set(package.__all__)"
    )
