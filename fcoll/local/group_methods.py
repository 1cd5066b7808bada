"""Methods of ProcessGroup on plain LocalTensors, which torch.distributed's functions call.

Not through the dispatcher, where boxing and unboxing a call take as long as the collective on 64
ranks, and by a plan if a call like it was made before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fcoll.local import _c10d, _torch, premul, rank_groups
from fcoll.local.collective_calls import (
    Calling,
    Result,
    arguments_of,
    calling,
    carry_out,
    check_divisible,
    ragged,
    tensors_in,
    with_size,
    write,
)
from fcoll.local.ints import is_local_int
from fcoll.local.local_tensor import LocalTensor
from fcoll.reductions import PREMUL_SUM
from fcoll.table import c10d
from fcoll.table.collectives import COLLECTIVES, functional_row


def methods() -> dict[str, Callable[..., Any]]:
    """Those of ProcessGroup that send something, for ``patches.where``."""
    collectives = {n: _of_method(op) for op in c10d.OPS.values() if op.route for n in op.methods}
    return {**collectives, "send": _message, "recv": _message}


def _message(
    original: Callable[..., Any], group: Any, tensors: Any, peer: Any, tag: int = 0
) -> Any:
    """To or from one peer; of an int of each rank, C++ would say that it is no int."""
    if is_local_int(peer):
        _c10d.refuse(original.__name__)
    return original(group, tensors, peer, tag)


def _of_method(op: c10d.Op) -> Callable[..., Any]:
    def call(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_in(args[: op.group_at])
        if kwargs or not _torch.one_mode() or not all(map(_is_plain, tensors)):
            with premul.noted(args):
                return original(group, *args, **kwargs)
        named, _ = op.of_method(args)
        with _torch.below_the_mode():
            plan = _planned(op, named, tensors, group) if len(tensors) <= 2 else None
            if plan is not None:
                plan.run(tensors)
            else:
                with premul.noted(args):
                    carry_out(op, {**named, "process_group": group})
        return _torch.FakeWork()

    return call


def _is_plain(x: Any) -> bool:
    return isinstance(x, LocalTensor) and type(x._stack) is Tensor and not x.requires_grad


@dataclass(frozen=True)
class Plan:
    """A call that was read and checked: what is left to do with tensors of the same shapes."""

    changes: int  # of what is known of groups, until which it holds
    rule: Callable[..., Tensor]
    args: Mapping[str, Any]
    who: Calling
    source: int  # which of the call's tensors it takes
    target: int  # and which it writes to

    def run(self, tensors: Sequence[LocalTensor]) -> None:
        stack = self.rule(tensors[self.source]._stack, self.args, self.who.partition)
        write(Result(self.who.ranks, stack=stack), tensors[self.target])


_UNKNOWN: Any = object()
_plans: weakref.WeakKeyDictionary[Any, dict[Any, Plan | None]] = weakref.WeakKeyDictionary()


def _planned(op: c10d.Op, named: dict[str, Any], tensors: list[Any], group: Any) -> Plan | None:
    """Kept: of a call with other arguments that look the same; None if it takes more than one rule
    on a stack of all ranks."""
    more = list(named.values())[op.group_at :]
    others = tuple(tuple(v) if isinstance(v, list) else v for v in more)
    key = op.name, others, *((x.shape, x.dtype, x._order) for x in tensors)
    kept = _plans.setdefault(group, {})
    plan = kept.get(key, _UNKNOWN)
    if plan is _UNKNOWN or (plan is not None and plan.changes != rank_groups.changes):
        plan = kept[key] = _plan(op, {**named, "process_group": group}, tensors)
    return plan


def _plan(op: c10d.Op, named: dict[str, Any], tensors: list[Any]) -> Plan | None:
    message, group = op.read(named, with_size), named["process_group"]
    row = functional_row(COLLECTIVES[message.row])
    if message.lists or message.root is not None or row.on_lists or row.stacked is None:
        return None
    ((x,),), ((out,),) = message.ins, message.outs
    at = {id(t): i for i, t in enumerate(tensors)}
    args, who = arguments_of(row, message.args, {})[2], calling(group, x._order)
    if args.get("reduce_op") == PREMUL_SUM or who.ranks != x._order or id(x) not in at:
        return None
    if ragged(args):
        return None
    check_divisible(row.name, x.shape, len(who.groups[0]), args)
    return Plan(rank_groups.changes, row.stacked, args, who, at[id(x)], at[id(out)])
