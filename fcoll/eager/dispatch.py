"""Dispatch of eager calls: the paths a call can take, and which code chooses one.

============  ===========================================  =======================================
path          when                                         chosen by
============  ===========================================  =======================================
traced        Dynamo records the program                   ``start``, by ``is_compiling()``
fast path     plain CPU tensors, on a group that is known  the extension
              to have shared memory
undispatched  tensors that only autograd wants to see      ``start``, by ``_torch.ordinary``
stacked       tensors of ranks in ``fcoll.simulate``       ``on_stacked``, for ``start``
dispatcher    everything else: subclasses, modes,          ``start``
              transforms, the profiler
============  ===========================================  =======================================

The fast path is one C++ function for each row that has one (``row.native.fast``). It returns
NotImplemented for what it does not serve, and the call goes on as if it had not been asked. Whether
a group has shared memory is found out once, at its first collective; the extension looks it up, and
``shared_memory.served`` keeps it by name for undispatched calls.

Undispatched calls go to the row's kernel themselves: of a small collective's time, the dispatcher
and the Python kernels that it finds for autograd would be nine tenths.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh

from fcoll import _torch
from fcoll.eager.async_tensor import in_flight, wait_undispatched
from fcoll.errors import from_native
from fcoll.groups import GroupLike, group_name, group_size, is_stacked_group, stacked_groups
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective, signed
from fcoll.table.stacks import Identity
from fcoll.transport import shared_memory
from fcoll.transport.native import build
from fcoll.transport.protocol import running

#: The autograd function of each row that has a gradient: ``apply(args, kwargs, *tensors)``.
autograd_functions: dict[str, Any] = {}


def collective(name: str, group: GroupLike, *args: Any) -> Any:
    """Run a public function's collective. The arguments are the schema's in order, without the
    group's size and name, which are inserted at their positions."""
    row, values = COLLECTIVES[name], list(args)
    known = group_name(group)
    n = group_size(known)
    if "group_size" in row.position:
        values.insert(row.position["group_size"], n)
    values.insert(row.position["group_name"], known)
    out = start(name, *values)
    if not is_compiling() and is_stacked_group(known):
        return out  # complete
    return result(name, n, out)


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
            return run(row, args)
    elif _torch.ordinary(x):
        if not (x.requires_grad and torch.is_grad_enabled()):
            return run(row, args)
        with _torch.single_level_functions():
            return autograd_functions[name].apply(args, {}, x)[0]
    out = on_stacked(row, args) if stacked_groups else NotImplemented
    return getattr(torch.ops.fcoll, name)(*args) if out is NotImplemented else out


def on_stacked(row: Collective, args: tuple[Any, ...]) -> Any:
    """A batched simulation puts its own here, for tensors of its stacked ranks."""
    return NotImplemented


def result(name: str, n: int, out: Any) -> Any:
    """Async in eager, waited for in a trace."""
    if n == 1:
        return out
    return returned(out, name) if isinstance(out, Tensor) else [returned(x, name) for x in out]


def returned(x: Tensor, op: str) -> Tensor:
    """The same for the result of any call."""
    if _torch.tracing() or _torch.transforming(x):
        return torch.ops.fcoll.wait_tensor(x)
    return in_flight(x, op)


# -- without the dispatcher ---


def run(row: Collective, args: tuple[Any, ...]) -> Any:
    """Run a call on plain tensors: by its C++ kernel where the group has shared memory."""
    if row.native.kernel and _in_cpp(row, args):
        try:
            return _torch.native_op(row.name)(*args)  # it checks the arguments too
        except RuntimeError as error:
            raise from_native(error) from None
    return check_and_run(row, args, {})


def check_and_run(row: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The Python kernel of a row."""
    row.check(*args, **kwargs)
    before, running.signed = running.signed, lambda: signed(row, args, kwargs)
    try:
        return row.run(*args, **kwargs)
    finally:
        running.signed = before


def _in_cpp(row: Collective, args: tuple[Any, ...]) -> bool:
    return args[0].is_cpu and args[row.position["group_name"]] in shared_memory.served


def call(name: str, *args: Any) -> Any:
    """``torch.ops.fcoll.<name>(*args)``, complete: the collectives of backward passes."""
    row, x = COLLECTIVES[name], args[0]
    if not is_compiling() and not row.on_lists and _torch.plain(x):
        return wait(run(row, args))
    out = getattr(torch.ops.fcoll, name)(*args)
    return list(map(wait, out)) if row.on_lists else wait(out)


def wait(x: Tensor) -> Tensor:
    """``torch.ops.fcoll.wait_tensor(x)``, without the dispatcher where that is the same."""
    if is_compiling() or not (_torch.plain(x) and wait_undispatched(x)):
        return torch.ops.fcoll.wait_tensor(x)
    return x


def identity(x: Tensor, group_name: str) -> Tensor:
    """x itself; its gradient is summed over the group: all_reduce(grad="identity"), and of that the
    gradient is this."""
    if is_stacked_group(group_name):
        return torch.ops.fcoll_simulation.identity(x, group_name)
    return Identity.apply(x, lambda G: call("all_reduce", G, "sum", group_name, "identity"))


# -- callbacks of the C++ fast path: look up a group, wrap a result, translate an error ---


def _name_of_mesh(group: Any) -> str | None:
    """The name of a mesh's group; None if it is not a mesh, which the fast path does not serve."""
    mesh = group[0] if isinstance(group, tuple) and group else group
    return group_name(group) if isinstance(mesh, DeviceMesh) else None


def _error(message: str) -> Exception:
    """The Python exception for a C++ error with this message."""
    return from_native(RuntimeError(message))


_world = partial(getattr, dist.group, "WORLD")
build.when_loaded(lambda fast: fast.set_callbacks(_world, _name_of_mesh, in_flight, _error))
