"""Modules with sharded parameters: plans, state dicts, outputs, and the shards of other ranks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import RANKS, blocks, plain, sizes, specs
from torch import nn

import fcoll
from fcoll import sharded
from fcoll.sharded.errors import BadShardingPlan, NoRemoteShards

ROWS = sharded.chunk(0, 4)
COLUMNS = sharded.chunk(1, 4)


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))


def parameter(rank):
    """The source rank's values, on all; a frozen parameter stays frozen."""
    layer = nn.Linear(6, 8)
    with torch.no_grad():
        layer.weight.copy_(plain((8, 6)) + 100 * rank)
    layer.bias.requires_grad_(False)
    sharded.shard_parameter(layer, "weight", sharded.grid((2, 2), 4), src_rank=2)
    assert torch.equal(layer.weight.all_gather(), plain((8, 6)) + 200)
    assert isinstance(layer.weight, nn.Parameter) and layer.weight.requires_grad
    assert all(shard.tensor.is_leaf for shard in layer.weight.local_shards())
    sharded.shard_parameter(layer, "bias", ROWS)
    assert not layer.bias.requires_grad and len(list(layer.parameters())) == 2
    assert type(copy.deepcopy(layer).weight) is sharded.ShardedTensor


def test_a_parameter_is_sharded(ranks4):
    ranks4.run(parameter)
    fcoll.simulate_ranks(parameter, 4)


def test_what_cannot_be_sharded():
    def check(rank):
        layer = nn.Linear(12, 12)
        with pytest.raises(ValueError, match="does not match with src_rank"):
            sharded.shard_parameter(layer, "weight", ROWS, src_rank=rank)
        with pytest.raises(AttributeError, match="Linear has no attribute `foo`"):
            sharded.shard_parameter(layer, "foo", ROWS)
        mine = sharded.chunk(0, [rank, 1, 2, 3])
        with pytest.raises(ValueError, match="does not match with sharding_spec"):
            sharded.shard_parameter(layer, "weight", mine)
        half = sharded.EnumerableShardingSpec([sharded.ShardMetadata([0, 0], [5, 5], "rank:0/cpu")])
        with pytest.raises(NotImplementedError, match="not implemented yet!"):
            sharded.shard_parameter(layer, "weight", half)
        del layer.bias
        layer.bias = "foo"
        with pytest.raises(ValueError, match=r"Expected Linear.bias to be a Tensor, but found str"):
            sharded.shard_parameter(layer, "bias", ROWS)
        layer.bias = torch.rand(10, 10).t()
        with pytest.raises(ValueError, match="not a contiguous Tensor"):
            sharded.shard_parameter(layer, "bias", ROWS)
        sharded.shard_parameter(layer, "weight", ROWS)
        with pytest.raises(ValueError, match="is sharded already"):
            sharded.shard_parameter(layer, "weight", ROWS)

    fcoll.simulate_ranks(check, 4)


class Rows(sharded.ShardingPlanner):
    """Everything by rows."""

    def build_plan(self, module):
        return sharded.ShardingPlan({name: ROWS for name, _ in module.named_parameters()})


def test_a_planner_shards_everything():
    def check(rank):
        model, plain_model = net(), net()
        sharded.shard_module(model, Rows().build_plan(model))
        for (name, ours), (_, theirs) in zip(
            model.named_parameters(), plain_model.named_parameters(), strict=True
        ):
            assert torch.equal(ours.all_gather(), theirs), name

    fcoll.simulate_ranks(check, 4)


class Swap(sharded.Sharder):
    """Puts a module in the place of another."""

    def __init__(self, made):
        self.made = made

    def shard(self, module):
        return self.made


def test_a_sharder_s_module_takes_the_place_if_it_can_run():
    def check(rank):
        model, other = net(), nn.Linear(8, 5)
        sharded.shard_module(model, sharded.ShardingPlan({"2": Swap(other)}))
        assert model[2] is other
        sharded.shard_module(model, sharded.ShardingPlan({"2": Swap(nn.Module())}))
        assert model[2] is other, "one without a forward cannot"

    fcoll.simulate_ranks(check, 2)


@pytest.mark.parametrize(
    ("plan", "kind", "text"),
    [
        ({"plan": {"0.weight": 3}}, TypeError, "Only `ShardingSpec` and `Sharder` are supported"),
        (
            {"plan": {"0.weight": ROWS}, "output_plan": {"": 3}},
            TypeError,
            "Only `ShardingSpec` is supported as output_plan",
        ),
        ({"plan": {"3.weight": ROWS}}, AttributeError, "has no attribute"),
        ({"plan": {"0.biass": ROWS}}, AttributeError, "has no attribute"),
        ({"plan": {}, "return_local_tensor": ["9"]}, AttributeError, "has no attribute"),
        ({"plan": {"": Swap(None)}}, KeyError, "path must not be empty for custom sharder!"),
        (
            {"plan": {"0.weight": ROWS, "0": Swap(None)}},
            RuntimeError,
            "should not conflict with the submodule tree",
        ),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(plan, kind, text):
    def check(rank):
        model = net()
        with pytest.raises(kind, match=text):
            sharded.shard_module(model, sharded.ShardingPlan(**plan))
        assert type(model[0].weight) is nn.Parameter and not model._forward_hooks
        return issubclass(kind, AttributeError) or BadShardingPlan

    fcoll.simulate_ranks(check, 2)


def test_a_name_that_begins_as_a_sharder_s_is_no_conflict():
    def check(rank):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "ab": nn.Linear(4, 4)})
        plan = sharded.ShardingPlan({"a": Swap(nn.Identity()), "ab.weight": ROWS})
        sharded.shard_module(model, plan)
        assert isinstance(model["ab"].weight, sharded.ShardedTensor)

    fcoll.simulate_ranks(check, 4)


