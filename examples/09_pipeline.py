"""Compare 1F1B with GPipe on all ranks of a pipeline at once, and with a straggler. No processes.

python examples/09_pipeline.py
"""

import torch

import fcoll

STAGES, MICROBATCHES = 4, 8
ROWS, WIDTH = 2048, 1024


def gpipe(stage):
    """All forwards, then all backwards."""
    return [("f", i) for i in range(MICROBATCHES)] + [("b", i) for i in range(MICROBATCHES)]


def one_f_one_b(stage):
    """As many forwards as there are stages behind this one, then one backward for each forward."""
    ahead = min(STAGES - 1 - stage, MICROBATCHES)
    order = [("f", i) for i in range(ahead)]
    for i in range(MICROBATCHES - ahead):
        order += [("f", i + ahead), ("b", i)]
    return order + [("b", i) for i in range(MICROBATCHES - ahead, MICROBATCHES)]


def pipeline(order):
    """build(mesh) -> (step, its arguments) of this rank's stage, with messages written by hand."""

    def build(mesh):
        stage = mesh.get_local_rank()
        first, last = stage == 0, stage == STAGES - 1

        def step(x, w):
            saved, sent, grad_w = {}, [], torch.zeros_like(w)
            for kind, i in order(stage):
                if kind == "f":
                    saved[i] = x if first else fcoll.irecv(x, stage - 1, mesh, tag=2 * i)
                    y = torch.relu(saved[i] @ w)
                    if not last:
                        sent.append(fcoll.isend(y, stage + 1, mesh, tag=2 * i))
                else:
                    grad = x if last else fcoll.irecv(x, stage + 1, mesh, tag=2 * i + 1)
                    grad_x, grad_w = grad @ w.T, grad_w + saved.pop(i).T @ grad
                    if not first:
                        sent.append(fcoll.isend(grad_x, stage - 1, mesh, tag=2 * i + 1))
            return grad_w, [fcoll.wait_tensor(s) for s in sent]

        return step, (torch.empty(ROWS, WIDTH), torch.empty(WIDTH, WIDTH))

    return build


def main() -> None:
    for name, order in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        line = fcoll.timeline(pipeline(order), mesh={"pp": STAGES}, machine="h100", mode="forward")
        print(f"{name}\n{line}\n")

    # the textbook: a bubble of (stages - 1) / (microbatches + stages - 1)
    print(f"without messages: {(STAGES - 1) / (MICROBATCHES + STAGES - 1):.1%} idle\n")

    slow = fcoll.timeline(pipeline(one_f_one_b), {"pp": STAGES}, slow={2: 1.5}, mode="forward")
    print(f"\na slow stage 2\n{slow}")  # slow.to_html("ranks.html") is the same as a page


if __name__ == "__main__":
    main()
