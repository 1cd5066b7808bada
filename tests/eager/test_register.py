"""fcoll.register: a collective from outside the package has all that the table's have."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll.errors import BadRow
from fcoll.table.collectives import row_of

sys.path.append(str(Path(__file__).parent.parent.parent / "examples"))
from add_a_collective import NEIGHBOUR_SUM, neighbour_sum, step


def eager(rank: int, n: int) -> None:
    x = torch.full((2, 3), float(rank), requires_grad=True)
    around = [(rank - 1) % n, (rank + 1) % n]
    assert torch.equal(neighbour_sum(x), torch.full((2, 3), float(sum(around))))
    (neighbour_sum(x) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), float(sum(r + 1 for r in around))))
    mapped = torch.vmap(neighbour_sum)(torch.ones(4, 2))
    assert torch.equal(mapped, torch.full((4, 2), 2.0))
    y = neighbour_sum(input=torch.ones(2), group_name=list(range(n)))
    assert y.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("pool", ["ranks2", "ranks4", "shared2"])
def test_eager(pool, request):
    ranks = request.getfixturevalue(pool)
    ranks.run(eager, ranks.world_size)


def compiled(rank: int) -> None:
    x = torch.full((4,), float(rank + 1), requires_grad=True)
    step(x).backward()
    y = x.detach().clone().requires_grad_()
    loss = torch.compile(step, backend="fcoll", fullgraph=True)(y)
    loss.backward()
    assert torch.equal(loss, step(x)) and torch.equal(x.grad, y.grad)


def test_compiled_as_a_kernel(shared2):
    shared2.run(compiled)


def test_traced_checked_and_priced():
    with fcoll.fake_world(tp=8) as mesh:
        graph = make_fx(lambda x: neighbour_sum(x, mesh))(torch.ones(4)).graph
        trace = fcoll.trace(lambda x: neighbour_sum(x, mesh), torch.ones(1024))
    assert next(row_of(n.target) for n in graph.nodes if n.op == "call_function") is NEIGHBOUR_SUM
    (call,) = trace.collectives
    assert (call.op, call.axis, call.n, call.bytes) == ("neighbour_sum", "tp", 8, 4096)
    assert call.wire_bytes == 8192
    assert fcoll.check(lambda mesh: (step, (torch.ones(4),)), mesh={"tp": 4}).ok


def test_what_cannot_be_registered():
    assert fcoll.register(NEIGHBOUR_SUM).__name__ == "neighbour_sum"  # once more is once
    with pytest.raises(BadRow, match="another row of this name"):
        fcoll.register(replace(NEIGHBOUR_SUM, personal=False))
    with pytest.raises(BadRow, match="must begin with a Tensor"):
        fcoll.register(replace(NEIGHBOUR_SUM, name="odd", schema="(str group_name) -> Tensor"))
    native = fcoll.COLLECTIVES["all_reduce"].native
    with pytest.raises(BadRow, match="leave native out"):
        fcoll.register(replace(NEIGHBOUR_SUM, name="odd", native=native))
    with pytest.raises(TypeError, match="input"):
        neighbour_sum()
