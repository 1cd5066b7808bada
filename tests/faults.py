"""Programs with one fault each, and what fcoll.check must say of it.

A fault's lines are marked by comments: "# a" is the line of the first rank named, "# b" that of the
second. ``no`` is a rank that should have made a call and did not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import fcoll
from fcoll.errors import (
    CheckMismatch,
    DataDependent,
    Deadlock,
    GroupDestroyed,
    UnknownGroup,
    UnmatchedTransfer,
)

GRID = {"dp": 2, "tp": 2}
PAIR = {"tp": 2}


@dataclass(frozen=True)
class Fault:
    build: Callable[[Any], Any]
    mesh: dict[str, int]
    error: type
    ranks: tuple[int, ...]
    says: str

    @property
    def name(self) -> str:
        return self.build.__name__

    def line(self, mark: str) -> str | None:
        """ "faults.py:31" of the line with the mark, None if there is none."""
        lines, first = inspect.getsourcelines(self.build)
        found = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}")]
        assert len(found) < 2
        return f"faults.py:{found[0]}" if found else None


FAULTS: list[Fault] = []


def fault(mesh: dict[str, int], error: type, ranks: tuple[int, ...], says: str) -> Any:
    """The function is the program: ``fn(x, rank, tp, dp)`` on a 4 x 4 tensor of ones."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        def build(m: Any) -> Any:
            groups = [(m, axis) if axis in m.mesh_dim_names else None for axis in ("tp", "dp")]
            return lambda x: fn(x, m.get_rank(), *groups), (torch.ones(4, 4),)

        build.__name__ = fn.__name__
        build.__wrapped__ = fn  # type: ignore[attr-defined]
        FAULTS.append(Fault(build, mesh, error, ranks, says))
        return fn

    return register


# -- order and number of calls ---


@fault(PAIR, CheckMismatch, (0, 1), "the collective differs")
def reordered(x, rank, tp, dp):
    if rank == 0:
        y = fcoll.all_reduce(x, "sum", tp)  # a
        return y, fcoll.all_gather_into_tensor(x, tp)
    z = fcoll.all_gather_into_tensor(x, tp)  # b
    return z, fcoll.all_reduce(x, "sum", tp)


@fault(GRID, CheckMismatch, (1, 3), "one makes the call, the other does not")
def missing_between_equal_ones(x, rank, tp, dp):
    x = fcoll.all_reduce(x, "sum", dp)
    if rank != 3:
        x = fcoll.all_reduce(x, "sum", dp)  # a
    x = fcoll.all_reduce(x, "sum", dp)  # b
    return fcoll.all_reduce(x, "sum", dp)


@fault(PAIR, CheckMismatch, (0, 1), "one makes the call, the other does not")
def missing_at_the_end(x, rank, tp, dp):
    x = fcoll.all_reduce(x, "sum", tp)
    if rank == 0:
        x = fcoll.all_reduce(x, "max", tp)  # a
    return x


@fault({"tp": 4}, CheckMismatch, (0, 2), "the collective differs")
def extra_on_one_rank(x, rank, tp, dp):
    if rank == 2:
        x = x + fcoll.broadcast(x, 0, tp)  # b
    return fcoll.all_reduce(x, "sum", tp)  # a


@fault(PAIR, CheckMismatch, (0, 1), "one makes the call, the other does not")
def loops_of_different_length(x, rank, tp, dp):
    for _ in range(3 - rank):
        x = fcoll.all_reduce(x, "sum", tp)  # a
    return x


@fault(GRID, CheckMismatch, (0, 1), "one makes the call, the other does not")
def only_the_first_rank_reports(x, rank, tp, dp):
    y = fcoll.all_reduce(x, "sum", dp)
    if rank == 0:
        y = y + fcoll.all_reduce(x.sum(), "avg", tp)  # a
    return y


@fault({"tp": 3}, CheckMismatch, (0, 2), "one makes the call, the other does not")
def barrier_skipped(x, rank, tp, dp):
    if rank < 2:
        fcoll.barrier(tp)  # a
    return x * 2


# -- arguments ---


@fault(PAIR, CheckMismatch, (0, 1), "the shape differs")
def shape(x, rank, tp, dp):
    return fcoll.all_reduce(x[: 4 - rank], "sum", tp)  # a


@fault({"tp": 4}, CheckMismatch, (0, 3), "the shape differs")
def number_of_dims(x, rank, tp, dp):
    if rank == 3:
        return fcoll.all_reduce(x.flatten(), "sum", tp)  # b
    return fcoll.all_reduce(x, "sum", tp)  # a


