"""Find out that a pipeline would hang, before it runs.

Four stages pass activations on and gradients back. In the broken one a stage waits for a gradient
before it has sent what the next stage makes it from: in a run that is a hang without a word. The
check says who waits for whom, in which lines.

python examples/04_check.py
"""

import torch

import fcoll

MICROBATCHES = 4


def pipeline(mesh, gradients_first: bool):
    """One forward and one backward step for each microbatch; stages pass messages to each other."""
    rank, last = mesh.get_rank(), mesh.size() - 1

    def step(x):
        grad, sent = x, []
        for _ in range(MICROBATCHES):
            if rank > 0:
                x = fcoll.irecv(x, rank - 1, mesh)
            if rank < last and not gradients_first:
                sent.append(fcoll.isend(x * 2, rank + 1, mesh))
            if rank < last:
                grad = fcoll.irecv(x, rank + 1, mesh)
            if rank < last and gradients_first:  # too late: the next stage waits for it
                sent.append(fcoll.isend(x * 2, rank + 1, mesh))
            if rank > 0:
                sent.append(fcoll.isend(grad * 2, rank - 1, mesh))
        for token in sent:
            fcoll.wait_tensor(token)
        return x, grad

    return step, (torch.ones(2, 8),)


def main() -> None:
    print(fcoll.check(lambda mesh: pipeline(mesh, gradients_first=False), mesh={"pp": 4}))
    print()
    try:
        fcoll.check(lambda mesh: pipeline(mesh, gradients_first=True), mesh={"pp": 4})
    except fcoll.errors.CollectiveMismatch as error:
        print(error)
    else:
        raise SystemExit("the broken pipeline was not found out")


if __name__ == "__main__":
    main()
