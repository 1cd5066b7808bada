"""Data parallel models as strangers use them: several at once, copied, cast, wrapped twice."""

from __future__ import annotations

import copy
import io
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll.errors import CollectiveMismatch, ReductionUnfinished, UnknownGroup


def on_our_reducer(module: nn.Module, **options) -> nn.Module:
    with fcoll.accelerate_ddp():
        return DistributedDataParallel(module, **options)


WRAPS = {"fcoll": fcoll.DataParallel, "ours": on_our_reducer, "torch": DistributedDataParallel}
POOLS = ("ranks2", "shared2")  # gloo alone, shared memory


@pytest.fixture(params=POOLS)
def pool(request):
    return request.getfixturevalue(request.param)


# -- two models, of which one rank runs them in another order --------------------------------------


class Net(nn.Module):
    def __init__(self, layer: str = "layer") -> None:
        super().__init__()
        self.add_module(layer, nn.Linear(4, 4))

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


def in_another_order(rank: int, wrap: str, layers: tuple[str, str], options: dict) -> None:
    group = dist.new_group([0, 1])  # of which it is not known yet that it has shared memory
    generator = WRAPS[wrap](Net(layers[0]), process_group=group, **options)
    critic = WRAPS[wrap](Net(layers[1]), process_group=group, **options)
    for step in range(4):
        turned = step == 2 and rank == 1
        for model in (critic, generator) if turned else (generator, critic):
            model(torch.ones(2, 4)).sum().backward()


ALIKE, NAMED, FIND = ("layer", "layer"), ("draw", "score"), {"find_unused_parameters": True}
ORDERS = [
    ("ranks2", "fcoll", ALIKE, {}),
    ("ranks2", "ours", ALIKE, {}),
    ("ranks2", "fcoll", ALIKE, FIND),
    ("ranks2", "ours", NAMED, FIND),
    ("shared2", "ours", NAMED, FIND),  # through the ring
    ("shared2", "fcoll", ALIKE, {}),  # in place, from the second step on
    ("shared2", "ours", ALIKE, {}),
]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("pool, wrap, layers, options", ORDERS, indirect=["pool"], ids=str)
def test_models_that_one_rank_runs_in_another_order(pool, wrap, layers, options):
    line = in_another_order.__code__.co_firstlineno
    errors = pool.run_expecting(in_another_order, wrap, layers, options)
    for rank, error in enumerate(errors):
        assert isinstance(error, CollectiveMismatch), error
        mine, theirs = re.split("where (?:others reduce|rank . reduces)", str(error))
        here, there = (0, 1) if rank == 0 else (1, 0)
        assert f"{layers[here]}.weight" in mine and f"{layers[there]}.weight" in theirs
        if wrap == "fcoll":
            assert f":{line + 2 + here})" in mine and f":{line + 2 + there})" in theirs


# -- one program on three: fcoll's module, torch's on our reducer, torch's on its own --------------


def steps(model: nn.Module, rank: int, n: int = 3, dtype: torch.dtype = torch.float32) -> list:
    """The gradients of each of n steps."""
    found = []
    for step in range(n):
        model.zero_grad()
        x = torch.arange(8.0, dtype=dtype).view(2, 4) * (rank + 1) + step
        model(x).square().sum().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


