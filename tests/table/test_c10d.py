"""torch's c10d ops: the adapter has them all, and programs give the same wherever they run."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from local.worlds import fake_world
from table.c10d_programs import CASES, X_W, W, on_rank
from torch import Tensor

import fcoll
from fcoll._torch import c10d_ops
from fcoll.errors import NotInBatch, RaggedRanks, UnknownCollective
from fcoll.local import LocalTensor, LocalTensorMode
from fcoll.simulation.group import SimulatedGroup
from fcoll.table.c10d import OPS, SEND_NOTHING
from fcoll.table.collectives import COLLECTIVES

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
HERE = {name: op for name, op in OPS.items() if name in c10d_ops()}  # in this version of torch
MESSAGES = {name for name, case in CASES.items() if COLLECTIVES[OPS[case.op].row].is_p2p}
UNEVEN = {name for name in CASES if name.endswith("_uneven")}
#: Results are those of the root only: elsewhere backends may leave anything.
ON_ROOT = {"gather_", "gather_into_tensor_", "reduce_"}
#: gloo takes lists of one size only, and no stacks; simulated ranks say what others give.
NOT_ON_GLOO = {
    *("all_gather_uneven", "all_to_all_uneven"),
    *("all_gather_into_stack", "reduce_scatter_of_a_stack"),
}


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


def on_ranks(rank: int, names: list[str]) -> dict[str, list[Tensor]]:
    return {name: on_rank(rank, name) for name in names}


def simulated(name: str) -> list[list[Tensor]]:
    return fcoll.simulate_ranks(lambda rank: on_rank(rank, name), world_size=W)


@pytest.fixture(scope="module")
def results(ranks2):
    """What real ranks get, by the name of a program."""
    on_gloo = ranks2.run(on_ranks, [name for name in CASES if name not in NOT_ON_GLOO])
    return dict(zip(on_gloo[0], zip(*map(dict.values, on_gloo), strict=True), strict=True)) | {
        name: simulated(name) for name in NOT_ON_GLOO
    }


def same(got: list[list[Tensor]], want: list[list[Tensor]], name: str) -> None:
    for r in [0] if CASES[name].op in ON_ROOT else range(W):
        for y, z in zip(got[r], want[r], strict=True):
            assert torch.equal(y, z), (r, y, z)


@pytest.mark.parametrize("name", CASES)
def test_simulated_ranks(name, results):
    same(simulated(name), results[name], name)


@pytest.mark.parametrize("name", CASES)
def test_batched(name, results):
    run = fcoll.simulate(lambda x: CASES[name].program(x, 0), world_size=W)
    if name in MESSAGES | UNEVEN:
        with pytest.raises(NotInBatch if name in MESSAGES else RaggedRanks):
            run(X_W.clone())
        return
    got = run(X_W.clone())
    same([[y[r] for y in got] for r in range(W)], results[name], name)


# LocalTensors' messages and uneven tensors have programs of their own (tests/local)
@pytest.mark.parametrize("name", sorted(CASES.keys() - MESSAGES - UNEVEN))
def test_local_tensors(name, results):
    with fake_world(W), LocalTensorMode(W):
        x = LocalTensor({r: X_W[r].clone() for r in range(W)})
        got = CASES[name].program(x, 0)
    same([[y._local_tensors[r] for y in got] for r in range(W)], results[name], name)


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
