"""FSDP2's gathers on its own streams: hidden behind the layer before, as on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fcoll
from fcoll.report.all_ranks import timeline as all_ranks
from fcoll.scheduling.streams import as_streams_run
from fcoll.scheduling.timeline import timeline

LAYERS, DIM = 4, 8192
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


def build(mesh):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])

    def step(x):
        model(x).square().mean().backward()

    return step, (torch.empty(4 * DIM, DIM, device="meta"),)


@pytest.fixture(scope="module")
def trace():
    with fcoll.fake_world(dp=8) as mesh:
        step, args = build(mesh)
        found = fcoll.trace(step, *args)
        _ = found.steps
        return found


def test_hidden_behind_the_layer_before(trace):
    """Compute takes longer than a gather: of each pass, only the first can be seen."""
    line = timeline(trace, "h100", waits="first use")
    exposed = [
        (c.module, c.phase)
        for c in line.collectives
        if "gather" in c.op and line.exposed_us[c.id] > 0
    ]
    assert exposed == [("0", "fwd"), (str(LAYERS - 1), "bwd")]
    in_place = timeline(trace, "h100", waits="in place")
    assert all(us > 0 for us in in_place.exposed_us.values())
    us = line.step_us - line.compute_us
    one = max(s.us for s in line.spans if s.collective is not None)
    assert us == pytest.approx(3 * one, rel=0.1)  # those two and the last reduce-scatter


def test_all_ranks_alike(trace):
    line = all_ranks(build, {"dp": 8}, "h100", waits="first use")
    alone = timeline(trace, "h100", waits="first use")
    assert line.step_us == pytest.approx(alone.step_us, rel=1e-6)


def test_only_gathers_of_the_forward_pass_and_what_they_need_are_moved(trace):
    before, after = trace.steps, as_streams_run(trace.steps)
    assert sorted(s.name for s in before) == sorted(s.name for s in after)
    assert as_streams_run(after) == after
    place = {step.name: i for i, step in enumerate(after)}
    for step in after:
        assert all(place[name] < place[step.name] for name in step.inputs)
    starts = [s.collective for s in after if s.kind == "start"]
    assert starts == sorted(starts)  # in the order of their issue


def test_one_that_needs_a_result_stays(trace):
    """The gather of the second layer, made to need the first layer's product."""
    steps = list(trace.steps)
    copies = [i for i, s in enumerate(steps) if s.op == "fsdp::all_gather_copy_in"]
    product = next(s for s in steps if s.op == "aten::mm")
    steps[copies[1]] = replace(steps[copies[1]], inputs=(product.name,))
    after = [s.name for s in as_streams_run(tuple(steps))]
    assert after.index(product.name) < after.index(steps[copies[1]].name)
    assert (
        after.index(steps[copies[2]].name)
        < [i for i, name in enumerate(after) if name.startswith("mm")][1]
    )
