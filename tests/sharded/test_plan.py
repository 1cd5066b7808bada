"""Layouts and plans as pure geometry, against element by element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import RANKS, blocks, holders, two_layouts

from fcoll.sharded import EnumerableShardingSpec, ShardMetadata, chunk, grid
from fcoll.sharded.errors import BadLayout
from fcoll.sharded.specs import check_layout, inferred_spec, layout_of
from fcoll.sharded.transfer_plan import Box, HeldBlock, TransferPlan, first_gap, first_overlap


def plan_of(size, old, new):
    held = [
        tuple(
            HeldBlock(s.placement.rank(), Box.of(s.shard_offsets, s.shard_sizes))
            for s in layout_of(spec, size)
        )
        for spec in (old, new)
    ]
    return TransferPlan(*held)


@given(two_layouts())
def test_a_plan_moves_each_element_that_must_move_once(layouts):
    size, old, new = layouts
    plan = plan_of(size, old, new)
    before, after = holders(old, size), holders(new, size)
    assert plan.moved == (before != after).sum()
    assert plan.moves == bool((before != after).any())
    came = torch.full(size, -1)
    for rank in range(RANKS):
        for sender, transfers in [(rank, plan.kept_on(rank)), *plan.received_by(rank)]:
            for t in transfers:
                place = t.box.within(Box.whole(size))
                assert (came[place] == -1).all(), "sent twice"
                assert (before[place] == sender).all()
                assert (after[place] == rank).all()
                came[place] = sender
    assert torch.equal(came, before)


@given(two_layouts())
def test_what_one_sends_the_other_expects(layouts):
    plan = plan_of(*layouts)
    for sender in range(RANKS):
        for receiver, sent in plan.sent_by(sender):
            assert dict(plan.received_by(receiver))[sender] == sent
    sent = sum(len(ts) for r in range(RANKS) for _, ts in plan.sent_by(r))
    assert sent == sum(len(ts) for r in range(RANKS) for _, ts in plan.received_by(r))


@given(two_layouts())
def test_layouts_are_those_of_torch_chunk(layouts):
    size, spec, _ = layouts
    found = layout_of(spec, size)
    assert sorted(blocks(spec, size)) == sorted(
        (s.placement.rank(), tuple(s.shard_offsets), tuple(s.shard_sizes))
        for s in found
        if torch.Size(s.shard_sizes).numel()
    )
    again = inferred_spec(found, size)
    assert sorted(blocks(again, size)) == sorted(blocks(spec, size))


@st.composite
def any_boxes(draw):
    dims = draw(st.integers(1, 3))
    numbers = st.lists(st.integers(0, 3), min_size=dims, max_size=dims)
    pairs = draw(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5))
    return [Box.of(offsets, lengths) for offsets, lengths in pairs]


@given(any_boxes())
def test_overlaps_and_gaps_are_found(boxes):
    whole = Box.whole([6] * len(boxes[0].sizes))
    count = torch.zeros(whole.sizes)
    for box in boxes:
        count[box.within(whole)] += 1
    pair = first_overlap(boxes)
    assert (pair is not None) == bool((count > 1).any())
    if pair:
        assert pair[0] < pair[1] and boxes[pair[0]].meet(boxes[pair[1]])
    gap = first_gap(boxes, whole)
    assert (gap is not None) == bool((count == 0).any())
    if gap:
        assert gap.volume and not count[gap.within(whole)].any()


def shards(*placed):
    return [ShardMetadata(list(o), list(n), f"rank:{r}/cpu") for r, o, n in placed]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (shards((0, (0, 0), (4, 2)), (1, (3, 0), (1, 2))), "overlap.*Both hold .3:4, 0:2."),
        (shards((0, (0, 0), (4, 1)), (1, (0, 1), (3, 1))), "not match tensor volume.*3:4, 1:2"),
        (shards((0, (0, 0), (5, 2))), "offset 0 and length 5 exceeds tensor dim: 4"),
        (shards((0, (0,), (8,))), "Rank of tensor is 2, but shards rank is 1"),
        ([], "shards_metadata must not be empty"),
    ],
)
def test_what_is_no_layout_is_named(found, words):
    with pytest.raises(BadLayout, match=words):
        check_layout(found, (4, 2))


def test_empty_shards_may_be_anywhere():
    check_layout(shards((0, (0, 0), (4, 2)), (1, (9, 0), (0, 2)), (2, (1, 1), (0, 0))), (4, 2))
    assert len(layout_of(chunk(0, 4), (5, 2))) == 4  # torch's own check refuses the fourth
    layout_of(EnumerableShardingSpec(layout_of(chunk(0, 4), (5, 2))), (5, 2))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grid((2, 2), 3), "4 blocks.*placement for each; there are 3"),
        (lambda: grid((0, 2), 0), "a grid of .0, 2. blocks"),
        (lambda: layout_of(grid((2, 2), 4), (8,)), "2 dims for a tensor of 1"),
        (lambda: layout_of("rows", (8,)), "Expecting ShardingSpec"),
    ],
)
def test_specs_that_cannot_be(make, words):
    with pytest.raises((BadLayout, TypeError), match=words):
        make()
