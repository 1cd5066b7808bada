"""Gradients through collectives, on 2 ranks: a linear layer split by rows of its weight.

Every rank holds half of the input features and the half of the weight that multiplies them. The
partial products are summed by an all-reduce. The gradients are those of the whole layer.

python examples/02_autograd.py
"""

import torch
import torch.distributed as dist

import fcoll


def ranks() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same whole layer on every rank, to compare with
    x_BI, w_IO = torch.randn(3, 8), torch.randn(8, 5)

    x = x_BI.chunk(n, dim=1)[rank].clone().requires_grad_()
    w = w_IO.chunk(n, dim=0)[rank].clone().requires_grad_()
    # Every rank computes the same loss below, so the gradient that comes back is whole already.
    y_BO = fcoll.all_reduce(x @ w, "sum", grad="identity")
    y_BO.square().sum().backward()

    x_whole, w_whole = x_BI.requires_grad_(), w_IO.requires_grad_()
    (x_whole @ w_whole).square().sum().backward()
    torch.testing.assert_close(x.grad, x_whole.grad.chunk(n, dim=1)[rank])
    torch.testing.assert_close(w.grad, w_whole.grad.chunk(n, dim=0)[rank])

    # The gradient of an all-gather is a reduce-scatter: with a loss of its own on each rank, it
    # sums what the ranks' losses say of each part.
    part = torch.ones(2, requires_grad=True)
    (fcoll.all_gather_into_tensor(part).sum() * (rank + 1)).backward()
    assert part.grad.tolist() == [sum(r + 1 for r in range(n))] * 2
    print(f"rank {rank}: gradients equal those of the whole layer")


def main() -> None:
    fcoll.launch(ranks, world_size=2)


if __name__ == "__main__":
    main()
