"""torch's DDP on a static graph: its first backward starts its all-reduces and waits for them in
C++, in one callback at the end of the pass."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fcoll
from fcoll.errors import CheckMismatch


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def trained(rank, hook=None, steps=3, **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(Checkpointed(), **options)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(steps):
        x = torch.full((2, 4), 0.1 * (rank + i), requires_grad=True)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.flatten() for p in model.parameters()]).detach()


def halved(state, bucket):
    """A comm hook that calls another collective when the first is done."""
    x = bucket.buffer() / (2 * dist.get_world_size())
    future = dist.all_reduce(x, async_op=True).get_future()
    return future.then(lambda done: dist.broadcast(done.value()[0], 0) or done.value()[0])


# the hook with one bucket only: callbacks of several may come in any order
@pytest.mark.parametrize("hook, bucket_mb", [(None, 25.0), (None, 1e-5), (halved, 25.0)])
@pytest.mark.timeout(60)
def test_a_static_graph_trains_as_one_process_does(hook, bucket_mb):
    options = {"static_graph": True, "bucket_cap_mb": bucket_mb}
    results = fcoll.simulate_ranks(lambda r: trained(r, hook, **options), 2, timeout=30)
    torch.manual_seed(0)
    model, parts = Checkpointed(), 2 if hook is None else 4
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(3):
        for rank in range(2):
            x = torch.full((2, 4), 0.1 * (rank + i), requires_grad=True)
            (model(x).sum() / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([p.flatten() for p in model.parameters()]).detach()
    for result in results:
        torch.testing.assert_close(result, expected)


@pytest.mark.timeout(60)
def test_a_rank_that_does_not_come_is_reported():
    def program(rank):
        trained(rank, steps=2 - rank, static_graph=True)

    with pytest.raises(CheckMismatch, match=r"rank 0 waits in .*all_reduce"):
        fcoll.simulate_ranks(program, 2, timeout=30)
