"""torch's DistributedDataParallel is given traceable reducers when one is made, not before."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import fcoll
from fcoll.training.reducer import Reducer

X = torch.ones(2, 4)


def wrapped():
    return DDP(torch.nn.Linear(4, 4))


def reduces(trace):
    return [c.op.removesuffix("_") for c in trace.collectives if "reduce" in c.op]


@pytest.fixture(autouse=True)
def nothing_is_left():
    methods = DDP.__init__, DDP.__setstate__, dist._broadcast_coalesced
    yield
    assert methods == (DDP.__init__, DDP.__setstate__, dist._broadcast_coalesced)


def test_made_in_a_world_and_traced_there():
    with fcoll.fake_world(dp=2):
        model = wrapped()
        assert isinstance(model.reducer, Reducer) and isinstance(model.reducer, dist.Reducer)
        assert reduces(fcoll.trace(model, X)) == ["all_reduce"]
        assert isinstance(wrapped().reducer, Reducer), "the second one, too"


def test_made_in_the_traced_step():
    made = []

    def step(x):
        made.append(wrapped())
        return made[-1](x).sum()

    with fcoll.fake_world(dp=2):
        fcoll.trace(step, X)
        assert isinstance(made[0].reducer, Reducer)
        assert isinstance(wrapped().reducer, Reducer), "the trace ended before the world"


def test_made_while_another_is_traced():
    with fcoll.fake_world(dp=2):
        model = wrapped()

        def step(x):
            assert isinstance(wrapped().reducer, Reducer)
            return model(x).sum()

        assert reduces(fcoll.trace(step, X)) == ["all_reduce"]
        assert isinstance(wrapped().reducer, Reducer)


def test_a_trace_in_a_traced_step():
    inner = []

    def step(x):
        inner.append(fcoll.trace(wrapped(), x))
        return x + 1

    with fcoll.fake_world(dp=2):
        assert reduces(fcoll.trace(step, X)) == [] and reduces(inner[0]) == ["all_reduce"]
        assert isinstance(wrapped().reducer, Reducer)


def test_after_an_error_in_the_middle():
    def step(x):
        wrapped()
        raise KeyError("mine")

    with fcoll.fake_world(dp=2):
        with pytest.raises(KeyError):
            fcoll.trace(step, X)
        assert reduces(fcoll.trace(wrapped(), X)) == ["all_reduce"]


def test_copied_in_a_world():
    with fcoll.fake_world(dp=2):
        model = wrapped()
        assert isinstance(copy.deepcopy(model).reducer, Reducer)


def test_outside_of_worlds_it_is_torchs(solo):
    with fcoll.fake_world(dp=2):
        wrapped()
    assert not isinstance(wrapped().reducer, Reducer)
    assert isinstance(wrapped().reducer, dist.Reducer)


def test_in_a_thread(solo):
    """The world is made and used in one; here it is torch's again."""
    found = []

    def program():
        with fcoll.fake_world(dp=2):
            found.extend(reduces(fcoll.trace(wrapped(), X)))

    thread = threading.Thread(target=program)
    thread.start()
    thread.join(60)
    assert found == ["all_reduce"]
    assert not isinstance(wrapped().reducer, Reducer)
