"""Find a silent wrong gradient: the loss is right, training is a little worse.

An MLP is cut over tp. In the broken one the gradient of what goes into it is not summed over tp,
so that the scale before it gets a part of its gradient on each rank. All calls match, nothing
hangs, the loss is right. fcoll.prove runs the step in exact arithmetic and says what is missing.

python examples/15_prove.py
fcoll prove examples/15_prove.py:broken --mesh dp=2,tp=2 --html verdict.html
"""

import torch
from torch import nn
from torch.nn.functional import gelu

import fcoll

DIM, HIDDEN = 8, 16


class SumGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over the ranks of tp."""

    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return fcoll.all_reduce(grad, "sum", ctx.tp), None


class MLP(nn.Module):
    def __init__(self, tp, mended: bool):
        super().__init__()
        torch.manual_seed(0)
        self.tp, self.mended = tp, mended
        n, i = tp.size(), tp.get_local_rank()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.up = nn.Parameter(torch.randn(HIDDEN, DIM).chunk(n, 0)[i].clone())
        self.down = nn.Parameter(torch.randn(DIM, HIDDEN).chunk(n, 1)[i].clone())

    def forward(self, x):
        x = x * self.scale
        if self.mended:
            x = SumGradient.apply(x, self.tp)
        y = gelu(x @ self.up.t()) @ self.down.t()
        return fcoll.all_reduce(y, "sum", self.tp, grad="identity")


def program(mesh, mended: bool):
    dp, model = mesh["dp"], MLP(mesh["tp"], mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(p.grad, "avg", dp)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(1)
    return step, (torch.randn(8, DIM).chunk(dp.size())[dp.get_local_rank()],)


def build(mesh):
    return program(mesh, mended=True)


def broken(mesh):
    return program(mesh, mended=False)


def main() -> None:
    found = fcoll.prove(broken, mesh={"dp": 2, "tp": 2})
    print(found)
    if found.equal is not False:
        raise SystemExit("the broken model was not found out")
    print()
    print(fcoll.prove(build, mesh={"dp": 2, "tp": 2}).require())


if __name__ == "__main__":
    main()
