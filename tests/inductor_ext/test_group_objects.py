"""Groups as objects in calls of torch's ops and as values of graphs, not as names: eager, traced
and compiled."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
import inductor_ext
from fcoll._torch import ONE_RANK_CONFIG

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
c10d = torch.ops._c10d_functional


def calls(group, rank):
    """op -> a call of it, and its result on this of two ranks, each of which has [r, r + 1]."""
    x = torch.tensor([float(rank), rank + 1.0])
    out = torch.empty(4)
    return {
        "all_reduce": (lambda: c10d.all_reduce(x, "sum", group), [1, 3]),
        "all_reduce_": (lambda: c10d.all_reduce_(x.clone(), "sum", group), [1, 3]),
        "all_gather": (lambda: c10d.all_gather_into_tensor(x, 2, group), [0, 1, 1, 2]),
        "all_gather_out": (
            lambda: c10d.all_gather_into_tensor_out(x, 2, group, out=out),
            [0, 1, 1, 2],
        ),
        "reduce_scatter": (lambda: c10d.reduce_scatter_tensor(x, "sum", 2, group), [1 + 2 * rank]),
        "broadcast": (lambda: c10d.broadcast(x, 1, group), [1, 2]),
        "all_to_all": (lambda: c10d.all_to_all_single(x, [1, 1], [1, 1], group), [rank, rank + 1]),
        "half": (lambda: c10d.all_reduce(x.to(torch.float8_e5m2).half(), "sum", group), [1, 3]),
    }


def eager(rank, shared):
    groups = [dist.group.WORLD, dist.new_group([0, 1])]  # and one that is connected here
    with fcoll.accelerate_c10d():
        for group in groups:
            for given in (group, group.group_name):
                for name, (call, want) in calls(given, rank).items():
                    assert c10d.wait_tensor(call()).tolist() == want, (name, given)
    assert fcoll.symm_mem.status(groups[1]).shared == shared
    alone = dist.new_group([rank], use_local_synchronization=True)  # it has no shared memory
    with fcoll.accelerate_c10d():
        assert c10d.wait_tensor(c10d.all_reduce(torch.ones(2), "sum", alone)).tolist() == [1, 1]


def test_eager(shared2, ranks2):
    shared2.run(eager, True)
    ranks2.run(eager, False)


def profiled(rank):
    with fcoll.profile() as p:
        for group in ("0", dist.group.WORLD):
            c10d.wait_tensor(c10d.all_reduce(torch.ones(2), "sum", group))
    assert [(c.op, c.group.name) for c in p.calls] == [("all_reduce", "0")] * 2


def test_profile(shared2):
    shared2.run(profiled)


def traced(rank):
    group = dist.group.WORLD
    with fcoll.accelerate_c10d():
        graph = make_fx(lambda x: c10d.wait_tensor(c10d.all_reduce(x * 2, "sum", group)))(
            torch.ones(2)
        )
        assert graph(torch.ones(2) + rank).tolist() == [6, 6]


def test_make_fx(shared2):
    shared2.run(traced)


@pytest.mark.parametrize("one_rank", [False, True])
def test_trace(one_rank):
    with fcoll.fake_world(tp=4) as mesh, ONE_RANK_CONFIG.patch(compile_on_one_rank=one_rank):
        group = mesh.get_group("tp")

        def step(x):
            x = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
            return funcol.all_gather_single(x, 0, (mesh, 0)) * 2

        trace = fcoll.trace(step, torch.ones(4))
        assert [c.op for c in trace.collectives] == ["all_reduce", "all_gather_into_tensor"]
        assert {c.ranks for c in trace.collectives} == {(0, 1, 2, 3)}
        assert trace.graph_module(torch.ones(4))[0].shape == (16,)


def compiled(rank, accelerate):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.arange(4.0) + rank

    def over_mesh(x):
        total = funcol.all_reduce(x * 2, "sum", (mesh, 0))
        return total.relu() + 1, funcol.all_gather_single(x, 0, (mesh, 0)) * 2

    def over_group(x):  # twice the same group, and small: merged if it had a name
        a = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
        b = funcol.all_reduce(x + 1, "sum", dist.group.WORLD)
        return a + b, funcol.all_reduce(b, "max", dist.group.WORLD)

    acceleration = fcoll.accelerate_c10d() if accelerate else None
    inductor_ext.install()
    try:
        with ONE_RANK_CONFIG.patch(compile_on_one_rank=True):
            for fn in (over_mesh, over_group):
                torch._dynamo.reset()
                (first, second), [code] = run_and_get_code(torch.compile(fn, fullgraph=True), x)
                if fn is over_mesh:
                    assert first.tolist() == [3, 7, 11, 15]
                    assert second.tolist() == [0, 2, 4, 6, 2, 4, 6, 8]
                else:
                    assert first.tolist() == [5, 11, 17, 23]
                    assert second.tolist() == [3, 5, 7, 9]
                assert f"'{mesh.get_group().group_name}'" not in code  # of this rank's alone
    finally:
        inductor_ext.uninstall()
        if acceleration:
            acceleration.undo()


@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_graph_for_all_ranks(shared2, accelerate):
    shared2.run(compiled, accelerate, timeout=300)
