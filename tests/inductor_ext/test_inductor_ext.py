"""Compiled collectives on real ranks: the values of eager, the same bits on every rank."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import reduced
from programs import (
    bits,
    busy,
    compiled,
    forms,
    leaves,
    loaded,
    no_graph_cache,
    normal,
    results_and_gradients,
)
from ranks import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import fcoll
import inductor_ext
from inductor_ext.lower import registry

pytestmark = pytest.mark.usefixtures("compiled")
Tensor = torch.Tensor

COMPILE_S = 170.0  # a few graphs, on a machine that does something else too


@pytest.fixture(params=["shared2", "shared4"])
def shared(request: pytest.FixtureRequest) -> RankPool:
    return request.getfixturevalue(request.param)


# -- every reduction and dtype, in every form ---

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
REDUCTIONS = [
    *itertools.product(FLOATS, ("sum", "avg", "product", "min", "max")),
    *itertools.product(INTS, ("sum", "product", "min", "max")),
]
GATHERED = (torch.float32, torch.bfloat16, torch.int64)
SCATTERED = [(torch.float32, "sum"), (torch.float32, "max"), (torch.bfloat16, "avg")]

# Fused, each is read by a kernel of its own, which takes seconds to compile: some of them.
FUSED = [
    *itertools.product((torch.float32,), ("sum", "avg", "product", "min", "max")),
    *itertools.product((torch.float64, torch.bfloat16, torch.float16), ("sum",)),
    (torch.int64, "max"),
]

FORMS: dict[str, dict[str, Any]] = {
    "fused": {"overlap": False, "merge_bytes": 0},
    "opaque": {"overlap": False, "merge_bytes": 0, "form": "opaque"},
    "kernel": {"overlap": False, "merge_bytes": 0, "form": "kernel"},
    "split": {"merge_bytes": 0},  # starts go up and waits down: products are in between
}

Key = tuple[str, torch.dtype, str]


def calls_of(form: str) -> list[Key]:
    return [
        *(("all_reduce", *call) for call in (FUSED if form == "fused" else REDUCTIONS)),
        *(("gather", dtype, "") for dtype in GATHERED),
        *(("scatter", *call) for call in SCATTERED),
    ]


def every_collective(ms: dict[Key, Tensor]) -> dict[Key, Tensor]:
    """Each of a product of its own, so that the product is written where the peers read it."""
    out = {}
    for (kind, dtype, op), m in ms.items():
        if kind == "all_reduce":
            out[kind, dtype, op] = fcoll.all_reduce(m @ m, op)
        elif kind == "gather":
            out[kind, dtype, op] = fcoll.all_gather_into_tensor(m @ m)
        else:
            out[kind, dtype, op] = fcoll.reduce_scatter_tensor(m @ m, op)
    return out


def in_form(rank: int, form: str) -> dict[str, Any]:
    calls = calls_of(form)
    ms = {key: normal(8, 8, rank=rank, seed=i, dtype=key[1]) for i, key in enumerate(calls)}
    before = loaded()
    # Inductor would move products between a start and its wait.
    options = {"reorder_for_locality": False}
    with no_graph_cache(**FORMS[form]):
        f = compiled(every_collective, options=options)
        got = f(ms)
        again = f({key: m + 1 for key, m in ms.items()})
        third = f(ms)  # in the memory of the first
    m = ms["all_reduce", torch.bfloat16, "sum"]
    gloo = m @ m
    dist.all_reduce(gloo)
    return {
        "forms": [form for _, form in forms(before)],
        "got": got,
        "eager": {key: y + 0 for key, y in every_collective(ms).items()},
        "parts": {key: m @ m for key, m in ms.items()},
        "same": sum(bits(got[key]) == bits(third[key]) for key in calls),
        "other": sum(bits(got[key]) != bits(again[key]) for key in calls),
        "gloo": gloo,
    }


@pytest.mark.parametrize("form", FORMS)
def test_every_reduction_and_dtype(shared, form):
    ranks = shared.run(in_form, form, timeout=COMPILE_S)
    calls = calls_of(form)
    for r in ranks:
        # An opaque form of a gather would only be a copy; after the last start nothing is computed.
        fused = {"fused": len(calls), "opaque": len(GATHERED), "split": 1}.get(form, 0)
        assert r["forms"].count("fused") == fused
        assert r["forms"].count(form) == (len(calls) if form == "fused" else len(calls) - fused)
        assert r["same"] == len(calls) and r["other"] > len(calls) // 2
        torch.testing.assert_close(r["got"], r["eager"], rtol=1e-6, atol=1e-6)
    first = ranks[0]["got"]
    for key in calls:
        if key[0] == "all_reduce":
            assert len({bits(r["got"][key]) for r in ranks}) == 1, key
            check_rounding(first[key], [r["parts"][key] for r in ranks], key[2])
    key = ("all_reduce", torch.bfloat16, "sum")
    want = sum(r["parts"][key].double() for r in ranks)
    ours = (first[key].double() - want).abs().sum()
    theirs = (ranks[0]["gloo"].double() - want).abs().sum()
    assert ours < theirs if len(ranks) > 2 else ours <= theirs


def check_rounding(got: Tensor, parts: list[Tensor], op: str) -> None:
    """f32 to 1e-6 of the exact value, 16-bit floats rounded once, integers exact."""
    if not got.dtype.is_floating_point:
        assert torch.equal(got, reduced(parts, op)), (got.dtype, op)
        return
    parts = [p.double() for p in parts]
    want = reduced(parts, op)
    # Where parts cancel, the rounding is that of their sizes.
    scale = reduced([p.abs() for p in parts], op) if op in ("sum", "avg") else want.abs()
    half_a_unit = torch.finfo(got.dtype).eps / 2 if got.element_size() == 2 else 0
    allowed = scale * 1e-6 + want.abs() * half_a_unit + torch.finfo(got.dtype).tiny
    assert bool(((got.double() - want).abs() <= allowed).all()), (got.dtype, op)


# -- where the argument comes from ---


def where_from(x: Tensor, w: Tensor, scalar: Tensor, empty: Tensor) -> dict[str, Any]:
    n = dist.get_world_size()
    h = x @ w  # used several times
    out = {
        "input": fcoll.all_reduce(x) + 1,
        "view of a product": fcoll.all_reduce((x @ w[:, :4]).view(2, -1)) + 1,
        "three dims": fcoll.all_reduce((w @ w).view(2, 4, -1)).sum(1),
        "part of a product": fcoll.all_reduce((x @ w)[1:3]) * 2,
        "transposed": fcoll.all_reduce((x @ w).t()) * 2,
        "expanded": fcoll.all_reduce(x[:1].expand(4, 8)) * 2,
        "used again": (fcoll.all_reduce(h, "max") + h, h),
        "alone": fcoll.all_reduce(h, "min"),
        "scalar": fcoll.all_reduce(scalar) + 1,
        "empty": fcoll.all_reduce(empty * 2) + 1,
        "gathered input": fcoll.all_gather_into_tensor(x) * 3,
        "gathered part": fcoll.all_gather_into_tensor(x.relu())[1],
        "gathered along 1": fcoll.all_gather_into_tensor(x, dim=1) + 1,
        "gathered bool": ~fcoll.all_gather_into_tensor(x > 0),
        "uneven": fcoll.all_gather_into_tensor(
            x[: 1 + dist.get_rank()], sizes=list(range(1, n + 1))
        ),
        "scattered input": fcoll.reduce_scatter_tensor(x, "avg") + 1,
        "scattered along 1": fcoll.reduce_scatter_tensor(w, "sum", dim=1) + 1,
        "into a reduction": fcoll.all_reduce(x @ w).sum(),
        "into a product": fcoll.all_reduce(x @ w) @ w,
        "all to all": fcoll.all_to_all_single(x) + 1,
    }
    return out


def placed(rank: int) -> tuple[Any, Any, list[tuple[str, str]]]:
    args = [normal(4, 8, rank=rank), normal(8, 8, rank=rank, seed=1)]
    args += [torch.tensor(rank + 0.5), torch.empty(0, 3)]
    kept = args[0].clone()
    before = loaded()
    with no_graph_cache():
        f = compiled(where_from)
        f(*args)
        got = f(*args)
    want = {key: leaves(value) for key, value in where_from(*args).items()}
    assert torch.equal(args[0], kept)
    return {key: leaves(value) for key, value in got.items()}, want, forms(before)


def test_wherever_the_argument_comes_from(shared):
    for got, want, used in shared.run(placed, timeout=COMPILE_S):
        for key, value in want.items():
            torch.testing.assert_close(
                got[key], value, rtol=1e-5, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
            )
        assert {form for _, form in used} >= {"kernel"} and len(used) > 8


# -- again and again ---


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def chain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Every form that is read in place, each needing the one before."""
    h = x
    for _ in range(3):
        h = norm(fcoll.all_reduce(h @ w) + h)
    part = fcoll.reduce_scatter_tensor(h @ w)
    whole = fcoll.all_gather_into_tensor(norm(part))
    late = fcoll.all_reduce(whole @ w, "max")
    between = (h @ w) @ w
    return late + between, h


