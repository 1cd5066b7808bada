"""Training on simulated ranks: as on real ranks, and as in one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fcoll

STEPS = 3


def model():
    """In f64: Adam divides by gradients, so that rounding in f32 shows where they are small."""
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8)
    return nn.Sequential(*layers).double()


def batch(step):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(8, 8, generator=generator, dtype=torch.float64)


def train(net, part):
    """A few steps of Adam on this rank's part of the batch; the parameters, whole."""
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for step in range(STEPS):
        net(part(batch(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [p.detach().clone() for p in whole]


def mine(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def fsdp(rank):
    mesh, net = init_device_mesh("cpu", (dist.get_world_size(),)), model()
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    return train(fully_shard(net, mesh=mesh), mine)


def ddp(rank):
    return train(DistributedDataParallel(model(), bucket_cap_mb=0.0001), mine)


def ddp_of_checkpoints(rank):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    return train(DistributedDataParallel(Checkpointed()), mine)


def close(found, wanted, **tolerance):
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@pytest.mark.parametrize("program", [fsdp, ddp, ddp_of_checkpoints], ids=lambda p: p.__name__)
def test_data_parallel_as_on_real_ranks(ranks2, program):
    alone = train(model(), lambda x: x)
    real = ranks2.run(program, timeout=150.0)
    simulated = fcoll.simulate_ranks(program, 2)
    for rank in range(2):
        close(simulated[rank], real[rank])
        close(simulated[rank], alone)


def tp_and_dp(rank):
    mesh, net = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), model()
    net = parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for step in range(STEPS):
        net(batch(step).chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
        for p in net.parameters():
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(grad, dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in net.parameters()]


def test_tensor_and_data_parallel_as_in_one_process():
    alone = train(model(), lambda x: x)
    for found in fcoll.simulate_ranks(tp_and_dp, 4):
        close(found, alone)


def test_sequence_parallel_as_in_one_process():
    def fn(rank):
        mesh, net = init_device_mesh("cpu", (2,)), model()
        plan = {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "2": RowwiseParallel(output_layouts=Shard(0)),
            "3": SequenceParallel(sequence_dim=0, use_local_output=False),
        }
        net = parallelize_module(net, mesh, plan)
        x = distribute_tensor(batch(0), mesh, [Shard(0)])
        return net(x.to_local()).full_tensor().detach()

    for found in fcoll.simulate_ranks(fn, 2):
        torch.testing.assert_close(found, model()(batch(0)).detach())


PLACEMENTS = (Replicate(), Shard(0), Shard(1), Partial())


def test_every_redistribution_keeps_the_value():
    """Of an uneven tensor over a mesh of 2 x 3; what is partial adds up."""
    whole = torch.arange(35.0).view(5, 7)

    def placed(mesh, placements):
        """The tensor as these placements hold it, without a redistribution to Partial."""
        kept = [Replicate() if p.is_partial() else p for p in placements]
        local = distribute_tensor(whole, mesh, kept).to_local()
        for axis, p in enumerate(placements):
            if p.is_partial() and mesh.get_local_rank(axis) != 0:
                local = torch.zeros_like(local)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def fn(rank):
        mesh, wrong = init_device_mesh("cpu", (2, 3)), []
        for source in itertools.product(PLACEMENTS, repeat=2):
            for target in itertools.product(PLACEMENTS[:3], repeat=2):
                found = placed(mesh, source).redistribute(mesh, target)
                want = distribute_tensor(whole, mesh, target)
                if not torch.equal(found.to_local(), want.to_local()):
                    wrong.append((source, target))
        return wrong

    assert fcoll.simulate_ranks(fn, 6) == [[]] * 6


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_pipelines_as_in_one_process(kind):
    interleaved = kind is ScheduleInterleaved1F1B
    stages = 4 if interleaved else 2

    def layers():
        torch.manual_seed(0)
        return [nn.Linear(8, 8).double() for _ in range(stages)]

    def loss_fn(y, target):
        return (y - target).square().mean()

    def fn(rank):
        mine = {i: layer for i, layer in enumerate(layers()) if i % 2 == rank}
        device = torch.device("cpu")
        made = [PipelineStage(layer, i, stages, device) for i, layer in mine.items()]
        schedule = kind(made if interleaved else made[0], 4, loss_fn=loss_fn)
        losses = []
        if rank == 0:
            schedule.step(batch(0))
        else:
            schedule.step(target=batch(1), losses=losses)
        mean = torch.stack(losses).mean().item() if losses else None
        return mean, {i: layer.weight.grad for i, layer in mine.items()}

    alone = layers()
    loss = loss_fn(nn.Sequential(*alone)(batch(0)), batch(1))
    loss.backward()
    (_, first), (found, second) = fcoll.simulate_ranks(fn, 2)
    assert found == pytest.approx(loss.item())
    for i, grad in {**first, **second}.items():
        torch.testing.assert_close(grad, alone[i].weight.grad)
