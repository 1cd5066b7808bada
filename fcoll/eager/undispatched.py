"""Collectives without the dispatcher, for tensors that nobody between the user and the kernel wants
to see. Of a small collective's time, the dispatcher and the Python kernels that it finds for
autograd would be nine tenths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fcoll import _torch
from fcoll.errors import from_native
from fcoll.groups import is_stacked_group
from fcoll.table.collectives import COLLECTIVES
from fcoll.table.row import Collective
from fcoll.table.signature import signed
from fcoll.transport import shared_memory
from fcoll.transport.native import build
from fcoll.transport.protocol import running


def run(row: Collective, args: tuple[Any, ...]) -> Any:
    """Run a call on plain tensors: by its C++ kernel where the group has shared memory."""
    if row.native.kernel and _in_cpp(row, args):
        return kernel(row.name, *args)
    return check_and_run(row, args, {})


def check_and_run(row: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the Python kernel of a row does."""
    row.check(*args, **kwargs)
    before, running.signed = running.signed, lambda: signed(row, args, kwargs)
    try:
        return row.run(*args, **kwargs)
    finally:
        running.signed = before


def _in_cpp(row: Collective, args: tuple[Any, ...]) -> bool:
    return args[0].is_cpu and args[row.position["group_name"]] in shared_memory.served


def kernel(name: str, *args: Any) -> Tensor:
    """Run the op's C++ kernel, which checks the arguments too."""
    try:
        return _torch.native_op(name)(*args)
    except RuntimeError as error:
        raise from_native(error) from None


def call(name: str, *args: Any) -> Any:
    """``torch.ops.fcoll.<name>(*args)``, complete: what a gradient makes calls by."""
    row, x = COLLECTIVES[name], args[0]
    if not is_compiling() and not row.on_lists and _torch.plain(x):
        return wait(run(row, args))
    out = getattr(torch.ops.fcoll, name)(*args)
    return list(map(wait, out)) if row.on_lists else wait(out)


def wait(x: Tensor) -> Tensor:
    """``torch.ops.fcoll.wait_tensor(x)``, without the dispatcher where that is the same."""
    if is_compiling() or not _torch.plain(x):
        return torch.ops.fcoll.wait_tensor(x)
    if build.fast.wait_tensor(x) is x:
        return x
    try:
        _torch.wait_plain(x)
    except RuntimeError as error:
        raise from_native(error) from None
    return x


class _Identity(torch.autograd.Function):
    """all_reduce(grad="identity") and this are each the gradient of the other."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, group_name: str) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
        ctx.group_name = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return call("all_reduce", grad, "sum", ctx.group_name, "identity"), None


def identity(x: Tensor, group_name: str) -> Tensor:
    """x itself; its gradient is summed over the group."""
    if is_stacked_group(group_name):
        return torch.ops.fcoll_simulation.identity(x, group_name)
    return _Identity.apply(x, group_name)
