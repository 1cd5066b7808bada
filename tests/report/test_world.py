"""``fcoll.timeline``: all ranks against each other, on schedules whose times are known."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from golden import check_golden

import fcoll
from fcoll.costs.machine import Link, Machine
from fcoll.errors import BadMesh, BadOption, CollectiveMismatch
from fcoll.report import all_ranks, lanes

FORWARD_US, BACKWARD_US = 10.0, 20.0


def priced(step):
    """A matmul is a forward of a microbatch, an exp a backward; nothing else takes time."""
    return {"mm": FORWARD_US, "exp": BACKWARD_US}.get(step.op.split("::")[-1].split(".")[0], 0.0)


def pipeline(order, microbatches, axis="pp"):
    """build(mesh) of a pipeline; ``order(stage, stages, microbatches)`` are its ("f" | "b", i)."""

    def build(mesh):
        pp = mesh[axis] if mesh.ndim > 1 else mesh
        stage, stages = pp.get_local_rank(), pp.size()

        def step(x):
            sent = []
            for kind, i in order(stage, stages, microbatches):
                forward = kind == "f"
                before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
                tag = 2 * i + forward
                given = fcoll.irecv(x, before, pp, tag=tag) if 0 <= before < stages else x
                made = given @ given if forward else given.exp()
                if 0 <= after < stages:
                    sent.append(fcoll.isend(made, after, pp, tag=tag))
            return [fcoll.wait_tensor(s) for s in sent]

        return step, (torch.ones(4, 4),)

    return build


def gpipe(stage, stages, microbatches):
    yield from (("f", i) for i in range(microbatches))
    yield from (("b", i) for i in range(microbatches))


def one_forward_one_backward(stage, stages, microbatches):
    ahead = min(stages - 1 - stage, microbatches)
    yield from (("f", i) for i in range(ahead))
    for i in range(microbatches - ahead):
        yield "f", i + ahead
        yield "b", i
    yield from (("b", i) for i in range(microbatches - ahead, microbatches))


@pytest.mark.parametrize("order", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("stages, microbatches", [(2, 1), (2, 4), (4, 4), (4, 9)])
def test_bubbles_of_pipelines_are_those_of_the_textbook(order, stages, microbatches):
    build = pipeline(order, microbatches)
    line = fcoll.timeline(build, {"pp": stages}, costs=priced, mode="forward")
    each = FORWARD_US + BACKWARD_US
    assert line.step_us == (microbatches + stages - 1) * each
    assert all(rank.compute_us == microbatches * each for rank in line.ranks.values())
    assert line.bubble_share == pytest.approx((stages - 1) / (microbatches + stages - 1))


def test_of_many_ranks_those_that_are_alike_are_traced_once():
    few = fcoll.timeline(pipeline(gpipe, 4), {"pp": 4}, costs=priced, mode="forward")
    many = fcoll.timeline(pipeline(gpipe, 4), {"dp": 32, "pp": 4}, costs=priced, mode="forward")
    assert len(many.ranks) == 128 and many.ranks_traced == (0, 1, 2, 3, 127)
    assert many.step_us == few.step_us
    for rank, line in many.ranks.items():
        assert line.end_us == few.ranks[rank % 4].end_us
        assert line.compute_us == few.ranks[rank % 4].compute_us


def reduced(mesh):
    """Two steps of compute, each with a sum over tp behind it; then one over dp."""

    def step(x):
        x = fcoll.all_reduce(x @ x, "sum", mesh["tp"])
        x = fcoll.all_reduce(x @ x, "sum", mesh["tp"])
        return fcoll.all_reduce(x, "sum", mesh["dp"]) + 1

    return step, (torch.ones(4, 4),)


def collective_us(step):
    if step.kind == "start":
        return 4.0 if step.stream == "tp" else 6.0
    return priced(step)


def test_stragglers():
    """By hand: ranks 0, 1 and 2, 3 are pairs over tp; rank 3 computes 1.5 times as long.

    tp of ranks 0, 1: matmul to 10, sum to 14, matmul to 24, sum to 28.
    tp of ranks 2, 3: matmul to 10 and 15, sum from 15 to 19, matmul to 29 and 34, sum to 38.
    dp: ranks 0, 2 and 1, 3 from 38 to 44.
    """
    line = fcoll.timeline(
        reduced, {"dp": 2, "tp": 2}, costs=collective_us, slow={3: 1.5}, mode="forward"
    )
    assert line.step_us == 44
    waits = {r: [(s.start_us, s.end_us) for s in x.waits] for r, x in line.ranks.items()}
    assert waits == {
        0: [(10, 14), (24, 44)],
        1: [(10, 14), (24, 44)],
        2: [(10, 19), (29, 44)],
        3: [(15, 19), (34, 44)],
    }
    even = fcoll.timeline(reduced, {"dp": 2, "tp": 2}, costs=collective_us, mode="forward")
    assert even.step_us == 34
    assert str(line).splitlines()[0].startswith("dp=2 x tp=2: step 44.0 us")
    assert "█" in str(line) and "░" in str(line)


def test_stragglers_as_they_are_shown():
    """The four ranks above, as text: a golden file with times from the computation by hand."""
    line = fcoll.timeline(
        reduced,
        {"dp": 2, "tp": 2},
        Machine("m", {"float32": 1.0}, 1.0, Link(1.0, 1.0), Link(1.0, 1.0)),
        costs=collective_us,
        slow={3: 1.5},
        mode="forward",
    )
    check_golden("stragglers.txt", f"{line}\n")


def test_the_picture_is_to_scale():
    line = fcoll.timeline(
        reduced, {"dp": 2, "tp": 2}, costs=collective_us, slow={3: 1.5}, mode="forward"
    )
    drawn = ElementTree.fromstring(line.svg())
    shown = line._repr_html_()
    assert shown.startswith("<img alt=") and "<style" not in shown  # which would be the notebook's
    lanes_ = [e for e in drawn if e.tag.endswith("}g")]
    assert len(lanes_) == 3  # ranks 0 and 1 do the same
    scale = (lanes.WIDTH - lanes.LEFT - lanes.RIGHT) / 44

    def drawn_as(lane, kind):
        found = [e for e in lane if e.get("class") == kind]
        ends = [(float(e.get("x")) - lanes.LEFT, float(e.get("width"))) for e in found]
        return [(round(x / scale), round((x + width) / scale)) for x, width in ends]

    assert drawn_as(lanes_[2], "matmul") == [(0, 15), (19, 34)]
    assert drawn_as(lanes_[2], "blocked") == [(15, 19), (34, 44)]
    assert drawn_as(lanes_[2], "hidden") == [(15, 19), (34, 44)]
    assert "rank 3" in lanes_[2][0].text
    page = line.html("a <step>")
    assert "a &lt;step&gt;" in page and "44.0 us" in page and page.count("<tr>") == 4
    assert line.as_dict()["ranks"][3]["compute_us"] == 30


def test_a_large_world_is_what_a_small_one_is():
    """The same pairs 32 times, one of them slow: dp waits for it everywhere."""
    line = fcoll.timeline(
        reduced, {"dp": 32, "tp": 2}, costs=collective_us, slow={7: 1.5}, mode="forward"
    )
    assert len(line.ranks_traced) == 2  # the first and the last
    assert {r.end_us for r in line.ranks.values()} == {44.0}
    assert [r for r, x in line.ranks.items() if x.compute_us > 20] == [7]
    assert line.ranks[6].waits[0].end_us == 19 and line.ranks[8].waits[0].end_us == 14


@pytest.mark.parametrize("slow", [{}, {0: 1.5}, {7: 1.5, 21: 2.0}, {23: 3.0}])
@pytest.mark.parametrize("mesh", [{"dp": 6, "pp": 4}, {"pp": 4, "dp": 3, "tp": 2}])
def test_running_one_of_those_that_are_alike_is_as_good_as_running_all(mesh, slow, monkeypatch):
    """Stages with messages, whose gradients are summed over dp, with stragglers."""

    def build(mesh):
        step, args = pipeline(one_forward_one_backward, 3)(mesh)

        def summed(x):
            sent = step(x)
            grads = fcoll.all_reduce(x @ x, "sum", mesh["dp"])
            more = [fcoll.all_reduce(x @ grads, "sum", mesh["tp"])] if "tp" in axes else []
            return sent, grads + 1, more

        return summed, args

    axes = mesh
    few = fcoll.timeline(build, mesh, costs=collective_us, slow=slow, mode="forward")
    assert len(few.ranks_traced) == 5
    monkeypatch.setattr(all_ranks, "representatives", lambda *args: None)
    every = fcoll.timeline(build, mesh, costs=collective_us, slow=slow, mode="forward")
    for rank, line in every.ranks.items():
        assert few.ranks[rank].end_us == line.end_us, rank
        assert few.ranks[rank].waits == line.waits and few.ranks[rank].spans == line.spans


def test_groups_of_a_part_of_an_axis_are_run_rank_by_rank():
    def build(mesh):
        half = [r for r in range(32) if r // 16 == mesh.get_rank() // 16]
        return lambda x: fcoll.all_reduce(x @ x, "sum", half) + 1, (torch.ones(4, 4),)

    line = fcoll.timeline(build, {"dp": 32}, costs=collective_us, slow={3: 2.0}, mode="forward")
    assert {line.ranks[r].end_us for r in range(16)} == {26.0}


@pytest.mark.parametrize("links", [(), ("intra",)])
@pytest.mark.parametrize("slowdown", [1.0, 1.7])
@pytest.mark.parametrize("host_us", [0.0, 3.0, 50.0])
def test_as_one_rank_alone_where_all_do_the_same(host_us, slowdown, links):
    from fcoll.scheduling.timeline import timeline as of_one

    h100 = fcoll.Machine.of("h100")
    machine = replace(h100, host_us=host_us, slowdown=slowdown, shared_links=links)

    def build(mesh):
        w = torch.ones(64, 64)

        def step(x):  # what uses the result is a kernel of its own, issued while others are late
            reduced = fcoll.all_reduce(x @ w, "sum", mesh["tp"])
            gathered = fcoll.all_gather_into_tensor(x, mesh["dp"])
            return (w @ w @ w).sum() + reduced @ w + gathered[:64] @ w

        return step, (torch.ones(64, 64),)

    with fcoll.fake_world(dp=2, tp=4) as mesh:
        fn, args = build(mesh)
        alone = of_one(fcoll.trace(fn, *args), machine, waits="first use")
    world = fcoll.timeline(build, {"dp": 2, "tp": 4}, machine)
    assert world.step_us == pytest.approx(alone.step_us)
    late = sum(s.us for s in alone.host_waits)
    for rank in world.ranks.values():
        assert rank.wait_us == pytest.approx(alone.exposed_total_us)
        assert sum(s.us for s in rank.host_waits) == pytest.approx(late)
    assert (late > 0) == (host_us > 0)


def test_ranks_that_do_not_meet_are_an_error():
    def build(mesh):
        first = mesh.get_rank() == 0
        calls = 2 if first else 1

        def step(x):
            for _ in range(calls):
                x = fcoll.all_reduce(x, "sum", mesh) + 1
            return x

        return step, (torch.ones(4),)

    with pytest.raises(CollectiveMismatch, match=r"rank 0 waits in .*test_world.py:\d+ for rank 1"):
        fcoll.timeline(build, {"tp": 2})


def test_bad_options():
    with pytest.raises(BadMesh, match="slow rank 4"):
        fcoll.timeline(reduced, {"dp": 2, "tp": 2}, slow={4: 2.0})
    with pytest.raises(BadOption, match="waits"):
        fcoll.timeline(reduced, {"dp": 2, "tp": 2}, waits="never")


def test_scale_sees_the_bubbles_of_a_pipeline():
    from fcoll.report.scale import scale

    points = scale(pipeline(gpipe, 4), "pp", [2, 4], mode="forward", waits="first use")
    for p in points:
        line = fcoll.timeline(pipeline(gpipe, 4), {"pp": p.size}, mode="forward")
        assert p.step_us == line.step_us == pytest.approx(p.compute_us + p.exposed_us)
    assert points[1].step_us > points[0].step_us