def repeated(rank: int, times: int) -> int:
    n = dist.get_world_size()
    w = normal(16, 16, rank=rank) / 8
    xs = [normal(8, 16, rank=0, seed=i) for i in range(times)]
    slow = random.Random(rank)  # each rank is slow at times of its own
    with no_graph_cache():
        f = compiled(chain)
        f(xs[0], w)
        got = []
        for x in xs:
            if slow.random() < 1 / n:
                busy(slow.choice((20, 200, 1000)))
            got.append(f(x, w))
    different = 0
    for x, y in zip(xs, got, strict=True):
        want = chain(x, w)
        close = [torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(y, want, strict=True)]
        different += not all(close)
    return different


def test_200_times_with_ranks_that_are_slow_at_times(shared):
    assert not any(shared.run(repeated, 200, timeout=COMPILE_S))


def same_bits(rank: int, times: int) -> list[bytes]:
    w, v = normal(16, 16, rank=rank) / 8, normal(16, 16, rank=99) / 8

    def f(x: Tensor) -> Tensor:
        y = norm(fcoll.all_reduce(x @ w))
        return norm(fcoll.all_gather_into_tensor(y[:2] @ v).sum(0) + y)

    with no_graph_cache():
        g = compiled(f)
        return [bits(g(normal(8, 16, rank=rank, seed=i))) for i in range(times)]


