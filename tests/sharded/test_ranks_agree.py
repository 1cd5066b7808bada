"""Ranks that think differently of a sharded tensor: all raise, before anything is sent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fcoll
from fcoll import sharded
from fcoll.eager import small_messages
from fcoll.errors import FcollError
from fcoll.sharded import EnumerableShardingSpec, ShardMetadata


def error_of(act):
    try:
        act()
    except FcollError as error:
        return type(error).__name__, str(error)
    return None


def odd_new_spec(rank):
    """Rank 2 wants the same volumes elsewhere."""
    tensor = sharded.arange(sharded.chunk(0, 4), 4, 4)
    order = [1, 0, 2, 3] if rank == 2 else [0, 1, 2, 3]
    found = error_of(lambda: sharded.reshard(tensor, sharded.chunk(1, order)))
    again = sharded.reshard(tensor, sharded.chunk(1, 4))  # nothing was moved
    assert torch.equal(again.all_gather(), torch.arange(16).view(4, 4))
    return found


def check_odd_new_spec(found):
    assert all(kind == "LayoutsDisagree" for kind, _ in found)
    assert len({text.partition(", at")[0] for _, text in found}) == 1
    assert "new shard 0" in found[0][1] and "on rank 2 and" in found[0][1]


def test_another_new_layout_on_one_rank(ranks4):
    check_odd_new_spec(fcoll.simulate_ranks(odd_new_spec, 4))
    check_odd_new_spec(ranks4.run(odd_new_spec))


def test_another_new_layout_on_shared_memory(shared4):
    check_odd_new_spec(shared4.run(odd_new_spec))


def odd_spec(act):
    """A tensor that rank 1 was told to cut otherwise, into as many elements."""

    def on_rank(rank):
        order = [0, 1, 3, 2] if rank == 1 else [0, 1, 2, 3]
        tensor = sharded.ones(sharded.chunk(0, order), 4, 4)
        return error_of(lambda: act(tensor, rank))

    return on_rank


CALLS = {
    "reshard": lambda st, rank: st.reshard(sharded.chunk(1, 4)),
    "all_gather": lambda st, rank: st.all_gather(),
    "gather": lambda st, rank: st.gather(0, torch.empty(4, 4) if rank == 0 else None),
    "sum": lambda st, rank: st.sum(),
    "embedding": lambda st, rank: F.embedding(torch.tensor([1]), st),
    "embedding_bag": lambda st, rank: F.embedding_bag(torch.tensor([[1, 2]]), st),
    "linear": lambda st, rank: F.linear(torch.ones(2, 4), st),
    "matmul": lambda st, rank: torch.ones(2, 4) @ st,
    "to_dtensor": lambda st, rank: sharded.to_dtensor(st),
}


@pytest.mark.parametrize("name", CALLS)
def test_another_layout_from_the_start(name):
    found = fcoll.simulate_ranks(odd_spec(CALLS[name]), 4)
    for kind, text in found:
        assert kind == "LayoutsDisagree"
        assert "shard 2" in text and "on rank 1 and" in text


PROPERTIES = {
    "size": lambda odd: sharded.ones(sharded.chunk(0, 4), 8 if odd else 4, 4),
    "dtype": lambda odd: sharded.ones(
        sharded.chunk(0, 4), 4, 4, dtype=torch.float64 if odd else torch.float32
    ),
    "requires_grad": lambda odd: sharded.ones(sharded.chunk(0, 4), 4, 4, requires_grad=odd),
    "number of shards": lambda odd: sharded.ones(sharded.chunk(0, 3 if odd else 4), 4, 4),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_the_property_is_named(name):
    def on_rank(rank):
        tensor = PROPERTIES[name](rank == 3)
        return error_of(lambda: tensor.reshard(sharded.chunk(1, 4)))

    for kind, text in fcoll.simulate_ranks(on_rank, 4):
        assert kind == "LayoutsDisagree" and f"agree on {name}:" in text
        assert "on rank 3 and" in text and "on rank 0" in text


def mistake_of_one(rank):
    """A spec that does not cover the tensor, on rank 1 only; then the right one."""
    tensor = sharded.arange(sharded.chunk(0, 4), 8, 2)
    few = EnumerableShardingSpec([ShardMetadata([0, 0], [2, 2], "rank:0/cpu")])
    new = few if rank == 1 else sharded.chunk(1, 2)
    found = error_of(lambda: tensor.reshard(new))
    tensor.reshard(sharded.chunk(1, 2))
    assert torch.equal(tensor.all_gather(), torch.arange(16).view(8, 2))
    return found


def check_mistake_of_one(found):
    kinds = [kind for kind, _ in found]
    assert kinds == ["FailedElsewhere", "CannotReshard", "FailedElsewhere", "FailedElsewhere"]
    assert all("rank 1 could not take part" in found[r][1] for r in (0, 2, 3))
    assert all("No shard holds [2:8, 0:2]" in text for _, text in found)


def test_a_mistake_of_one_rank_is_an_error_on_all(ranks4):
    check_mistake_of_one(fcoll.simulate_ranks(mistake_of_one, 4))
    check_mistake_of_one(ranks4.run(mistake_of_one))


def test_the_same_spec_on_one_rank_only():
    """That rank would return at once; the others would wait for it."""

    def on_rank(rank):
        tensor = sharded.ones(sharded.chunk(0, 4), 4, 4)
        new = sharded.chunk(0, 4) if rank == 0 else sharded.chunk(1, 4)
        return error_of(lambda: tensor.reshard(new))

    assert all(kind == "LayoutsDisagree" for kind, _ in fcoll.simulate_ranks(on_rank, 4))


def test_a_tensor_is_compared_once(monkeypatch):
    calls = []
    gathered = small_messages.gathered

    def counted(x, *args):
        calls.append(x.dtype)
        return gathered(x, *args)

    monkeypatch.setattr(small_messages, "gathered", counted)

    def on_rank(rank):
        tensor = sharded.ones(sharded.chunk(0, 2), 4, 4)
        for _ in range(3):
            tensor.all_gather()
        sharded.reshard(tensor, sharded.chunk(1, 2)).all_gather()
        tensor.clone().detach().sum()

    fcoll.simulate_ranks(on_rank, 2)
    assert calls.count(torch.int64) == 2 * 2  # the first all_gather and the reshard, on 2 ranks


PLAIN = {
    "size": lambda odd: torch.ones(8 if odd else 4, 2),
    "dtype": lambda odd: torch.ones(4, 2, dtype=torch.float64 if odd else torch.float32),
    "contiguous": lambda odd: torch.ones(2, 4).t() if odd else torch.ones(4, 2),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_that_differ_are_not_sharded(name):
    def on_rank(rank):
        x = PLAIN[name](rank == 1)
        found = error_of(lambda: sharded.shard_tensor(x, sharded.chunk(0, 4)))
        assert sharded.shard_tensor(torch.ones(4, 2), sharded.chunk(0, 4)).sum() == 8
        return found

    for rank, (kind, text) in enumerate(fcoll.simulate_ranks(on_rank, 4)):
        assert kind == ("BadShards" if (rank, name) == (1, "contiguous") else "ShardsDiffer")
        assert name in text and (rank == 1 or "on rank: 1" in text)
