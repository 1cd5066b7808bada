"""Names of torch are replaced in one way, and all come back: nested, in any order, by threads."""

from __future__ import annotations

import threading
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll.ranks.patches import Patches, SharedPatches, patched, replaced_now, report, where


@pytest.fixture
def module() -> ModuleType:
    made = ModuleType("patched_module")
    made.answer = 1  # type: ignore[attr-defined]
    return made


class Base:
    def ask(self):
        return "base"


class Derived(Base):
    pass


def test_a_name_comes_back_after_an_error(module):
    with pytest.raises(KeyError), patched("a test", module, {"answer": 2}):
        assert module.answer == 2
        raise KeyError
    assert module.answer == 1


def test_what_a_base_class_has_is_its_own_again():
    with patched("a test", Derived, {"ask": lambda self: "ours"}):
        assert Derived().ask() == "ours" and Base().ask() == "base"
    assert "ask" not in vars(Derived) and Derived().ask() == "base"


@pytest.mark.parametrize("first_out", [0, 1])
def test_patches_may_end_in_any_order(module, first_out):
    both = [Patches("outer"), Patches("inner")]
    for i, patches in enumerate(both):
        patches.wrap(module, "answer", lambda there, i=i: 10 * there + i)
    assert module.answer == 101
    both[first_out].undo()
    assert module.answer == (101 if first_out == 0 else 10)  # what lies on top stays
    both[1 - first_out].undo()
    assert module.answer == 1


def test_one_that_is_undone_twice_leaves_others_alone(module):
    patches = Patches("a test")
    patches.replace(module, "answer", 2)
    patches.undo()
    with patched("another", module, {"answer": 3}):
        patches.undo()
        assert module.answer == 3


def test_shared_ones_end_with_the_last_user(module):
    calls = []

    def apply(patches: Patches) -> None:
        patches.replace(module, "answer", 2)
        patches.at_undo(lambda: calls.append(module.answer))

    shared = SharedPatches("a test", apply)
    inside, leave = threading.Barrier(2), threading.Event()

    def user() -> None:
        with shared:
            inside.wait(10)
            leave.wait(10)

    thread = threading.Thread(target=user)
    thread.start()
    with shared:
        inside.wait(10)
    assert module.answer == 2
    leave.set()
    thread.join()
    assert module.answer == 1 and calls == [2]  # ahead of the names


def test_a_call_is_ours_or_the_originals_by_the_thread(module):
    module.ask = lambda x: ("original", x)  # type: ignore[attr-defined]
    mine = threading.get_ident()
    with Patches("a test") as patches:
        ours = where(lambda: threading.get_ident() == mine, lambda old, x: ("ours", *old(x)))
        patches.wrap(module, "ask", ours)
        found = [module.ask(1)]
        thread = threading.Thread(target=lambda: found.append(module.ask(2)))
        thread.start()
        thread.join()
    assert found == [("ours", "original", 1), ("original", 2)]


def test_the_report_says_who_replaced_what():
    def step(x):
        names = replaced_now()["fcoll.simulate"]
        assert "torch.distributed.get_rank" in names
        assert "torch.distributed.get_rank  by fcoll.simulate" in report()
        return x

    fcoll.simulate(step, world_size=2)(torch.ones(2))
    assert "fcoll.simulate" not in replaced_now()


def in_a_trace(seen):
    def step(x):
        seen.append(replaced_now())
        return x + 1

    with fcoll.fake_world(dp=2):
        fcoll.trace(step, torch.ones(2))


def on_ranks(seen):
    fcoll.simulate_ranks(lambda rank: seen.append(replaced_now()), 2)


def in_a_mode(seen):
    with fcoll.local.LocalTensorMode(2):
        seen.append(replaced_now())


def under_a_profile(seen):
    with fcoll.profile():
        seen.append(replaced_now())


def while_served(seen):
    with fcoll.sharded.serve_torch():
        seen.append(replaced_now())


def on_our_reducer(seen):
    with fcoll.accelerate_ddp():
        seen.append(replaced_now())


@pytest.mark.parametrize(
    ("enter", "by"),
    [
        (in_a_trace, "a trace"),
        (on_ranks, "fcoll.simulate_ranks"),
        (in_a_mode, "fcoll.local"),
        (under_a_profile, "fcoll.profile"),
        (while_served, "fcoll.sharded.serve_torch"),
        (on_our_reducer, "fcoll.Reducer"),
    ],
)
def test_every_part_is_named_while_it_replaces_names_and_puts_them_back(enter, by):
    owners = (torch, torch.Tensor, dist, dist.ProcessGroup, dist.distributed_c10d, dist.Work)
    seen: list[dict[str, list[str]]] = []
    enter([])  # what is imported or replaced for good at a first use
    before = [dict(vars(owner)) for owner in owners]
    now = replaced_now()
    enter(seen)
    assert seen and all(len(names[by]) > len(now.get(by, [])) for names in seen)
    assert replaced_now() == now
    for owner, names in zip(owners, before, strict=True):
        changed = [n for n, v in vars(owner).items() if names.get(n, owner) is not v]
        assert not changed, owner
