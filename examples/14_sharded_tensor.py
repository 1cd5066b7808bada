"""An embedding table over 4 ranks: trained by rows, resharded to columns, saved, loaded on 2 ranks.

python examples/14_sharded_tensor.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor import zeros as dtensor_zeros

import fcoll
from fcoll import sharded

ROWS, DIM = 30, 8
GOAL = torch.arange(ROWS).sin()  # what the rows shall add up to


def train(folder: str) -> None:
    model = nn.Embedding(ROWS, DIM)
    sharded.shard_parameter(model, "weight", sharded.chunk(0, 4))  # rank 0's values, by rows
    optimizer = torch.optim.SGD([shard.tensor for shard in model.weight.local_shards()], 0.25)
    data = torch.Generator().manual_seed(dist.get_rank())  # every rank has its own
    losses = []
    for _ in range(100):
        ids = torch.randint(ROWS, (16,), generator=data)
        loss = (model(ids).sum(1) - GOAL[ids]).square().mean()
        optimizer.zero_grad()
        loss.backward()  # a row's gradient is summed on the rank that holds it
        optimizer.step()
        losses.append(loss.item())
    print(f"rank {dist.get_rank()}: loss {losses[0]:.3f} -> {losses[-1]:.6f}")
    assert losses[-1] < losses[0] / 100

    columns = sharded.reshard(model.weight.detach(), sharded.chunk(1, 4))
    assert torch.equal(columns.all_gather(), model.weight.all_gather())
    dcp.save({"table": columns}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        print(columns)


def load(folder: str) -> None:
    rows = sharded.zeros(sharded.chunk(0, 2), ROWS, DIM)
    dcp.load({"table": rows}, checkpoint_id=folder)
    assert torch.allclose(rows.all_gather().sum(1), GOAL, atol=0.1)

    mesh = dist.init_device_mesh("cpu", (2,))
    x = dtensor_zeros(ROWS, DIM, device_mesh=mesh, placements=[Shard(0)])
    dcp.load({"table": x}, checkpoint_id=folder)
    assert torch.equal(x.full_tensor(), rows.all_gather())
    assert torch.equal(sharded.to_dtensor(rows, mesh).to_local(), x.to_local())  # nothing is sent
    print(f"rank {dist.get_rank()} of 2: rows {tuple(rows.local_tensor().shape)}, {x.placements}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # in one process; on real ranks: fcoll.launch(train, folder, world_size=4), or torchrun
        fcoll.simulate_ranks(lambda rank: train(folder), 4)
        fcoll.simulate_ranks(lambda rank: load(folder), 2)


if __name__ == "__main__":
    main()
