"""Plans of stacked calls: a row's call prepared once for all calls that look alike.

Whoever makes a plan reads and checks the call; whoever runs it brings the tensors. Batched
simulation and LocalTensors keep theirs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fcoll.table.partition import Partition
from fcoll.table.row import Collective
from fcoll.table.stacks import Args, Prepared, StackedRule

Plan = TypeVar("Plan")
_MOST = 1024
_UNKNOWN: Any = object()


class Plans(dict[Any, Any]):
    """Plans by what their calls look like; the old ones go when there are many. One may be None,
    that there is none."""

    def of(self, key: Any, make: Callable[[], Plan]) -> Plan:
        try:
            plan = self.get(key, _UNKNOWN)
        except TypeError:  # a list among the arguments
            return make()
        if plan is _UNKNOWN:
            if len(self) == _MOST:
                self.clear()
            plan = self[key] = make()
        return plan


def prepared(row: Collective, args: Args, groups: Partition, dtype: torch.dtype) -> Prepared:
    """The row's ``stacked`` rule with its arguments, as a function of the stack alone."""
    rule = row.stacked
    assert rule is not None
    if isinstance(rule, StackedRule):
        return rule.prepare(dtype, args, groups)
    return lambda xs_W: rule(xs_W, args, groups)
