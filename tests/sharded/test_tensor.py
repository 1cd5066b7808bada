"""What a sharded tensor says, how it is drawn, and which rule runs for a torch function."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll import sharded
from fcoll.sharded import EnumerableShardingSpec, ShardedTensor, ShardMetadata

SVG = "{http://www.w3.org/2000/svg}"


def on_one_rank(fn, n=4):
    """fn on n simulated ranks; rank 0's result."""
    return fcoll.simulate_ranks(lambda rank: fn(), n)[0]


def test_sizes_and_properties():
    def look():
        tensor = sharded.empty(sharded.chunk(0, 4), 10, 20, dtype=torch.double)
        assert (tensor.shape, tensor.size(), tensor.size(-1)) == ((10, 20), (10, 20), 20)
        assert (tensor.dim(), tensor.ndim, tensor.numel(), len(tensor)) == (2, 2, 200, 10)
        assert (tensor.dtype, tensor.layout) == (torch.double, torch.strided)
        assert tensor.device.type == "cpu" and tensor.is_cpu and not tensor.is_cuda
        assert tensor.is_contiguous() and tensor.is_floating_point() and tensor.is_leaf
        assert not tensor.is_pinned() and tensor.element_size() == 8
        assert isinstance(hash(tensor), int) and tensor.owners() == [0, 1, 2, 3]
        with pytest.raises(IndexError, match="Dimension out of range"):
            tensor.size(2)
        for size in ((10,), [10, 20], torch.Size([3])):
            assert sharded.empty(sharded.chunk(0, 4), size).shape == tuple(size)

    on_one_rank(look)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: sharded.empty(sharded.chunk(0, 4), "foo"), TypeError, "sequence of ints"),
        (lambda: sharded.empty(sharded.chunk(-3, 4), 2, 2), ValueError, "Invalid sharding dim"),
        (lambda: sharded.empty(sharded.chunk(0, [5]), 2, 2), ValueError, "Global rank 5 does not"),
        (lambda: sharded.empty("rows", 2), TypeError, "Expecting ShardingSpec but got"),
        (
            lambda: sharded.empty(sharded.chunk(0, 4), 2, layout=torch.sparse_coo),
            ValueError,
            "Only torch.strided layout is currently supported",
        ),
        (
            lambda: sharded.empty(sharded.chunk(0, 4), 2, memory_format=torch.channels_last),
            ValueError,
            "Only torch.contiguous_format memory_format is currently supported",
        ),
        (
            lambda: sharded.empty(sharded.ChunkShardingSpec(0, ["worker0/cpu"]), 2),
            RuntimeError,
            "RPC framework needs to be initialized",
        ),
        (
            lambda: sharded.empty(sharded.ChunkShardingSpec(0, ["cpu"]), 2),
            ValueError,
            "cpu names no rank",
        ),
    ],
)
def test_what_cannot_be_made(make, kind, words):
    def attempt():
        with pytest.raises(kind, match=words):
            make()

    on_one_rank(attempt)


def test_gather_takes_its_output_on_one_rank():
    def attempt(rank):
        tensor = sharded.ones(sharded.chunk(0, 2), 4)
        for dst, out, words in (
            (rank, None, f"rank {rank}: .*must be specified on destination rank"),
            (rank, torch.empty(3), r"have size \(3,\),but should be \(4,\)"),
            (1 - rank, torch.empty(4), "must NOT be specified on non-destination ranks"),
            (2, None, "dst=2 is none of its 2 ranks"),
        ):
            with pytest.raises(ValueError, match=words):
                tensor.gather(dst, out)

    fcoll.simulate_ranks(attempt, 2)


def test_one_shard_or_several():
    def look():
        tensor = sharded.ones(sharded.chunk(0, [0, 0, 1, 2, 3]), 10, 2)
        if len(tensor.local_shards()) == 2:
            with pytest.raises(
                NotImplementedError, match=r"Only single local shard is supported\."
            ):
                tensor.local_tensor()
        return len(tensor.local_shards())

    assert on_one_rank(look) == 2


# -- pictures ---


def test_the_drawing_of_a_grid():
    drawn = on_one_rank(lambda: str(sharded.zeros(sharded.grid((2, 2), 4), 5, 6)))
    assert drawn == (
        "ShardedTensor (5, 6) float32: 120 B in 4 shards on ranks 0-3\n"
        "            | dim 1 0:3 | dim 1 3:6\n"
        "  dim 0 0:3 | rank 0    | rank 1\n"
        "  dim 0 3:5 | rank 2    | rank 3"
    )


