"""``fcoll.verify``: 60 wrong graphs are refuted, 40 right ones proved, whoever made them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import row_programs as rows
import stacked_ranks
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._inductor.fx_passes import bucketing, overlap_scheduling
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.distributed.fsdp import fully_shard

import fcoll
from fcoll.errors import GraphNotProved
from fcoll.graph.nodes import is_start, is_wait, start_of

aten = torch.ops.aten
Graph = fx.GraphModule


def reduces(x, w, n, group):
    """Several small all-reduces, as of gradients."""
    return tuple(rows.reduced((x[: 2 * i] @ w) * i, group) for i in range(1, 6))


def gathers(x, w, n, group):
    """Parameters gathered and used."""
    parts = [rows.gathered(w[: i + 1] * i, n, group) for i in range(1, 5)]
    return tuple((x @ part[:8].t()).sum(0) for part in parts)


def scatters(x, w, n, group):
    return tuple(rows.scattered((x * i) @ w, n, group) * 2 for i in range(1, 6))


def mixed(x, w, n, group):
    h = rows.gathered(x, n, group)
    a, b = rows.reduced(w * 2, group), rows.reduced(w.sum(0), group)
    return rows.scattered(h @ a, n, group), rows.reduced(x + b, group), rows.gathered(w, n, group)


PROGRAMS = [reduces, gathers, scatters, mixed, *rows.SHAPES]


def fsdp_step(mesh):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return lambda x: model(x).sum().backward()


def dp_step(mesh):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        F.mse_loss(model(x), x).backward()
        for p in model.parameters():
            p.grad = fcoll.all_reduce(p.grad, "avg", mesh)
        optimizer.step()

    return step


def tp_step(mesh):
    up, down = nn.Linear(8, 4), nn.Linear(4, 8, bias=False)

    def step(x):
        for _ in range(2):
            x = x + fcoll.all_reduce(down(up(x).relu()), "sum", mesh)
        x.sum().backward()

    return step


@dataclass
class Made:
    """All that is compared, made in one world of 4 ranks: torch's passes ask for its groups."""

    graphs: dict[str, Graph]
    right: dict[str, tuple[Graph, Graph]]
    wrong: dict[str, list[tuple[Graph, Any]]]


@pytest.fixture(scope="module")
def made() -> Made:
    with fcoll.fake_world(dp=4) as mesh:
        group = mesh.get_group("dp").group_name
        graphs = {program.__name__: rows.graph_of(program, 4, group) for program in PROGRAMS}
        for seed in SEEDS:
            graphs[f"random {seed}"] = rows.graph_of(rows.random_program(seed), 4, group)
        for step in (fsdp_step, dp_step, tp_step):
            graphs[step.__name__] = fcoll.trace(step(mesh), torch.randn(16, 8)).graph_module
        right = {name: make(graphs) for name, make in RIGHT.items()}
        wrong = {kind: list(make(graphs)) for kind, make in WRONG.items()}
        step = graphs["fsdp_step"]
        wrong["torch on writes"] = [(step, overlapped(step, False))]
        wrong["torch's buckets"] = [
            (graphs[of], overlapped(graphs[of], True, "custom_ops")) for of in ("gathers", "mixed")
        ]
        return Made(graphs, right, wrong)


SEEDS = range(24)
STEPS = ("fsdp_step", "dp_step", "tp_step")
NAMES = [*(program.__name__ for program in PROGRAMS), *STEPS]
FUNCTIONAL = [name for name in NAMES if name not in STEPS]


def copied(module: Graph) -> Graph:
    return Graph(module, copy.deepcopy(module.graph))


def starts(module: Graph) -> list[fx.Node]:
    return [node for node in module.graph.nodes if is_start(node)]


# -- right ones: those of torch's passes, of our planner, by lot ---


def bucketed(module: Graph, what: str, mode: str) -> Graph:
    made = copied(module)
    if what == "all_gather":
        bucketing.bucket_all_gather(made, mode=mode)
    elif what == "reduce_scatter":
        bucketing.bucket_reduce_scatter(made, mode=mode)
    else:
        for nodes in bucketing.bucket_all_reduce_by_mb(made, lambda i: 2000.0):
            bucketing.merge_all_reduce_bucket(made.graph, nodes, mode)
    stable_topological_sort(made.graph)  # as torch does it after these passes
    return made


def overlapped(module: Graph, buckets: bool, mode: str = "default") -> Graph:
    """torch's scheduler, with what it asks a GPU and other ranks for left out."""
    align = "_align_compute_nodes_runtime_estimations_across_all_distributed_ranks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: 0.0)
        patch.setattr(overlap_scheduling.OverlapScheduler, align, lambda self: None)
        return overlap_scheduling.schedule_overlap_bucketing(
            copied(module),
            collective_bucketing=buckets,
            bucket_mode=mode,
            custom_runtime_estimation=lambda node, size: 0.1,
            compute_estimator="analytical",
        )


