"""Training steps of Llama-shaped models as FX graphs, with a price for every node.

A graph is what a trace of one rank gives: aten ops and ``_c10d_functional`` collectives with a wait
behind each, forward, backward and a plain SGD update, with fake values in ``meta["val"]``. Nothing
is run, so any number of layers fits. T is the tokens of a rank, D the width, H the hidden width.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fcoll.costs.machine import Link, Machine

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class Shape:
    """What a step looks like. ``data`` is how parameters are kept on the data axis."""

    name: str
    layers: int
    data: str = ""  # "", "ddp", "fsdp" or "hsdp"
    tp: int = 1
    sequence: bool = False  # sequence parallel: gather and scatter instead of all-reduce
    cp: int = 1
    experts: bool = False
    checkpoint: bool = False
    uneven: bool = False  # layers of different widths
    train: bool = True
    ratio: float = 1.0  # time of all collectives : time of all compute
    flat: bool = False  # one gather a layer instead of one a parameter
    tokens: int = 2048
    dim: int = 2048
    seed: int = 0


@dataclass
class Program:
    """A graph, the time of each of its nodes in us, and a machine that has the same prices, for
    nodes that are made of them."""

    shape: Shape
    graph_module: fx.GraphModule
    costs: dict[str, float]
    machine: Machine


@dataclass
class Builder:
    """Adds calls to a graph and prices them."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    costs: dict[str, float] = field(default_factory=dict)
    mode: Any = field(default_factory=FakeTensorMode)
    known: dict[Any, Any] = field(default_factory=dict)
    inputs: int = 0

    def placeholder(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
        node = self.graph.placeholder(f"arg{self.inputs}_1")
        self.inputs += 1
        node.meta["val"] = self.value(
            ("empty", shape, dtype), lambda: torch.empty(shape, dtype=dtype)
        )
        return node

    def value(self, key: Any, make: Callable[[], Any]) -> Any:
        """Fake values of equal calls are equal, and made once: it takes long."""
        if key not in self.known:
            with self.mode:
                self.known[key] = make()
        return self.known[key]

    def call(self, op: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(op, args)
        values = fx.node.map_arg(args, lambda n: n.meta["val"])
        key = (
            op,
            str(fx.node.map_arg(args, lambda n: (tuple(n.meta["val"].shape), n.meta["val"].dtype))),
        )
        node.meta["val"] = self.value(key, lambda: op(*values))
        self.costs[node.name] = self.price(node)
        return node

    def price(self, node: fx.Node) -> float:
        """400 TFLOP/s for products, 2 TB/s for the rest; collectives are priced at the end."""
        if node.target in (aten.view.default, aten.t.default, aten.slice.Tensor):
            return 0.0
        if node.target is aten.mm.default:
            (m, k), (_, n) = (a.meta["val"].shape for a in node.args)
            return 2.0 + 2 * m * k * n / 4e8
        tensors = [node, *node.all_input_nodes]
        return (
            2.0 + sum(t.meta["val"].numel() * t.meta["val"].element_size() for t in tensors) / 2e6
        )

    def comm(self, op: Any, x: fx.Node, *args: Any) -> fx.Node:
        """A collective and its wait; its price for now is the bytes that it moves."""
        start = self.call(op, x, *args)
        nbytes = max(n.meta["val"].numel() * n.meta["val"].element_size() for n in (start, x))
        self.costs[start.name] = nbytes * (2 if op is c10d.all_reduce.default else 1)
        wait = self.call(c10d.wait_tensor.default, start)
        self.costs[wait.name] = 0.0
        return wait

    def gather(self, x: fx.Node, n: int, group: str) -> fx.Node:
        return self.comm(c10d.all_gather_into_tensor.default, x, n, group)

    def scatter(self, x: fx.Node, n: int, group: str) -> fx.Node:
        return self.comm(c10d.reduce_scatter_tensor.default, x, "sum", n, group)

    def reduce(self, x: fx.Node, group: str) -> fx.Node:
        return self.comm(c10d.all_reduce.default, x, "sum", group)

    def t(self, x: fx.Node) -> fx.Node:
        return self.call(aten.t.default, x)

    def mm(self, x: fx.Node, w: fx.Node) -> fx.Node:
        return self.call(aten.mm.default, x, w)

    def add(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.call(aten.add.Tensor, x, y)


def program(shape: Shape, groups: dict[str, str], dp: int = 8, shard: int = 8) -> Program:
    """The step. ``groups`` names the process groups of dp, shard, tp, cp and ep."""
    return _Step(shape, groups, dp, shard).build()


class _Step:
    def __init__(self, shape: Shape, groups: dict[str, str], dp: int, shard: int) -> None:
        self.shape, self.groups, self.dp, self.shard = shape, groups, dp, shard
        self.g = Builder()
        self.random = random.Random(shape.seed)
        self.updates: list[fx.Node] = []
        self.weights: list[tuple[fx.Node, tuple[int, int]]] = []

    def build(self) -> Program:
        s = self.shape
        hidden = [self.hidden(i) for i in range(s.layers)]
        weights = [[self.weight(*w) for w in self.weight_shapes(h)] for h in hidden]
        x = self.g.placeholder(s.tokens // (s.tp if s.sequence else 1), s.dim)
        saved = []
        for layer in weights:
            x, keep = self.forward(x, layer)
            saved.append(keep)
        out: Any = x
        if s.train:
            grad = self.g.call(aten.mul.Tensor, x, 0.5)
            for layer, keep in zip(reversed(weights), reversed(saved), strict=True):
                grad = self.backward(grad, layer, keep)
            out = [grad, *self.updates]
        self.g.graph.output((out,) if not isinstance(out, list) else tuple(out))
        module = fx.GraphModule(torch.nn.Module(), self.g.graph)
        return Program(s, module, *_scaled(module, self.g.costs, s.ratio))

    def hidden(self, layer: int) -> int:
        wide = 2 * self.shape.dim
        if not self.shape.uneven:
            return wide
        return self.random.choice([wide // 2, wide, wide, 2 * wide])

    def weight_shapes(self, hidden: int) -> list[tuple[int, int]]:
        d, tp = self.shape.dim, self.shape.tp
        return [
            (d, 3 * d // tp),
            (d // tp, d),
            (d, hidden // tp),
            (d, hidden // tp),
            (hidden // tp, d),
        ]

    # -- parameters ---

    def weight(self, rows: int, columns: int) -> tuple[fx.Node, tuple[int, int]]:
        n = self.shard if self.shape.data in ("fsdp", "hsdp") else 1
        return self.g.placeholder(rows // n, columns), (rows, columns)

    def whole(self, weight: tuple[fx.Node, tuple[int, int]]) -> fx.Node:
        if self.shape.data not in ("fsdp", "hsdp"):
            return weight[0]
        return self.g.gather(weight[0], self.shard, self.groups["shard"])

    def whole_layer(self, layer: list[Any]) -> list[fx.Node]:
        """All parameters of a layer, by one gather if they are kept in one flat tensor."""
        if not self.shape.flat or self.shape.data not in ("fsdp", "hsdp"):
            return [self.whole(w) for w in layer]
        g = self.g
        flat = g.call(aten.cat.default, [g.call(aten.view.default, w, [-1]) for w, _ in layer])
        flat = g.gather(flat, self.shard, self.groups["shard"])
        parts, at = [], 0
        for _, (rows, columns) in layer:
            part = g.call(aten.slice.Tensor, flat, 0, at, at + rows * columns)
            parts.append(g.call(aten.view.default, part, [rows, columns]))
            at += rows * columns
        return parts

    def update(self, weight: tuple[fx.Node, Any], grad: fx.Node) -> None:
        """Reduce a gradient as the data axis wants it, and take a step."""
        data, g = self.shape.data, self.g
        if data in ("fsdp", "hsdp"):
            grad = g.scatter(grad, self.shard, self.groups["shard"])
        if data in ("ddp", "hsdp"):
            grad = g.reduce(grad, self.groups["dp"])
        self.updates.append(g.call(aten.sub.Tensor, weight[0], grad))

    # -- a layer ---

    def enter(self, x: fx.Node) -> fx.Node:
        s = self.shape
        return self.g.gather(x, s.tp, self.groups["tp"]) if s.sequence else x

    def leave(self, x: fx.Node) -> fx.Node:
        s = self.shape
        if s.tp == 1:
            return x
        if s.sequence:
            return self.g.scatter(x, s.tp, self.groups["tp"])
        return self.g.reduce(x, self.groups["tp"])

    def exchange(self, x: fx.Node) -> fx.Node:
        rows = x.meta["val"].shape[0] // 8
        splits = [rows] * 8
        return self.g.comm(c10d.all_to_all_single.default, x, splits, splits, self.groups["ep"])

    def forward(self, x: fx.Node, layer: list[Any]) -> tuple[fx.Node, dict[str, Any]]:
        """Gives the result and what backward needs."""
        g, s = self.g, self.shape
        keep: dict[str, Any] = {"x": x}
        wqkv, wo, w1, w3, w2 = self.whole_layer(layer)
        keep |= {"w": (wqkv, wo, w1, w3, w2)}
        h = self.enter(g.call(aten.mul.Tensor, x, 1.5))
        qkv = g.mm(h, wqkv)
        third = qkv.meta["val"].shape[1] // 3
        q, k, v = (g.call(aten.slice.Tensor, qkv, 1, i * third, (i + 1) * third) for i in range(3))
        if s.cp > 1:
            k, v = (
                g.gather(g.call(aten.clone.default, t), s.cp, self.groups["cp"]) for t in (k, v)
            )
        scores = g.mm(q, g.t(k))
        a = g.mm(g.call(aten.exp.default, scores), v)
        x1 = g.add(x, self.leave(g.mm(a, wo)))
        h2 = self.enter(g.call(aten.mul.Tensor, x1, 1.5))
        e = self.exchange(h2) if s.experts else h2
        gate, up = g.mm(e, w1), g.mm(e, w3)
        act = g.call(aten.mul.Tensor, g.call(aten.sigmoid.default, gate), up)
        down = g.mm(act, w2)
        down = self.exchange(down) if s.experts else down
        out = g.add(x1, self.leave(down))
        keep |= {"h": h, "q": q, "k": k, "v": v, "scores": scores, "a": a}
        keep |= {"h2": h2, "e": e, "gate": gate, "up": up, "act": act}
        return out, {"x": x} if s.checkpoint else keep

    def backward(self, grad: fx.Node, layer: list[Any], keep: dict[str, Any]) -> fx.Node:
        """The gradient of the layer's input; the parameters' are reduced and used."""
        g, s = self.g, self.shape
        if s.checkpoint:
            _, keep = self.again(keep["x"], layer)
        wqkv, wo, w1, w3, w2 = self.whole_layer(layer) if s.data in ("fsdp", "hsdp") else keep["w"]
        d = self.enter(grad) if s.sequence else grad
        d = self.exchange(d) if s.experts else d
        dact, dw2 = g.mm(d, g.t(w2)), g.mm(g.t(keep["act"]), d)
        self.update(layer[4], dw2)
        dgate = g.call(aten.mul.Tensor, dact, keep["up"])
        dup = g.call(aten.mul.Tensor, dact, keep["gate"])
        self.update(layer[2], g.mm(g.t(keep["e"]), dgate))
        self.update(layer[3], g.mm(g.t(keep["e"]), dup))
        dh2 = g.add(g.mm(dgate, g.t(w1)), g.mm(dup, g.t(w3)))
        dh2 = self.exchange(dh2) if s.experts else dh2
        dx1 = g.add(grad, self.leave(dh2))
        da_in = self.enter(dx1) if s.sequence else dx1
        da = g.mm(da_in, g.t(wo))
        self.update(layer[1], g.mm(g.t(keep["a"]), da_in))
        dscores, dv = g.mm(da, g.t(keep["v"])), g.mm(g.t(keep["scores"]), da)
        dscores = g.call(aten.mul.Tensor, dscores, keep["scores"])
        dq, dk = g.mm(dscores, keep["k"]), g.mm(g.t(dscores), keep["q"])
        if s.cp > 1:
            dk, dv = (g.scatter(t, s.cp, self.groups["cp"]) for t in (dk, dv))
        dqkv = g.call(aten.cat.default, [dq, dk, dv], 1)
        self.update(layer[0], g.mm(g.t(keep["h"]), dqkv))
        return g.add(dx1, self.leave(g.mm(dqkv, g.t(wqkv))))

    def again(self, x: fx.Node, layer: list[Any]) -> tuple[fx.Node, dict[str, Any]]:
        """Forward once more, keeping everything: activation checkpointing."""
        full, self.shape = self.shape, _without_checkpoint(self.shape)
        try:
            return self.forward(x, layer)
        finally:
            self.shape = full


def _without_checkpoint(shape: Shape) -> Shape:
    return Shape(**{**vars(shape), "checkpoint": False})


def _scaled(
    module: fx.GraphModule, costs: dict[str, float], ratio: float
) -> tuple[dict[str, float], Machine]:
    """Collectives cost a latency and their bytes, scaled so that together they take ``ratio`` times
    as long as all compute does."""
    calls = (n for n in module.graph.nodes if "_c10d" in str(n.target))
    starts = {n.name for n in calls if "wait" not in n.name}
    compute = sum(us for name, us in costs.items() if name not in starts)
    moved = sum(costs[name] for name in starts)
    latency = min(10.0, 0.2 * ratio * compute / max(len(starts), 1))
    rate = max(ratio * compute - latency * len(starts), 0.0) / max(moved, 1)
    link = Link(0.0, 1 / (1000 * rate) if rate else 1e6)
    machine = Machine(
        *("suite", {"bfloat16": 400.0}, 2000.0, link, link),
        launch_us=2.0,
        collective_us=latency,
    )
    scaled = {name: latency + us * rate if name in starts else us for name, us in costs.items()}
    return scaled, machine
