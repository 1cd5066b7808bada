"""Train a small tensor-parallel model on 2 local ranks, compiled, and compare it with 1 process.

python examples/03_train_tp.py

Shapes: B batch, D model width, H hidden width (split over the ranks).
"""

import os
import re
import time

import torch
import torch.distributed as dist
from torch import nn

import fcoll
import inductor_ext
from fcoll.table.collectives import row_of

B, D, H, LAYERS, STEPS = 16, 256, 1024, 2, 5


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))), with H split over the group; the whole of it without one."""

    def __init__(self, group: list[int] | None) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.RMSNorm(D)
        self.up = nn.Linear(D, H, bias=False)
        self.down = nn.Linear(H, D, bias=False)
        if group:  # keep this rank's part of the same initial weights
            rank, n = group.index(dist.get_rank()), len(group)
            self.up.weight = nn.Parameter(self.up.weight.detach().chunk(n, 0)[rank].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach().chunk(n, 1)[rank].clone())

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        h_BD = self.norm(x_BD)
        if self.group is None:
            return x_BD + self.down(nn.functional.gelu(self.up(h_BD)))
        h_BD = fcoll.identity(h_BD, self.group)  # whole here, split below: sum its gradients
        part_BD = self.down(nn.functional.gelu(self.up(h_BD)))
        return x_BD + fcoll.all_reduce(part_BD, "sum", self.group, grad="identity")


def model(group: list[int] | None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(group) for _ in range(LAYERS)])


def train(net: nn.Module, backend: object) -> tuple[list[float], float]:
    """The losses of a few steps, and the time of the last one in ms."""
    step = torch.compile(net, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(1)
    x_BD, target_BD = torch.randn(B, D), torch.randn(B, D)
    losses = []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = nn.functional.mse_loss(step(x_BD), target_BD)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, (time.perf_counter() - start) * 1e3


def show(graph: torch.fx.GraphModule, inputs: list) -> object:
    """Print the collectives of the graph that is being compiled, then compile it."""
    if dist.get_rank() == 0:
        print("\nforward graph: one line a collective")
        for node in graph.graph.nodes:
            row = row_of(node.target)
            if row and node.args:
                value = node.args[0].meta["example_value"]
                lines = re.findall(rf'File "{__file__}", line (\d+)', node.stack_trace)
                where = f"{os.path.basename(__file__)}:{lines[-1]}"
                print(f"  {row.name:<12} {list(value.shape)!s:<10} {value.nbytes:>6} B   {where}")
    return inductor_ext.backend(graph, inputs)


def ranks() -> None:
    rank = dist.get_rank()
    if rank == 0:
        print(f"compiling for {dist.get_world_size()} ranks (the first time takes a minute) ...")
    losses, ms = train(model(list(range(dist.get_world_size()))), show)
    if rank == 0:
        print(f"\n1 process : compiling the whole model with {os.cpu_count()} threads ...")
        torch.set_num_threads(os.cpu_count() or 1)
        whole, whole_ms = train(model(None), "inductor")
        print(f"\n{'step':>6} {'2 ranks':>12} {'1 process':>12} {'difference':>12}")
        for i, (a, b) in enumerate(zip(losses, whole, strict=True)):
            print(f"{i:>6} {a:>12.6f} {b:>12.6f} {abs(a - b):>12.1e}")
        print(f"{'ms':>6} {ms:>12.1f} {whole_ms:>12.1f}   (last step, wall clock)")
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole))
        print("\nthe tensor-parallel model trains as the whole one does")
    fcoll.barrier()


def main() -> None:
    fcoll.launch(ranks, world_size=2)


if __name__ == "__main__":
    main()
