"""Sharded tensors in fcoll.trace and under torch.compile."""

from __future__ import annotations

import re
from base64 import b64decode

import pytest
import torch
import torch.nn.functional as F

import fcoll
from fcoll import sharded
from fcoll.report import html
from fcoll.scheduling.timeline import timeline
from fcoll.tracing.trace import Trace


def calls_of(step, *args, rank=1):
    with fcoll.fake_world(dp=4, rank=rank):
        trace = fcoll.trace(step, *args)
        assert trace.steps
    return [(c.row.name, c.phase, c.wire_bytes) for c in trace.collectives]


COMPARED = ("all_gather_into_tensor", "fwd", 3 * 8)  # a number of each other rank
TOLD = ("all_gather_into_tensor", "fwd", 3 * 4 * 8)  # four of each


def test_resharding_shows_what_this_rank_sends():
    def step():
        tensor = sharded.ones(sharded.chunk(0, 4), 8, 12)
        return sharded.reshard(tensor, sharded.chunk(1, 4)).local_tensor() * 2

    # two rows of the other ranks' nine columns, in float32
    assert calls_of(step) == [COMPARED, ("all_to_all_single", "fwd", 2 * 9 * 4)]


def test_a_product_shows_its_inputs_and_its_results():
    def step(x):
        weight = sharded.ones(sharded.chunk(0, 4), 8, 12, requires_grad=True)
        F.linear(x, weight).sum().backward()
        return weight.local_tensor().grad

    # 5 rows of 12 go to each of 3 other holders, 5 results of 2 columns come from each
    there, back = 3 * 5 * 12 * 4, 3 * 5 * 2 * 4
    assert calls_of(step, torch.ones(5, 12)) == [
        TOLD,
        ("all_to_all_single", "fwd", there),
        ("all_to_all_single", "fwd", back),
        ("all_to_all_single", "bwd", back),
    ]
    assert calls_of(step, torch.ones(5, 12, requires_grad=True))[-1] == (
        "all_to_all_single",
        "bwd",
        there,
    )


@pytest.mark.parametrize(("dim", "sent"), [(0, 3 * 2 * 6 * 4), (1, 3 * 8 * 2 * 4)])
def test_a_lookup_shows_as_many_rows_as_can_be_asked_for(dim, sent):
    """8 different ids spread over 16 rows of 6 or 8 columns: to each other rank 2 of them whole, or
    a part of all."""
    table_size = (16, 6) if dim == 0 else (16, 8)

    def step(ids):
        table = sharded.ones(sharded.chunk(dim, 4), *table_size, requires_grad=True)
        F.embedding(ids, table).sum().backward()
        return table.local_tensor().grad

    ids = torch.zeros(2, 4, dtype=torch.long)
    assert calls_of(step, ids) == [
        TOLD,
        ("all_gather_into_tensor", "fwd", 3 * 8 * 8),
        ("all_to_all_single", "fwd", sent),
        ("all_to_all_single", "bwd", sent),
    ]


def test_no_more_rows_than_the_table_has():
    def step(ids):
        return F.embedding(ids, sharded.ones(sharded.chunk(0, 4), 8, 2))

    assert calls_of(step, torch.zeros(1000, dtype=torch.long))[1][2] == 3 * 8 * 8


def test_bags_padding_and_norms_are_traced_too():
    def step(ids):
        table = sharded.ones(sharded.chunk(1, 4), 16, 8)
        bags = F.embedding_bag(ids, table, mode="max", padding_idx=3)
        return bags + F.embedding(ids[:, 0], table, max_norm=1.0)

    names = [name for name, _, _ in calls_of(step, torch.zeros(4, 3, dtype=torch.long))]
    bag = ["all_gather_into_tensor", "all_gather_into_tensor", "all_to_all_single"]
    norms = ["all_reduce"]  # of rows whose columns lie on several ranks
    assert names == [*bag, *bag[:2], *norms, *bag[2:]]


def test_layouts_with_ranks_that_hold_nothing():
    def step(ids, x):
        table = sharded.ones(sharded.grid((3, 2), [0, 2, 0, 2, 0, 0]), 7, 5)
        return F.embedding(ids, table), F.linear(x, table), x @ table.transpose(0, 1)

    for rank in range(4):
        found = calls_of(step, torch.zeros(3, dtype=torch.long), torch.ones(2, 5), rank=rank)
        assert [name for name, _, _ in found].count("all_to_all_single") == 5


def lookup(ids):
    table = sharded.arange(sharded.chunk(0, 4), 8, 2, dtype=torch.float32)
    return F.embedding(ids, table)


def test_a_graph_says_if_the_ids_are_not_as_they_were_taken_to_be():
    with fcoll.fake_world(dp=4, rank=0):
        graph = fcoll.trace(lookup, torch.zeros(4, dtype=torch.long)).graph_module
    checks = [n for n in graph.graph.nodes if "assert" in str(n.target)]
    assert len(checks) >= 3, "the ids are different, and spread as they were taken to be"
    assert any("spread evenly" in str(n.args) for n in checks)


