"""Faults in the collectives of a program: the k-th one of a run is done wrong, on all its ranks."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from fcoll import reductions
from fcoll.reductions import REDUCTIONS
from fcoll.simulation import _torch, channel, mailbox
from fcoll.simulation.baton import this_rank

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
MESSAGE = "message"
MOVING = ("all_gather", "all_to_all", "broadcast", "scatter", "gather")


def skipped(op, parts, carry):
    """Each rank has its own part for the result; who waits for a message has what was there."""
    if op == MESSAGE:
        return
    for me, p in enumerate(parts):
        for i, out in enumerate(p.outs):
            x = p.ins[i * len(p.ins) // len(p.outs)]
            if op == "reduce_scatter":
                x = p.ins[i * len(parts) + me]
            if out is not x and out.numel() == x.numel():
                out.data.copy_(x.reshape(out.shape))


def twice(op, parts, carry):
    carry(op, parts)
    if op == "all_reduce":
        carry(op, [replace(p, ins=p.outs) for p in parts])
    else:
        for p in parts:  # what a second reduction of the result would add
            carry_sum(p, parts)


def carry_sum(part, parts):
    algebra = this_rank().session.arithmetic
    for out in part.outs:
        out.data.copy_(algebra.fold(REDUCTIONS["sum"], [out.detach()] * len(parts)))


def other_op(op, parts, carry):
    swap = {"sum": "avg", "avg": "sum", "max": "min", "min": "max"}
    carry(op, [replace(p, reduce_op=swap[p.reduce_op]) for p in parts])


def half(op, parts, carry):
    """Only the first half of the group takes part: the others have what they had."""
    n = max(1, len(parts) // 2)
    if op == "all_reduce":
        carry(op, parts[:n])
        return
    if op == "reduce_scatter":  # chunks of the first half's ranks only are summed
        for me, p in enumerate(parts):
            given = [q.ins[i * len(parts) + me] for q in parts[:n] for i in range(len(p.outs))]
            for i, out in enumerate(p.outs):
                mine = given[i :: len(p.outs)]
                carry("all_reduce", [replace(p, ins=[x.clone()], outs=[out]) for x in mine])
        return
    for p in parts:  # of what is moved, the second half's is missing: the first's stands there
        for i, out in enumerate(p.outs):
            x = parts[i % n].ins[min(i // len(parts), len(p.ins) - 1)]
            if x.numel() == out.numel():
                out.data.copy_(x.reshape(out.shape))


def rotated(op, parts, carry):
    """Offsets are off by one rank: what is gathered is in the order of the ranks after it, what is
    dealt out is what the next rank should have."""
    carry(op, parts)
    given = [[out.detach().clone() for out in p.outs] for p in parts]
    for me, p in enumerate(parts):
        mine = given[me][1:] + given[me][:1] if op == "all_gather" else given[(me + 1) % len(parts)]
        for out, x in zip(p.outs, mine, strict=True):
            if out.numel() == x.numel():
                out.data.copy_(x.reshape(out.shape))


KINDS = {"skipped": skipped, "twice": twice, "other_op": other_op, "half": half, "rotated": rotated}


def kinds_of(op):
    """``stale``, the result of the last call of this kind, is of all."""
    if op == "all_reduce":
        return ("skipped", "twice", "other_op", "half", "stale")
    if op in REDUCING:
        return ("skipped", "twice", "other_op", "half", "rotated", "stale")
    if op == MESSAGE:
        return ("skipped", "stale")
    return ("skipped", "half", "rotated", "stale") if op in MOVING else ()


class Collectives:
    """Counts the collectives of steps, on groups of more than one rank, and spoils one."""

    def __init__(self, spoil=None):
        self.spoil = spoil  # (number, kind)
        self.seen = []  # (op, reduce_op, elements of a result)
        self.trial = None
        self.changed = False  # did what was spoilt give other values?
        self.last = {}  # the results of the last call that is alike

    def message(self, op, parts):
        return self(MESSAGE, parts, reductions)

    def __call__(self, op, parts, arithmetic):
        original = partial(self._carried, arithmetic=arithmetic)
        algebra = getattr(this_rank().session.arithmetic, "current", lambda: None)()
        floats = any(x.is_floating_point() for p in parts for x in p.ins)
        if algebra is None or len(parts) == 1 or not floats:
            return original(op, parts)
        if algebra is not self.trial:
            self.trial, self.seen, self.last = algebra, [], {}
        op = op.removesuffix("_coalesced")
        self.seen.append((op, parts[0].reduce_op, sum(x.numel() for x in parts[0].outs)))
        with torch.no_grad(), _torch.unseen():
            right = [replace(p, ins=_copies(p.ins), outs=_copies(p.outs)) for p in parts]
            original(op, right)
            if self.spoil is not None and self.spoil[0] == len(self.seen) - 1:
                _clear(parts)
                self._spoilt(op, parts, original)
            else:
                original(op, parts)
            self.last[self._alike(op, parts)] = right
            for p, q in zip(parts, right, strict=True):
                self.changed |= not all(map(torch.equal, p.outs, q.outs))

    def _carried(self, op, parts, arithmetic):
        return self.original("broadcast" if op == MESSAGE else op, parts, arithmetic)

    def _spoilt(self, op, parts, original):
        kind = self.spoil[1]
        if kind != "stale":
            return KINDS[kind](op, parts, original)
        last = self.last.get(self._alike(op, parts), ())
        for p, q in list(zip(parts, last, strict=False))[-1 if op == MESSAGE else 0 :]:
            for out, x in zip(p.outs, q.outs, strict=True):
                out.data.copy_(x)

    def _alike(self, op, parts):
        return op, tuple(out.shape for p in parts for out in p.outs)

    @contextmanager
    def installed(self, monkeypatch):
        self.original = channel.carry_out
        with monkeypatch.context() as patch:
            patch.setattr(channel, "carry_out", self)
            patch.setattr(mailbox, "carry_out", self.message)
            yield self


def _clear(parts):
    """Where a result goes that is not there yet: 0, and not what was in memory."""
    given = {x.untyped_storage().data_ptr() for p in parts for x in p.ins}
    for out in (out for p in parts for out in p.outs):
        if out.untyped_storage().data_ptr() not in given:
            out.data.zero_()


def _copies(tensors):
    return [x.detach().clone() for x in tensors]
