"""Twenty ways and more to get a plan wrong, each caught: orders, memory, chunks, buckets."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import row_programs as rows
import torch
from test_splits import SLOW

import fcoll
from fcoll.errors import BadPlan
from fcoll.graph.nodes import is_start, is_wait
from fcoll.scheduling.verified_plan import verify_plan

aten = torch.ops.aten
MUTATIONS = {}


def mutation(fn):
    MUTATIONS[fn.__name__] = fn
    return fn


def reduced_sums(x, w, n, group):
    """Several small all-reduces: a bucket."""
    return tuple(rows.reduced((x @ w).sum(0) * i, group) for i in range(1, 5))


@pytest.fixture(scope="module")
def plans():
    """One with splits, one with a bucket, one with messages between ranks."""
    with fcoll.fake_world(tp=4) as mesh:
        group = mesh.get_group("tp").group_name
        split = fcoll.schedule(rows.graph_of(rows.rows_parallel, 4, group), SLOW, memory_cap=None)
        bucket = fcoll.schedule(rows.graph_of(reduced_sums, 4, group), memory_cap=None)

        def messages(x):
            fcoll.batch_p2p([("isend", x + 1, 1)], mesh)
            a = fcoll.all_reduce(x @ x, "sum", mesh)
            return a, fcoll.all_reduce(x, "sum", mesh)

        trace = fcoll.trace(messages, torch.ones(8, 8), mode="forward")
        ordered = fcoll.schedule(trace, memory_cap=None)
    assert split.splits and bucket.buckets
    for plan in (split, bucket, ordered):
        verify_plan(plan)
    return {"split": split, "bucket": bucket, "ordered": ordered}


def changed(plan, change):
    """The plan with a graph in which something else is done."""
    module = copy.deepcopy(plan.graph_module)
    change({node.name: node for node in module.graph.nodes})
    return replace(plan, graph_module=module)


def one(nodes, test):
    return next(node for node in nodes.values() if test(node))


def joins(node):
    return node.target is aten.cat.default and "_joined" in node.name


def moved(plan, name, to):
    order = [x for x in plan.order if x != name]
    order.insert(to(order), name)
    return replace(plan, order=tuple(order))


# -- orders and memory ---


@mutation
def a_wait_after_its_use(plans):
    plan = plans["split"]
    wait = next(n for n in plan.graph_module.graph.nodes if is_wait(n))
    user = max(plan.order.index(u.name) for u in wait.users)
    return moved(plan, wait.name, lambda order: user)


@mutation
def a_wait_is_dropped(plans):
    plan = plans["split"]
    wait = next(n.name for n in plan.graph_module.graph.nodes if is_wait(n))
    return replace(plan, order=tuple(x for x in plan.order if x != wait))


@mutation
def a_start_before_what_it_sends(plans):
    plan = plans["split"]
    start = [n for n in plan.graph_module.graph.nodes if is_start(n)][-1]
    sent = start.all_input_nodes[0].name
    return moved(plan, start.name, lambda order: order.index(sent))


@mutation
def a_step_is_missing(plans):
    plan = plans["split"]
    return replace(plan, steps=plan.steps[:-1])


@mutation
def a_step_is_there_twice(plans):
    plan = plans["split"]
    return replace(plan, steps=(*plan.steps, plan.steps[3]))


@mutation
def two_steps_change_places(plans):
    plan = plans["split"]
    steps = list(plan.steps)
    i = next(i for i, s in enumerate(steps) if s.kind == "wait")
    j = next(j for j, s in enumerate(steps) if steps[i].name in s.inputs)
    steps[i], steps[j] = steps[j], steps[i]
    return replace(plan, steps=tuple(steps))


@mutation
def it_holds_more_than_it_says(plans):
    return replace(plans["split"], peak_bytes=plans["split"].peak_bytes // 2)


@mutation
def it_is_over_the_cap(plans):
    return replace(plans["split"], cap_bytes=plans["split"].peak_bytes - 1)


@mutation
def starts_beside_messages_change_places(plans):
    plan = plans["ordered"]
    steps = list(plan.steps)
    i, j = [i for i, s in enumerate(steps) if s.kind == "start"][1:3]
    first, second = steps[i], steps[j]
    ends = [s for s in steps if s.kind == "wait" and s.collective == first.collective]
    rest = [s for s in steps if s is not first and s not in ends]
    at = rest.index(second) + 1
    rest[at:at] = [first, *ends]
    return replace(plan, steps=tuple(rest))


# -- chunks ---


@mutation
def a_chunk_has_other_rows(plans):
    def change(nodes):
        rows_ = one(nodes, lambda n: n.target is aten.slice.Tensor and "_part1_rows" in n.name)
        x, dim, begin, end = rows_.args
        rows_.args = (x, dim, 0, end - begin)

    return changed(plans["split"], change)


@mutation
def a_chunk_has_rows_between_chunks(plans):
    def change(nodes):
        rows_ = one(nodes, lambda n: n.target is aten.slice.Tensor and "_part1_rows" in n.name)
        x, dim, begin, end = rows_.args
        rows_.args = (x, dim, begin - 1, end - 1)

    return changed(plans["split"], change)


@mutation
def chunks_are_put_together_in_another_order(plans):
    def change(nodes):
        cat = one(nodes, joins)
        cat.args = (list(reversed(cat.args[0])), *cat.args[1:])

    return changed(plans["split"], change)


@mutation
def a_chunk_is_put_in_twice(plans):
    def change(nodes):
        cat = one(nodes, joins)
        cat.args = ([cat.args[0][0]] * len(cat.args[0]), *cat.args[1:])

    return changed(plans["split"], change)


@mutation
def chunks_are_put_together_without_their_blocks(plans):
    def change(nodes):
        cat = one(nodes, joins)
        cat.args = (cat.args[0], 0)

    return changed(plans["split"], change)


@mutation
def a_product_takes_another_chunk(plans):
    def change(nodes):
        product = one(nodes, lambda n: n.target is aten.mm.default and n.name.endswith("_c1"))
        other = product.args[0].name.replace("_c1", "_c0").replace("_part1", "_part0")
        product.args = (nodes[other], product.args[1])

    return changed(plans["split"], change)


@mutation
def a_product_of_a_chunk_takes_another_matrix(plans):
    def change(nodes):
        product = one(nodes, lambda n: n.target is aten.mm.default and n.name.endswith("_c1"))
        product.args = (product.args[0], product.args[0])

    return changed(plans["split"], change)


@mutation
def a_chunk_is_another_call(plans):
    def change(nodes):
        one(nodes, lambda n: n.name == f"{adding(nodes)}_c0").target = aten.sub.Tensor

    def adding(nodes):
        names = (n.name for n in nodes.values() if n.target is aten.add.Tensor)
        return next(n for n in names if n.endswith("_c0")).removesuffix("_c0")

    return changed(plans["split"], change)


@mutation
def a_chunk_is_called_with_another_number(plans):
    def change(nodes):
        chunk = one(nodes, lambda n: n.target is aten.mul.Tensor and n.name.endswith("_c1"))
        chunk.args = (chunk.args[0], 3)

    return changed(plans["split"], change)


@mutation
def a_chunk_is_reduced_otherwise(plans):
    def change(nodes):
        start = one(nodes, lambda n: "reduce_scatter" in n.name and n.name.endswith("_c1"))
        start.args = (start.args[0], "max", *start.args[2:])

    return changed(plans["split"], change)


@mutation
def a_chunk_goes_to_another_group(plans):
    def change(nodes):
        start = one(nodes, lambda n: "all_gather" in n.name and n.name.endswith("_c0"))
        start.args = (*start.args[:-1], "another")

    return changed(plans["split"], change)


@mutation
def the_split_speaks_of_other_blocks(plans):
    plan = plans["split"]
    split = plan.splits[0]
    wrong = replace(split, blocks=(*split.blocks[:-1], split.blocks[-1] * 2))
    return replace(plan, splits=(wrong, *plan.splits[1:]))


@mutation
def the_split_has_more_chunks(plans):
    plan = plans["split"]
    wrong = replace(plan.splits[0], chunks=plan.splits[0].chunks + 1)
    return replace(plan, splits=(wrong, *plan.splits[1:]))


@mutation
def a_node_outside_takes_another_value(plans):
    def change(nodes):
        product = one(nodes, lambda n: n.target is aten.mm.default and "_c" not in n.name)
        product.args = (product.args[0], product.args[0])

    return changed(plans["split"], change)


# -- buckets ---


@mutation
def the_members_of_a_bucket_in_another_order(plans):
    plan = plans["bucket"]
    bucket = plan.buckets[0]
    wrong = replace(bucket, members=bucket.members[::-1])
    return replace(plan, buckets=(wrong, *plan.buckets[1:]))


@mutation
def a_bucket_sends_its_members_in_another_order(plans):
    def change(nodes):
        cat = nodes[f"{plans['bucket'].buckets[0].name}_cat"]
        cat.args = (list(reversed(cat.args[0])), 1)

    return changed(plans["bucket"], change)


@mutation
def a_member_gets_another_ones_part(plans):
    def change(nodes):
        one_, other = (nodes[f"{w}_part"] for w in plans["bucket"].buckets[0].waits[:2])
        one_.args = (one_.args[0], *other.args[1:])

    return changed(plans["bucket"], change)


@mutation
def a_member_gets_elements_between_two_parts(plans):
    def change(nodes):
        part = nodes[f"{plans['bucket'].buckets[0].waits[1]}_part"]
        x, dim, begin, end = part.args
        part.args = (x, dim, begin - 1, end - 1)

    return changed(plans["bucket"], change)


@mutation
def a_member_is_not_in_the_bucket(plans):
    plan = plans["bucket"]
    bucket = plan.buckets[0]
    wrong = replace(bucket, members=bucket.members[1:], waits=bucket.waits[1:])
    return replace(plan, buckets=(wrong, *plan.buckets[1:]))


@pytest.mark.parametrize("name", MUTATIONS)
def test_it_is_caught(plans, name):
    with pytest.raises(BadPlan) as caught:
        verify_plan(MUTATIONS[name](plans))
    assert "is wrong: " in str(caught.value)


def test_there_are_enough():
    assert len(MUTATIONS) >= 20
