"""Programs over fcoll.local as a stranger writes them, compared with plain tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from local.worlds import fake_world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fcoll.local import LocalTensor, LocalTensorMode

W = 3


@pytest.fixture
def mode():
    with fake_world(W), LocalTensorMode(W) as entered:
        yield entered


def unequal(*rest: int) -> LocalTensor:
    """Two rows on ranks 0 and 1, one on rank 2."""
    return LocalTensor({r: torch.randn(2 if r < 2 else 1, *rest) for r in range(W)})


@pytest.mark.parametrize("how", ["nearest", "bilinear", "area"])
def test_interpolate_of_unequal_shards(mode, how):
    with mode.disable():
        full = torch.randn(5, 4, 2, 2)
        wanted = F.interpolate(full, size=(4, 4), mode=how)
    shards = distribute_tensor(full, init_device_mesh("cpu", (W,)), [Shard(0)]).requires_grad_()
    out = F.interpolate(shards, size=(4, 4), mode=how)
    torch.testing.assert_close(out.full_tensor().reconcile().detach(), wanted)
    out.sum().backward()
    assert shards.grad.shape == full.shape


@pytest.mark.parametrize("layer", [lambda x: F.adaptive_avg_pool2d(x, 1), lambda x: x.mean(0)])
def test_layers_that_ask_an_unequal_tensor_for_its_layout(mode, layer):
    x = unequal(4, 2, 2)
    out = layer(x)
    for r in range(W):
        torch.testing.assert_close(out._local_tensors[r], layer(x._local_tensors[r]))


def test_unequal_shards_made_equal_in_place(mode):
    x = unequal(4, 2, 2)
    x.resize_(2, 4, 2, 2)
    assert tuple(x.shape) == (2, 4, 2, 2)
    assert F.interpolate(x, scale_factor=2).shape == (2, 4, 4, 4)


def test_sizes_that_c_plus_plus_needs_as_ints(mode):
    with pytest.raises(TypeError, match="an int of each rank is not one int"):
        F.interpolate(unequal(4, 2, 2), scale_factor=2)


DIFFER = "the ranks differ, and the first one's answer is taken for all"


def test_the_rank_in_a_dict(mode):
    x = torch.ones(2) * dist.get_rank()
    with pytest.warns(UserWarning, match=DIFFER):
        assert x._local_tensors[dist.get_rank()].tolist() == [0.0, 0.0]
    with pytest.warns(UserWarning, match=DIFFER):
        assert {0: "root"}.get(dist.get_rank()) == "root"


def test_the_rank_in_a_branch(mode):
    with pytest.warns(UserWarning, match=rf"{DIFFER}.* compared with 0 at .*test_local_tensors"):
        assert dist.get_rank() == 0
    with pytest.warns(UserWarning, match=DIFFER):
        assert (dist.get_rank() + 1) % W == 1 and dist.get_rank() < 2 and not dist.get_rank()
    assert dist.get_rank() < W and dist.get_rank() >= 0  # the same on all ranks


def test_the_rank_in_a_name(mode):
    assert f"{dist.get_rank():02d}" == "{0: 00, 1: 01, 2: 02}"
    assert "1: 1" in f"rank {dist.get_rank()}"


def test_arithmetic_on_the_rank(mode):
    for made in (
        lambda r: (r + 1) % W,
        lambda r: 8 - r,
        lambda r: 8 // (r + 1),
        lambda r: 8 % (r + 2),
        lambda r: r ^ 1,
        lambda r: (r & 1) | (r << 2) | (1 << r) | (r >> 1),
        lambda r: abs(-r) ** 2,
    ):
        value = made(dist.get_rank()) + torch.zeros((), dtype=torch.int64)
        assert [int(value._local_tensors[r]) for r in range(W)] == [made(r) for r in range(W)]
    with pytest.raises(TypeError, match="no float of each rank"):
        dist.get_rank() / 2


def test_a_module_in_another_dtype(mode):
    """torch swaps the parameters of a subclass, which have no weak references then."""
    net = torch.nn.Linear(3, 2)
    net(torch.ones(4, 3)).sum().backward()
    before = {r: t.clone() for r, t in net.weight._local_tensors.items()}
    net.double()
    assert net.weight.grad.dtype == torch.float64
    for r, t in before.items():
        torch.testing.assert_close(net.weight._local_tensors[r], t.double())


def test_a_rank_whose_tensor_is_put_in_the_place_of_another(mode):
    x = torch.ones(2)
    x._local_tensors[1] = torch.full((2,), 5.0)
    assert [(x + 1)._local_tensors[r].tolist() for r in range(W)] == [
        [2.0, 2.0],
        [6.0, 6.0],
        [2.0, 2.0],
    ]
    x._local_tensors[2] = torch.zeros(3)
    assert x.shape[0].node._local_ints == {0: 2, 1: 2, 2: 3}