def test_the_drawing_of_chunks_of_blocks_and_of_three_dims():
    rows = on_one_rank(lambda: str(sharded.zeros(sharded.chunk(0, [2, 0]), 5, 6)))
    assert rows.splitlines()[1:] == ["  dim 0 0:3 | rank 2", "  dim 0 3:5 | rank 0"]
    uneven = EnumerableShardingSpec(
        [
            ShardMetadata([0, 0], [2, 3], "rank:1/cpu"),
            ShardMetadata([2, 0], [2, 1], "rank:0/cpu"),
            ShardMetadata([2, 1], [2, 2], "rank:3/cpu"),
        ]
    )
    assert on_one_rank(lambda: str(sharded.zeros(uneven, 4, 3))).splitlines()[0].endswith("0, 1, 3")
    assert on_one_rank(lambda: str(sharded.zeros(uneven, 4, 3))).splitlines()[1:] == [
        "            | dim 1 0:1 | dim 1 1:3",
        "  dim 0 0:2 | rank 1    | rank 1",
        "  dim 0 2:4 | rank 0    | rank 3",
    ]
    cube = sharded.grid((2, 1, 2, 2), [*range(4), *range(4)])
    lines = on_one_rank(lambda: str(sharded.zeros(cube, 2, 7, 2, 2))).splitlines()
    assert lines[1] == "[0:1, :, :, :]" and lines[5] == "[1:2, :, :, :]" and len(lines) == 9
    whole = on_one_rank(lambda: str(sharded.zeros(sharded.chunk(0, [1]), 3)))
    assert whole == "ShardedTensor (3,) float32: 12 B in 1 shard on rank 1"


def test_a_long_drawing_is_cut():
    def draw():
        return str(sharded.zeros(sharded.grid((40, 20), [0] * 800), 40, 20))

    lines = on_one_rank(draw).splitlines()
    assert lines[-1] == "  ... and 8 more rows" and all(len(line) < 200 for line in lines)
    assert lines[1].endswith("...")


def test_one_line():
    def line():
        return repr([sharded.rand(sharded.chunk(1, 4), 2, 4, requires_grad=True)])

    assert on_one_rank(line) == (
        "[ShardedTensor(size=(2, 4), dtype=float32, chunks along dim 1, ranks 0-3, "
        "requires_grad=True)]"
    )


def test_the_picture_has_the_blocks_in_proportion():
    def picture():
        return sharded.zeros(sharded.grid((1, 2), [3, 1]), 5, 6).svg()

    _, *blocks = ElementTree.fromstring(on_one_rank(picture)).iter(f"{SVG}rect")
    assert [block.find(f"{SVG}title").text for block in blocks] == [
        "rank 3: dim 1 0:3",
        "rank 1: dim 1 3:6",
    ]
    assert blocks[0].get("width") == blocks[1].get("width") == "120.0"
    assert float(blocks[1].get("x")) - float(blocks[0].get("x")) == 120
    assert blocks[0].get("fill") != blocks[1].get("fill")


def test_the_picture_of_three_dims_has_a_panel_for_each_block_of_the_first():
    def picture():
        return sharded.zeros(sharded.grid((2, 2, 2), [*range(4)] * 2), 4, 4, 4).svg()

    _, *blocks = ElementTree.fromstring(on_one_rank(picture)).iter(f"{SVG}rect")
    assert len(blocks) == 8 and len({(b.get("x"), b.get("y")) for b in blocks}) == 8


# -- rules ---


def test_users_rules_come_first_then_those_of_specs_then_built_in():
    func = torch.special.i0e

    class MySpec(sharded.GridShardingSpec):
        pass

    def calls(rank):
        tensor = sharded.ones(MySpec((2, 1), sharded.chunk(0, [0, 0]).placements), 4, 4)
        with pytest.raises(RuntimeError, match=r"@fcoll.sharded.sharded_op.torch.special_i0e."):
            func(tensor)
        found = []
        sharded._sharded_op_impl(func)(lambda types, args, kwargs, group: "built in")
        found.append(func(tensor))
        sharded.sharding_spec_op(sharded.GridShardingSpec, func)(lambda t, a, k, g: "of the spec")
        found.append(func(tensor))
        sharded.sharded_op(func)(lambda types, args, kwargs, group: group.size())
        found.append(func(tensor))
        return found

    # one rank: rules are of the process, so that ranks which are threads share them
    assert fcoll.simulate_ranks(calls, 1) == [["built in", "of the spec", 1]]


def test_a_function_without_a_rule_says_what_has_one():
    def call():
        tensor = sharded.ones(sharded.chunk(0, 4), 4)
        for func in (torch.add, torch.linalg.svd):
            with pytest.raises(RuntimeError, match=r".*not supported for ShardedTensor!$") as error:
                func(tensor, torch.ones(4)) if func is torch.add else func(tensor)
        return str(error.value)

    assert "no rule for torch." in on_one_rank(call)


def test_rules_take_four_arguments():
    with pytest.raises(TypeError, match="expects signature"):
        sharded.sharded_op(torch.asin)(lambda types, args: None)


def test_tensors_of_two_groups_do_not_mix():
    def mix(rank):
        if rank > 1:
            return
        one = sharded.ones(sharded.chunk(0, [0, 1]), 4)
        other = sharded.ones(sharded.chunk(0, [0, 1]), 4, process_group=[0, 1])
        with pytest.raises(RuntimeError, match="should use the same ProcessGroup"):
            torch.add(one, other)

    fcoll.simulate_ranks(mix, 3)


def test_a_rank_outside_the_group_holds_the_metadata():
    def look(rank):
        group = dist.new_group([1, 2])
        tensor = sharded.ones(sharded.chunk(0, [1, 2]), 4, 2, process_group=group)
        assert isinstance(tensor, ShardedTensor) and tensor.shape == (4, 2)
        if rank == 0:
            with pytest.raises(fcoll.FcollError, match="not a member"):
                tensor.all_gather()
            return 0
        return int(tensor.all_gather().sum())

    assert fcoll.simulate_ranks(look, 3) == [0, 8, 8]