def planned(module: Graph, scheduler: str, **options) -> Graph:
    plan = fcoll.schedule(module, scheduler=scheduler, memory_cap=None, **options)
    return plan.apply()


def shuffled(module: Graph, seed: int) -> Graph:
    """Any order that keeps what each node takes; there are no writes in these graphs."""
    rng, graph, made = random.Random(seed), fx.Graph(), {}
    left = list(module.graph.nodes)
    inputs = [node for node in left if node.op == "placeholder"]
    while left:
        ready = [n for n in left if n.op != "output" and made.keys() >= {*n.all_input_nodes}]
        node = inputs.pop(0) if inputs else rng.choice(ready) if ready else left[0]
        made[node] = graph.node_copy(node, made.__getitem__)
        made[node].name = f"other_{len(made)}"  # names say nothing
        left.remove(node)
    return Graph(module, graph)


MODES = ("default", "custom_ops", "coalesced")
RIGHT: dict[str, Callable[[dict[str, Graph]], tuple[Graph, Graph]]] = {}


def right(name: str, of: str, make: Callable[[Graph], Graph]) -> None:
    RIGHT[f"{name} of {of}"] = lambda graphs: (graphs[of], make(graphs[of]))


for _mode in MODES:
    right(f"bucket_all_reduce {_mode}", "reduces", lambda g, m=_mode: bucketed(g, "all_reduce", m))
    right(f"bucket_all_gather {_mode}", "gathers", lambda g, m=_mode: bucketed(g, "all_gather", m))
    right(
        f"bucket_reduce_scatter {_mode}",
        "scatters",
        lambda g, m=_mode: bucketed(g, "reduce_scatter", m),
    )
for _of in ("gathers", "mixed"):
    right("multidtype", _of, lambda g: bucketed(g, "all_gather", "custom_ops_multidtype"))
right("bucket_all_reduce default", "mixed", lambda g: bucketed(g, "all_reduce", "default"))
right("bucket_all_gather default", "mixed", lambda g: bucketed(g, "all_gather", "default"))
for _of in (*FUNCTIONAL, "dp_step", "tp_step", *(f"random {seed}" for seed in SEEDS)):
    right("overlap", _of, lambda g: overlapped(g, False))
for _of in ("reduces", "gathers", "scatters", "mixed"):
    right("overlap and buckets", _of, lambda g: overlapped(g, True))
    if torch.__version__ < "2.15" or _of in ("reduces", "scatters"):
        right("overlap and custom_ops", _of, lambda g: overlapped(g, True, "custom_ops"))
for _of in FUNCTIONAL:
    right("a shuffle", _of, lambda g: shuffled(g, len(g.graph.nodes)))
for _of in NAMES:
    right("our plan", _of, lambda g: planned(g, "overlap"))
    right("raise_comms", _of, lambda g: planned(g, "raise_comms"))
for _of in (*FUNCTIONAL, "tp_step", "dp_step"):
    right("torch's order", _of, lambda g: planned(g, "torch"))


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_graph_is_proved(made, name):
    before, after = made.right[name]
    verdict = fcoll.verify(before, after)
    assert verdict.equal is True, str(verdict)
    assert str(verdict).startswith("proved")


def test_there_are_enough_right_ones(made):
    """40 that torch's passes and its scheduler changed."""

    def calls(module):
        return [(node.name, str(node.target)) for node in module.graph.nodes]

    of_torch = [made.right[name] for name in RIGHT if name.startswith(TORCHS)]
    changed = [pair for pair in of_torch if calls(pair[0]) != calls(pair[1])]
    print(f"torch's: {len(of_torch)}, of which it changed {len(changed)}; all: {len(RIGHT)}")
    assert len(changed) >= 40


TORCHS = ("bucket_", "multidtype", "overlap", "torch's order")


@pytest.mark.skipif(torch.__version__ < "2.15", reason="it splits buckets without a write")
def test_torchs_buckets_are_read_before_they_are_split(made):
    """torch 2.15 empties a bucket by a copy into other memory, which its scheduler does not order:
    a product takes that memory first."""
    for before, after in made.wrong["torch's buckets"]:
        verdict = fcoll.verify(before, after)
        assert verdict.equal is False and "memory that nobody has written to" in str(verdict)


