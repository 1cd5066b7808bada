"""Steps that run their own backward pass and optimizer, in the ways that people write them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fcoll

Step = Callable[[torch.Tensor], Any]


def plain(model: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def gradients_zeroed(model: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    optimizer.zero_grad(set_to_none=False)
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def accumulated(model: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    total = x.new_zeros(())
    for part in x.split(1):
        loss = model(part).sum() / 2
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return loss, total


def returns_logits(model: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    logits = model(x)
    loss = logits.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "logits": logits}


def by_autograd_grad(model: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    loss = model(x).sum()
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters)
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = fcoll.all_reduce(grad, "avg")
    optimizer.step()
    return loss


def one_of_two_losses(model: nn.Module, optimizer: Any, x: torch.Tensor) -> Any:
    first, second = model(x).sum(), model(x * 2).square().sum()
    first.backward()
    return first, second


def returns_nothing(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    plain(model, optimizer, x)


STEPS = (
    plain,
    gradients_zeroed,
    accumulated,
    returns_logits,
    by_autograd_grad,
    one_of_two_losses,
    returns_nothing,
)


def traced(step: Callable[..., Any], mode: str) -> fcoll.Trace:
    """On a model whose gradients are averaged one by one as soon as they are there."""
    with fcoll.fake_world(dp=2) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters())

        def average(p: torch.Tensor) -> None:
            p.grad = fcoll.all_reduce(p.grad, "avg", mesh)

        for p in model.parameters() if step is not by_autograd_grad else ():
            p.register_post_accumulate_grad_hook(average)
        found = fcoll.trace(lambda x: step(model, optimizer, x), torch.ones(2, 4), mode=mode)
        assert all(p.grad is None for p in model.parameters())
    return found


@pytest.mark.parametrize("mode", ["joint", "forward"])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_ran_its_backward_has_run_it(step, mode):
    found = traced(step, mode)
    times = 2 if step is accumulated else 1
    assert Counter((c.op, c.phase) for c in found.collectives) == {("all_reduce", "bwd"): 4 * times}
    assert not found.notes


@pytest.mark.parametrize("step", [plain, accumulated, by_autograd_grad])
def test_compiled(step):
    times = 2 if step is accumulated else 1
    assert len(traced(step, "compiled").collectives) == 4 * times


def test_compiled_as_often_as_one_likes():
    """Dynamo does not compile a function again that it has compiled for too many backends."""
    small = nn.Linear(2, 2)

    def average(p):
        p.grad = fcoll.all_reduce(p.grad, "avg")

    for p in small.parameters():
        p.register_post_accumulate_grad_hook(average)
    with torch._dynamo.config.patch(recompile_limit=1), fcoll.fake_world(dp=2):
        for _ in range(3):
            t = fcoll.trace(lambda x: small(x).sum().backward(), torch.ones(1, 2), mode="compiled")
            assert len(t.collectives) == 2


def test_a_step_that_runs_no_backward_has_one_run():
    found = traced(lambda model, optimizer, x: model(x).sum(), "joint")
    assert [c.phase for c in found.collectives] == ["bwd"] * 4


def test_gradients_that_are_differentiated_are_forward():
    """A penalty on gradients: its own backward pass is still to be run."""

    def penalty(model, optimizer, x):
        x = x.detach().requires_grad_()
        loss = model(x).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + grad.norm()

    assert len(traced(penalty, "joint").collectives) == 4


def sharded(mesh: Any, device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fully_shard_with_clipping_and_adamw(device):
    with fcoll.fake_world(dp=4) as mesh:
        model = sharded(mesh, device)
        optimizer = torch.optim.AdamW(model.parameters())
        printed = []

        def step(x):
            loss = model(x).sum()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            printed.append(f"loss {loss.item():.3f} norm {norm.item():.2f} {norm}")
            return loss

        first = fcoll.trace(step, torch.ones(2, 8, device=device))
        again = fcoll.trace(step, torch.ones(2, 8, device=device))
    assert len(printed) == 2 and first.collectives == again.collectives
    kinds = Counter((c.op.removesuffix("_out"), c.phase) for c in first.collectives)
    assert kinds == {
        ("all_gather_into_tensor", "fwd"): 2,
        ("all_gather_into_tensor", "bwd"): 2,
        ("reduce_scatter_tensor", "bwd"): 2,
        ("all_reduce", "bwd"): 1,
    }
    # the last reduce-scatter is started after all nodes of the backward pass
    assert {c.source.rpartition(":")[0] for c in first.collectives} == {
        "tests/tracing/test_training_steps.py"
    }


def test_fully_shard_is_afterwards_what_it_was():
    """Also after a step that stops between its passes, with parameters gathered."""
    with fcoll.fake_world(dp=4) as mesh:
        model = sharded(mesh)
        before = [(p, p.to_local().clone()) for p in model.parameters()]

        def step(x, stop=False):
            loss = model(x).sum()
            if stop:
                raise KeyError("stop")
            loss.backward()

        whole = fcoll.trace(step, torch.ones(2, 8)).collectives
        with pytest.raises(KeyError):
            fcoll.trace(step, torch.ones(2, 8), stop=True)
        for (p, value), now in zip(before, model.parameters(), strict=True):
            assert now is p and torch.equal(now.to_local(), value) and now.grad is None
        assert fcoll.trace(step, torch.ones(2, 8)).collectives == whole


def phases(step: Callable[..., Any], *args: Any) -> list[str]:
    return [c.phase for c in fcoll.trace(step, *args).collectives]


def test_a_second_forward_pass_works_on_what_the_optimizer_wrote_and_is_forward():
    with fcoll.fake_world(dp=2) as mesh:
        model = nn.Sequential(nn.Linear(4, 4), Summed(mesh), nn.BatchNorm1d(4))
        optimizer = torch.optim.Adam(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                optimizer.zero_grad()
                model(x).sum().backward()
                for p in model.parameters():
                    fcoll.all_reduce(p.grad, "sum", mesh)
                optimizer.step()
            with torch.no_grad():
                return fcoll.all_reduce(model(x).sum(), "sum", mesh)

        of_a_step = ["fwd", *["bwd"] * 5]  # the sum's own gradient, four parameters'
        assert phases(step, torch.ones(2, 4)) == [*of_a_step, *of_a_step, "fwd", "fwd"]


def test_without_modules_it_is_what_autograd_records():
    with fcoll.fake_world(dp=2) as mesh:
        w = torch.ones(4, 4, requires_grad=True)

        def step(x: torch.Tensor) -> None:
            for _ in range(2):
                fcoll.all_reduce(x @ w, "sum", mesh, grad="identity").sum().backward()
                with torch.no_grad():
                    w.sub_(w.grad)
                w.grad = None
            with torch.no_grad():  # as sharded optimizers do
                fcoll.broadcast(w, 0, mesh)

        assert phases(step, torch.ones(2, 4)) == ["fwd", "fwd", "bwd"]


class Summed(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fcoll.all_reduce(x, "sum", self.mesh)


def test_a_program_made_of_text_is_looked_through(monkeypatch):
    """Its modules have no file; what its objects hold must be found and faked all the same."""
    program = ModuleType("made_of_text")
    monkeypatch.setitem(sys.modules, "made_of_text", program)
    exec(
        "class Trainer:\n"
        "    def __init__(self, model): self.model, self.steps = model, []\n"
        "    def step(self, x):\n"
        "        self.model(x).sum().backward()\n"
        "        self.steps.append(len(self.steps))\n",
        program.__dict__,
    )
    model = nn.Linear(4, 4)
    trainer = program.Trainer(model)
    with fcoll.fake_world(dp=2):
        trace = fcoll.trace(trainer.step, torch.ones(2, 4))
    assert trace.own_backward
    assert model.weight.grad is None
    inputs = [n.name for n in trace.graph_module.graph.nodes if n.op == "placeholder"]
    assert "weight" in inputs and "constant" not in inputs
