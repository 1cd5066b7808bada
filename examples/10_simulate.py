"""64 ranks of a tensor- and data-parallel MLP in this process, compared with one process.

python examples/10_simulate.py
"""

import torch
from torch import Tensor, nn

import fcoll

DP, TP = 16, 4
DIM, HIDDEN, TOKENS = 32, 64, 8


class Mlp(nn.Module):
    """A rank's part: columns of the first layer, rows of the second."""

    def __init__(self, whole: nn.Sequential, tp: int) -> None:
        super().__init__()
        self.up = nn.Parameter(whole[0].weight.detach().chunk(TP, 0)[tp].clone())
        self.down = nn.Parameter(whole[2].weight.detach().chunk(TP, 1)[tp].clone())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(fcoll.identity(x, "tp") @ self.up.T)
        return fcoll.all_reduce(h @ self.down.T, "sum", "tp", grad="identity")


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def main() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(DIM, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, DIM, bias=False)
    whole = nn.Sequential(*layers).double()
    # one module for all ranks: its parameters are [64, ...], its optimizer is torch's
    model = fcoll.stack_modules([Mlp(whole, rank % TP) for rank in range(DP * TP)])
    mesh = {"dp": DP, "tp": TP}
    loss = fcoll.simulate(loss_of, mesh_shape=mesh)
    average = fcoll.simulate(lambda g: fcoll.all_reduce(g, "avg", "dp"), mesh_shape=mesh)
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for step in range(3):
        x, y = torch.randn(2, DP, TOKENS, DIM, dtype=torch.float64)
        losses = loss(model, x.repeat_interleave(TP, 0), y.repeat_interleave(TP, 0))
        losses.sum().backward()
        for p in model.parameters():
            p.grad = average(p.grad)
        ours.step()
        ours.zero_grad()

        one = loss_of(whole, x.flatten(0, 1), y.flatten(0, 1))
        one.backward()
        theirs.step()
        theirs.zero_grad()
        print(f"step {step}: {DP * TP} ranks {losses.mean():.6f}, one process {one:.6f}")
    parts = whole[0].weight.chunk(TP, 0)
    for rank in range(DP * TP):
        torch.testing.assert_close(model.up[rank], parts[rank % TP])
    print("every rank holds its part of the one-process model")


if __name__ == "__main__":
    main()
