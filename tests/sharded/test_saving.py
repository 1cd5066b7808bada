"""Pickles, copies and checkpoints: what is loaded is what was saved, on as many ranks or others."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import RANKS, check_local, plain, sizes, specs
from torch.distributed._shard import sharded_tensor as theirs
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardedDim

import fcoll
from fcoll import sharded
from fcoll.sharded.errors import BadShards, GroupAlreadySet, OtherRanks, WorldNeeded

SIZE = (6, 7)


def numbers(spec, size=SIZE, **options):
    return sharded.arange(spec, *size, dtype=torch.float32, **options)


def through_a_file(value):
    """What torch.load reads, with its default weights_only, of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


# -- pickle and copies ---


@given(st.data())
@settings(max_examples=20)
def test_pickles_and_copies_are_the_same_tensor(data):
    size = data.draw(sizes())
    spec = data.draw(specs(size))

    def check(rank):
        made = numbers(spec, size)
        same = {"pickle": through_a_file({"x": made})["x"], "deepcopy": copy.deepcopy(made)}
        for other in same.values():
            check_local(other, spec, size, rank)
            assert other.metadata() == made.metadata() and other.sharding_spec() == spec
            assert torch.equal(other.all_gather(), plain(size))
            for shard in other.local_shards():
                shard.tensor.zero_()
        check_local(made, spec, size, rank)
        assert copy.copy(made).local_shards() == made.local_shards()

    fcoll.simulate_ranks(check, RANKS)


def parameters(rank):
    """A parameter stays one, with its requires_grad; the same tensor twice stays one tensor."""
    table = numbers(sharded.chunk(0, [1, 3]), requires_grad=True)
    table._is_param = True
    for copied in (copy.deepcopy([table, table]), through_a_file([table, table])):
        assert copied[0] is copied[1]
        assert isinstance(copied[0], torch.nn.Parameter) and copied[0].requires_grad
        assert all(s.tensor.requires_grad and s.tensor.is_leaf for s in copied[0].local_shards())
        (copied[0].all_gather() * plain(SIZE)).sum().backward()  # each of the 4 ranks adds to it
        for shard in copied[0].local_shards():
            row = shard.metadata.shard_offsets[0]
            assert torch.equal(shard.tensor.grad, 4 * plain(SIZE)[row : row + 3])


def test_parameters(ranks4):
    ranks4.run(parameters)
    fcoll.simulate_ranks(parameters, 4)


def on_a_group(rank):
    group = dist.new_group([3, 1])
    made = numbers(sharded.chunk(0, [1, 3]), process_group=group)
    file = pickle.dumps(made)
    with sharded.load_with_process_group(group) as pg:
        loaded = pickle.loads(file)
        assert loaded._process_group is pg
        with pytest.raises(GroupAlreadySet, match="ProcessGroup already set by previous"):
            sharded.load_with_process_group(None).__enter__()
    if rank in (1, 3):
        assert torch.equal(loaded.all_gather(), plain(SIZE))
        with pytest.raises(OtherRanks):
            pickle.loads(file)  # for all ranks: the group is not set any more
    assert loaded.metadata() == made.metadata()


def test_a_pickle_is_loaded_for_a_group(ranks4):
    ranks4.run(on_a_group)
    fcoll.simulate_ranks(on_a_group, 4)


def other_ranks(rank):
    """The four things that a rank must be as it was, one after the other."""
    made = numbers(sharded.chunk(0, 4))
    parts = list(made.__getstate__())
    here = parts[2]
    right = {
        "local_rank": rank,
        "global_rank": rank,
        "local_world_size": 4,
        "global_world_size": 4,
    }
    assert vars(here) == right
    for name in right:
        parts[2] = type(here)(**{**right, name: 9})
        text = name.replace("_", " ").capitalize()
        with pytest.raises(RuntimeError, match=f"{text} at save time was 9, but at load time was"):
            made.__setstate__(tuple(parts))
    group = dist.new_group([0, 2, 3])
    what = "Local world size" if rank == 0 else "Local rank"
    with (
        sharded.load_with_process_group(group),
        pytest.raises(OtherRanks, match=f"{what} at save time was"),
    ):
        pickle.loads(pickle.dumps(made))
    return pickle.dumps(made)