def test_all_ranks_of_a_check_agree():
    def build(mesh):
        def step(ids, x):
            table = sharded.ones(sharded.chunk(0, 4), 8, 6)
            return F.embedding(ids, table), F.linear(x, table)

        return step, (torch.zeros(3, dtype=torch.long), torch.ones(2, 6))

    fcoll.check(build, mesh={"dp": 4})


# -- programs that have sharded tensors, and their layouts in a report ---


def model_on(rank):
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 4))
    plan = {"0.weight": sharded.chunk(0, 4), "1.weight": sharded.chunk(1, [2, 1])}
    sharded.shard_module(model, sharded.ShardingPlan(plan))
    return model


@pytest.mark.parametrize("rank", [0, 3])
def test_a_model_is_as_before_after_its_trace(rank):
    """Its shards, their gradients, their layouts; on a rank that holds all or one."""
    with fcoll.fake_world(dp=4, rank=rank):
        model = model_on(rank)
        weight = model[0].weight
        before = weight.local_tensor()

        def step(ids):
            model(ids).sum().backward()
            weight.reshard(sharded.chunk(1, 4))
            return weight.local_tensor() * 2

        calls = fcoll.trace(step, torch.zeros(6, dtype=torch.long)).collectives
        assert [c.phase for c in calls].count("bwd") == 3  # of the rows, there and back
        assert weight.local_tensor() is before and type(before) is torch.Tensor
        assert before.grad is None and weight.sharding_spec() == sharded.chunk(0, 4)
        assert weight.metadata().shards_metadata[3].shard_offsets == [12, 0]


def traced_model(rank=0):
    with fcoll.fake_world(dp=4, rank=rank):
        model = model_on(rank)

        def step(ids):
            table = sharded.ones(sharded.grid((2, 2), 4), 6, 10)
            same = table * 2  # the same layout once more
            return model(ids).sum() + same.sum()

        return fcoll.trace(step, torch.zeros(6, dtype=torch.long))


def test_a_trace_has_each_layout_once():
    trace = traced_model()
    texts = [card["text"] for card in trace.layouts]
    assert ["16, 8" in texts[0], "4, 8" in texts[1], "6, 10" in texts[2]] == [True] * 3
    assert len(texts) == 3 and "2x2 grid" in texts[2]
    assert [card.get("name") for card in trace.layouts] == ["0.weight", "1.weight", None]
    assert "test_traces.py" in trace.layouts[2]["source"]
    assert Trace.from_json(trace.to_json()).layouts == trace.layouts


def test_a_page_shows_the_layouts():
    trace = traced_model()
    line = timeline(trace, "h100")
    page = html.render(line, layouts=trace.layouts)
    assert page.count("data:image/svg+xml;base64,") == 3
    assert "3 layouts" in page and "0.weight" in page
    pictures = re.findall(r"svg\+xml;base64,([^\"]+)", page)
    for picture, card in zip(pictures, trace.layouts, strict=True):
        assert b64decode(picture).decode() == card["svg"]
    assert "Sharded tensors" not in html.render(line)


# -- torch.compile ---


def elementwise(st):
    return (st * 2 + 1).relu()


def reduced(st):
    return st.sum(1)


def total(st):
    return st.sum() * 3


def moved(st):
    return sharded.reshard(st, sharded.chunk(1, 2))


def product(st):
    return F.linear(torch.ones(3, st.shape[1]), st) + 1


def rows(st):
    return F.embedding(torch.tensor([1, 2, 1]), st) * 2


def gathered(st):
    return st.all_gather() * 2


def made(st):
    return st + sharded.ones(st.sharding_spec(), *st.shape)


COMPILED = (elementwise, reduced, total, moved, product, rows, gathered, made)


def compiled_as_eager(rank):
    st = sharded.arange(sharded.chunk(0, 2), 4, 6, dtype=torch.float32)
    for fn in COMPILED:
        torch.compiler.reset()
        want, got = fn(st), torch.compile(fn, backend="aot_eager")(st)
        assert type(got) is type(want), fn
        if isinstance(want, sharded.ShardedTensor):
            assert got.sharding_spec() == want.sharding_spec()
            want, got = want.all_gather(), got.all_gather()
        assert torch.equal(got, want), fn


def test_compiled_programs_do_the_same(ranks2):
    ranks2.run(compiled_as_eager, timeout=120)


def local_code(st):
    return st.local_tensor() * 2 + st.local_shards()[0].tensor.sum()


def one_graph(rank):
    """What a program does with its local tensors is one graph, also with gradients."""
    st = sharded.rand(sharded.chunk(0, 2), 4, 6, requires_grad=True)
    torch.compiler.reset()
    got = torch.compile(local_code, backend="aot_eager", fullgraph=True)(st)
    assert torch.allclose(got, local_code(st))
    got.sum().backward()
    mine = st.local_tensor()
    assert torch.equal(mine.grad, torch.full_like(mine, 2.0 + mine.numel()))


def test_code_on_local_tensors_is_one_graph(ranks2):
    ranks2.run(one_graph, timeout=120)