def test_the_same_bits_on_every_rank(shared):
    ranks = shared.run(same_bits, 50, timeout=COMPILE_S)
    assert all(r == ranks[0] for r in ranks)
    assert len(set(ranks[0])) == 50


# -- several at once ---


def alternating(rank: int) -> int:
    """Two graphs of equal shapes, eager calls between them, and eager results under way."""
    w = normal(8, 8, rank=rank)

    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x @ w) + 1

    def g(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x @ w, "max") * fcoll.all_reduce(x @ w, "min")

    checked = 0
    with no_graph_cache(merge_bytes=0):
        torch.compiler.reset()
        cf, cg = (torch.compile(h, backend="fcoll", fullgraph=True) for h in (f, g))
        for i in range(40):
            x = normal(8, 8, rank=rank, seed=i)
            pending = [fcoll.all_reduce(x + j, "sum") for j in range(i % 4)]
            a = cf(x)
            dist.all_reduce(x.clone())
            b = cg(x)
            waited = [fcoll.wait_tensor(y) for y in pending]
            c = cf(x * 2)
            torch.testing.assert_close(a, f(x) + 0)
            torch.testing.assert_close(b, g(x) + 0)
            torch.testing.assert_close(c, f(x * 2) + 0)
            for j, y in enumerate(waited):
                torch.testing.assert_close(y, fcoll.all_reduce(x + j, "sum") + 0)
            checked += 1
    return checked