@fault(PAIR, CheckMismatch, (0, 1), "the dtype differs")
def dtype(x, rank, tp, dp):
    x = x.double() if rank else x
    return fcoll.all_gather_into_tensor(x, tp)  # a


@fault({"tp": 4}, CheckMismatch, (0, 1), "reduce_op differs")
def reduce_op(x, rank, tp, dp):
    return fcoll.all_reduce(x, "max" if rank == 1 else "sum", tp)  # a


@fault(PAIR, CheckMismatch, (0, 1), "src differs")
def root_of_a_broadcast(x, rank, tp, dp):
    return fcoll.broadcast(x, rank, tp)  # a


@fault(GRID, CheckMismatch, (0, 1), "dst differs")
def root_of_a_reduce(x, rank, tp, dp):
    return fcoll.reduce(x, int(rank == 1), "sum", tp)  # a


@fault(PAIR, CheckMismatch, (0, 1), "src differs")
def root_of_a_scatter(x, rank, tp, dp):
    return fcoll.scatter(x, 1 - rank, tp)  # a


@fault(PAIR, CheckMismatch, (0, 1), "rank 0 sends 3 rows to rank 1, which expects 2")
def splits(x, rank, tp, dp):
    sends, receives = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [2, 2])
    return fcoll.all_to_all_single(x, tp, receives, sends)  # a


@fault(PAIR, CheckMismatch, (0, 1), "sizes differs")
def sizes_of_a_gather(x, rank, tp, dp):
    sizes = [4, 3] if rank == 0 else [4, 4]
    return fcoll.all_gather_into_tensor(x, tp, sizes=sizes)  # a


@fault(PAIR, CheckMismatch, (0, 1), "dim differs")
def dim(x, rank, tp, dp):
    return fcoll.all_gather_into_tensor(x, tp, dim=rank)  # a


@fault({"tp": 4}, CheckMismatch, (0, 2), "dst differs")
def permutation(x, rank, tp, dp):
    turn = -1 if rank == 2 else 1
    return fcoll.permute(x, [(r + turn) % 4 for r in range(4)], tp)  # a


@fault(PAIR, CheckMismatch, (0, 1), "the shape differs")
def number_of_tensors(x, rank, tp, dp):
    return fcoll.all_reduce_coalesced([x, x[0]][: 2 - rank], "sum", tp)  # a


@fault(PAIR, CheckMismatch, (0, 1), "the collective differs")
def gather_meets_scatter(x, rank, tp, dp):
    if rank == 0:
        return fcoll.all_gather_into_tensor(x, tp)  # a
    return fcoll.reduce_scatter_tensor(x, "sum", tp)  # b


@fault(PAIR, CheckMismatch, (0, 1), "the shape differs")
def torchs_own_collectives(x, rank, tp, dp):
    name = fcoll.groups.resolve(tp).name
    y = torch.ops._c10d_functional.all_reduce(x[rank:], "sum", name)  # a
    return torch.ops._c10d_functional.wait_tensor(y)


# -- backward pass and optimizer ---


@fault(PAIR, CheckMismatch, (0, 1), "one makes the call, the other does not")
def gradient_asked_for_on_one_rank(x, rank, tp, dp):
    x.requires_grad_(rank == 0)
    y = fcoll.all_gather_into_tensor(x * 2, tp)  # a
    return y.sum()


@fault({"tp": 3}, CheckMismatch, (0, 1), "reduce_op differs")
def other_gradient(x, rank, tp, dp):
    x.requires_grad_()
    y = fcoll.all_reduce(x * 2, "sum", tp)
    y.sum().backward()
    return fcoll.all_reduce(x.grad, "max" if rank == 1 else "avg", tp)  # a


@fault({"dp": 3}, CheckMismatch, (0, 2), "one makes the call, the other does not")
def clipping_skipped(x, rank, tp, dp):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    (x @ weight).sum().backward()
    norm = weight.grad.square().sum()
    if rank != 2:
        norm = fcoll.all_reduce(norm, "sum", dp)  # a
    weight.grad.mul_(norm)
    optimizer.step()


@fault(PAIR, CheckMismatch, (0, 1), "the collective differs")
def other_placements(x, rank, tp, dp):
    w = DTensor.from_local(x, tp[0], [Shard(0)], run_check=False)
    if rank == 0:
        return w.redistribute(placements=[Replicate()]).to_local()  # a
    w = DTensor.from_local(x, tp[0], [fcoll_partial()], run_check=False)
    return w.redistribute(placements=[Replicate()]).to_local()  # b