def test_torchs_passes_leave_writes_out_of_account(made):
    """FSDP2's step as it runs has writes, which torch's scheduler does not order: it sends a buffer
    before it is filled."""
    before, after = made.wrong["torch on writes"][0]
    verdict = fcoll.verify(before, after)
    assert verdict.equal is False and "in flight" in verdict.difference


@pytest.mark.parametrize("of", ["reduces", "scatters"])
def test_what_is_proved_gives_the_same_values(made, of):
    """Where all ranks are run, on a bucketed and on a shuffled graph."""
    what = {"reduces": "all_reduce"}.get(of, "reduce_scatter")
    before = made.graphs[of]
    inputs = [rows.inputs_of(before, rank) for rank in range(4)]
    for after in (made.right[f"bucket_{what} default of {of}"][1], shuffled(before, 1)):
        assert fcoll.verify(before, after)
        one, two = (stacked_ranks.run(module, inputs) for module in (before, after))
        for xs, ys in zip(one, two, strict=True):
            assert all(map(torch.equal, xs, ys))


# -- wrong ones: twelve of each kind ---

EACH = 12


def past_what_depends_on_it(graphs) -> Iterator[tuple[Graph, Graph]]:
    """A start behind its wait, or before what makes its input."""
    for name in NAMES:
        for i in range(min(2, len(starts(graphs[name])))):
            made = copied(graphs[name])
            node = starts(made)[i]
            if i:
                next(user for user in node.users).append(node)
            else:
                node.all_input_nodes[0].prepend(node)
            yield graphs[name], made


def past_a_write(graphs) -> Iterator[tuple[Graph, Graph]]:
    """Behind a write to what it sends: the graph is whole, its values are others."""
    for name in FUNCTIONAL:
        given = copied(graphs[name])
        start = starts(given)[0]
        with given.graph.inserting_after(next(u for u in start.users if is_wait(u))):
            write = given.graph.call_function(aten.mul_.Tensor, (start.all_input_nodes[0], 3))
        write.meta["val"] = start.all_input_nodes[0].meta["val"]
        made = copied(given)
        by_name = {node.name: node for node in made.graph.nodes}
        by_name[start.name].prepend(by_name[write.name])
        yield given, made


def swapped_on_one_rank(graphs) -> Iterator[tuple[Graph, dict[int, Graph]]]:
    """Two collectives of one group; nothing depends on their order but the other ranks."""
    for name in FUNCTIONAL:
        nodes = starts(graphs[name])
        for i in range(len(nodes) - 1):
            made = copied(graphs[name])
            one, two = starts(made)[i : i + 2]
            if (swapped := exchanged(made, one, two)) is not None:
                yield graphs[name], {0: copied(graphs[name]), 1: swapped, 2: graphs[name]}


def exchanged(module: Graph, one: fx.Node, two: fx.Node) -> Graph | None:
    """With the first collective, and all that needs it, behind the second."""
    nodes = list(module.graph.nodes)
    behind = {one}
    for node in nodes[nodes.index(one) + 1 : nodes.index(two) + 1]:
        if behind & {*node.all_input_nodes}:
            behind.add(node)
    if two in behind:
        return None
    cursor = two
    for node in nodes:
        if node in behind:
            cursor.append(node)
            cursor = node
    module.graph.lint()
    return module


def exchange_two(split: fx.Node) -> None:
    """Of the parts of a split: its results, or what it writes to."""
    if split.users:
        one, two = list(split.users)[:2]
        one.args, two.args = (split, two.args[1]), (split, one.args[1])
    else:
        one, two, *others = split.kwargs["out"]
        split.kwargs = {**split.kwargs, "out": [two, one, *others]}


def a_wrong_offset(graphs) -> Iterator[tuple[Graph, Graph]]:
    """A member gets what is one element further on, or another member's part; or the members are
    sent in another order."""
    cases = [("reduces", "all_reduce"), ("gathers", "all_gather"), ("scatters", "reduce_scatter")]
    for of, what in cases:
        for mode in ("default", "custom_ops"):
            made = bucketed(graphs[of], what, mode)
            exchange_two(next(n for n in made.graph.nodes if "split" in str(n.target)))
            yield graphs[of], made
            made = bucketed(graphs[of], what, mode)
            split = next(n for n in made.graph.nodes if "split" in str(n.target))
            sizes = list(split.args[1])
            split.args = (split.args[0], [sizes[0] + 1, sizes[1] - 1, *sizes[2:]], *split.args[2:])
            yield graphs[of], made
    for of in ("reduces", "gathers", "scatters"):
        for i in (1, 2):
            made = planned(graphs[of], "overlap", buckets=True, splits=False)
            part = [n for n in made.graph.nodes if n.name.endswith("_part")][i]
            x, dim, begin, end = part.args
            part.args = (x, dim, begin - 1, end - 1)
            yield graphs[of], made
    for of in ("reduces", "scatters"):
        made = bucketed(graphs[of], dict(cases)[of], "default")
        cat = [n for n in made.graph.nodes if n.target is aten.cat.default][-1]
        cat.args = (list(reversed(cat.args[0])), *cat.args[1:])
        yield graphs[of], made


