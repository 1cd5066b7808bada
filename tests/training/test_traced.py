"""torch's DistributedDataParallel in traces: broadcasts and buckets, where they are sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll.errors import UntraceableDDP

THEIRS = DistributedDataParallel.__init__, dist.Reducer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        self.unused = nn.Linear(8, 8)

    def forward(self, x, use=True):
        y = self.c(torch.relu(self.b(self.a(x))))
        return self.unused(y) if use else y


X = torch.ones(2, 64)
WHOLE = 4 * (2 * (64 * 64 + 64) + 64 * 8 + 8 + 64 + 8)


def traced(module: nn.Module, use: bool = True) -> fcoll.Trace:
    def step(x):
        loss = module(x, use).sum()
        loss.backward()
        return loss

    made = fcoll.trace(step, X)
    assert all("test_traced.py:" in c.source for c in made.collectives)
    return made


def kinds(made: fcoll.Trace) -> list[tuple]:
    return [(c.op, c.axis, c.bytes, c.phase) for c in made.collectives]


OPTIONS = [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_bucket_is_where_it_is_sent(options):
    with fcoll.fake_world(dp=4):
        made = traced(DistributedDataParallel(Net(), **options))
    assert kinds(made) == [("all_reduce_", "dp", WHOLE, "bwd")]
    (note,) = made.notes
    assert note.startswith(f"DistributedDataParallel bucket_0, {WHOLE} bytes: unused.bias, unused")


def test_small_buckets_leave_before_the_backward_pass_ends():
    with fcoll.fake_world(dp=4):
        made = traced(DistributedDataParallel(Net(), bucket_cap_mb=0.001))
    names = [n.name for n in made.graph_module.graph.nodes]
    sent = [names.index(c.start) for c in made.collectives]
    computed = [i for i, name in enumerate(names) if name.startswith("mm")]
    assert len(sent) == len(made.notes) > 2 and sum(c.bytes for c in made.collectives) == WHOLE
    assert sent[0] < computed[-1] < sent[-1]
    assert "bucket_0, 2368 bytes: unused.bias, unused.weight, c.bias, c.weight" in made.notes[0]


def test_unused_parameters_are_found():
    with fcoll.fake_world(dp=4):
        module = DistributedDataParallel(Net(), find_unused_parameters=True)
        made = traced(module, use=False)
        assert kinds(made)[1:] == [("all_reduce_", "dp", 8 * 4, "bwd")]  # who used what
        assert kinds(made)[0][2] == WHOLE
        static = DistributedDataParallel(Net(), static_graph=True)
        assert kinds(traced(static, use=False)) == [("all_reduce_", "dp", WHOLE, "bwd")]


def test_hooks_meshes_and_meta():
    with fcoll.fake_world(dp=2, tp=2) as mesh:
        with torch.device("meta"):
            net = Net()
        module = DistributedDataParallel(net, device_mesh=mesh["dp"])
        module.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
        made = traced(module)
        assert kinds(made) == [("all_reduce_", None, WHOLE // 2, "bwd")]
        assert made.collectives[0].dtypes == ("float16",) and made.collectives[0].n == 4
        plain = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
        assert kinds(traced(plain)) == [("all_reduce_", "dp", WHOLE, "bwd")]


def test_made_in_the_step_its_broadcasts_are_seen():
    with fcoll.fake_world(dp=4):

        def step(x):
            module = DistributedDataParallel(Net())  # broadcast
            module(x).sum().backward()

        made = fcoll.trace(step, X)
        assert kinds(made) == [
            ("broadcast_", "dp", WHOLE, "fwd"),
            ("all_reduce_", "dp", WHOLE, "bwd"),
        ]
        line = step.__code__.co_firstlineno
        assert made.collectives[0].source.endswith(f"test_traced.py:{line + 1}")


def test_no_sync_and_forward_send_nothing():
    with fcoll.fake_world(dp=4):
        module = DistributedDataParallel(Net())

        def not_synced(x):
            with module.no_sync():
                module(x).sum().backward()

        assert fcoll.trace(module, X, mode="forward").collectives == ()
        assert fcoll.trace(not_synced, X).collectives == ()


def test_it_can_be_checked():
    assert fcoll.check(lambda mesh: (DistributedDataParallel(Net()), (X,)), mesh={"dp": 2})


def test_everything_is_as_before():
    with fcoll.fake_world(dp=2):
        module = DistributedDataParallel(Net())
        before = dict(vars(module))
        traced(module)
        assert all(vars(module)[name] is value for name, value in before.items())
        assert all(p.grad is None for p in module.parameters())
        with pytest.raises(KeyError):
            fcoll.trace(lambda x: module(x).sum() + {}["no"], X)
        assert vars(module)["reducer"] is before["reducer"]
        assert kinds(traced(module))
    assert DistributedDataParallel.__init__ is THEIRS[0]


# Dynamo makes one itself where it traces an autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_data_parallel_in_all_modes():
    with fcoll.fake_world(dp=4):
        module = fcoll.DataParallel(Net())
        assert kinds(traced(module)) == [("all_reduce_", "dp", WHOLE, "bwd")]
        compiled = fcoll.trace(lambda x: module(x).sum(), X, mode="compiled")
        assert kinds(compiled) == [("all_reduce", "dp", WHOLE, "bwd")]
        with pytest.raises(UntraceableDDP, match=r"fcoll.DataParallel"):
            fcoll.trace(DistributedDataParallel(Net()), X, mode="compiled")
