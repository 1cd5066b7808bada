"""What is left after a collective has failed: the error stays with its result."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

import fcoll
from fcoll.errors import CollectiveMismatch


def used_again(rank: int) -> list[str]:
    """Rank 1 answers with another call, after rank 0 has started two."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    assert fcoll.symm_mem.status(group).shared
    word = torch.zeros(1)
    seen = []
    if rank == 0:
        first, second = (fcoll.all_reduce(torch.ones(4), "sum", group) for _ in range(2))
        view = second[:2]
        dist.send(word, 1)
        uses = [first.tolist, first.tolist, lambda: first + 1, second.sum, lambda: view * 2]
        uses += [lambda: fcoll.wait_tensor(first), second.tolist]
    else:
        dist.recv(word, 0)
        uses = [lambda: fcoll.wait_tensor(fcoll.all_reduce(torch.ones(8), "sum", group))]
    for use in uses:
        try:
            seen.append(f"gave {use()}")
        except fcoll.FcollError as error:
            seen.append(type(error).__name__)
    dist.destroy_process_group(group)
    return seen


def test_a_failed_result_raises_at_every_use(shared2):
    first, second = shared2.run(used_again)
    assert second == [CollectiveMismatch.__name__]
    assert first[:3] == [CollectiveMismatch.__name__] * 3
    assert set(first) == {"CollectiveMismatch", "GroupClosed"} and len(first) == 7


def twice(rank: int, n: int) -> None:
    """A gradient that saved nothing can be asked for again."""
    x = torch.ones(3, requires_grad=True)
    for call in (fcoll.all_reduce, fcoll.all_gather_into_tensor, lambda x: fcoll.broadcast(x, 0)):
        y = fcoll.wait_tensor(call(x))
        y.sum().backward()
        (again,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(again, x.grad)
        x.grad = None


def test_a_second_backward(ranks2, shared2):
    ranks2.run(twice, 2)
    shared2.run(twice, 2)