def a_wait_dropped(graphs) -> Iterator[tuple[Graph, Graph]]:
    for name in NAMES:
        made = copied(graphs[name])
        waits = [n for n in made.graph.nodes if is_wait(n) and n.users]
        for wait in waits[len(waits) // 2 :][:1]:
            wait.replace_all_uses_with(wait.args[0])
            made.graph.erase_node(wait)
            yield graphs[name], made


def reused_in_flight(graphs) -> Iterator[tuple[Graph, Graph]]:
    """A write to what a collective sends, or gives, between its start and its wait."""
    for i, name in enumerate(NAMES):
        for gives in (False, True):
            made = copied(graphs[name])
            nodes = [n for n in made.graph.nodes if is_wait(n) and start_of(n) is not None]
            start = start_of(nodes[i % len(nodes)])
            buffer = start if gives else start.all_input_nodes[0]
            with made.graph.inserting_after(start):
                made.graph.call_function(aten.zero_.default, (buffer,)).meta = dict(buffer.meta)
            yield graphs[name], made


WRONG = {
    "a start moved past a dependent op": past_what_depends_on_it,
    "a start moved past a write": past_a_write,
    "two collectives swapped on one rank": swapped_on_one_rank,
    "a bucket with a wrong offset": a_wrong_offset,
    "a wait dropped": a_wait_dropped,
    "a buffer reused in flight": reused_in_flight,
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_graphs_are_refuted(made, kind):
    verdicts = []
    for before, after in made.wrong[kind]:
        verdict = fcoll.verify(before, after)
        verdicts.append(verdict)
        if verdict.equal is False and kind != "two collectives swapped on one rank":
            names = {n.name for g in (before, after) for n in g.graph.nodes}
            assert verdict.nodes and names.issuperset(verdict.nodes), verdict
    refuted = [v for v in verdicts if v.equal is False]
    others = [str(v) for v in verdicts if v.equal is not False]
    print(f"{kind}: {len(refuted)} of {len(verdicts)} refuted")
    assert not others, others
    assert len(verdicts) >= (9 if kind == "a start moved past a write" else EACH)


# -- by lot: nothing is proved whose values are others ---


def changed_by_lot(module: Graph, rng: random.Random) -> Graph:
    """One argument is another value of that shape, or another number."""
    made = copied(module)
    nodes = list(made.graph.nodes)
    node = rng.choice([node for node in nodes if node.op == "call_function"])
    i = rng.randrange(len(node.args))
    given = node.args[i]
    if isinstance(given, fx.Node) and isinstance(given.meta["val"], torch.Tensor):
        before = [n for n in nodes[: nodes.index(node)] if isinstance(n.meta["val"], torch.Tensor)]
        given = rng.choice([n for n in before if n.meta["val"].shape == given.meta["val"].shape])
    elif isinstance(given, int):
        given += rng.choice([-1, 1])
    elif isinstance(given, list):
        given = rng.sample(given, len(given))
    node.args = (*node.args[:i], given, *node.args[i + 1 :])
    return made


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_proved_that_has_other_values(made, seed):
    rng, proved = random.Random(seed), 0
    for name in (*FUNCTIONAL, *(f"random {seed}" for seed in SEEDS)):
        before = made.graphs[name]
        after = changed_by_lot(before, rng)
        if not fcoll.verify(before, after):
            continue
        proved += 1
        inputs = [[x + rank for x in rows.inputs_of(before, rank)] for rank in range(4)]
        try:
            found = stacked_ranks.run(after, inputs)
        except (RuntimeError, TypeError, AssertionError):
            continue  # what is not used cannot be called so
        for xs, ys in zip(stacked_ranks.run(before, inputs), found, strict=True):
            assert all(map(torch.equal, xs, ys)), name
    assert proved  # what was chosen for an argument may be itself


# -- what can be told of it, and what cannot ---


def traced(fn: Callable[..., Any], **options: Any) -> Graph:
    with fcoll.fake_world(dp=4):
        return fcoll.trace(fn, torch.ones(8, 8), mode="forward", **options).graph_module


def test_a_verdict_says_what_is_wrong(made):
    before, after = made.wrong["a wait dropped"][0]
    verdict = fcoll.verify(before, after)
    assert not verdict and "before its wait" in str(verdict)
    assert verdict.to_dict()["nodes"] == verdict.nodes
    with pytest.raises(GraphNotProved, match="before its wait"):
        verdict.require()
    proof = fcoll.verify(before, copied(before)).require()
    assert proof.peak_bytes[0] == proof.peak_bytes[1] > 0


def test_names_and_groups_of_another_trace_say_nothing():
    def one(x):
        return fcoll.all_reduce(x, "sum") + 1

    def two(y):
        done = fcoll.all_reduce(y, "sum")
        unused = y * 3  # noqa: F841
        return done + 1

    assert fcoll.verify(traced(one), traced(two))


def test_another_order_is_said_and_compared_between_ranks(made):
    before, ranks = made.wrong["two collectives swapped on one rank"][0]
    alone = fcoll.verify(before, ranks[1])
    assert alone and alone.reordered and "right only if all ranks" in str(alone)
    assert not fcoll.verify(before, ranks[1], mesh={"dp": 4}).reordered
    everywhere = dict.fromkeys(range(4), ranks[1])
    assert fcoll.verify(before, everywhere, mesh={"dp": 4})
    del everywhere[3]
    verdict = fcoll.verify(before, everywhere, mesh={"dp": 4})
    assert verdict.equal is None and "rank 3" in verdict.why
    verdict = fcoll.verify(before, ranks)
    assert verdict.equal is False and verdict.rank == 1


def test_what_is_not_known_is_never_proved(made):
    before = made.graphs["mixed"]
    after = copied(before)
    product = next(n for n in after.graph.nodes if n.target is aten.mm.default)
    product.target = aten.matmul.default  # the same, which nobody told it
    verdict = fcoll.verify(before, after)
    assert verdict.equal is None and str(verdict).startswith("could not tell")
    broken = copied(before)
    starts(broken)[0].graph.output_node().prepend(starts(broken)[0])
    assert fcoll.verify(broken, before).equal is None


def test_a_collective_is_issued_once():
    def twice(x):
        return fcoll.all_reduce(x, "sum") * fcoll.all_reduce(x, "sum")

    before = traced(twice)
    after = copied(before)
    one, two = starts(after)
    two.replace_all_uses_with(one)
    after.graph.erase_node(two)
    assert fcoll.verify(before, after).collectives == (2, 1)  # it is the same on all ranks
    verdict = fcoll.verify(after, before)
    assert verdict.equal is False and "more than once" in verdict.difference


def sums_of_parts_that_are_alike(x):
    """The same sum three times, and of a part of it, which a bucket sends side by side."""
    whole = [fcoll.all_reduce(x * 2) for _ in range(3)]
    return [*whole, fcoll.all_reduce((x * 2)[1:3]), fcoll.all_reduce(x)]


def test_a_bucket_may_send_one_value_for_several_collectives():
    with fcoll.fake_world(dp=4):
        trace = fcoll.trace(sums_of_parts_that_are_alike, torch.ones(8, 4))
        plan = fcoll.schedule(trace, machine="h100", memory_cap=None, buckets=True, reuse=False)
    assert plan.buckets and max(len(bucket.members) for bucket in plan.buckets) > 3
    assert fcoll.verify(trace, plan.apply()).equal


def test_messages_and_random_numbers_keep_their_order():
    def step(x):
        fcoll.batch_p2p([("isend", x + 1, 1)])
        return fcoll.all_reduce(x, "sum"), torch.rand(8), torch.rand(8)

    before = traced(step)
    after = copied(before)
    messages, reduce = starts(after)
    sent = messages.all_input_nodes[0]
    reduce.append(messages)
    reduce.append(sent)
    assert not fcoll.verify(before, after)
    after = copied(before)
    one, two = (n for n in after.graph.nodes if n.target is aten.rand.default)
    two.append(one)
    assert fcoll.verify(before, after).equal is False


def test_writes_keep_their_order():
    def step(x):
        y = x + 1
        z = y * 2
        y.mul_(3)
        return z, y

    before = traced(step)
    after = copied(before)
    read, write = (n for n in after.graph.nodes if n.target in (aten.mul.Tensor, aten.mul_.Tensor))
    write.append(read)
    verdict = fcoll.verify(before, after)
    assert verdict.equal is False and read.name in verdict.nodes


def test_gathers_of_other_dims_are_others():
    def step(x):
        return tuple(fcoll.all_gather_into_tensor_coalesced([x, x + 1]))

    before = traced(step)
    after = copied(before)
    starts(after)[0].update_kwarg("dims", [1, 0])
    assert not fcoll.verify(before, after)
