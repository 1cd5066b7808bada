"""Programs over fcoll.local as a stranger writes them, compared with plain tensors."""

from __future__ import annotations

import pytest
import torch
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
