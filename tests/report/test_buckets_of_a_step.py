"""The buckets of data parallel training on the timeline: as text, in Perfetto's events."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll.report import perfetto, text
from fcoll.scheduling.timeline import timeline


@pytest.mark.parametrize("wrap", [fcoll.DataParallel, DistributedDataParallel])
def test_buckets_have_their_parameters(wrap):
    with fcoll.fake_world(dp=4):
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        module = wrap(layers, bucket_cap_mb=0.01)
        line = timeline(fcoll.trace(lambda x: module(x).sum().backward(), torch.ones(2, 64)))
    names = ["bucket_0: 1.bias, 1.weight", "bucket_1: 0.bias, 0.weight"]
    assert [c.module for c in line.collectives if c.op.startswith("all_reduce")] == names

    shown = text.render(line).splitlines()
    head = next(i for i, row in enumerate(shown) if row.startswith("bucket"))
    first, second = (row.split(maxsplit=5) for row in shown[head + 1 : head + 3])
    assert (first[0], first[1], first[-1]) == ("0", "16.2", first[-1])
    assert first[-1].endswith("1.bias, 1.weight") and second[-1].endswith("0.bias, 0.weight")

    events = json.loads(perfetto.render(line))["traceEvents"]
    modules = {e["args"].get("module") for e in events if e["ph"] == "X"}
    assert {*names} <= modules


def test_a_step_without_buckets_has_no_such_table():
    with fcoll.fake_world(dp=4):
        line = timeline(fcoll.trace(lambda x: fcoll.all_reduce(x) + 1, torch.ones(64)))
    assert "parameters" not in text.render(line)
