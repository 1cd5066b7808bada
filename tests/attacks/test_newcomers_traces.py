"""Steps as a newcomer writes them: decorated, with nothing sharded, too large for the machine."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fcoll
from fcoll.errors import ShapeRuleLacksDtype
from fcoll.report import summary, svg, text
from fcoll.scheduling.timeline import timeline


class Block(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.up, self.tp = nn.Linear(8, 8, device="meta"), tp

    def forward(self, x):
        return fcoll.all_reduce(self.up(x), "sum", self.tp)


@pytest.mark.parametrize(
    "decorate",
    [
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu"),
        torch.compiler.disable,
        lambda step: torch.no_grad()(torch.autocast("cpu")(step)),
    ],
)
def test_a_decorated_step_keeps_its_modules(decorate):
    with fcoll.fake_world(tp=2) as mesh:
        model = nn.ModuleDict({"first": Block(mesh["tp"]), "second": Block(mesh["tp"])})

        @decorate
        def step(x):
            return model["second"](model["first"](x)).detach()

        trace = fcoll.trace(step, torch.ones(8, 8, device="meta"))
    assert [c.module for c in trace.collectives if c.phase == "fwd"] == ["first", "second"]


def plain(mesh):
    model = nn.Linear(1024, 1024, device="meta")
    return model, (torch.empty(64, 1024, device="meta"),)


def test_a_step_without_collectives_says_why():
    with fcoll.fake_world(dp=8) as mesh:
        model, args = plain(mesh)
        trace = fcoll.trace(model, *args)
    why = "nothing is sharded or reduced over dp=8"
    assert why in str(trace) and "fully_shard" in str(trace)
    told = str(fcoll.check(plain, mesh={"dp": 8}))
    assert told.startswith("ok") and why in told and "match" not in told.partition(why)[0]
    assert why in summary.verdict(timeline(trace))
    with fcoll.fake_world(dp=1) as mesh:
        model, args = plain(mesh)
        alone = fcoll.trace(model, *args)
    assert "one rank has nobody to send to" in str(alone)


def large(mesh):
    model = nn.Linear(1 << 18, 1 << 17, device="meta")  # 128 GiB

    def step(x):
        return fcoll.all_reduce(model(x), "sum", mesh)

    return step, (torch.empty(8, 1 << 18, device="meta"),)


def test_a_step_that_does_not_fit_says_so(monkeypatch):
    with fcoll.fake_world(dp=8) as mesh:
        step, args = large(mesh)
        trace = fcoll.trace(step, *args, mode="forward")
    line = timeline(trace)
    assert "peak memory 128 GiB, more than the 80 GiB of h100" in text.render(line)
    assert summary.verdict(line).startswith("does not fit: 128 GiB is more than the 80 GiB of h100")
    assert summary.as_dict(line)["fits"] is False
    assert "more than the 80 GiB of h100" in svg.render(line) and '"alarm"' in svg.render(line)
    monkeypatch.setattr("fcoll.units.on_terminal", True)
    assert "\x1b[31m128 GiB, more than" in text.render(line)
    assert "\x1b" not in json.dumps(summary.as_dict(line))
    fits = timeline(trace, "b200")
    assert "more than" not in text.render(fits) and "\x1b" not in text.render(fits)
    assert summary.as_dict(fits)["fits"] is True


def test_sizes_of_a_world_that_do_not_fit():
    points = fcoll.scale(large, "dp", [2, 4], mode="forward")
    assert "dp=2 does not fit: more than the 80 GiB of h100" in str(points)


def test_grouped_products_in_float32():
    """torch's rule for their shape takes bfloat16 alone; the op itself takes float32."""
    ends = torch.tensor([16, 32], dtype=torch.int32)
    x, w = torch.ones(32, 16), torch.ones(2, 16, 32)
    assert nn.functional.grouped_mm(x, w, offs=ends).dtype == torch.float32

    def step(x):
        y = nn.functional.grouped_mm(x, w.to(x.dtype), offs=ends)
        return fcoll.all_reduce(y, "sum")

    with fcoll.fake_world(ep=4):
        if torch.__version__ >= "2.15":  # whose rule takes it
            assert fcoll.trace(step, x, mode="forward").collectives[0].bytes == 32 * 32 * 4
        else:
            refused = "_grouped_mm takes bfloat16 and refuses flo"
            with pytest.raises(ShapeRuleLacksDtype, match=refused):
                fcoll.trace(step, x)
        trace = fcoll.trace(step, x.bfloat16(), mode="forward")
        assert trace.collectives[0].bytes == 32 * 32 * 2
        with pytest.raises(RuntimeError, match="contraction dimension"):  # wrong in any dtype
            fcoll.trace(step, torch.ones(32, 24).bfloat16())
        if torch.__version__ < "2.15":  # of two dtypes: torch's word
            with pytest.raises(RuntimeError, match="BF16") as caught:
                fcoll.trace(lambda x: nn.functional.grouped_mm(x, w, offs=ends), x.bfloat16())
            assert not isinstance(caught.value, fcoll.FcollError)
