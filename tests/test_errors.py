"""Every mistake is an error of its own class, before any communication, in every mode.

It says what is wrong, on which line, and what to do; and it is the same in eager, with fake
tensors, under make_fx and under torch.compile.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mistakes import CUDA_GROUP, MESH, MISTAKES, Mistake
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
import fcoll.local.errors
import fcoll.sharded.errors
import inductor_ext.errors
from fcoll import errors
from fcoll._torch import work_registry_size
from fcoll.errors import FcollError

Tensor = torch.Tensor


# -- the modes ---


def eagerly(fn: Callable, x: Tensor) -> Any:
    return fn(x)


def with_fakes(fn: Callable, x: Tensor) -> Any:
    with FakeTensorMode() as mode:
        return fn(mode.from_tensor(x))


def by_make_fx(fn: Callable, x: Tensor) -> Any:
    return make_fx(fn, tracing_mode="fake")(x)


def by_symbolic_make_fx(fn: Callable, x: Tensor) -> Any:
    return make_fx(fn, tracing_mode="symbolic")(x)


def compiled(fn: Callable, x: Tensor) -> Any:
    return torch.compile(fn, fullgraph=True, backend="eager", dynamic=False)(x)


def compiled_dynamic(fn: Callable, x: Tensor) -> Any:
    return torch.compile(fn, fullgraph=True, backend="eager", dynamic=True)(x)


MODES = (eagerly, with_fakes, by_make_fx, by_symbolic_make_fx, compiled, compiled_dynamic)


@dataclass(frozen=True)
class Seen:
    """What rank 0 saw of a mistake, and what came after it."""

    errors: dict[str, Exception | None]  # by mode
    total: float  # of an all_reduce of both ranks
    left: int  # works in torch's registry


def make_mistakes(rank: int) -> dict[str, Seen]:
    MESH[:] = [init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))]
    CUDA_GROUP[:] = [dist.new_group(backend="cuda:gloo")]
    seen, works = {}, work_registry_size()
    for name, known in MISTAKES.items():
        # by one rank alone: had it sent anything, the sum would be out of step
        found = {mode.__name__: error_of(mode, known) for mode in MODES} if rank == 0 else {}
        try:
            total = fcoll.all_reduce(torch.tensor(1.0 + rank)).item()
        except Exception as error:
            error.add_note(f"after {name}")
            raise
        seen[name] = Seen(found, total, work_registry_size() - works)
    return seen


def error_of(mode: Callable, known: Mistake) -> Exception | None:
    torch.compiler.reset()
    try:
        mode(known.make, torch.ones(known.shape).to(known.dtype))
    except Exception as error:
        return error
    return None


@pytest.fixture(scope="module")
def seen(ranks2) -> dict[str, Seen]:
    return ranks2.run(make_mistakes)[0]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(seen, name):
    known = MISTAKES[name]
    classes = {mode: type(error) for mode, error in seen[name].errors.items()}
    assert classes == {mode.__name__: known.error for mode in MODES}, seen[name].errors
    for mode, error in seen[name].errors.items():
        message = str(error)
        assert message.startswith(f"{known.error.__name__}: "), mode
        assert known.line in message, f"{mode}: {message}"
        for part in known.says:
            assert part in message, f"{mode}: {message}"
    assert seen[name].total == 3.0
    assert seen[name].left == 0


# -- mistakes that need a stage of their own ---


def world_sum(x):
    return fcoll.all_reduce(x)


@pytest.mark.parametrize("mode", MODES)
def test_not_initialized(mode):
    with pytest.raises(errors.NotInitialized, match=r"init_process_group.*torchrun") as raised:
        mode(world_sum, torch.ones(2))
    assert Mistake(errors.NotInitialized, (), world_sum, (), torch.float32).line in str(
        raised.value
    )


def gather_out(x, out):
    name = dist.group.WORLD.group_name
    return torch.ops.fcoll.all_gather_into_tensor_out(x, 1, name, out=out)


def scatter_out(x, out):
    name = dist.group.WORLD.group_name
    return torch.ops.fcoll.reduce_scatter_tensor_out(x, "sum", 1, name, out=out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", [gather_out, scatter_out])
@pytest.mark.parametrize(
    ("out", "got"),
    [
        (lambda x: x.new_empty(3, 2), "out has shape [3, 2], torch.float32"),
        (lambda x: x.double(), "out has shape [4, 6], torch.float64"),
        (lambda x: x.new_empty(6, 4).t(), "strided"),
    ],
    ids=["shape", "dtype", "strides"],
)
def test_bad_output(solo, mode, op, out, got):
    torch.compiler.reset()
    # an op called by its name, not through a user function: Dynamo wraps the error and quotes it
    by_dynamo = mode in (compiled, compiled_dynamic)
    cls = torch._dynamo.exc.TorchRuntimeError if by_dynamo else errors.BadOutput
    with pytest.raises(cls, match=r"BadOutput: .* Allocate it so") as raised:
        mode(lambda x: op(x, out(x)), torch.ones(4, 6))
    message = str(raised.value)
    assert got in message
    assert "the result needs shape [4, 6], torch.float32" in message
    assert "test_errors.py:" in message


def overwrite(x):
    return torch.ops.fcoll.all_reduce_(x * 1, "sum", dist.group.WORLD.group_name)


def receive(x):
    return torch.ops.fcoll.irecv(x, 1, 0, dist.group.WORLD.group_name)


@pytest.mark.parametrize("mode", [eagerly, with_fakes, compiled, compiled_dynamic])
def test_no_gradient_of_overwriting(solo, mode):
    torch.compiler.reset()
    x = torch.ones(3, requires_grad=True)
    y = mode(overwrite, x)
    with pytest.raises(errors.NoGradient, match=r"Use all_reduce, which returns a new") as raised:
        y.sum().backward()
    assert "test_errors.py:" in str(raised.value)
    assert "it overwrites its argument" in str(raised.value)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_no_gradient_of_forward_mode(solo):
    with pytest.raises(errors.NoGradient, match="Use reverse mode"):
        torch.func.jvp(world_sum, (torch.ones(2),), (torch.ones(2),))


def send_and_receive(rank: int) -> list[str]:
    """Ranks meet in the transfer; its backward then fails on both without one."""
    messages = []
    x = torch.ones(2, requires_grad=True)
    received = fcoll.batch_p2p([("isend", x, 1 - rank), ("irecv", x, 1 - rank)])[1]
    try:
        received.sum().backward()
    except errors.NoGradient as error:
        messages.append(str(error))
    assert fcoll.all_reduce(torch.ones(1)).item() == 2
    return messages


def test_no_gradient_of_transfers(ranks2):
    for (message,) in ranks2.run(send_and_receive):
        assert "batch_p2p_ops has no gradient, at " in message
        assert "test_errors.py:" in message
        assert "Use permute, scatter or all_to_all_single" in message


OWN_STAGE = {errors.NotInitialized, errors.BadOutput, errors.NoGradient}

# -- what the C++ part reports ---

NATIVE = {
    "CollectiveMismatch": "look for a branch",
    "PeerDied": "restart the job",
    "CollectiveTimeout": "Raise the timeout",
    "GroupClosed": "Make a new process group",
    "GroupForked": "Call init_process_group in the new process",
    "BadSymmetricCall": "Its tensors are contiguous",
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_errors_keep_their_class(name):
    raw = RuntimeError(f"fcoll.{name}[3]: rank 3 went away\nException raised from wait at x.cpp:1")
    error = errors.from_native(raw)
    assert type(error) is getattr(errors, name)
    assert error.rank == 3
    assert str(error).startswith(f"{name}: rank 3 went away, at ")
    assert "test_errors.py:" in str(error)
    assert NATIVE[name] in str(error)


def test_other_errors_stay():
    raw = RuntimeError("out of memory")
    assert errors.from_native(raw) is raw


# -- all classes ---

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, FcollError)]


@pytest.mark.parametrize("cls", [c for c in CLASSES if c not in (FcollError, errors.Reported)])
def test_class_is_raised_by_a_test(cls):
    raised = {m.error for m in MISTAKES.values()} | OWN_STAGE
    others = [p.read_text() for p in Path(__file__).parent.rglob("*.py") if p.name != "mistakes.py"]
    expected = rf"(raises|fault)\([^)]*\b{cls.__name__}\b"  # by the tests of its own module
    elsewhere = any(re.search(expected, text) for text in others)
    assert cls in raised or cls.__name__ in NATIVE or elsewhere, f"no test raises {cls.__name__}"


#: Facts of a message in which the user's line is.
LINES = ("{line}", "{now}", "{cause}")
#: Whose texts have another form than what is wrong, where, how to fix it.
OTHER_TEXTS = {
    errors.NotEqual,
    errors.NotInBatch,
    errors.PlanMismatch,
    errors.CheckMismatch,
    errors.DataDependent,
    errors.NeedsPeers,
    errors.RankFailed,
    errors.ReductionUnfinished,
    errors.ReadyTwice,
    errors.GraphChanged,
    fcoll.sharded.errors.FailedElsewhere,
    fcoll.sharded.errors.NoSuchLookup,
    fcoll.sharded.errors.BadInit,
}
FOLDERS = (errors, fcoll.local.errors, fcoll.sharded.errors, inductor_ext.errors)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.__name__)
def test_a_message_says_what_where_and_how_to_fix_it(folder):
    for cls in vars(folder).values():
        if isinstance(cls, type) and issubclass(cls, FcollError):
            where = cls.what if "{at}" in cls.what else cls.what + "{at}"
            in_order = bool(cls.fix) and cls.template == f"{where}. {cls.fix}"
            assert in_order or {*cls.__mro__} & OTHER_TEXTS, cls


@pytest.mark.parametrize("cls", CLASSES)
def test_class(cls):
    assert issubclass(cls, AssertionError) and issubclass(cls, ValueError)
    # fcoll.check's and trace's, and those of backward passes
    own_lines = cls.template == "{message}" or any(x in cls.template for x in LINES)
    assert "{at}" in cls.template or own_lines
    error = cls("SomeError: what, where and how")
    error.rank = 2
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.rank) == (cls, str(error), 2)


def test_facts_that_are_attributes_are_kept_and_pickled():
    made = errors.ReductionUnfinished(cause="None came.", parameters=("a.weight",), rank=1)
    for error in (made, pickle.loads(pickle.dumps(made))):
        assert (error.parameters, error.rank) == (("a.weight",), 1)


def test_errors_are_pickled_with_their_message():
    with pytest.raises(errors.UnknownReduceOp) as raised:
        fcoll.all_reduce(torch.ones(1), "summ")
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is errors.UnknownReduceOp
    assert str(again) == str(raised.value)
