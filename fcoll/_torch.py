"""The private torch APIs that fcoll uses. No other file of the package names one.

Tested with torch 2.13.0. Each name says what it is needed for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import guard_or_false as guard_or_false

F = TypeVar("F", bound=Callable[..., Any])

TESTED_VERSION = "2.13.0"
TORCH_DIR = os.path.dirname(os.path.abspath(torch.__file__))

# The class that DTensor, FSDP2 and AOTAutograd recognise by isinstance: ours derives from it.
TorchAsyncCollectiveTensor = funcol.AsyncCollectiveTensor

# torch's registry of outstanding work, keyed by storage: `_c10d_functional.wait_tensor` finds
# there what a collective of ours left, and ours finds theirs.
register_work = torch._C._distributed_c10d._register_work
work_registry_size = torch._C._distributed_c10d._get_work_registry_size


# -- groups ---

resolve_process_group = c10d._resolve_process_group


def group_ranks(pg: dist.ProcessGroup) -> tuple[int, ...]:
    """The global ranks of a group in the order of its own ranks."""
    by_global = c10d._world.pg_group_ranks.get(pg)
    if by_global is None:
        return tuple(range(pg.size()))
    return tuple(sorted(by_global, key=by_global.__getitem__))


def all_groups() -> list[dist.ProcessGroup]:
    return list(c10d._world.pg_group_ranks)


def mesh_group_name(mesh: DeviceMesh, axis: int) -> str:
    return mesh._dim_group_names[axis]


def device_types(pg: dist.ProcessGroup) -> tuple[str, ...]:
    """The device types the group's backends serve; a fake group serves all, so gives none."""
    return () if pg._get_backend_name() == "fake" else tuple(d.type for d in pg._device_types)


def has_native_avg(pg: dist.ProcessGroup, device: torch.device) -> bool:
    """Only NCCL averages by itself."""
    return device.type == "cuda" and pg._get_backend(device).name() == "nccl"


# -- tracing ---


def at_trace_time(fn: F) -> F:
    """Dynamo calls ``fn`` while tracing, on constants, instead of tracing into it."""
    return torch.compiler.assume_constant_result(fn)


def tracing() -> bool:
    """Is a compiler or tracer recording (Dynamo, AOT, make_fx, fake tensors)?"""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)
        or get_proxy_mode() is not None
    )


def plain(x: torch.Tensor) -> bool:
    """Is x an ordinary tensor that nothing between the user and the kernel wants to see: no
    subclass, gradient, transform, dispatch mode or profiler?"""
    return (
        type(x) is torch.Tensor
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.autograd._profiler_enabled()
    )


def wait_plain(x: torch.Tensor) -> None:
    """Wait for a plain tensor. Below autograd, whose Python kernel takes twice the time of it."""
    with below_autograd():
        torch.ops._c10d_functional.wait_tensor.default(x)


def transforming(x: torch.Tensor) -> bool:
    """Is x inside vmap, grad or another functorch transform?"""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


below_autograd = torch._C._AutoDispatchBelowAutograd


def traced_stack() -> Sequence[Any]:
    """The user's frames that Dynamo is tracing right now, outermost first."""
    guards = sys.modules.get("torch._guards")
    if guards is None or guards.TracingContext.try_get() is None:
        return ()
    return guards.TracingContext.extract_stack()


def op_name(op: Any) -> str:
    """ "namespace::name" of an op or of one of its overloads; anything else as it prints."""
    if isinstance(op, torch._ops.OpOverload):
        return op.name().partition(".")[0]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    return str(op)


def is_view_op(op: Any) -> bool:
    return bool(funcol._is_view_op(op))


def make_wrapper(cls: type, elem: torch.Tensor) -> Any:
    """A tensor of class ``cls`` with elem's metadata and no storage of its own."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls,
        elem.size(),
        strides=elem.stride(),
        storage_offset=elem.storage_offset(),
        dtype=elem.dtype,
        layout=elem.layout,
        device=elem.device,
        requires_grad=elem.requires_grad,
    )


# -- Inductor ---

_lowered: set[Any] = set()


def teach_inductor(ops: Sequence[Any]) -> None:
    """Give stock Inductor the lowerings it has for torch's own collectives, if it is in use.

    As plain fallbacks the inputs of a collective in flight could be reused before its wait.
    """
    if "torch._inductor.compile_fx" not in sys.modules or ops[0] in _lowered:
        return
    _lowered.update(ops)
    from torch._inductor import ir, lowering  # type: ignore[attr-defined]
    from torch.utils._pytree import tree_map

    def lower(op: Any) -> Callable[..., Any]:
        def lowered(*args: Any, **kwargs: Any) -> Any:
            out = ir._CollectiveKernel.create_out_of_place(op, *args, **kwargs)
            return tree_map(ir.TensorBox.create, out)

        return lowered

    for op in ops:
        if op not in lowering.lowerings:
            lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
            lowering.register_lowering(op, type_promotion_kind=None)(lower(op))
