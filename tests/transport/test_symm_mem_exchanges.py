"""torch's ``symm_mem`` ops with splits in tensors and on tiles, on CPU. Every rank knows what all
ranks send, and puts together by plain indexing what it must receive."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fcoll import errors

WORLD = "0"
ops = torch.ops.symm_mem


@pytest.fixture(params=["shared2", "shared4", "ranks2"])
def pool(request):
    return request.getfixturevalue(request.param)


def all_inputs(splits):
    """Each rank's rows, one after the other by its splits: row values tell rank and position."""
    return [torch.arange(int(s.sum()) * 2.0).view(-1, 2) + 1000 * r for r, s in enumerate(splits)]


def slices(x, sizes):
    """x cut into parts of these sizes."""
    return torch.split(x[: int(sizes.sum())], sizes.tolist())


def random_splits(n, k, low=0):
    """splits[source][target, part], the same on every rank; some are 0."""
    return torch.randint(low, 5, (n, n, k), generator=torch.Generator().manual_seed(n * 10 + k))


def padded(x, rows):
    return torch.cat([x, x.new_full((rows - len(x), 2), -7)])


def vdev(rank):
    n = dist.get_world_size()
    splits = random_splits(n, 1)
    inputs = all_inputs(splits)
    out, found = torch.full((40, 2), -1.0), torch.empty(2, n, dtype=torch.int64)
    ops.all_to_all_vdev(padded(inputs[rank], 40), out, splits[rank].flatten(), found, WORLD)
    want = torch.cat([slices(inputs[r], splits[r].flatten())[rank] for r in range(n)])
    assert torch.equal(out[: len(want)], want) and out[len(want) :].eq(-1).all()
    sizes = splits[:, rank, 0]
    assert found[0].tolist() == sizes.tolist()
    assert found[1].tolist() == [int(sizes[:r].sum()) for r in range(n)]


def test_all_to_all_vdev(pool):
    pool.run(vdev)


def there_and_back(rank, align):
    """To the experts, three a rank, and the same rows back."""
    n, experts = dist.get_world_size(), 3
    splits = random_splits(n, experts)
    splits[:, 0, 1] = 0  # an expert without rows
    inputs = all_inputs(splits)
    out, found = torch.full((100, 2), -1.0), torch.empty(2, n * experts, dtype=torch.int64)
    mine = splits[rank].flatten()
    ops.all_to_all_vdev_2d(padded(inputs[rank], 100), out, mine, found, WORLD, major_align=align)
    end = 0
    for e in range(experts):
        start = end
        for r in range(n):
            part = slices(inputs[r], splits[r].flatten())[rank * experts + e]
            size, offset = found[:, e * n + r].tolist()
            assert (size, offset) == (len(part), end)
            assert torch.equal(out[offset : offset + size], part)
            end += size
        rows = -(-(end - start) // (align or 1)) * (align or 1)
        end = start + max(rows, align or 1)
    back, at = torch.full((100, 2), -1.0), torch.empty(2, n * experts, dtype=torch.int64)
    ops.all_to_all_vdev_2d_offset(out, back, found, at, WORLD)
    assert torch.equal(back[: len(inputs[rank])], inputs[rank])
    assert back[len(inputs[rank]) :].eq(-1).all()
    assert at[0].tolist() == mine.tolist()
    assert at[1].tolist() == [int(mine[:i].sum()) for i in range(len(mine))]


@pytest.mark.parametrize("align", [None, 1, 8])
def test_all_to_all_vdev_2d_and_back(pool, align):
    pool.run(there_and_back, align)


def tiles(rank):
    n = dist.get_world_size()
    whole, out = torch.arange(64.0).view(8, 8) * (rank + 1), torch.full((8, 8), -1.0)
    ops.tile_reduce(whole[4:, 4:], out[4:, 4:], 1, WORLD)
    total = torch.arange(64.0).view(8, 8) * sum(range(1, n + 1))
    want = torch.full((8, 8), -1.0)
    if rank == 1:
        want[4:, 4:] = total[4:, 4:]
    assert torch.equal(out, want)
    parts = [slice(4 * r % 8, 4 * r % 8 + 4) for r in range(n)]
    out = torch.full((4, 8), -1.0)
    ops.multi_root_tile_reduce(
        [whole[p] * (i + 1) for i, p in enumerate(parts)], out, range(n), WORLD
    )
    assert torch.equal(out, total[parts[rank]] * (rank + 1))


def test_tiles(pool):
    pool.run(tiles)


def wrong(rank):
    x, out = torch.ones(8, 2), torch.empty(8, 2)
    found, splits = torch.empty(2, 2, dtype=torch.int64), torch.tensor([1, 2])
    with pytest.raises(errors.BadSymmetricCall, match="3 ranks in a group of 2"):
        ops.all_to_all_vdev(x, out, torch.tensor([1, 2, 3]), found, WORLD)
    with pytest.raises(errors.BadSymmetricCall, match="end at row 10 of 8"):
        ops.all_to_all_vdev(x, out, torch.tensor([5, 5]), found, WORLD)
    with pytest.raises(errors.BadSymmetricCall, match="rows do not fit into out of 1"):
        ops.all_to_all_vdev(x, out[:1], splits, found, WORLD)
    with pytest.raises(errors.BadSymmetricCall, match="different roots"):
        ops.multi_root_tile_reduce([x, x], out, [0, 0], WORLD)
    with pytest.raises(errors.RankOutOfGroup):
        ops.tile_reduce(x, out, 2, WORLD)
    ops.all_to_all_vdev(x, out, splits, found, WORLD)
    assert found.tolist() == [[rank + 1] * 2, [0, rank + 1]]


def test_wrong_calls(shared2, ranks2):
    shared2.run(wrong)
    ranks2.run(wrong)
