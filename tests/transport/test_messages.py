"""Messages between two ranks whose ends differ: both raise, and go on."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import launch

import fcoll
from fcoll.transport import messages


def outcome(y) -> object:
    """The values of a result, or the class and the first line of what its wait raises."""
    try:
        return fcoll.wait_tensor(y).tolist()
    except Exception as error:
        return type(error).__name__, str(error).partition(", at ")[0]


def swap(rank: int, sent, expected, tag: int = 0) -> list[object]:
    """Both send and receive."""
    out = fcoll.isend(torch.ones(sent[0], dtype=sent[1]), 1 - rank, tag=tag)
    got = fcoll.irecv(torch.zeros(expected[0], dtype=expected[1]), 1 - rank, tag=tag)
    return [outcome(out), outcome(got)]


F32, I32, BF16, BOOL = torch.float32, torch.int32, torch.bfloat16, torch.bool


@pytest.mark.parametrize(
    "sent, expected",
    [
        ((3, F32), (5, F32)),
        ((5, F32), (3, F32)),
        ((100_000, F32), (1, F32)),
        ((4, F32), (4, I32)),
        ((4, F32), (8, BF16)),
        ((0, F32), (2, F32)),
        ((2, BOOL), (0, BOOL)),
    ],
    ids=str,
)
def test_both_sides_raise_and_go_on(ranks2, sent, expected):
    def shown(what):
        return f"{what[0]} {str(what[1]).removeprefix('torch.')}"

    for rank, (out, got) in enumerate(ranks2.run(swap, sent, expected)):
        for (name, message), sender in ((out, rank), (got, 1 - rank)):
            assert name == "CollectiveMismatch"
            assert f"rank {sender} sends {shown(sent)} to rank {1 - sender}" in message
            assert f"which expects {shown(expected)}" in message
    assert ranks2.run(swap, (3, BOOL), (3, BOOL)) == [[[], [True] * 3]] * 2


def several(rank: int) -> list[object]:
    """Many in flight, of two tags, of which some differ; waited for in another order."""
    lengths = [4, 2, 3, 9, 5]
    if rank == 0:
        outs = []
        for i, n in enumerate(lengths):
            outs.append(fcoll.isend(torch.full((n,), float(i)), 1, tag=3))
            outs.append(fcoll.isend(torch.full((2,), i, dtype=I32), 1, tag=4))
        return [outcome(y) for y in outs[::-1]][::-1]
    second = [fcoll.irecv(torch.zeros(2, dtype=I32), 0, tag=4) for _ in lengths]
    wanted = [4, 7, 3, 1, 5]
    first = [fcoll.irecv(torch.zeros(n), 0, tag=3) for n in wanted]
    return [outcome(y) for y in first[::-1]][::-1] + [outcome(y) for y in second]


def test_the_right_ones_arrive_among_those_that_differ(ranks2):
    sent, received = ranks2.run(several)
    for i, n in enumerate([4, 2, 3, 9, 5]):
        if i in (1, 3):
            assert received[i][0] == sent[2 * i][0] == "CollectiveMismatch"
            assert f"sends {n} float32" in received[i][1]
        else:
            assert received[i] == [float(i)] * n and sent[2 * i] == []
        assert received[5 + i] == [i, i] and sent[2 * i + 1] == []


def batch(rank: int, lengths: list[int]) -> object:
    x = torch.arange(4.0) + rank
    like = torch.zeros(lengths[rank])
    try:
        outs = fcoll.batch_p2p([("irecv", like, 1 - rank), ("isend", x, 1 - rank)])
        return [fcoll.wait_tensor(y).tolist() for y in outs]
    except Exception as error:
        return type(error).__name__


def test_a_batch_raises_on_both(ranks2):
    assert ranks2.run(batch, [4, 6]) == ["CollectiveMismatch"] * 2
    assert ranks2.run(batch, [4, 4]) == [[[1.0, 2.0, 3.0, 4.0], []], [[0.0, 1.0, 2.0, 3.0], []]]


def receiver_is_busy(rank: int) -> object:
    """The sender's wait needs no wait of the receiver, only its start."""
    x = torch.ones(200_000) * 3
    if rank == 0:
        fcoll.wait_tensor(fcoll.isend(x, 1))
        return fcoll.all_reduce(torch.ones(1)).item()
    y = fcoll.irecv(x, 0)
    total = fcoll.all_reduce(torch.ones(1)).item()
    return total, bool((fcoll.wait_tensor(y) == 3).all())


def test_a_sender_does_not_wait_for_the_receivers_wait(ranks2):
    assert ranks2.run(receiver_is_busy) == [2.0, (2.0, True)]


def with_torch(rank: int) -> object:
    """What fcoll sends a plain receive takes."""
    x = torch.arange(3.0)
    if rank == 0:
        return outcome(fcoll.isend(x, 1, tag=8))
    y = torch.zeros(3)
    dist.recv(y, 0, tag=8)
    return y.tolist()


def test_a_plain_receive_takes_what_isend_sends(ranks2):
    assert ranks2.run(with_torch) == [[], [0.0, 1.0, 2.0]]


def in_a_graph(rank: int, lengths: list[int]) -> object:
    def exchanged(x, like):
        token = fcoll.isend(x, 1 - rank)
        return fcoll.wait_tensor(fcoll.irecv(like, 1 - rank)) + 1, fcoll.wait_tensor(token)

    fn = torch.compile(exchanged, fullgraph=True, backend="aot_eager")
    try:
        return fn(torch.ones(2), torch.zeros(lengths[rank]))[0].tolist()
    except Exception as error:
        return type(error).__name__


def test_compiled_messages_are_compared(ranks2):
    assert ranks2.run(in_a_graph, [2, 2]) == [[2.0, 2.0]] * 2
    assert "CollectiveMismatch" in ranks2.run(in_a_graph, [3, 2])


def ends_early(rank: int) -> None:
    """Nobody sends: the process still ends well."""
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        return store.wait(["expected"])
    fcoll.irecv(torch.zeros(2), 0, tag=5)
    assert messages._expected.thread is not None
    store.set("expected", "")


def test_a_process_ends_with_a_receive_outstanding():
    done = launch(ends_early, 2)
    assert done.exitcodes == [0, 0], done.stderr


def huge_tag(rank: int) -> str:
    try:
        fcoll.isend(torch.ones(1), 1 - rank, tag=messages.TAGS)
    except fcoll.errors.FcollError as error:
        return str(error)
    return ""


def test_tags_have_a_limit(ranks2):
    for text in ranks2.run(huge_tag):
        assert text.startswith("BadOption: isend: tag=536870912")