def fcoll_partial():
    from torch.distributed.tensor import Partial

    return Partial()


# -- messages ---


@fault(PAIR, Deadlock, (0, 1), "wait for one another")
def both_receive_first(x, rank, tp, dp):
    y = fcoll.irecv(x, 1 - rank, tp)  # a
    fcoll.wait_tensor(fcoll.isend(x, 1 - rank, tp))
    return y


@fault({"pp": 3}, UnmatchedTransfer, (0, 2), "a send that nobody receives")
def sent_to_the_wrong_rank(x, rank, tp, dp):
    if rank == 0:
        fcoll.wait_tensor(fcoll.isend(x, 2))  # a
    if rank == 1:
        return fcoll.irecv(x, 0)
    return x * 2


@fault(PAIR, UnmatchedTransfer, (0, 1), "the shape differs")
def message_of_another_shape(x, rank, tp, dp):
    if rank == 0:
        return fcoll.wait_tensor(fcoll.isend(x[:2], 1, tp))  # a
    return fcoll.irecv(x, 0, tp)  # b


@fault(PAIR, UnmatchedTransfer, (0, 1), "the dtype differs")
def message_of_another_dtype(x, rank, tp, dp):
    if rank == 0:
        return fcoll.wait_tensor(fcoll.isend(x.half(), 1, tp))  # a
    return fcoll.irecv(x, 0, tp)  # b


@fault(PAIR, UnmatchedTransfer, (0, 1), "a send that nobody receives")
def another_tag(x, rank, tp, dp):
    if rank == 0:
        return fcoll.wait_tensor(fcoll.isend(x, 1, tp, tag=1))  # a
    return fcoll.irecv(x, 0, tp, tag=2)


@fault(PAIR, UnmatchedTransfer, (0, 1), "a send that nobody receives")
def receive_missing(x, rank, tp, dp):
    for _ in range(2):
        if rank == 0:
            fcoll.wait_tensor(fcoll.isend(x, 1, tp))  # a
    return x * 2 if rank == 0 else fcoll.irecv(x, 0, tp)


@fault(PAIR, UnmatchedTransfer, (1, 0), "a receive that nobody sends to")
def send_missing(x, rank, tp, dp):
    if rank == 1:
        return fcoll.irecv(x, 0, tp)  # a
    return x * 2


@fault({"pp": 4}, UnmatchedTransfer, (2, 1), "a send that nobody receives")
def ring_with_a_wrong_link(x, rank, tp, dp):
    after, before = (rank + 1) % 4, (rank - 1) % 4
    after = 1 if rank == 2 else after
    return fcoll.batch_p2p([("isend", x, after), ("irecv", x, before)])  # a


# -- groups ---


@fault({"dp": 2}, Deadlock, (0, 1), "wait for one another")
def two_groups_in_opposite_order(x, rank, tp, dp):
    other = dist.new_group([0, 1])
    first, second = (dp, other) if rank == 0 else (other, dp)
    y = fcoll.all_reduce(x, "sum", first)  # a
    return y, fcoll.all_reduce(x, "sum", second)


@fault({"dp": 3}, Deadlock, (0, 1, 2), "wait for one another")
def circle_of_three_groups(x, rank, tp, dp):
    pairs = [[0, 1], [1, 2], [2, 0]]
    groups = [dist.new_group(pair) for pair in pairs]
    y = fcoll.all_reduce(x, "sum", groups[rank])  # a
    return y, fcoll.all_reduce(x, "sum", groups[(rank - 1) % 3])


@fault(PAIR, GroupDestroyed, (0,), "destroyed")
def group_after_its_end(x, rank, tp, dp):
    group = dist.new_group([0, 1])
    name = group.group_name
    dist.destroy_process_group(group)
    return torch.ops._c10d_functional.all_reduce(x, "sum", name)  # a


@fault(PAIR, UnknownGroup, (0,), "no process group")
def group_after_its_end_by_object(x, rank, tp, dp):
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    return fcoll.all_reduce(x, "sum", group)  # a


@fault(PAIR, DataDependent, (0,), "decides by the value of a tensor")
def branch_on_data(x, rank, tp, dp):
    if x.sum() > 0:  # a
        x = fcoll.all_reduce(x, "sum", tp)
    return x


@fault({"dp": 128, "tp": 8}, CheckMismatch, (7, 1023), "the shape differs")
def last_of_1024_ranks(x, rank, tp, dp):
    y = fcoll.all_reduce(x, "sum", tp)
    return fcoll.all_reduce(y[1:] if rank == 1023 else y, "sum", dp)  # a
