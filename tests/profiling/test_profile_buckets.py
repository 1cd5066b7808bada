"""The buckets of data parallel training in a profile and in a trace."""

from __future__ import annotations

import json
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fcoll


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def profiled(module: nn.Module) -> fcoll.Profile:
    for _ in range(3):  # buckets are rebuilt after the first
        module(torch.ones(2, 64)).sum().backward()
    with fcoll.profile() as found:
        module(torch.ones(2, 64)).sum().backward()
    return found


def of_both(rank: int) -> list[str]:
    ours = profiled(fcoll.DataParallel(model(), bucket_cap_mb=0.01))
    calls = [c for c in ours.calls if c.op.startswith("all_reduce")]  # the last one in place
    assert [c.part for c in calls] == ["bucket_0: 1.bias, 1.weight", "bucket_1: 0.bias, 0.weight"]
    assert [c.bytes for c in calls] == [4 * (64 * 64 + 64)] * 2
    assert {c.phase for c in calls} == {"bwd"}
    assert all(c.waits <= 1 for c in calls)  # none if the other rank was there before
    assert "bucket_1: 0.bias, 0.weight" in str(ours)
    parts = [c["part"] for c in json.loads(ours.to_json())["collectives"]]
    assert parts == [c.part for c in calls]

    theirs = profiled(DistributedDataParallel(model(), bucket_cap_mb=0.01))
    calls = [c for c in theirs.calls if c.op == "all_reduce_"]
    assert [c.bytes for c in calls] == [4 * (64 * 64 + 64)] * 2
    assert {(c.waits, c.phase, c.way) for c in calls} == {(1, "bwd", "c10d")}
    assert all(c.wait_us > 0 for c in calls)

    # what a hook of the user's starts, the user waits for
    started = []
    x = torch.ones(4, requires_grad=True)
    x.register_hook(lambda grad: started.append(dist.all_reduce(grad.clone(), async_op=True)))
    with fcoll.profile() as found:
        x.sum().backward()
        assert [c.waits for c in found.calls] == [0]
        started[0].wait()
    assert [c.waits for c in found.calls] == [1]
    return parts


def test_buckets_are_measured(shared2):
    shared2.run(of_both)


def in_torchs_profile(rank: int) -> None:
    module = fcoll.DataParallel(model(), bucket_cap_mb=0.01, find_unused_parameters=True)
    plain = fcoll.DataParallel(model())
    warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(2):
            plain(torch.ones(2, 64)).sum().backward()
    names = [e.name for e in found.events() if e.is_async]
    assert names.count("gloo:all_reduce") == 2 and "gloo:broadcast" in names
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        module(torch.ones(2, 64))[:, :0].sum().backward()
    names = [e.name for e in found.events()]
    assert sum(name.endswith("search_unused_parameters") for name in names) == 1
    assert names.count("gloo:all_reduce") >= 2  # buckets; the map of used parameters may be late


def test_torchs_profiler_shows_the_buckets(shared2):
    shared2.run(in_torchs_profile)
