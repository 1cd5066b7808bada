"""Methods of ProcessGroup on plain LocalTensors, which torch.distributed's functions call.

Not through the dispatcher, where boxing and unboxing a call take as long as the collective on 64
ranks, and by a plan if a call like it was made before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fcoll.local import _c10d, _torch, premul, rank_groups
from fcoll.local.collective_calls import (
    arguments_of,
    calling,
    carry_out,
    check_divisible,
    ragged,
    tensors_in,
    with_size,
    write_stack,
)
from fcoll.local.ints import is_local_int
from fcoll.local.local_tensor import LocalTensor
from fcoll.reductions import PREMUL_SUM
from fcoll.table import c10d
from fcoll.table.collectives import COLLECTIVES, functional_row
from fcoll.table.plans import Plans, prepared
from fcoll.table.stacks import Prepared


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
        with _torch.below_the_mode():
            plan = _planned(op, args, tensors, group) if len(tensors) <= 2 else None
            if plan is not None:
                plan.run(tensors)
            else:
                with premul.noted(args):
                    carry_out(op, {**op.of_method(args)[0], "process_group": group})
        return _torch.FakeWork()

    return call


def _is_plain(x: Any) -> bool:
    return isinstance(x, LocalTensor) and type(x._stack) is Tensor and not x.requires_grad


@dataclass(frozen=True)
class PreparedCall:
    """A call that was read and checked: what is left to do with tensors of the same shapes."""

    rule: Prepared
    source: int  # which of the call's tensors it takes
    target: int  # and which it writes to

    def run(self, tensors: Sequence[LocalTensor]) -> None:
        write_stack(self.rule(tensors[self.source]._stack), tensors[self.target])


_plans: weakref.WeakKeyDictionary[Any, Plans] = weakref.WeakKeyDictionary()


def _planned(
    op: c10d.Op, args: Sequence[Any], tensors: list[Any], group: Any
) -> PreparedCall | None:
    """Kept: of a call with other tensors that look the same, while as much is known of groups."""
    plans = _plans.get(group)
    if plans is None:
        plans = _plans[group] = Plans()
    looks = [(x.shape, x.dtype, x._order) for x in tensors]
    key = op.name, rank_groups.changes, op.settings(args), *looks
    return plans.of(key, lambda: _plan(op, args, tensors, group))


def _plan(op: c10d.Op, args: Sequence[Any], tensors: list[Any], group: Any) -> PreparedCall | None:
    """None if the call takes more than one rule on a stack of all ranks."""
    message = op.read({**op.of_method(args)[0], "process_group": group}, with_size)
    row = functional_row(COLLECTIVES[message.row])
    if message.lists or message.root is not None or row.on_lists or row.stacked is None:
        return None
    ((x,),), ((out,),) = message.ins, message.outs
    at = {id(t): i for i, t in enumerate(tensors)}
    options, who = arguments_of(row, message.args, {})[2], calling(group, x._order)
    if options.get("reduce_op") == PREMUL_SUM or (who.ranks, who.ranks) != (x._order, out._order):
        return None
    if id(x) not in at or ragged(options):
        return None
    check_divisible(row.name, x.shape, len(who.groups[0]), options)
    rule = prepared(row, options, who.partition, x.dtype)
    return PreparedCall(rule, at[id(x)], at[id(out)])
