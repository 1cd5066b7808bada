"""Programs with a mistake in them: an error or a warning that says what it is, on all ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
from ranks import launch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fcoll
from fcoll.errors import (
    BadCommHook,
    CollectiveMismatch,
    JoinCompiled,
    ParametersDiffer,
    ReductionUnfinished,
)


class Net(nn.Module):
    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        for name in ("second", "first") if turned else ("first", "second"):
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x):
        return self.second(self.first(x))


def loss_of(module: nn.Module, rank: int) -> torch.Tensor:
    return module(torch.ones(2, 4) * (rank + 1)).square().sum()


def differ(build) -> list[str]:
    """What each rank raises."""

    def run(rank):
        with pytest.raises(ParametersDiffer) as raised:
            build(rank)
        return str(raised.value)

    return fcoll.simulate_ranks(run, 2)


def test_the_same_sizes_in_another_order():
    for rank, text in enumerate(differ(lambda rank: fcoll.DataParallel(Net(turned=rank == 1)))):
        here, there = ("first", "second")[:: 1 - 2 * rank]
        assert f"[{rank}]: params[0] in this process with name {here}.weight" in text
        assert f"the same param in process {1 - rank}: {there}.weight" in text


@pytest.mark.parametrize(
    "option, values",
    [
        ("find_unused_parameters", (False, True)),
        ("static_graph", (True, False)),
        ("bucket_cap_mb", (25.0, 1.0)),
        ("broadcast_buffers", (True, False)),
    ],
)
def test_options_that_differ(option, values):
    found = differ(lambda rank: fcoll.DataParallel(Net(), **{option: values[rank]}))
    for rank, text in enumerate(found):
        mine, theirs = values[rank], values[1 - rank]
        assert f"[{rank}]: {option} is {mine} in this process, and {theirs} in process" in text


def backward_that_raises(module: nn.Module, rank: int) -> None:
    def refuse(grad):
        raise ValueError("not this one")

    handle = module.module.first.weight.register_hook(refuse)
    with pytest.raises(ValueError, match="not this one"):
        loss_of(module, rank).backward()
    handle.remove()


def interrupted(rank: int) -> tuple[str, torch.Tensor]:
    torch.manual_seed(0)
    module = fcoll.DataParallel(Net(), bucket_cap_mb=1e-5)
    backward_that_raises(module, rank)
    with pytest.raises(ReductionUnfinished) as raised:
        module(torch.ones(2, 4))
    module.reducer.reset_state()
    for _ in range(2):
        module.zero_grad()
        loss_of(module, rank).backward()
    return str(raised.value), module.module.first.weight.grad


def test_a_backward_pass_that_raised_is_the_cause(shared2):
    raised_is_the_cause(fcoll.simulate_ranks(interrupted, 2))
    raised_is_the_cause(shared2.run(interrupted))  # where gradients are counted in C++


def raised_is_the_cause(found) -> None:
    (text, first), (_, second) = found
    line = backward_that_raises.__code__.co_firstlineno
    assert (
        f"an exception ended the backward pass at tests/training/test_mistakes.py:{line + 6}"
        in (text)
    )
    assert "reset_state()" in text and "skipped" not in text
    assert torch.equal(first, second)


def fails_alone(rank: int) -> None:
    """As a loop does that skips a batch on the rank where it is bad."""
    module = fcoll.DataParallel(Net(), bucket_cap_mb=1e-5)
    if rank == 1:
        return loss_of(module, rank).backward()

    backward_that_raises(module, rank)
    module.reducer.reset_state()


def test_a_rank_that_failed_alone_cannot_go_on():
    with pytest.raises(CollectiveMismatch, match="3 int64"):
        fcoll.simulate_ranks(fails_alone, 2)
    for error in launch(fails_alone, 2, env={"FCOLL_NATIVE": "1"}).errors:
        assert isinstance(error, CollectiveMismatch) and "int64 [3]" in str(error), error


def backward_again(rank: int) -> list[list[str]]:
    module = fcoll.DataParallel(Net())
    said = []
    for again in (False, True):
        module.zero_grad()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            loss = loss_of(module, rank)
            loss.backward(retain_graph=True)
            with module.no_sync():
                loss_of(module, rank).backward()  # this one is to stay here
            loss_of(module, rank).backward()
            if again:
                loss.backward()

        said.append([str(w.message) for w in found])
    return said


def test_gradients_after_the_reduction_are_warned_of(shared2):
    # one rank: what catches warnings catches them of all threads
    found = [*fcoll.simulate_ranks(backward_again, 1), *shared2.run(backward_again)]
    for fine, late in found:
        assert fine == []
        (text,) = late
        assert "second.bias" in text and "not reduced" in text and "no_sync()" in text


def test_hooks_that_torchs_module_refuses_or_trips_over():
    def run(rank):
        module = fcoll.DataParallel(Net())
        with pytest.raises(BadCommHook, match="hook\\(state, bucket\\)"):
            module.register_comm_hook(None, lambda state, b: None)
        module.register_comm_hook(None, default_hooks.bf16_compress_hook)
        loss_of(module, rank).backward()
        return module.module.second.weight.grad

    torch.manual_seed(0)
    first, second = fcoll.simulate_ranks(run, 2)
    assert torch.equal(first, second) and torch.equal(first, first.bfloat16().float())


def test_a_compiled_module_does_not_join():
    torch._dynamo.reset()  # what tests before have compiled, and where they had Dynamo skip frames

    def run(rank):
        module = fcoll.DataParallel(Net())
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        with pytest.raises(JoinCompiled, match="join"), module.join():
            compiled(torch.ones(2, 4))

    fcoll.simulate_ranks(run, 1)
