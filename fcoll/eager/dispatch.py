"""How an eager call is dispatched: the ways that it can go, and who decides.

============  ===========================================  =======================================
way           when                                         who decides
============  ===========================================  =======================================
traced        Dynamo records the program                   ``start``, by ``is_compiling()``
fast path     plain CPU tensors, on a group that is known  ``functions`` looks whether the group
              to have shared memory                        is refused, the extension at the rest
undispatched  tensors that only autograd wants to see      ``start``, by ``_torch.ordinary``
stacked       tensors of ranks in ``fcoll.simulate``       ``stacked_ways``, asked by ``start``
dispatcher    everything else: subclasses, modes,          ``start``
              transforms, the profiler
============  ===========================================  =======================================

The fast path is one C++ function for each row that has one (``row.native.fast``). It returns
NotImplemented for what it does not serve, and the call goes on as if it had not been asked. Whether
a group has shared memory is found out once, at its first collective; ``shared_memory.served`` and
``refused`` keep it by name, so that a call on a process group never enters C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from fcoll import _torch
from fcoll.eager import undispatched
from fcoll.eager.async_tensor import in_flight
from fcoll.eager.ops import function_of
from fcoll.errors import FcollError, from_native
from fcoll.groups import GroupLike, group_name, group_size
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective
from fcoll.transport.shared_memory import refused

#: What a batched simulation adds while it runs: a call on stacked ranks, or NotImplemented.
stacked_ways: list[Callable[[Collective, tuple[Any, ...]], Any]] = []


def is_refused(group: GroupLike) -> bool:
    """Is it known that the group has no shared memory? Not of what is no group."""
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return group.group_name in refused
    try:
        return group_name(group) in refused
    except FcollError:
        return False


def collective(name: str, group: GroupLike, *args: Any) -> Any:
    """What a public function returns. The arguments are the schema's in order, but for the group's
    size and name, which are put where the schema has them."""
    row, values = COLLECTIVES[name], list(args)
    known = group_name(group)
    n = group_size(known)
    if "group_size" in row.position:
        values.insert(row.position["group_size"], n)
    values.insert(row.position["group_name"], known)
    return result(name, n, start(name, *values))


def start(name: str, *args: Any) -> Any:
    """``torch.ops.fcoll.<name>(*args)``: the result, which need not be complete.

    The kernels check their arguments too; while Dynamo traces, the check here lets an error
    through unchanged.
    """
    if is_compiling():
        COLLECTIVES[name].check(*args)
        return getattr(torch.ops.fcoll, name)(*args)
    try:
        return start_eager(name, *args)
    except RuntimeError as error:
        raise from_native(error) from None


def start_eager(name: str, *args: Any) -> Any:
    """Without the dispatcher, in 30 us less, for tensors that are ordinary and, in a list, need no
    gradient."""
    x, row = args[0], COLLECTIVES[name]
    if type(x) is list:
        if x and all(map(_torch.plain, x)):
            return undispatched.run(row, args)
    elif _torch.ordinary(x):
        if not (x.requires_grad and torch.is_grad_enabled()):
            return undispatched.run(row, args)
        with _torch.single_level_functions():
            return function_of(name).apply(args, {}, x)[0]
    for way in stacked_ways:
        if (out := way(row, args)) is not NotImplemented:
            return out
    return getattr(torch.ops.fcoll, name)(*args)


def result(name: str, n: int, out: Any) -> Any:
    """Async in eager, waited for in a trace."""
    if n == 1:
        return out
    if isinstance(out, Tensor):
        return in_flight(out, name)
    return [in_flight(x, name) for x in out]