class Holds(nn.Module):
    """A sharded tensor as an attribute, as programs for torch's have it."""

    def __init__(self, spec=None, group=None):
        super().__init__()
        self.table = None
        if spec is not None:
            self.table = sharded.arange(spec, 8, 4, dtype=torch.float32, process_group=group)
        self.bias = nn.Parameter(torch.rand(2))

    def forward(self):
        return self.table


def test_outputs_are_cut_and_collected():
    def check(rank):
        module = Holds(ROWS)
        assert sharded.reshard_output(module, COLUMNS) is module
        out = module()
        assert torch.equal(out.local_tensor(), plain((8, 4))[:, rank : rank + 1])
        assert module.table.sharding_spec() == ROWS, "what the module holds stays"
        assert torch.equal(sharded.collect_local_shard(module)(), plain((8, 4))[:, rank])
        rows = Holds(ROWS)
        assert torch.equal(sharded.collect_local_shard(rows)(), plain((8, 4))[2 * rank :][:2])
        other = sharded.collect_local_shard(sharded.reshard_output(nn.Identity(), ROWS))
        assert other(3) == 3

    fcoll.simulate_ranks(check, 4)


def hooks(rank):
    """Attributes, in the module and below, through torch.save; also of a group of some ranks."""
    group = dist.new_group([2, 3])
    for spec, pg in ((ROWS, None), (sharded.chunk(0, [2, 3, 2]), group)):
        model, fresh = (nn.ModuleDict({"inner": Holds(s, pg)}) for s in (spec, None))
        model.outer = sharded.ones(spec, 4, process_group=pg)
        fresh.outer = None
        model.register_state_dict_post_hook(sharded.state_dict_hook)
        fresh.register_load_state_dict_pre_hook(sharded.pre_load_state_dict_hook)
        assert set(model.state_dict()) == {"outer", "inner.table", "inner.bias"}
        nested = model.state_dict(prefix="a.")
        assert set(nested) == {"a.outer", "a.inner.table", "a.inner.bias"}
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        with sharded.load_with_process_group(pg):
            state = torch.load(file)
        fresh.load_state_dict(state)
        assert "outer" in state, "the caller's dict stays as it is"
        assert torch.equal(model.outer, fresh.outer)
        assert torch.equal(model["inner"].table, fresh["inner"].table)
        assert torch.equal(model["inner"].bias, fresh["inner"].bias)


def test_state_dict_hooks(ranks4):
    ranks4.run(hooks)
    fcoll.simulate_ranks(hooks, 4)


def test_sharded_parameters_load_into_a_module():
    def check(rank):
        model, fresh = net(), net()
        for module in (model, fresh):
            plan = {"0.weight": ROWS, "2.weight": COLUMNS}
            sharded.shard_module(module, sharded.ShardingPlan(plan))
        for shard in fresh[0].weight.local_shards():
            shard.tensor.data.zero_()
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(fresh[0].weight, model[0].weight)

    fcoll.simulate_ranks(check, 4)


# -- shards of other ranks ---


@given(st.data())
@settings(max_examples=20)
def test_shards_of_other_ranks(data):
    size = data.draw(sizes())
    spec = data.draw(specs(size))
    wanted = data.draw(st.lists(st.sets(st.integers(0, RANKS - 1)), min_size=RANKS, max_size=RANKS))

    def check(rank):
        made = sharded.arange(spec, *size, dtype=torch.float32, init_rrefs=True)
        whole = made.remote_shards()
        assert set(whole) == set(made.owners()) - {rank}
        some = made.remote_shards(wanted[rank])
        assert set(some) == (set(made.owners()) & wanted[rank]) - {rank}
        for holder, shards in (*whole.items(), *some.items()):
            found = {tuple(s.to_here().metadata.shard_offsets): s.to_here().tensor for s in shards}
            assert {s.owner().id for s in shards} == {holder}
            for owner, offsets, lengths in blocks(spec, size):
                if owner == holder:
                    place = tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))
                    assert torch.equal(found[offsets], plain(size)[place])

    fcoll.simulate_ranks(check, RANKS)


def remote(rank):
    made = sharded.arange(ROWS, 8, 4, dtype=torch.float32, init_rrefs=True)
    found = made.remote_shards([] if rank == 1 else [1])
    assert list(found) == ([] if rank == 1 else [1])
    if rank != 1:
        assert torch.equal(found[1][0].to_here().tensor, plain((8, 4))[2:4])
    with pytest.raises(NoRemoteShards, match="created with init_rrefs=False"):
        sharded.ones(ROWS, 8).remote_shards()
    with pytest.raises(NoRemoteShards, match=r"rank 2 asks for ranks \[7\], which are not in"):
        made.remote_shards([7] if rank == 2 else None)
    with (
        sharded.serve_torch(),
        pytest.raises(RuntimeError, match="RPC Framework needs to be initialized"),
    ):
        sharded.ones(ROWS, 8, init_rrefs=True)
    return sharded.ones(ROWS, 8, init_rrefs=True).shape


def test_remote_shards_on_real_ranks(ranks4):
    ranks4.run(remote)
