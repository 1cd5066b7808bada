"""Mistakes with LocalTensors: AssertionErrors, as torch's own are, that say what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from local.worlds import fake_world

from fcoll.errors import FcollError
from fcoll.local import LocalRunnerMode, LocalTensor, LocalTensorMode, tensor_map
from fcoll.local import errors as local_errors


def of(*tensors: torch.Tensor) -> LocalTensor:
    return LocalTensor(dict(enumerate(tensors)))


def compared() -> None:
    bool(of(torch.ones(2), torch.ones(3)).shape[0] < 3)


def mixed() -> None:
    of(torch.ones(2)) + of(torch.ones(2), torch.ones(2))


def plain_input() -> None:
    x, plain = of(torch.ones(2), torch.ones(2)), torch.ones(4)
    with fake_world(2), LocalTensorMode(2):
        dist.all_gather_single(plain, x)


MISTAKES = {
    "NotLocal": (plain_input, "LocalTensor({rank: tensor})"),
    "BadRanks": (lambda: LocalTensorMode([0, 1]), "frozenset"),  # type: ignore[arg-type]
    "MixedRanks": (mixed, "same ranks"),
    "MismatchedShards": (lambda: of(torch.ones(2), torch.ones(2).int()), "alike on all ranks"),
    "ShardNeedsGrad": (lambda: of(torch.ones(2, requires_grad=True)), "Detach"),
    "RanksDiffer": (compared, "maybe_run_for_local_tensor"),
    "BadRunner": (LocalRunnerMode.current, "inside `with LocalRunnerMode"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_where_and_how_to_fix_it(name):
    make, hint = MISTAKES[name]
    with pytest.raises(AssertionError) as caught:
        make()
    error = caught.value
    assert type(error) is getattr(local_errors, name) and isinstance(error, FcollError)
    assert str(error).startswith(f"{name}: ") and hint in str(error)
    assert "test_local_errors.py:" in str(error)


def test_a_defect_of_a_call_on_stacks_is_seen(monkeypatch):
    """Only what a stack cannot do is run rank by rank instead."""
    from fcoll.local import op_on_stack

    def broken(*args: object) -> None:
        raise AttributeError("a defect")

    x = LocalTensor({0: torch.ones(2), 1: torch.ones(2)}) + 1
    monkeypatch.setattr(op_on_stack, "_elementwise", broken)
    monkeypatch.setattr(op_on_stack, "_same_on_all", broken)
    with pytest.raises(AttributeError, match="a defect"):
        x + x


def test_tensors_of_different_shapes_are_permuted():
    with fake_world(2), LocalTensorMode(2):
        x = of(torch.tensor([1.0]), torch.tensor([2.0, 3.0]))
        y = funcol.permute_tensor(x, [1, 0], dist.group.WORLD)
        assert {r: t.tolist() for r, t in y._local_tensors.items()} == {0: [2.0, 3.0], 1: [1.0]}


def test_a_plan_is_kept_for_calls_that_look_the_same_only():
    with fake_world(4), LocalTensorMode(4):
        x = of(*(torch.full((2,), float(r)) for r in range(4))) + 0
        for op, total in (("SUM", 6.0), ("MAX", 3.0), ("SUM", 6.0)):
            y = x.clone()
            dist.all_reduce(y, getattr(dist.ReduceOp, op))
            assert tensor_map(y, lambda r, t: t).reconcile().tolist() == [total] * 2
        for src in (1, 2):
            y = x.clone()
            dist.broadcast(y, src)
            assert y.reconcile().tolist() == [float(src)] * 2
        wide = torch.cat([x, x])
        dist.all_reduce(wide)
        assert wide.reconcile().tolist() == [6.0] * 4
