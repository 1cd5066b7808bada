"""torch's c10d ops: the adapter has them all, and programs give the same wherever they run."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local.worlds import fake_world
from ranks import RankPool, launch
from table.c10d_programs import CASES, X_W, W, on_rank
from torch import Tensor

import fcoll
from fcoll._torch import c10d_ops
from fcoll.errors import UnknownCollective
from fcoll.local import LocalTensor, LocalTensorMode
from fcoll.simulation.group import SimulatedGroup
from fcoll.table.c10d import OPS, SEND_NOTHING
from fcoll.table.collectives import COLLECTIVES

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
HERE = {name: op for name, op in OPS.items() if name in c10d_ops()}  # in this version of torch
MESSAGES = {name for name, case in CASES.items() if COLLECTIVES[OPS[case.op].row].is_p2p}
#: Results are those of the root only: elsewhere backends may leave anything.
ON_ROOT = {"gather_", "gather_into_tensor_", "reduce_"}

# -- the adapter and torch's schemas ---


def test_every_op_of_torch_is_described():
    assert set(c10d_ops()) <= OPS.keys() | SEND_NOTHING.keys()
    assert OPS.keys() - HERE.keys() <= {"gather_into_tensor_"}  # from torch 2.14 on
    assert not OPS.keys() & SEND_NOTHING.keys()


#: Arguments that say nothing of what is sent, or where.
SAY_NOTHING = {"async_op", "timeout", "sparse_indices", "root_tensor"}
OF_BARRIERS = {"tensor", "device_ids", "wait_all_ranks"}


@pytest.mark.parametrize("op", HERE.values(), ids=HERE)
def test_arguments_are_those_of_the_schema(op):
    schema = getattr(torch.ops.c10d, op.name).default._schema
    ours = inspect.signature(op.message).parameters.values()
    left_out = SAY_NOTHING | (OF_BARRIERS if op.row == "barrier" else set())
    assert [a.name for a in schema.arguments if a.name not in left_out] == [p.name for p in ours]
    assert all(p.default is p.empty for p in ours)
    assert op.row in COLLECTIVES


@pytest.mark.parametrize("op", HERE.values(), ids=HERE)
def test_methods_are_those_of_groups(op):
    assert any(hasattr(dist.ProcessGroup, name) for name in op.methods)
    assert all(name in vars(SimulatedGroup) for name in op.methods)


def test_every_op_has_a_program():
    assert {case.op for case in CASES.values()} == HERE.keys()


# -- the same values everywhere ---

REAL = ("gloo", "fcoll")  # backends of processes
Outcome = list[list[Tensor]] | str  # each rank's results, or what users are told

_GLOO = "ProcessGroupGloo::.*: invalid tensor size"
_ONE_SHAPE = r"RaggedRanks: .* differ.* Stacked ranks have one shape: pad the parts"
_NO_BATCH = "NotInBatch: .* is a message, which has another peer on each rank. Use fcoll.permute"
_NO_LOCAL = "BadRunner: .* has another peer on each rank.*local_p2p_op, or use fcoll.permute"
#: (executor, program) that it cannot run -> what it says.
CANNOT: dict[tuple[str, str], str] = {
    ("gloo", "all_gather_into_stack"): _GLOO,
    **{(real, "gather_single"): "does not support gather_single" for real in REAL},
    ("gloo", "reduce_scatter_of_a_stack"): r"Check failed: outputShape\[0\] \* worldSize",
    **{(real, f"{name}_uneven"): _GLOO for real in REAL for name in ("all_gather", "all_to_all")},
    **{("batch", name): _ONE_SHAPE for name in CASES if name.endswith("_uneven")},
    **{("batch", name): _NO_BATCH for name in MESSAGES},
    **{("local", name): _NO_LOCAL for name in MESSAGES},
}
#: What no real backend here can do: NCCL gives the parts as they are.
EXPECTED: dict[str, list[list[Tensor]]] = {
    "gather_single": [[X_W.flatten(0, 1)]] * W,
    "all_gather_uneven": [[X_W[0, :1], X_W[1, :2]]] * W,
    "all_to_all_uneven": [[X_W[s, :1] for s in range(W)], [X_W[s, 1:] for s in range(W)]],
}


def outcome(program: Callable[[], Any]) -> Any:
    try:
        return program()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def on_real_ranks(rank: int, backend: str) -> dict[str, list[Tensor] | str]:
    if backend != "gloo":  # as which ranks are started
        dist.init_process_group(backend)
    return {name: outcome(partial(on_rank, rank, name)) for name in CASES}


def of_ranks(found: list[dict[str, Any]]) -> dict[str, Outcome]:
    return {
        name: found[0][name] if isinstance(found[0][name], str) else [x[name] for x in found]
        for name in CASES
    }


def in_a_batch(name: str) -> list[list[Tensor]]:
    got = fcoll.simulate(lambda x: CASES[name].program(x, 0), world_size=W)(X_W.clone())
    return [[y[r] for y in got] for r in range(W)]


def on_local_tensors(name: str) -> list[list[Tensor]]:
    with fake_world(W), LocalTensorMode(W), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the first rank's branch is taken for all
        x = LocalTensor({r: X_W[r].clone() for r in range(W)})
        got = CASES[name].program(x, dist.get_rank())
    return [[y._local_tensors[r] for y in got] for r in range(W)]


def simulated(name: str) -> list[list[Tensor]]:
    return fcoll.simulate_ranks(lambda rank: on_rank(rank, name), world_size=W)


@pytest.fixture(scope="module")
def real(ranks2: RankPool, compiled: None) -> dict[str, dict[str, Outcome]]:
    """What processes get, by the names of a backend and of a program."""
    on_fcoll = launch(on_real_ranks, W, "fcoll", init=False, env={"FCOLL_NATIVE": "1"})
    return {
        "gloo": of_ranks(ranks2.run(on_real_ranks, "gloo")),
        "fcoll": of_ranks(on_fcoll.results),
    }


def expected(name: str, real: dict[str, dict[str, Outcome]]) -> Outcome:
    backends = (real[backend][name] for backend in REAL if (backend, name) not in CANNOT)
    return EXPECTED[name] if name in EXPECTED else next(backends)


SIMULATED: dict[str, Callable[[str], list[list[Tensor]]]] = {
    "ranks": simulated,
    "batch": in_a_batch,
    "local": on_local_tensors,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("executor", [*REAL, *SIMULATED])
def test_every_executor_gives_the_same(executor, name, real):
    run = SIMULATED.get(executor, lambda name: real[executor][name])
    got = outcome(lambda: run(name))
    if why := CANNOT.get((executor, name)):
        assert isinstance(got, str) and re.search(why, got), got
        return
    assert not isinstance(got, str), got
    want = expected(name, real)
    for r in [0] if CASES[name].op in ON_ROOT else range(W):
        for y, z in zip(got[r], want[r], strict=True):
            assert torch.equal(y, z), (r, y, z)


@pytest.mark.parametrize("name", CASES)
def test_traces(name):
    row = OPS[CASES[name].op].row
    for rank in range(W):
        with fcoll.fake_world(dp=W, rank=rank):
            if name == "recv_any_source" and rank == 0:
                with pytest.raises(UnknownCollective, match="from any rank"):
                    fcoll.trace(on_rank, rank, name)
                continue
            (call,) = fcoll.trace(on_rank, rank, name).collectives
        assert call.ranks == (0, 1)
        if rank == 0:
            assert (call.op, call.bytes) == (row, 4 * CASES[name].elements)
        elif name not in MESSAGES:
            assert call.op == row


def test_calls_of_simulated_ranks_are_timed_by_their_row():
    names = sorted(CASES.keys() - MESSAGES)

    def program(rank: int) -> list[str]:
        with fcoll.profile() as found:
            for name in names:
                on_rank(rank, name)
        return [call.op for call in found.calls]

    rows = [OPS[CASES[name].op].row for name in names]
    assert fcoll.simulate_ranks(program, world_size=W) == [rows] * W
