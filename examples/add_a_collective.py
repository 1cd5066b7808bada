"""A collective of one's own in one file: neighbour_sum adds what the neighbours on a ring have.

One row says what a legal call is, what comes out, how it runs, what its gradient is and what it
sends. Everything else follows: eager, gradients, traces, checks, prices, compiled graphs.
"""

import torch
import torch.distributed as dist
from torch import Tensor

import fcoll
from fcoll.groups import by_name, check_device
from fcoll.table import shapes, wire
from fcoll.table.row import Call
from fcoll.transport.carriers import carrier_of, issued


def check(input: Tensor, group_name: str) -> None:
    check_device("neighbour_sum", input.device.type, group_name)


def run(input: Tensor, group_name: str) -> Tensor:
    """Send x to both neighbours; at the wait, add what they sent."""
    g = by_name(group_name)
    left, right = (g.rank - 1) % g.n, (g.rank + 1) % g.n
    x = input.contiguous().view(-1)
    if g.n == 1:
        return 2 * input
    counts = [x.numel() * ((r == left) + (r == right)) for r in range(g.n)]
    sent = x.repeat(2)  # on two ranks both neighbours are the same one
    received, out = torch.empty_like(sent), torch.empty_like(x)
    work = carrier_of(g, x.device).exchange(received, sent, g, counts, counts)
    return issued(out, work, lambda: torch.sum(received.view(2, -1), 0, out=out)).view(input.shape)


def adjoint(grad: Tensor, a: Call) -> Tensor:
    return a.call("neighbour_sum", grad, a.group_name)  # who hears me is whom I hear


NEIGHBOUR_SUM = fcoll.Collective(
    "neighbour_sum",
    "(Tensor input, str group_name) -> Tensor",
    check=check,
    shape=shapes.same,
    run=run,
    adjoint=adjoint,
    wire_bytes=lambda n, b: 2 * b,
    steps=wire.one,
    personal=True,
)
neighbour_sum = fcoll.register(NEIGHBOUR_SUM)


def step(x: Tensor) -> Tensor:
    return neighbour_sum(x * 2).square().sum()


def main() -> None:
    """On every rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = torch.full((4,), float(rank), requires_grad=True)
    assert neighbour_sum(x).tolist() == [(rank - 1) % n + (rank + 1) % n] * 4
    step(x).backward()
    compiled = torch.compile(step, backend="fcoll", fullgraph=True)
    assert torch.equal(compiled(x), step(x))
    if rank == 0:
        with fcoll.fake_world(tp=8) as mesh:
            print(fcoll.trace(lambda x: neighbour_sum(x, mesh), torch.ones(1024)))
        print(fcoll.check(lambda mesh: (step, (torch.ones(4),)), mesh={"tp": 4}))


if __name__ == "__main__":
    fcoll.launch(main)
