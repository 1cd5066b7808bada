"""Data parallel models as strangers use them: several at once, copied, cast, wrapped twice."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll.errors import CollectiveMismatch


def on_our_reducer(module: nn.Module, **options) -> nn.Module:
    theirs, dist.Reducer = dist.Reducer, fcoll.Reducer
    try:
        return DistributedDataParallel(module, **options)
    finally:
        dist.Reducer = theirs


WRAPS = {"fcoll": fcoll.DataParallel, "ours": on_our_reducer, "torch": DistributedDataParallel}
POOLS = ("ranks2", "shared2")  # gloo alone, shared memory


@pytest.fixture(params=POOLS)
def pool(request):
    return request.getfixturevalue(request.param)


# -- two models, of which one rank runs them in another order --------------------------------------


class Net(nn.Module):
    def __init__(self, layer: str = "layer") -> None:
        super().__init__()
        self.add_module(layer, nn.Linear(4, 4))

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


def in_another_order(rank: int, wrap: str, layers: tuple[str, str], options: dict) -> None:
    generator = WRAPS[wrap](Net(layers[0]), **options)
    critic = WRAPS[wrap](Net(layers[1]), **options)
    for step in range(4):
        turned = step == 2 and rank == 1
        for model in (critic, generator) if turned else (generator, critic):
            model(torch.ones(2, 4)).sum().backward()


ALIKE, NAMED, FIND = ("layer", "layer"), ("draw", "score"), {"find_unused_parameters": True}
ORDERS = [
    ("ranks2", "fcoll", ALIKE, {}),
    ("ranks2", "ours", ALIKE, {}),
    ("ranks2", "fcoll", ALIKE, FIND),
    ("ranks2", "ours", NAMED, FIND),
    ("shared2", "ours", NAMED, FIND),  # through the ring: shared memory was not known of
]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("pool, wrap, layers, options", ORDERS, indirect=["pool"], ids=str)
def test_models_that_one_rank_runs_in_another_order(pool, wrap, layers, options):
    line = in_another_order.__code__.co_firstlineno
    errors = pool.run_expecting(in_another_order, wrap, layers, options)
    for rank, error in enumerate(errors):
        assert isinstance(error, CollectiveMismatch), error
        mine, theirs = str(error).split("where others reduce")
        here, there = (0, 1) if rank == 0 else (1, 0)
        assert f"{layers[here]}.weight" in mine and f"{layers[there]}.weight" in theirs
        if wrap == "fcoll":
            assert f":{line + 1 + here})" in mine and f":{line + 1 + there})" in theirs
