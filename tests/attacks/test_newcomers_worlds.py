"""Programs that ask torchrun's variables for their rank and the number of ranks, in a trace."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import fcoll


def library_shards(n: int) -> bool:
    """As transformers and accelerate do: alone, if the environment tells of no world."""
    return int(os.environ.get("WORLD_SIZE", 1)) == n


def test_a_fake_world_has_torchruns_variables(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with fcoll.fake_world(dp=4, tp=2, rank=3):
        assert library_shards(8) and dist.get_world_size() == 8
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == "3"
    assert os.environ["RANK"] == "7" and "WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("read", [os.getenv, lambda name: os.environ[name]])
@pytest.mark.parametrize("inside", [False, True])
def test_a_rank_of_many_that_its_variable_tells_apart(read, inside):
    """One of each kind is traced: no rank stands for others if it may have been asked for."""

    def build(mesh):
        mine = int(read("RANK"))

        def step(x):
            if (int(read("RANK")) if inside else mine) == 21:
                return x
            return fcoll.all_reduce(x, "sum", mesh)

        return step, (torch.ones(8),)

    try:
        found = fcoll.check(build, mesh={"dp": 32})
    except fcoll.FcollError as error:
        assert "21" in str(error)
    else:
        assert not found.all_ranks


def test_ranks_that_only_ask_how_many_there_are_stay_alike():
    def build(mesh):
        assert library_shards(64)
        return lambda x: fcoll.all_reduce(x, "sum", mesh), (torch.ones(8),)

    assert fcoll.check(build, mesh={"dp": 64}).all_ranks


STATE = """
import os

class State:
    "As accelerate's PartialState: its attributes are those of the first object."
    _shared_state = {}

    def __init__(self):
        self.__dict__ = self._shared_state
        if not self.__dict__:
            self.process_index = int(os.environ["RANK"])
"""


@pytest.mark.parametrize("n", [4, 20])
def test_ranks_do_not_see_the_state_of_the_first(tmp_path, monkeypatch, n):
    """A library keeps its rank once for the process, where all ranks are traced."""
    (tmp_path / "newcomers_state.py").write_text(STATE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def build(mesh):
        from newcomers_state import State

        is_main = State().process_index == 0

        def step(x):
            return fcoll.all_reduce(x, "sum", mesh) if is_main else x

        return step, (torch.ones(8),)

    with pytest.raises(fcoll.FcollError, match=r"rank 1|ranks 0, 1"):
        fcoll.check(build, mesh={"dp": n})
    import newcomers_state

    assert newcomers_state.State._shared_state == {}
