"""Runs a graph on N ranks in one process, collectives by plain formulas: an oracle of values."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg


def all_reduce(xs, op, group):
    assert op == "sum"
    return [sum(xs) for _ in xs]


def all_gather_into_tensor(xs, n, group):
    return [torch.cat(xs) for _ in xs]


def reduce_scatter_tensor(xs, op, n, group):
    assert op == "sum"
    return [part.clone() for part in sum(xs).chunk(n)]


def all_to_all_single(xs, out_sizes, in_sizes, group):
    parts = [x.split(in_sizes) for x in xs]
    return [torch.cat([p[i] for p in parts]) for i in range(len(xs))]


COLLECTIVES = {
    f"_c10d_functional.{fn.__name__}.default": fn
    for fn in (all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single)
}


def run(module: GraphModule, inputs: list[list[torch.Tensor]]) -> list[tuple]:
    """``inputs[rank]`` are the arguments of each rank; gives the results of each."""
    n = len(inputs)
    values: dict[Node, list] = {}
    arguments = [iter(given) for given in inputs]
    for node in module.graph.nodes:
        args = [map_arg((node.args, node.kwargs), lambda x, r=r: values[x][r]) for r in range(n)]
        if node.op == "placeholder":
            values[node] = [next(given) for given in arguments]
        elif node.op == "output":
            return [args[r][0][0] for r in range(n)]
        elif str(node.target) in COLLECTIVES:
            xs, others = [a[0][0] for a in args], args[0][0][1:]
            assert all(x.is_contiguous() for x in xs)
            values[node] = COLLECTIVES[str(node.target)](xs, *others)
        elif "wait_tensor" in str(node.target):
            values[node] = [a[0][0] for a in args]
        else:
            assert node.target is operator.getitem or "aten" in str(node.target)
            values[node] = [node.target(*a, **k) for a, k in args]
    raise AssertionError("no output")
