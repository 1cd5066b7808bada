"""An all-reduce as a reduce-scatter and an all-gather, with what lies between done on a shard.

The sum's rows are scattered. What follows row by row (residual adds, norms) then runs on 1/n of
them, as do its gradients; an all-gather comes where whole rows are needed: before a product,
another collective, or the end. A sum over rows is one of partial sums. This is what sequence
parallelism does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from fcoll.graph.issued import Issued
from fcoll.graph.steps import Step
from fcoll.scheduling.step_program import Edits, StepProgram
from fcoll.table.gather import ALL_GATHER_INTO_TENSOR
from fcoll.table.reduce import ALL_REDUCE, REDUCE_SCATTER_TENSOR

aten = torch.ops.aten
BY_ROW = {aten.clone, aten._to_copy, aten.native_layer_norm, aten.copy_, aten.native_dropout}
REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.var_mean}


def sharded(program: StepProgram, calls: Sequence[Issued]) -> StepProgram | None:
    """None where the rows cannot be divided, or the trace has no graph to see them in."""
    chosen = [c for c in calls if c.row is ALL_REDUCE and c.args.get("reduce_op") == "sum"]
    chosen = [c for c in chosen if c.start in program.nodes and _rows(program, c.start) % c.n == 0]
    sent: dict[Any, int] = {}
    for c in chosen:
        key = c.group, _rows(program, c.start)
        sent[key] = sent.get(key, 0) + c.bytes
    if not sent:
        return None
    group, rows = max(sent, key=lambda key: sent[key])
    chosen = [c for c in chosen if c.group == group and _rows(program, c.start) == rows]
    found = _Shards(program, chosen, rows)
    return found.edits.made() if found.local else None


def _rows(program: StepProgram, name: str) -> int:
    """The rows of a value: all its dimensions but the last."""
    val = program.nodes[name].meta.get("val")
    shape = val.shape if isinstance(val, torch.Tensor) else ()
    plain = len(shape) > 1 and all(isinstance(s, int) for s in shape)
    return prod(shape[:-1]) if plain else 1


class _Shards:
    def __init__(self, program: StepProgram, calls: Sequence[Issued], rows: int) -> None:
        self.program, self.rows, self.call = program, rows, calls[0]
        self.edits = Edits(program)
        self.scattered = {c.start for c in calls}
        self.waits = {c.wait for c in calls}
        self.local: dict[str, str] = {}  # step that works on a shard -> "row" or "sum"
        self.varies: set[str] = set()  # results that differ between the group's ranks
        self.next_id = max(c.id for c in program.collectives) + 1
        for step in program.steps:
            self.visit(step)
        for c in calls:
            self.scatter(c)
        for name in self.local:
            self.shrink(program.steps[program.at[name]])
        for name, first in self.gathered():
            self.gather(name, first)

    def is_shard(self, name: str) -> bool:
        return name in self.waits or name in self.scattered or self.local.get(name) == "row"

    def visit(self, step: Step) -> None:
        inputs = step.inputs
        if step.name in self.scattered or step.name in self.waits:
            return
        varies = not self.varies.isdisjoint(inputs)
        kind = self.kind(step)
        if kind and not varies and any(map(self.is_shard, inputs)):
            self.local[step.name] = kind
        elif step.flops != 0 or (varies and not self.equalizes(step)):
            self.varies.add(step.name)

    def equalizes(self, step: Step) -> bool:
        """Does it give all ranks of the group the same?"""
        here = step.stream == self.program.steps[self.program.at[self.call.start]].stream
        return step.kind == "start" and here and step.op.split("::")[-1].startswith("all_")

    def kind(self, step: Step) -> str:
        """ "row" if the step works row by row, "sum" if it adds rows up, else nothing."""
        node = self.program.nodes.get(step.name)
        if node is None or step.kind != "compute" or step.effect or step.flops != 0:
            return ""
        op = getattr(node.target, "overloadpacket", None)
        if op in REDUCTIONS:
            return self.reduction(node, op)
        by_row = op in BY_ROW or torch.Tag.pointwise in getattr(node.target, "tags", ())
        return "row" if by_row and self.has_rows(node) else ""

    def has_rows(self, node: Any) -> bool:
        val = node.meta.get("val")
        val = val[0] if isinstance(val, (list, tuple)) else val
        shape = getattr(val, "shape", ())
        return len(shape) > 0 and self.rows in (prod(shape[:-1]), prod(shape))

    def reduction(self, node: Any, op: Any) -> str:
        given, val = node.args[0].meta["val"], node.meta.get("val")
        dims = node.args[1] if len(node.args) > 1 else None
        dims = [dims] if isinstance(dims, int) else list(dims or range(given.ndim))
        last = {d % given.ndim for d in dims} == {given.ndim - 1}
        if last and self.has_rows(node):
            return "row"
        adds_rows = op is aten.sum and isinstance(val, torch.Tensor)
        return "sum" if adds_rows and prod(given.shape[:-1]) == self.rows and not last else ""

    # -- the edits ---

    def scatter(self, call: Issued) -> None:
        step = self.program.steps[self.program.at[call.start]]
        made = replace(call, op=REDUCE_SCATTER_TENSOR.name)
        small = replace(step, op=made.op, out_bytes=step.out_bytes // call.n)
        self.edits.steps[step.name] = small
        self.edits.us[step.name] = self.program.price_call(made, [call])
        self.edits.calls[call.id] = made

    def shrink(self, step: Step) -> None:
        n, us = self.call.n, self.program.us[step.name]
        small = replace(step, read_bytes=step.read_bytes / n, write_bytes=step.write_bytes / n)
        full = self.program.model(step)
        if self.local[step.name] == "row":
            small = replace(small, out_bytes=step.out_bytes // n)
        self.edits.steps[step.name] = small
        self.edits.us[step.name] = us * self.program.model(small) / full if full else us

    def gathered(self) -> Iterator[tuple[str, int]]:
        """What is needed whole, and where first."""
        first: dict[str, int] = {}
        for i, step in enumerate(self.program.steps):
            for name in step.inputs:
                is_own_wait = step.name in self.waits and name in self.scattered
                if self.local.get(step.name) != "row" and not is_own_wait:
                    adds = self.local.get(step.name) == "sum"
                    if self.local.get(name) == "sum" or (self.is_shard(name) and not adds):
                        first.setdefault(name, i)
        for step in self.program.steps:  # what the step returns
            part = self.is_shard(step.name) or step.name in self.local
            if part and step.out_bytes and step.name not in self.program.freed:
                first.setdefault(step.name, len(self.program.steps))
        return iter(first.items())

    def gather(self, name: str, first: int) -> None:
        """An all-gather right behind what gives the value, or an all-reduce of partial sums; its
        wait where the value is used."""
        at, step = self.program.at[name], self.program.steps[self.program.at[name]]
        row = ALL_REDUCE if self.local.get(name) == "sum" else ALL_GATHER_INTO_TENSOR
        val = self.program.nodes[name].meta["val"]
        val = val[0] if isinstance(val, (list, tuple)) else val
        nbytes = val.numel() * val.dtype.itemsize
        made = replace(
            self.call, id=self.next_id, op=row.name, bytes=nbytes, start=f"gather_{name}",
            wait=f"gather_{name}_wait", phase=step.phase, source=self.call.source,
        )  # fmt: skip
        self.next_id += 1
        like = self.program.steps[self.program.at[self.call.start]]
        start = replace(
            like, name=made.start, inputs=(name,), uses=(name,), out_bytes=nbytes,
            last_use_of=(), collective=made.id, op=row.name, phase=step.phase,
        )  # fmt: skip
        uses = (made.start, name)
        wait = replace(
            start, name=made.wait or "", kind="wait", inputs=(made.start,), uses=uses,
            stream="compute", out_bytes=0,
        )  # fmt: skip
        self.edits.calls[made.id] = made
        self.edits.add(at + 1, start, self.program.price_call(made, [self.call]))
        self.edits.add(first, wait, 0.0)
        self.edits.inputs[name] = wait.name
