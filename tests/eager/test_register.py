"""fcoll.register: a collective from outside the package has all that the table's have.

In processes of their own: the table of this one is what other tests are made of.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import launch
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll.errors import BadRow
from fcoll.table.collectives import row_of


def example() -> Any:
    """The module that adds a collective."""
    sys.path.append(str(Path(__file__).parent.parent.parent / "examples"))
    import add_a_collective

    return add_a_collective


def eager(rank: int, n: int) -> None:
    neighbour_sum = example().neighbour_sum
    x = torch.full((2, 3), float(rank), requires_grad=True)
    around = [(rank - 1) % n, (rank + 1) % n]
    assert torch.equal(neighbour_sum(x), torch.full((2, 3), float(sum(around))))
    (neighbour_sum(x) * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), float(sum(r + 1 for r in around))))
    mapped = torch.vmap(neighbour_sum)(torch.ones(4, 2))
    assert torch.equal(mapped, torch.full((4, 2), 2.0))
    y = neighbour_sum(input=torch.ones(2), group_name=list(range(n)))
    assert y.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("n", "native"), [(3, "0"), (2, "1")])
def test_eager(n, native, compiled):
    done = launch(eager, n, n, env={"FCOLL_NATIVE": native}, timeout=100)
    assert done.errors == [None] * n, done.errors


def compiled_step(rank: int) -> None:
    step = example().step
    x = torch.full((4,), float(rank + 1), requires_grad=True)
    step(x).backward()
    y = x.detach().clone().requires_grad_()
    loss = torch.compile(step, backend="fcoll", fullgraph=True)(y)
    loss.backward()
    assert torch.equal(loss, step(x)) and torch.equal(x.grad, y.grad)


def test_compiled_as_a_kernel(compiled):
    done = launch(compiled_step, 2, env={"FCOLL_NATIVE": "1"}, timeout=150)
    assert done.errors == [None, None], done.errors


def without_ranks(rank: int) -> None:
    """Traced, checked and priced; and what cannot be registered."""
    m = example()
    with fcoll.fake_world(tp=8) as mesh:
        graph = make_fx(lambda x: m.neighbour_sum(x, mesh))(torch.ones(4)).graph
        trace = fcoll.trace(lambda x: m.neighbour_sum(x, mesh), torch.ones(1024))
    rows = [row_of(n.target) for n in graph.nodes if n.op == "call_function"]
    assert rows[0] is m.NEIGHBOUR_SUM
    (call,) = trace.collectives
    assert (call.op, call.axis, call.n, call.bytes) == ("neighbour_sum", "tp", 8, 4096)
    assert call.wire_bytes == 8192
    assert fcoll.check(lambda mesh: (m.step, (torch.ones(4),)), mesh={"tp": 4}).ok

    assert fcoll.register(m.NEIGHBOUR_SUM).__name__ == "neighbour_sum"  # once more is once
    with pytest.raises(BadRow, match="another row of this name"):
        fcoll.register(replace(m.NEIGHBOUR_SUM, personal=False))
    with pytest.raises(BadRow, match="must begin with a Tensor"):
        fcoll.register(replace(m.NEIGHBOUR_SUM, name="odd", schema="(str group_name) -> Tensor"))
    native = fcoll.COLLECTIVES["all_reduce"].native
    with pytest.raises(BadRow, match="leave native out"):
        fcoll.register(replace(m.NEIGHBOUR_SUM, name="odd", native=native))
    with pytest.raises(TypeError, match="input"):
        m.neighbour_sum()


def test_traced_checked_priced_and_refused():
    done = launch(without_ranks, 1, init=False, timeout=100)
    assert done.errors == [None], done.errors