class Branches(nn.Module):
    """Which layer is used differs by rank and step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, rank, step):
        x = self.first(x)
        if (step + rank) % 3:
            x = self.left(x)
        return self.right(x) if step else x


def uses_some(rank: int, wrap: str, skips: bool) -> list:
    torch.manual_seed(0)
    options = {**FIND, "bucket_cap_mb": 1e-6, "skip_all_reduce_unused_params": skips}
    model = WRAPS[wrap](Branches(), **options)
    found = []
    for step in range(4):
        model.zero_grad()
        model(torch.ones(2, 4) * (rank + 1), rank, step).sum().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


def same(found, wanted) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("wrap", ["fcoll", "ours"])
def test_unused_parameters_are_skipped_only_if_no_rank_uses_them(pool, wrap):
    same(pool.run(uses_some, wrap, True), pool.run(uses_some, "torch", False))


def named_as_torch_does(rank: int) -> None:
    pair = dist.new_group([0, 1])
    model = fcoll.DataParallel(Net(), process_group=pair)
    assert model.process_group is pair and model.group_name == pair.group_name
    fcoll.DataParallel(Net(), pair, process_group=pair)
    with pytest.raises(UnknownGroup, match=r"\(group=\) and .* \(process_group=\)"):
        fcoll.DataParallel(Net(), dist.group.WORLD, process_group=pair)


def test_a_group_by_the_name_that_torch_gives_it(ranks2):
    ranks2.run(named_as_torch_does)


def copied(rank: int, wrap: str, how: str, options: dict) -> list:
    torch.manual_seed(0)
    model = WRAPS[wrap](Net(), **options)
    found = steps(model, rank, 2)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    if wrap == "fcoll":
        assert isinstance(other.reducer, fcoll.Reducer) and other.reducer is not model.reducer
    with torch.no_grad():
        other.module.layer.weight.add_(1)
    return [found, steps(other, rank), steps(model, rank), steps(other, rank)]


@pytest.mark.parametrize("how", ["deepcopy", "save"])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_a_copy_is_a_model_of_its_own(pool, how, options):
    wanted = pool.run(copied, "torch", how, {})
    same(pool.run(copied, "fcoll", how, options), wanted)


def halved(flat: torch.Tensor) -> torch.Tensor:
    return fcoll.all_reduce(flat / 2, "sum")


def copied_with_hooks(rank: int) -> None:
    for options in ({}, {"comm_hook": halved}):
        torch.manual_seed(0)
        model = fcoll.DataParallel(Net(), **options)
        if not options:
            model.register_comm_hook(None, twice)
        found = steps(model, rank, 1)
        same(steps(copy.deepcopy(model), rank, 1), found)


def twice(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


def test_a_copy_has_the_hooks(ranks2):
    ranks2.run(copied_with_hooks)


def cast(rank: int) -> None:
    torch.manual_seed(0)
    model = fcoll.DataParallel(Net())
    found = steps(model, rank)
    model.double()
    wide = steps(model, rank, dtype=torch.float64)
    torch.testing.assert_close([[g.float() for g in grads] for grads in wide], found)
    model.module.float()  # not by the wrapper
    torch.testing.assert_close(steps(model, rank), found)
    model.double()
    model.float()  # of one dtype again: other nodes of the graph all the same
    torch.testing.assert_close(steps(model, rank), found)


def test_a_model_that_is_cast_after_a_step(pool):
    pool.run(cast)


def wrapped_twice(rank: int, wrap: str, inner: str, options: dict) -> list:
    torch.manual_seed(0)
    within = WRAPS[inner](nn.Linear(4, 4), **options)
    return steps(WRAPS[wrap](nn.Sequential(within, nn.Linear(4, 4)), **options), rank, 4)


@pytest.mark.parametrize("inner", ["fcoll", "torch", "ours"])
def test_a_model_inside_a_model(pool, inner):
    wanted = pool.run(wrapped_twice, "torch", "torch", {})
    same(pool.run(wrapped_twice, "fcoll", inner, {}), wanted)
    same(pool.run(wrapped_twice, "fcoll", "fcoll", {"bucket_cap_mb": 1e-6}), wanted)


def wrapped_in_turn(rank: int) -> None:
    torch.manual_seed(0)
    net = Net()
    first, second = fcoll.DataParallel(net), fcoll.DataParallel(net)
    wanted = steps(first, rank)
    same(steps(second, rank), wanted)
    same(steps(first, rank), wanted)


def test_two_wrappers_of_one_model_take_turns(pool):
    pool.run(wrapped_in_turn)


def unfrozen(rank: int) -> list:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    model = fcoll.DataParallel(net)
    steps(model, rank)
    net[0].requires_grad_(True)
    return steps(model, rank)


def trained_whole(rank: int) -> list:
    torch.manual_seed(0)
    return steps(DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), rank)


def test_layers_that_are_no_longer_frozen_are_reduced(pool):
    same(pool.run(unfrozen), pool.run(trained_whole))


def raises_before_any_gradient(rank: int) -> None:
    torch.manual_seed(0)
    model = fcoll.DataParallel(Net())
    wanted = steps(model, rank)
    out = model(torch.ones(2, 4))
    out.register_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        (out * 2).sum().backward()
    with pytest.raises(ReductionUnfinished, match="exception ended the backward pass at"):
        model(torch.ones(2, 4))
    model.reducer.reset_state()
    same(steps(model, rank), wanted)
    x = torch.ones(2, 4, requires_grad=True)
    torch.autograd.grad(model(x).sum(), [x])  # reaches no parameter, as in a gradient penalty
    same(steps(model, rank), wanted)


def refuse(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_a_backward_pass_that_raises_before_any_gradient_is_told(pool):
    pool.run(raises_before_any_gradient)


def trained_in_a_thread(rank: int) -> None:
    torch.manual_seed(0)
    wanted = steps(DistributedDataParallel(Net()), rank)
    torch.manual_seed(0)
    model = fcoll.DataParallel(Net())  # its parameters' nodes belong to this thread
    with ThreadPoolExecutor(1) as other:
        same(other.submit(steps, model, rank).result(), wanted)


def test_a_model_that_another_thread_trains(pool):
    pool.run(trained_in_a_thread)