def test_two_graphs_eager_calls_and_pending_results_on_one_group(shared2):
    assert shared2.run(alternating, timeout=COMPILE_S) == [40, 40]


def two_axes(rank: int) -> list[tuple[str, str]]:
    """Two groups in one graph, and a third of some ranks only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    w = normal(8, 8, rank=rank)
    before = loaded()

    def f(x: Tensor) -> Tensor:
        y = norm(fcoll.all_reduce(x @ w, "sum", (mesh, "tp")))
        part = fcoll.reduce_scatter_tensor(y @ w, "avg", (mesh, "dp"))
        return fcoll.all_gather_into_tensor(part, (mesh, "dp")) + fcoll.all_reduce(x @ w, "max")

    args = (normal(4, 8, rank=rank),)
    with no_graph_cache():
        g = compiled(f)
        for _ in range(3):
            got, want = results_and_gradients(g, *args), results_and_gradients(f, *args)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return forms(before)


def test_several_groups(shared4):
    for used in shared4.run(two_axes, timeout=COMPILE_S):
        assert {form for _, form in used} <= {"fused", "split"}
        assert len(used) >= 6  # forward and backward


def unlike_ranks(rank: int) -> list[int]:
    """The ranks issue the same collectives, and compute other things between them."""
    w = torch.eye(64)

    def f(x: Tensor) -> Tensor:
        a = fcoll.all_reduce(x @ w)
        if rank == 0:  # each is read before the next one
            for _ in range(3):
                a = fcoll.all_reduce(a @ w)
            return a + 1
        late = [fcoll.all_reduce((x * k) @ w) for k in (2, 3, 4)]
        return a + sum(late)

    wrong = []
    with no_graph_cache(overlap=False, merge_bytes=0):
        g = compiled(f)
        for i in range(30):
            x = torch.full((64, 64), rank + 1.0 + i)
            got, want = g(x), f(x) + 0
            wrong += [] if torch.equal(got, want) else [i]
    return wrong


def test_ranks_that_compute_other_things_in_between(shared2):
    assert shared2.run(unlike_ranks, timeout=COMPILE_S) == [[], []]


# -- models ---

HIDDEN, HEADS, TOKENS = 16, 4, 8


class Block(nn.Module):
    """Attention and an MLP, split by heads and by hidden units."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // n, bias=False)
        self.proj = nn.Linear(HIDDEN // n, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN // n, bias=False)
        self.down = nn.Linear(4 * HIDDEN // n, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = fcoll.identity(norm(x))  # its gradient is summed over the ranks
        q, k, v = (
            t.view(TOKENS, HEADS // self.n, -1).transpose(0, 1) for t in self.qkv(h).chunk(3, -1)
        )
        scores = torch.softmax(q @ k.transpose(1, 2) / 2, -1)
        mixed = (scores @ v).transpose(0, 1).reshape(TOKENS, -1)
        x = x + fcoll.all_reduce(self.proj(mixed), grad="identity")
        h = fcoll.identity(norm(x))
        return x + fcoll.all_reduce(self.down(torch.relu(self.up(h))), grad="identity")


def trained(rank: int, checkpointed: bool) -> tuple[list[float], list[float], list[Any]]:
    """The losses of a few steps, compiled and not."""
    n = dist.get_world_size()

    def losses(compile_it: bool) -> list[float]:
        torch.manual_seed(rank)
        model = Block(n)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def loss_of(x: Tensor) -> Tensor:
            y = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            return (y - 1).square().mean()

        step = compiled(loss_of) if compile_it else loss_of
        seen = []
        for i in range(4):
            loss = step(normal(TOKENS, HIDDEN, rank=0, seed=i % 2))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    before = loaded()
    with no_graph_cache():
        got = losses(True)
    return got, losses(False), forms(before)


# Dynamo makes an instance of torch.autograd.Function, which warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_a_tensor_parallel_block_trains_as_in_eager(shared2, checkpointed):
    ranks = shared2.run(trained, checkpointed, timeout=COMPILE_S)
    for got, want, used in ranks:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert got[2] < got[0]
        assert {form for _, form in used} <= {"fused", "split"}
        assert len(used) >= 3  # two, and that of the gradient of the second half's input
    assert ranks[0][0] == ranks[1][0]  # the same loss, to the bit


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def dtensor_model(rank: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Any]]:
    """Sequence parallel by torch's parallelize_module: results and gradients, compiled, eager and
    of one process alone."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = normal(TOKENS, HIDDEN, rank=0)

    def model() -> Mlp:
        torch.manual_seed(0)
        return Mlp()

    def results(model: nn.Module, x: Tensor) -> list[Tensor]:
        y = model(x)
        y.square().sum().backward()
        found = [y, *(p.grad for p in model.parameters())]
        found = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
        return [t.detach() + 0 for t in found]

    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    split = distribute_tensor(x, mesh, [Shard(0)])
    before = loaded()
    with no_graph_cache():
        made = parallelize_module(model(), mesh, plan)
        got = results(compiled(made), split)
    eager = results(parallelize_module(model(), mesh, plan), split)
    return got, eager, results(model(), x), forms(before)


def test_dtensor_sequence_parallel(shared2):
    for got, eager, alone, used in shared2.run(dtensor_model, timeout=COMPILE_S):
        torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got, eager, rtol=1e-5, atol=1e-5)
        ops = {op for op, form in used if form in ("fused", "split")}
        assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= ops, used


def data_parallel(rank: int) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    """One graph with a step's loss, its gradients and their mean over the ranks."""
    w = {"a": normal(16, 16, rank=0), "b": normal(16, 4, rank=0, seed=1), "c": torch.ones(4)}

    def loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.relu(x @ w["a"]) @ w["b"] + w["c"]).square().mean()

    def step(w: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        grads = torch.func.grad(loss)(w, x)
        return {key: w[key] - 0.1 * fcoll.all_reduce(g, "avg") for key, g in grads.items()}

    before = loaded()
    x = normal(8, 16, rank=rank, seed=2)
    with no_graph_cache():
        got = leaves(compiled(step)(w, x))
    return got, leaves(step(w, x)), forms(before)


def test_gradients_averaged_in_the_graph(shared2):
    ranks = shared2.run(data_parallel, timeout=COMPILE_S)
    for got, want, used in ranks:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert used and {form for _, form in used} <= {"fused", "split"}
    assert [bits(y) for y in ranks[0][0]] == [bits(y) for y in ranks[1][0]]


# -- ways to compile ---


def every_size(rank: int) -> list[str]:
    """Sizes on both sides of the limit for parts that are read in place."""

    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x.relu()) + fcoll.all_gather_into_tensor(x)[: x.shape[0]]

    before = loaded()
    with no_graph_cache(one_shot_bytes={2: 4096}, merge_bytes=0):
        g = compiled(f, dynamic=True)
        for rows in (8, 12, 64, 200, 9, 400, 33):  # 16 floats each: the limit is 64 rows
            x = normal(rows, 16, rank=rank)
            torch.testing.assert_close(g(x), f(x) + 0)
    return [form for _, form in forms(before)]


def test_sizes_that_vary_across_the_limit(shared2):
    for used in shared2.run(every_size, timeout=COMPILE_S):
        # a graph for those that fit and one for those that do not; no more
        assert len(used) == 4
        assert used.count("kernel") == 2


def block(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return norm(fcoll.all_reduce(x @ w) + residual)


def block_args(rank: int) -> list[Tensor]:
    return [normal(4, 16, rank=rank), normal(16, 16, rank=rank, seed=1), normal(4, 16, rank=0)]


def by_mode(rank: int, options: dict[str, Any]) -> list[tuple[str, str]]:
    args = block_args(rank)
    before = loaded()
    with no_graph_cache(), torch.no_grad():
        f = compiled(block, **options)
        for _ in range(3):
            torch.testing.assert_close(f(*args), block(*args) + 0, rtol=1e-5, atol=1e-5)
    return forms(before)


def test_max_autotune(shared2):
    options = {"mode": "max-autotune-no-cudagraphs"}
    assert shared2.run(by_mode, options, timeout=COMPILE_S) == [[("all_reduce", "fused")]] * 2


@pytest.mark.slow
def test_cpp_wrapper(shared2):
    options = {"options": {"cpp_wrapper": True}}
    assert shared2.run(by_mode, options, timeout=COMPILE_S) == [[("all_reduce", "fused")]] * 2


def frozen(rank: int) -> list[tuple[str, str]]:
    torch.manual_seed(rank)
    linear = nn.Linear(16, 16).eval()

    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(linear(x)) + x

    before = loaded()
    x = normal(4, 16, rank=rank)
    with no_graph_cache(), torch.no_grad():
        g = compiled(f, options={"freezing": True})
        for _ in range(3):
            torch.testing.assert_close(g(x), f(x) + 0, rtol=1e-5, atol=1e-5)
    return forms(before)


def test_freezing(shared2):
    assert shared2.run(frozen, timeout=COMPILE_S) == [[("all_reduce", "fused")]] * 2


def default_backend(rank: int) -> list[list[tuple[str, str]]]:
    args = block_args(rank)
    seen = []

    def run() -> None:
        before = loaded()
        got = compiled(block, backend="inductor")(*args)
        torch.testing.assert_close(got, block(*args) + 0, rtol=1e-5, atol=1e-5)
        seen.append(forms(before))

    with no_graph_cache():
        inductor_ext.install()
        run()
        inductor_ext.uninstall()
        run()
    return seen


def test_install_and_uninstall(shared2):
    for installed, uninstalled in shared2.run(default_backend, timeout=COMPILE_S):
        assert installed == [("all_reduce", "fused")]
        assert uninstalled == []


def without_shared_memory(rank: int) -> list[tuple[str, str]]:
    args = block_args(rank)
    before = loaded()
    with no_graph_cache():
        got = results_and_gradients(compiled(block), *args)
    torch.testing.assert_close(got, results_and_gradients(block, *args), rtol=1e-5, atol=1e-5)
    return forms(before)


def test_without_the_native_part_it_is_stock_inductor(ranks2):
    for used in ranks2.run(without_shared_memory, timeout=COMPILE_S):
        assert {form for _, form in used} <= {"stock", "kernel"}


def one_rank(rank: int) -> None:
    """A group of one: nothing to communicate, and nothing to wait for."""

    def f(x: Tensor) -> Tensor:
        return fcoll.all_reduce(x @ x, "sum", [rank]) + fcoll.all_reduce(x)

    x = normal(4, 4, rank=rank)
    with no_graph_cache():
        torch.testing.assert_close(compiled(f)(x), f(x) + 0)


def test_groups_of_one_rank(shared2):
    shared2.run(one_rank, timeout=COMPILE_S)


# -- lowerings of users ---


def own_lowering(rank: int) -> list[int]:
    called = []

    def f(x: Tensor) -> Tensor:
        return fcoll.broadcast(x.relu(), 0) + 1

    x = normal(4, 4, rank=rank)
    with no_graph_cache():
        compiled(f)(x)
        before = registry.lowering_of("broadcast")

        @registry.lowers("broadcast")
        def noted(*args: Any, **kwargs: Any) -> Any:
            called.append(1)
            return before(*args, **kwargs)

        torch.testing.assert_close(compiled(f)(x), f(x) + 0)
        with_it = len(called)
        registry.lowers("broadcast")(before)
        torch.testing.assert_close(compiled(f)(x), f(x) + 0)
    return [with_it, len(called)]


def test_a_lowering_of_a_users(shared2):
    assert shared2.run(own_lowering, timeout=COMPILE_S) == [[1, 1]] * 2
