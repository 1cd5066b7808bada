"""One rank of each kind is traced, and it is proved for all: a fault on any rank is found."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import get_rank
from torch.distributed.fsdp import fully_shard
from torch.utils._device import _device_constructors

import fcoll
from fcoll.checking.check import check
from fcoll.errors import CheckMismatch, CollectiveMismatch, Deadlock, UnmatchedTransfer
from fcoll.tracing.equivalent_ranks import Alike

MESH = {"dp": 16, "tp": 8}


def stepping(who):
    """All ranks reduce along tp; those that who(mesh) is true of reduce along dp besides."""

    def build(mesh):
        odd = who(mesh)

        def step(x):
            y = fcoll.all_reduce(x, "sum", mesh["tp"])
            return fcoll.all_reduce(y, "sum", mesh["dp"]) if odd else y

        return step, (torch.ones(4),)

    return build


def seeded(number):
    torch.manual_seed(number)
    return torch.rand(())


ASKS = {
    "a seed": lambda mesh: seeded(dist.get_rank()).item() == seeded(77).item(),
    "rank ==": lambda mesh: dist.get_rank() == 77,
    "imported": lambda mesh: get_rank() == 77,
    "arithmetic": lambda mesh: (dist.get_rank() * 3 - 1) // 2 == 115,
    "in a list": lambda mesh: mesh.get_rank() in (77, 200),
    "a dict": lambda mesh: {77: True}.get(dist.get_rank(), False),
    "int()": lambda mesh: int(dist.get_rank()) == 77,
    "a list's place": lambda mesh: [i == 77 for i in range(128)][dist.get_rank()],
    "both places": lambda mesh: (
        mesh.get_local_rank("dp") == 9 and dist.get_rank(mesh.get_group("tp")) == 5
    ),
    "coordinate": lambda mesh: mesh.get_coordinate() == (9, 5),
    "group's ranks": lambda mesh: (
        dist.get_process_group_ranks(mesh.get_group("tp"))[5] == 77 and mesh["tp"].get_rank() == 77
    ),
    "global rank": lambda mesh: (
        dist.get_global_rank(mesh.get_group("dp"), 9) == 77 and mesh.get_local_rank("dp") == 9
    ),
    "a submesh's ranks": lambda mesh: (
        mesh["dp"].mesh[9].item() == 77 and mesh.get_local_rank("dp") == 9
    ),
    "fcoll's": lambda mesh: fcoll.rank() == 77,
    "fcoll's axes": lambda mesh: fcoll.axis_index("dp") == 9 and fcoll.axis_index("tp") == 5,
    "a tensor": lambda mesh: (torch.ones(3) * dist.get_rank())[0].item() == 77,
    "a new group": lambda mesh: (
        dist.new_group([77, 78]) != dist.GroupMember.NON_GROUP_MEMBER and get_rank() < 78
    ),
}


@pytest.mark.parametrize("how", ASKS)
def test_a_fault_on_one_rank_in_the_middle_is_found(how):
    with pytest.raises((CheckMismatch, Deadlock)) as caught:
        check(stepping(ASKS[how]), MESH)
    assert 77 in caught.value.ranks


def test_few_are_traced_and_it_is_proved_for_all():
    found = check(stepping(lambda mesh: True), {"dp": 128, "tp": 8})
    assert found.ranks_traced == (0,) and found.all_ranks
    assert "proved for all 1024 ranks" in str(found)
    found = check(stepping(lambda mesh: mesh.get_local_rank("tp") == 3), {"dp": 128, "tp": 8})
    assert found.ranks_traced == (0, 3) and found.all_ranks
    shown = check(stepping(lambda mesh: print(f"[rank {dist.get_rank()}]") is None), MESH)
    assert shown.ranks_traced == (0,)


def test_where_there_are_too_many_kinds_it_says_so(monkeypatch):
    monkeypatch.setattr("fcoll.checking.kinds.PATIENCE_S", 0.0)
    monkeypatch.setattr("fcoll.checking.kinds.FEW", 4)
    found = check(stepping(lambda mesh: int(dist.get_rank()) < 1000), MESH)
    assert found.ranks_traced == (0, 1, 2, 3) and not found.all_ranks
    assert "proved for 4 of 128 ranks, those traced" in str(found)
    assert "nothing is known of the others" in str(found)


def test_a_place_in_a_pipeline_is_a_kind():
    """Neighbours along pp, whatever the place along dp; a shape that differs on one is found."""

    def building(wrong):
        def build(mesh):
            group, me = mesh.get_group("pp"), mesh.get_local_rank("pp")
            ranks = dist.get_process_group_ranks(group)
            rows = 5 if dist.get_rank() == wrong else 4

            def step(x):
                if me > 0:
                    dist.recv(x, ranks[me - 1], group=group)
                if me < 3:
                    dist.send(x, ranks[me + 1], group=group)

            return step, (torch.ones(rows),)

        return build

    found = check(building(None), {"dp": 16, "pp": 4})
    assert found.ranks_traced == (0, 1, 2, 3) and found.all_ranks
    with pytest.raises(
        UnmatchedTransfer, match=r"between ranks 3[67] and 3[67]: the shape differs"
    ):
        check(building(37), {"dp": 16, "pp": 4})


def test_orders_that_differ_between_kinds_are_run_on_all_ranks():
    """A circle that leads over four ranks, no two of which are in one witness's groups."""

    def build(mesh):
        first, second = mesh["dp"], mesh["tp"]
        if (mesh.get_local_rank("dp") + mesh.get_local_rank("tp")) % 2:
            first, second = second, first

        def step(x):
            y = fcoll.all_reduce(x, "sum", first)
            return y, fcoll.all_reduce(x, "sum", second)

        return step, (torch.ones(4),)

    with pytest.raises(Deadlock):
        check(build, {"dp": 16, "tp": 2})