def test_a_pickle_is_of_one_rank(ranks4):
    file = ranks4.run(other_ranks)[1]
    assert fcoll.simulate_ranks(other_ranks, 4)
    with pytest.raises(WorldNeeded, match="Need to initialize default process group"):
        pickle.loads(file)


# -- files of each rank, read by other ranks ---


def save_theirs(rank, folder):
    """As programs did with torch's: each rank its own file; also a checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = theirs.empty(sharded.chunk(0, [3, 0, 1, 2]), *SIZE)
        for shard in table.local_shards():
            row = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(plain(SIZE)[row : row + 2])
        state = {"table": table, "bias": torch.ones(3), "step": 7}
        torch.save(state, f"{folder}/{rank}.pt")
        dcp.save({"table": table}, checkpoint_id=f"{folder}/dcp")


@pytest.fixture(scope="module")
def old(ranks4, tmp_path_factory):
    """A folder with what torch's ShardedTensor wrote on 4 ranks."""
    folder = tmp_path_factory.mktemp("old")
    ranks4.run(save_theirs, str(folder))
    return str(folder)


def load_theirs(rank, folder):
    """On as many ranks: as torch's tensor and then ours, or as ours at once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch.load(f"{folder}/{rank}.pt", weights_only=False)
        one = sharded.from_torch(state)
    with sharded.serve_torch():
        other = torch.load(f"{folder}/{rank}.pt", weights_only=False)
    for loaded in (one, other):
        assert loaded["step"] == 7 and type(loaded["table"]) is sharded.ShardedTensor
        assert torch.equal(loaded["table"].all_gather(), plain(SIZE))
        assert loaded["table"].sharding_spec() == sharded.chunk(0, [3, 0, 1, 2])
    nested = sharded.from_torch([state["table"], (1, {"a": state["table"]})])
    assert type(nested[1][1]["a"]) is sharded.ShardedTensor and nested[1][0] == 1
    assert nested[0].local_tensor() is state["table"].local_tensor()


def test_old_pickles_load(ranks4, old):
    ranks4.run(load_theirs, old)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_old_pickles_load_on_other_ranks(ranks, old):
    files = [f"{old}/{r}.pt" for r in range(4)]

    def load(rank):
        spec = sharded.chunk(1, ranks)
        state = {"table": sharded.zeros(spec, *SIZE), "bias": torch.zeros(3), "step": 0}
        sharded.load_files(files, state)
        check_local(state["table"], spec, SIZE, rank)
        assert state["bias"].tolist() == [1, 1, 1] and state["step"] == 0
        whole = torch.zeros(SIZE)
        sharded.load_files(files, {"table": whole})
        assert torch.equal(whole, plain(SIZE))
        with pytest.raises(BadShards, match="no file has the block of 'table' at"):
            sharded.load_files(files[:2], {"table": whole})
        with pytest.raises(BadShards, match="no file has the block of 'other'"):
            sharded.load_files(files, {"other": whole})
        with pytest.raises(BadShards, match=r"has size \(6, 7\) in the files and \(2, 7\) here"):
            sharded.load_files(files, {"table": sharded.zeros(spec, 2, 7)})

    fcoll.simulate_ranks(load, ranks)


def test_our_pickles_load_on_other_ranks(tmp_path):
    def save(rank):
        torch.save({"x": numbers(sharded.grid((2, 2), 4))}, tmp_path / f"{rank}.pt")

    def load(rank):
        made = sharded.zeros(sharded.chunk(0, 2), *SIZE)
        sharded.load_files([tmp_path / f"{r}.pt" for r in range(4)], {"x": made})
        check_local(made, sharded.chunk(0, 2), SIZE, rank)

    fcoll.simulate_ranks(save, 4)
    fcoll.simulate_ranks(load, 2)


# -- torch.distributed.checkpoint ---


def kinds(ranks):
    """Layouts on this many ranks: rows, columns, blocks; on some of the ranks."""
    found = [sharded.chunk(0, ranks), sharded.chunk(1, [ranks - 1])]
    return found + ([sharded.grid((2, 2), 4)] if ranks == 4 else [sharded.grid((1, 2), [0, 1])])


def load_all(rank, folder, name="x"):
    """A checkpoint as every kind of tensor that there is."""
    ranks = dist.get_world_size()
    for spec in kinds(ranks):
        made = sharded.zeros(spec, *SIZE, requires_grad=True)
        dcp.load({name: made}, checkpoint_id=folder)
        check_local(made, spec, SIZE, rank)
    mesh = dist.init_device_mesh("cpu", (ranks,))
    for placement in (ShardedDim(0), ShardedDim(1), Replicate()):
        empty = sharded.to_dtensor(sharded.zeros(sharded.chunk(0, ranks), *SIZE), mesh, [placement])
        dcp.load({name: empty}, checkpoint_id=folder)
        assert isinstance(empty, DTensor)
        assert torch.equal(empty.full_tensor(), plain(SIZE))
    whole = torch.zeros(SIZE)
    dcp.load({name: whole}, checkpoint_id=folder)
    assert torch.equal(whole, plain(SIZE))


def save_one(rank, spec, folder):
    dcp.save({"x": numbers(spec)}, checkpoint_id=folder)


@pytest.mark.parametrize("kind", range(3))
def test_a_checkpoint_loads_on_other_ranks(kind, tmp_path):
    folder = str(tmp_path / "saved")
    fcoll.simulate_ranks(lambda rank: save_one(rank, kinds(4)[kind], folder), 4)
    for ranks in (2, 3, 4):
        fcoll.simulate_ranks(lambda rank: load_all(rank, folder), ranks)


def test_a_checkpoint_of_real_ranks(ranks4, ranks2, tmp_path):
    folder = str(tmp_path / "saved")
    ranks4.run(save_one, sharded.grid((2, 2), 4), folder)
    ranks4.run(load_all, folder)
    ranks2.run(load_all, folder)


def load_in_theirs(rank, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = theirs.zeros(sharded.chunk(1, [2, 0]), *SIZE)
        dcp.load({"x": table}, checkpoint_id=folder)
        whole = torch.zeros(SIZE) if rank == 0 else None
        table.gather(0, whole)
        assert whole is None or torch.equal(whole, plain(SIZE))


def test_ours_is_theirs_and_theirs_is_ours(ranks4, old, tmp_path):
    ranks4.run(load_all, f"{old}/dcp", "table")
    for ranks in (2, 3):
        fcoll.simulate_ranks(lambda rank: load_all(rank, f"{old}/dcp", "table"), ranks)
    folder = str(tmp_path / "ours")
    ranks4.run(save_one, sharded.chunk(0, [2, 1, 0]), folder)
    ranks4.run(load_in_theirs, folder)


def test_chunks_behind_the_end_of_an_empty_tensor_are_not_written(tmp_path):
    """Three chunks of one column: the third begins at column 2."""
    old, new = sharded.chunk(1, [0, 0, 0]), sharded.chunk(0, [0])

    def check(rank):
        dcp.save({"x": sharded.zeros(old, 0, 1)}, checkpoint_id=tmp_path)
        made = sharded.zeros(new, 0, 1)
        dcp.load({"x": made}, checkpoint_id=tmp_path)
        check_local(made, new, (0, 1), rank)

    fcoll.simulate_ranks(check, 2)


@given(data=st.data())
@settings(max_examples=10)
def test_any_layout_loads_as_any_other(data, tmp_path_factory):
    size = data.draw(sizes(most=5))
    old, new = data.draw(specs(size)), data.draw(specs(size))
    folder = tmp_path_factory.mktemp("any")

    def check(rank):
        dcp.save({"x": numbers(old, size)}, checkpoint_id=folder)
        made = sharded.zeros(new, *size)
        dcp.load({"x": made}, checkpoint_id=folder)
        check_local(made, new, size, rank)

    fcoll.simulate_ranks(check, RANKS)
    shutil.rmtree(folder)
