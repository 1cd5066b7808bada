"""Collectives in chunks inside torch.compile (``config.splits``): values and generated code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import compiled, no_graph_cache, normal, results_and_gradients
from steps import events
from test_inductor_passes import graph_of, names, run_passes
from torch._inductor.utils import run_and_get_code

import fcoll
from fcoll.costs.machine import Link, Machine
from inductor_ext.config import config

# Dynamo itself makes an instance of autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
Tensor = torch.Tensor
COMPILE_S = 600
ROWS, DIM, HIDDEN = 16, 8, 12  # of a rank: rows of x, and columns of ``up``

#: Products and messages take long and launches nothing: chunks pay at any size.
SLOW = Machine(
    "slow", {"float32": 1e-3}, memory_gb_per_s=1e3, intra=Link(0.0, 0.3), inter=Link(0.0, 0.3),
    launch_us=0.02, collective_us=0.02,
)  # fmt: skip
CHUNKED = {"schedule": "overlap", "splits": True, "memory_cap": None, "machine": SLOW}


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Tensor parallel with the sequence in shards: columns of ``up``, rows of ``down``."""
    whole = fcoll.all_gather_into_tensor(x)
    return fcoll.reduce_scatter_tensor(torch.relu(whole @ up) @ down)


def inputs(rank: int) -> list[Tensor]:
    shapes = ((ROWS, DIM), (DIM, HIDDEN), (HIDDEN, DIM))
    return [normal(*shape, rank=rank, seed=i) for i, shape in enumerate(shapes)]


def expected(n: int) -> list[list[Tensor]]:
    """Of each rank the result and the gradients of the sum of all ranks' squares, in float64, from
    the weights of all ranks in one process."""
    xs, ups, downs = zip(*(map(_leaf, inputs(rank)) for rank in range(n)), strict=True)
    whole = torch.cat(xs)
    total = sum(torch.relu(whole @ up) @ down for up, down in zip(ups, downs, strict=True))
    total.square().sum().backward()
    parts = total.detach().chunk(n)
    leaves = zip(xs, ups, downs, strict=True)
    return [[y, *(leaf.grad for leaf in mine)] for y, mine in zip(parts, leaves, strict=True)]


def _leaf(x: Tensor) -> Tensor:
    return x.double().requires_grad_()


def in_chunks(rank: int, changes: dict[str, Any]) -> tuple[list[Tensor], list[list[str]]]:
    """A step's values, and the events of the code of its forward and its backward graph."""
    with no_graph_cache(**changes):
        made = compiled(mlp)
        values, codes = run_and_get_code(lambda: results_and_gradients(made, *inputs(rank)))
    return values, [found for found in map(events, codes) if "start" in found]


def test_a_tensor_parallel_mlp_runs_in_chunks(ranks2):
    for (values, codes), want in zip(
        ranks2.run(in_chunks, CHUNKED, timeout=COMPILE_S), expected(2), strict=True
    ):
        for got, right in zip(values, want, strict=True):
            torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)
        assert len(codes) == 2
        for code in codes:  # of two collectives one or both in at least two chunks,
            assert code.count("start") > 2 and code.count("start") == code.count("wait")
            # and some product is computed while chunks are on their way
            under_way = 0
            while_under_way = []
            for kind in code:
                under_way += {"start": 1, "wait": -1}.get(kind, 0)
                while_under_way += [kind] if kind == "mm" and under_way else []
            assert len(while_under_way) >= 2
        products = sum(code.count("mm") for code in codes)
        assert products > 2 + 4  # as it is written: two, and two for each in the backward pass


# -- without ranks ---


@pytest.fixture
def world():
    with fcoll.fake_world(tp=2) as mesh:
        yield mesh


def test_chunks_only_where_they_are_asked_for_and_pay(world):
    x, up, down = inputs(0)
    late = Machine(
        "late", {"float32": 1e-3}, memory_gb_per_s=1e3, intra=Link(0.0, 0.3), launch_us=0.02,
        inter=Link(0.0, 0.3), collective_us=1e4,
    )  # fmt: skip
    for changes, is_split in (
        (CHUNKED, True),
        (CHUNKED | {"splits": False}, False),
        (CHUNKED | {"machine": late}, False),  # a message costs more than all that it hides
        (CHUNKED | {"schedule": "safe"}, False),
    ):
        gm = graph_of(mlp, x, up, down)
        with config.patch(**changes):
            run_passes(gm)
        assert (len(names(gm)) > 2) is is_split, changes