def test_uneven_shards_are_kinds_of_their_own():
    def building(rows):
        def build(mesh):
            model = torch.nn.Linear(4, rows, bias=False)
            fully_shard(model, mesh=mesh)
            return lambda x: model(x).sum(), (torch.ones(2, 4),)

        return build

    assert check(building(40), {"dp": 20}).ranks_traced == (0,)
    uneven = check(building(33), {"dp": 20})  # 2 rows on 16 ranks, 1 on the next, none
    assert uneven.ranks_traced == (0, 16, 17) and uneven.all_ranks


def test_sizes_of_a_rank_are_its_own():
    def build(mesh):
        sizes = [2] * 16 + [3]
        me = mesh.get_local_rank("dp")
        return lambda x: fcoll.all_gather_into_tensor(x, mesh, sizes=sizes), (
            torch.ones(3 if me == 16 else 2),
        )

    assert check(build, {"dp": 17}).all_ranks


@pytest.mark.parametrize("axes", [{"a": 4, "b": 6}, {"a": 2, "b": 3, "c": 4}])
def test_places_are_those_of_the_mesh(axes):
    world, sizes = Alike(axes, 0), tuple(axes.values())
    ranks = numpy.arange(world.size).reshape(sizes)
    for i, axis in enumerate(axes):
        for rank in range(world.size):
            place = numpy.unravel_index(rank, sizes)
            group = numpy.moveaxis(ranks, i, -1)[tuple(numpy.delete(place, i))].tolist()
            assert world.index(axis)[rank] == place[i]
            assert [world.member(axis, k)[rank] for k in range(sizes[i])] == group
            for other in range(world.size):
                expected = group.index(other) if other in group else -1
                assert world.place_of(axis, other)[rank] == expected


def test_numbers_that_decide_only_values_tell_no_ranks_apart():
    """A vocabulary cut over ranks, seeds, numbers in tensors: what every large program does."""

    def build(mesh):
        rank, group = dist.get_rank(), mesh.get_group("dp")
        torch.manual_seed(1234 + rank)
        seen = torch.tensor([rank], dtype=torch.float32)

        def step(logits, targets):
            first = rank * logits.shape[1]
            mine = (targets >= first) & (targets < first + logits.shape[1])
            index = (targets - first).masked_fill(~mine, 0)
            picked = logits.gather(1, index[:, None])[:, 0].masked_fill(~mine, 0.0)
            dist.all_reduce(picked, group=group)
            dist.all_reduce(seen, group=group)
            return picked.sum()

        return step, (torch.randn(4, 8), torch.randint(0, 8, (4,)))

    found = check(build, {"dp": 64})
    assert found.all_ranks and len(found.ranks_traced) == 1


def test_a_size_made_of_a_rank_is_still_asked():
    def build(mesh):
        rank = dist.get_rank()
        return lambda x: fcoll.all_reduce(torch.full((8 + (rank == 40),), 1.0) * rank), (
            torch.ones(1),
        )

    with pytest.raises(CollectiveMismatch, match="40"):
        check(build, {"dp": 64})


def test_torch_is_afterwards_as_it_was():
    """Also what torch notes of its functions when a device is first set: here, in the program."""
    _device_constructors.cache_clear()

    def build(mesh):
        with torch.device("meta"):
            weight = torch.empty(4, 4)
        return lambda x: fcoll.all_reduce(x @ weight.new_ones(4, 4, device="cpu")), (
            torch.ones(4, 4),
        )

    before = {name: getattr(torch, name) for name in ("empty", "zeros", "arange", "tensor")}
    check(build, {"dp": 64})
    assert before == {name: getattr(torch, name) for name in before}
    with torch.device("meta"):
        assert torch.empty(1).is_meta and torch.arange(2).is_meta
