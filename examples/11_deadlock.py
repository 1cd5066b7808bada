"""A pipeline schedule with a deadlock, found on simulated ranks before it hangs a cluster.

python examples/11_deadlock.py
"""

import torch
import torch.distributed as dist

import fcoll

STAGES, MICROBATCHES = 4, 6


def pipeline(rank, blocking):
    """1F1B: each stage warms up, then runs a forward and a backward in turn."""
    sent = []

    def send(peer):
        work = dist.isend(torch.zeros(2), peer)
        if blocking:
            work.wait()  # in the steady state, two stages send to each other: neither receives
        sent.append(work)

    def forward():
        if rank > 0:
            dist.recv(torch.empty(2), rank - 1)
        if rank < STAGES - 1:
            send(rank + 1)

    def backward():
        if rank < STAGES - 1:
            dist.recv(torch.empty(2), rank + 1)
        if rank > 0:
            send(rank - 1)

    warmup = min(STAGES - 1 - rank, MICROBATCHES)
    for _ in range(warmup):
        forward()
    for _ in range(MICROBATCHES - warmup):
        forward()
        backward()
    for _ in range(warmup):
        backward()
    for work in sent:
        work.wait()
    return len(sent)


def main() -> None:
    print(
        "messages sent:", fcoll.simulate_ranks(lambda rank: pipeline(rank, blocking=False), STAGES)
    )
    try:
        fcoll.simulate_ranks(lambda rank: pipeline(rank, blocking=True), STAGES)
    except fcoll.errors.Deadlock as error:
        print(error)
    else:
        raise SystemExit("the deadlock was not found")


if __name__ == "__main__":
    main()
