"""Results of rules that are found again: never those of other arguments."""

import torch

from fcoll.proving import known_results
from fcoll.proving.known_results import KnownResults


def counted(results, name, *args, **kwargs):
    """How often was it computed, of two calls, and what the second gave."""
    computed = []

    def compute():
        computed.append(1)
        return torch.zeros(2), None

    results.of(name, args, kwargs, compute)
    out = results.of(name, args, kwargs, compute)
    return len(computed), out


def test_equal_arguments_are_computed_once():
    results = KnownResults()
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    count, (first, nothing) = counted(results, "add", x, [x.clone(), 2])
    assert count == 1 and nothing is None
    first.fill_(7)  # the caller's own
    assert counted(results, "add", x.clone(), [x, 2])[1][0].tolist() == [0, 0]


def test_other_arguments_are_other_calls():
    results = KnownResults()
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    changed = x.clone()
    changed[1, 2] += 1
    calls = [
        ("add", (x, 1), {}),
        ("sub", (x, 1), {}),
        ("add", (x, 1.0), {}),
        ("add", (x, True), {}),
        ("add", (x, None), {}),
        ("add", (x,), {"dim": 1}),
        ("add", (x,), {"keepdim": 1}),
        ("add", (changed, 1), {}),
        ("add", (x.view(3, 2), 1), {}),
        ("add", (x.t().contiguous().t(), 1), {}),  # of other strides
        ("add", (x.to(torch.int64), 1), {}),
        ("add", (x.view(torch.int64), 1), {}),
        ("add", ([x, x], 1), {}),
        ("add", ([x], x, 1), {}),
    ]
    made = []
    for name, args, kwargs in calls:
        results.of(name, args, kwargs, lambda: made.append(1) or torch.zeros(1))
    assert len(made) == len(calls)


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr(known_results, "MOST_BYTES", 100)
    results, made = KnownResults(), []
    xs = [torch.full((4,), float(i), dtype=torch.float64) for i in range(3)]
    for x in (*xs, xs[-1], xs[0]):
        results.of("neg", (x,), {}, lambda: made.append(1) or torch.zeros(1))
    assert len(made) == 4


def test_long_arguments_are_not_kept(monkeypatch):
    monkeypatch.setattr(known_results, "_LONGEST", 31)
    results = KnownResults()
    assert counted(results, "neg", torch.zeros(4, dtype=torch.float64))[0] == 2
