"""The reducer by itself: buckets as torch makes them, torch's calls and its errors."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fcoll
from fcoll.errors import (
    BadBuckets,
    BadCommHook,
    BadGradient,
    GraphChanged,
    ParametersDiffer,
    ReadyTwice,
    ReductionUnfinished,
    ResetElsewhere,
    StaticGraphTooLate,
)
from fcoll.training.arrivals import Arrivals
from fcoll.training.assignment import compute_bucket_assignment_by_size
from fcoll.training.parameter_check import verify_params_across_processes

SIZES = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(SIZES, st.lists(st.integers(1, 400), min_size=1, max_size=3), st.booleans())
@settings(max_examples=200)
def test_buckets_are_torchs(sizes, caps, some_sparse):
    tensors = [torch.empty(n, dtype=dtype) for n, dtype, _ in sizes]
    sparse = [s for *_, s in sizes] if some_sparse else []
    theirs = dist._compute_bucket_assignment_by_size(tensors, caps, sparse)
    assert compute_bucket_assignment_by_size(tensors, caps, sparse) == theirs


@given(SIZES, st.integers(1, 400))
def test_buckets_in_ready_order_leave_in_their_order(sizes, cap):
    tensors = [torch.empty(n, dtype=dtype) for n, dtype, _ in sizes]
    order = list(range(len(sizes)))[::-1]
    buckets, caps = compute_bucket_assignment_by_size(tensors, [cap], [], order)
    assert sorted(i for b in buckets for i in b) == sorted(order) and len(caps) == len(buckets)
    last = [max(order.index(i) for i in b) for b in buckets]
    assert last == sorted(last)


def reducer_of(model: nn.Module, **options) -> fcoll.Reducer:
    params = list(model.parameters())
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    whole = [list(range(len(params)))]
    return fcoll.Reducer(
        params, whole, [1 << 20], dist.group.WORLD, param_to_name_mapping=names, **options
    )


def iterate(reducer: fcoll.Reducer, forward) -> None:
    reducer.prepare_for_forward()
    reducer.rebuild_buckets()
    loss = forward()
    reducer.prepare_for_backward([loss])
    loss.backward()


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x, both=True):
        return (self.b(self.a(x)) if both else self.a(x)).sum()


X = torch.ones(3, 2)


@pytest.mark.parametrize(
    "buckets, why",
    [
        ([[]], "Empty bucket specified"),
        ([[0, 1]], "must have the same dtype"),
        ([[0], [7]], "Out of range variable index"),
    ],
)
def test_bad_buckets_are_torchs_errors(solo, buckets, why):
    params = [torch.ones(2, requires_grad=True), torch.ones(2).double().requires_grad_()]
    for kind in (dist.Reducer, fcoll.Reducer):
        with pytest.raises(RuntimeError, match=why):
            kind(params, buckets, [1], dist.group.WORLD)
    with pytest.raises(BadBuckets, match="at least one parameter"):
        fcoll.Reducer([], [], [], dist.group.WORLD)


def test_an_unused_parameter_is_named(solo):
    model = Branch()
    reducer = reducer_of(model)
    iterate(reducer, lambda: model(X, both=False))
    with pytest.raises(ReductionUnfinished) as raised:
        iterate(reducer, lambda: model(X))
    text = str(raised.value)
    assert raised.value.parameters == ("b.weight", "b.bias")
    assert "Expected to have finished reduction in the prior iteration" in text
    assert "`find_unused_parameters=True`" in text and "skipped b, or" in text
    me = f"which did not receive grad for rank {dist.get_rank()}"
    assert f"Parameters {me}: b.weight, b.bias" in text
    assert f"Parameter indices {me}: 2 3" in text
    reducer.reset_state()  # and it can go on
    iterate(reducer, lambda: model(X))
    assert model.b.weight.grad is not None


def test_ready_twice_names_both_backward_calls(solo):
    model = Branch()
    reducer = reducer_of(model)
    reducer.prepare_for_forward()
    a, b = model.a(X).sum(), model.a(X * 2).sum()
    reducer.prepare_for_backward([a, b])
    a.backward()  # first
    with pytest.raises(ReadyTwice) as raised:
        b.backward()  # then
    text = str(raised.value)
    line = test_ready_twice_names_both_backward_calls.__code__.co_firstlineno
    assert f"test_reducer.py:{line + 6}, then at tests" in text.replace("First at", "")
    assert f"test_reducer.py:{line + 8}." in text and "with name a.bias" in text
    assert "Expected to mark a variable ready only once" in text


def test_a_static_graph_that_changes_says_how(solo):
    model = Branch()
    reducer = reducer_of(model)
    reducer.set_static_graph()

    def first():
        reducer.prepare_for_forward()
        loss = model(X, both=False)
        reducer.prepare_for_backward([])
        loss.backward()
        reducer.delay_all_reduce()

    first()
    assert model.b.weight.grad is None  # nobody used it
    with pytest.raises(GraphChanged, match=r"Parameter b.\w+ .* was unused in the first iteration"):
        iterate(reducer, lambda: model(X))
    with pytest.raises(StaticGraphTooLate, match="before training loop starts"):
        reducer.set_static_graph()


def test_buckets_are_kept(solo):
    """An argument that torch has from 2.15 on. Its DDP passes all of them."""
    params = [nn.Parameter(torch.ones(2))]
    with pytest.warns(UserWarning, match="lazy_bucket_allocation=True saves no memory"):
        fcoll.Reducer(params, [[0]], [100], solo, lazy_bucket_allocation=True)


def test_a_hook_is_checked(solo):
    model = Branch()
    reducer = reducer_of(model)
    with pytest.raises(BadCommHook, match="is a function"):
        reducer.register_comm_hook(None, 3)
    reducer.register_comm_hook(None, lambda state, bucket: 1)
    with pytest.raises(RuntimeError, match="can only be called once"):
        reducer.register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(RuntimeError, match=r"must return a torch.futures.Future object, but got"):
        iterate(reducer, lambda: model(X))


def test_hooks_go_with_the_reducer(solo):
    model = Branch()
    reducer = reducer_of(model)
    iterate(reducer, lambda: model(X))
    gone = weakref.ref(reducer)
    del reducer
    gc.collect()
    assert gone() is None
    model(X, both=False).backward()  # nobody listens
    again = reducer_of(model)
    iterate(again, lambda: model(X))


def test_what_a_hook_sees(solo):
    model = Branch()
    reducer = reducer_of(model)
    seen = []

    def hook(state, bucket):
        seen.append(bucket)
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * state)
        return future

    reducer.register_comm_hook(3.0, hook)
    iterate(reducer, lambda: model(X))
    (bucket,) = seen
    assert isinstance(bucket, dist.GradBucket) and bucket.index() == 0 and bucket.is_last()
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in model.parameters()]
    assert all(a is b for a, b in zip(bucket.parameters(), model.parameters(), strict=True))
    assert torch.equal(model.b.bias.grad, torch.full((2,), 9.0))
    assert reducer.get_backward_stats()[3] > 0


def test_buckets_are_rebuilt_in_the_order_of_gradients(solo):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    reducer = reducer_of(model, first_bucket_bytes_cap=1000, bucket_bytes_cap=20_000)
    for _ in range(2):
        iterate(reducer, lambda: model(torch.ones(1, 64)).sum())
    assert reducer.buckets[0].members == ("3.bias", "3.weight")
    assert [len(b.members) for b in reducer.buckets] == [2, 4, 2]
    assert sum(b.bytes for b in reducer.buckets) == 4 * (64 * 64 + 64) * 4


def test_a_gradient_of_another_dtype(solo):
    model = Branch()
    reducer = reducer_of(model)
    model.double()
    with pytest.raises(BadGradient, match=r"Expected torch.float32, got torch.float64"):
        iterate(reducer, lambda: model(X.double()))
    reducer = reducer_of(model.float())
    iterate(reducer, lambda: model(X))
    model.double()  # the buckets are rebuilt in another dtype, the parameters' nodes are not
    with pytest.raises(BadGradient, match=r"Expected torch.float32, got torch.float64"):
        iterate(reducer, lambda: model(X.double()))


# -- the same where gradients are counted in C++ ---

BOTH = [
    test_an_unused_parameter_is_named,
    test_ready_twice_names_both_backward_calls,
    test_a_static_graph_that_changes_says_how,
    test_a_hook_is_checked,
    test_hooks_go_with_the_reducer,
    test_what_a_hook_sees,
    test_buckets_are_rebuilt_in_the_order_of_gradients,
    test_a_gradient_of_another_dtype,
]


def counted_in_cpp(rank: int) -> None:
    assert not isinstance(reducer_of(Branch()).arrivals, Arrivals)
    for test in BOTH:
        test(None)


def test_errors_and_hooks_in_cpp(shared2):
    shared2.run(counted_in_cpp)


def test_a_gradient_with_other_strides_or_a_graph_is_copied(shared2):
    shared2.run(unusual_gradients)


def unusual_gradients(rank: int) -> None:
    for text in (r".*backward\(\) with create_graph=True", "grad and param do not", "Grad strides"):
        warnings.filterwarnings("ignore", text)
    torch.manual_seed(0)  # the same model on all ranks
    model = Branch()
    reducer = reducer_of(model, gradient_as_bucket_view=True)
    for _ in range(2):
        for p in model.parameters():
            p.grad = None
        model.a.weight.grad = torch.ones(2, 2).t().contiguous().t() * (rank + 1)
        reducer.prepare_for_forward()
        loss = model(X) * (rank + 1)
        reducer.prepare_for_backward([loss])
        loss.backward(create_graph=True)
        found = [p.grad.clone() for p in model.parameters()]
        alone = torch.autograd.grad(model(X), list(model.parameters()))
        alone = [1.5 * g.detach() for g in alone]  # the mean of both ranks
        alone[0] = alone[0] + 1.5
        for mine, right in zip(found, alone, strict=True):
            torch.testing.assert_close(mine, right)


# -- parameters that differ between ranks ---


def verify(rank: int, kind: str) -> str:
    params = [torch.ones(2, 3), torch.ones(4, 4)]
    if rank and kind == "count":
        params.pop()
    elif rank and kind == "sizes":
        params[1] = torch.ones(2, 8)
    elif rank and kind == "strides":
        params[1] = params[1].t()
    elif rank and kind == "dtype":
        params[1] = params[1].double()
    with pytest.raises(ParametersDiffer) as raised:
        verify_params_across_processes(dist.group.WORLD, params, names=["a.weight", "b.weight"])
    return str(raised.value)


def reset_on_one_rank(rank: int) -> None:
    if rank == 0:
        with pytest.raises(ResetElsewhere, match="Call it on all ranks"):
            reducer_of(Branch()).reset_state()
    else:
        fcoll.all_reduce(torch.full((3,), 2)).tolist()


def test_a_reset_that_meets_another_collective():
    fcoll.simulate_ranks(reset_on_one_rank, 2)


def test_parameters_that_differ_are_named_on_all_ranks(ranks2):
    for rank, text in enumerate(ranks2.run(verify, "count")):
        assert f"Rank {rank} has {2 - rank} params, while rank {1 - rank} has" in text
    for kind in ("sizes", "strides", "dtype"):
        for rank, text in enumerate(ranks2.run(verify, kind)):
            assert f"[{rank}]: params[1] (b.weight) in this process with {kind}" in text
            assert f"appears not to match {kind} of the same param in process {1 - rank}" in text


def verify_on_three(rank: int) -> str:
    with pytest.raises(ParametersDiffer) as raised:
        verify_params_across_processes(dist.group.WORLD, [torch.ones(2, 3 + rank // 2)])
    return str(raised.value)


def test_ranks_that_agree_are_told_of_one_that_differs():
    for rank, text in enumerate(fcoll.simulate_ranks(verify_on_three, 3)):
        other = 0 if rank == 2 else 2
        assert f"[{rank}]: params[0] in this process with sizes" in text
        assert f"in process {other}: " in text


# -- gradients that become ready in another order on each rank ---


class Either(nn.Module):
    """Two branches, computed in the given order: the last one's gradients are ready first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, order: str):
        return sum(getattr(self, name)(x).sum() for name in order)


def in_another_order(rank: int):
    module = fcoll.DataParallel(Either(), bucket_cap_mb=1e-5)
    for _ in range(3):
        module.zero_grad()
        module(torch.full((1, 4), rank + 1.0), "ba" if rank else "ab").backward()
    members = [bucket.members for bucket in module.reducer.buckets]
    return members, [p.grad.clone() for p in module.parameters()]


def test_rank_0_decides_on_the_order_of_buckets():
    (zero, grads), (one, _) = fcoll.simulate_ranks(in_another_order, 2)
    assert zero == one and {name for name in zero[0]} <= {"b.weight", "b.bias"}
    assert all((g == (1.0 if g.ndim == 1 else 1.5)).all() for g in grads)
