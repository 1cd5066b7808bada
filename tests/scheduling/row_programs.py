"""Programs of matrix products and collectives, as tensor and expert parallel layers have them."""

from __future__ import annotations

import random

import torch
from torch.fx.experimental.proxy_tensor import make_fx

c10d = torch.ops._c10d_functional
D = 8


def reduced(x, group):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))


def gathered(x, n, group):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, n, group))


def scattered(x, n, group):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", n, group))


def gathered1(x, n, group):
    """Of dimension 1, as DTensor does it."""
    return torch.cat(gathered(x, n, group).split(x.shape[0]), 1)


def scattered1(x, n, group):
    return scattered(torch.cat(x.split(x.shape[1] // n, 1)), n, group)


def exchanged(x, n, group):
    sizes = [x.shape[0] // n] * n
    return c10d.wait_tensor(c10d.all_to_all_single(x, sizes, sizes, group))


def tensor_parallel(x, w, n, group):
    """Two layers with all-reduces; what backward needs is given out, too."""
    for _ in range(2):
        h = x * x.amax(1, keepdim=True).add_(1)
        a = (h @ w) * 2
        x = x + reduced(a @ w, group)
    return x, h.t() @ a


def sequence_parallel(x, w, n, group):
    """3-D: batch, sequence / n, width."""
    saved = []
    for _ in range(2):
        h = gathered1(x + 1, n, group)
        gate, up = h @ w, h @ w.t()
        y = (gate.relu() * up) @ w
        x = x + scattered1(y, n, group)
        saved.append(h)
    return x, saved[0].sum(), saved[1]


def rows_parallel(x, w, n, group):
    """2-D rows; the gathered value is needed in whole, too."""
    h = gathered(x, n, group)
    q, k, v = (h @ torch.cat([w, w, w], 1)).split(D, 1)
    scores = (q @ k.t()).remainder(5)
    x = x + scattered((scores @ v).remainder(7) @ w, n, group)
    h2 = gathered(x * 2, n, group)
    x = x + scattered((h2 @ w).relu() @ w, n, group)
    return x, h.t() @ h2


def experts(x, w, n, group):
    e = exchanged(x + 1, n, group)
    y = (e @ w).relu() @ w
    return x + exchanged(y, n, group), e.sum(0)


def weights_gathered(x, w, n, group):
    """The right matrix is gathered: it cannot be split by rows of the left one."""
    whole = gathered(w[: D // n].contiguous(), n, group)
    return reduced((x @ whole).relu() @ w, group), whole


SHAPES = {
    tensor_parallel: (16, D),
    sequence_parallel: (2, 8, D),
    rows_parallel: (16, D),
    experts: (32, D),
    weights_gathered: (16, D),
}


def graph_of(program, n: int, group: str, dtype=torch.float64):
    x, w = torch.ones(SHAPES.get(program, (16, D)), dtype=dtype), torch.ones(D, D, dtype=dtype)
    return make_fx(lambda x, w: program(x, w, n, group), tracing_mode="fake")(x, w)


def inputs_of(graph, rank: int, dtype=torch.float64) -> list[torch.Tensor]:
    """Small whole numbers: sums of products are exact in whatever order they are made."""
    made = torch.Generator().manual_seed(rank + 1)
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    shapes = [tuple(node.meta["val"].shape) for node in nodes]
    return [torch.randint(-1, 2, s, generator=made).to(dtype) for s in shapes]


def random_program(seed: int):
    """A random chain of products, pointwise ops, views and collectives, with results kept."""
    rng = random.Random(seed)
    moves = [rng.randrange(9) for _ in range(rng.randint(4, 9))]
    keep = rng.sample(range(len(moves)), 2)

    def program(x, w, n, group):
        kept = []
        for i, move in enumerate(moves):
            rows = x.shape[0]
            if move == 0 and rows <= 64:
                x = gathered(x, n, group)
            elif move == 1 and rows % (4 * n) == 0:
                x = scattered(x.remainder(3), n, group)
            elif move == 2:
                x = reduced(x.remainder(3), group)
            elif move == 3 and rows % (4 * n) == 0:
                x = exchanged(x, n, group)
            elif move in (4, 5):
                x = (x.remainder(3) @ w).relu()
            elif move == 6:
                x = x + x.sum(1, keepdim=True).remainder(2) * w[0]
            elif move == 7:
                x = (x.view(rows // 2, 2, D) * 2).transpose(1, 2).contiguous()
                x = x.transpose(1, 2).reshape(rows, D)
            else:
                x = torch.cat([x[:, : D // 2], x[:, D // 2 :] + 1], 1)
            if i in keep:
                kept.append(x)
        return (x, *kept)

    return program
