"""The private torch APIs that fcoll uses. No other file of the package names one.

Tested with torch 2.13.0. Each name says what it is needed for.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch._dynamo.symbolic_convert as symbolic_convert
import torch._functorch.autograd_function as _functorch_autograd
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import guard_or_false as guard_or_false
from torch.utils.flop_counter import flop_registry

F = TypeVar("F", bound=Callable[..., Any])

TESTED_VERSION = "2.13.0"
TORCH_DIR = os.path.dirname(os.path.abspath(torch.__file__))

# The class that DTensor, FSDP2 and AOTAutograd recognise by isinstance: ours derives from it.
TorchAsyncCollectiveTensor = funcol.AsyncCollectiveTensor

# All that torch's module has, as it is now: compat.py may be put in its place later.
FUNCTIONAL_COLLECTIVES = dict(vars(funcol))

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


def new_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A group of these ranks in this order, which only its members make.

    dist.new_group(use_local_synchronization=True) names it after the number of groups that the
    process has. Members that do not agree on that number would wait for each other for ever.
    """
    world = c10d._get_default_group()
    backend, store = c10d._world.pg_map[world]
    pg, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(world.rank()),
        list(ranks),
        c10d.Backend(backend),
        store,
        c10d.GroupName(name),
        timeout=c10d._get_default_timeout(backend),
        device_id=world.bound_device_id,
        group_desc=str(list(ranks)),
    )
    c10d._world.pg_group_ranks[pg] = {rank: i for i, rank in enumerate(ranks)}
    return pg


def mesh_group_name(mesh: DeviceMesh, axis: int) -> str:
    return mesh._dim_group_names[axis]


def mesh_process_group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The group as an object of the graph, when one graph is traced for all ranks."""
    return torch.ops._dtensor.mesh_get_process_group(mesh, axis)


def find_group(ranks: list[int], tag: str) -> dist.ProcessGroup | None:
    """The group of these ranks, in any order, that was made with this tag."""
    return c10d._find_pg_by_ranks_and_tag(tag, ranks)


def torch_ops_only() -> bool:
    """Does someone listen who knows torch's ops only: LocalTensorMode, or a trace for all ranks?"""
    if dist.config.compile_on_one_rank and tracing():
        return True
    local = None if torch.compiler.is_compiling() else sys.modules.get(_LOCAL_TENSOR)
    return local is not None and local.local_tensor_mode() is not None


_LOCAL_TENSOR = "torch.distributed._local_tensor"


def group_timeout_s(pg: dist.ProcessGroup) -> float:
    options = pg._get_backend(torch.device("cpu")).options
    return options._timeout.total_seconds()


def device_types(pg: dist.ProcessGroup) -> tuple[str, ...]:
    """The device types the group's backends serve; a fake group serves all, so gives none."""
    backend = c10d._world.pg_map.get(pg, ("", None))[0]
    return () if backend == "fake" else tuple(d.type for d in pg._device_types)


def has_native_avg(pg: dist.ProcessGroup, device: torch.device) -> bool:
    """Only NCCL averages by itself."""
    return device.type == "cuda" and pg._get_backend(device).name() == "nccl"


# -- tracing ---


def at_trace_time(fn: F) -> F:
    """Dynamo calls ``fn`` while tracing, on constants, instead of tracing into it."""
    return torch.compiler.assume_constant_result(fn)


def no_guards_on_globals_of(package: str) -> None:
    """Dynamo takes the globals of the package's modules for constant, as it does those of the
    standard library. One all_reduce reads fifty; guards on them would take 5 us a call."""
    is_constant = symbolic_convert.is_stdlib

    def is_constant_or_ours(module: Any) -> bool:
        return getattr(module, "__name__", "").split(".")[0] == package or is_constant(module)

    symbolic_convert.is_stdlib = is_constant_or_ours


def tracing() -> bool:
    """Is a compiler or tracer recording (Dynamo, AOT, make_fx, fake tensors)?"""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)
        or get_proxy_mode() is not None
    )


def size_hint(size: int) -> int:
    """The value that a symbolic size has in the trace at hand; as it is if there is none."""
    node = getattr(size, "node", None)  # of a SymInt
    return node.hint if node is not None and node.has_hint() else size


def ordinary(x: torch.Tensor) -> bool:
    """Is x a tensor that nothing but autograd, between the user and the kernel, wants to see: no
    subclass, meta device, lazy conjugate or negative, tangent, transform, mode or profiler?"""
    return (
        type(x) in _TENSORS
        and not x.is_meta
        and not x.is_conj()
        and not x.is_neg()
        and not transforms_active()
        and forward_ad._current_level < 0
        and _modes() == 0
        and _function_modes() == 0
        and not _profiling()
    )


def plain(x: torch.Tensor) -> bool:
    """Is x ordinary, and autograd has no part in it?"""
    return ordinary(x) and not (x.requires_grad and torch.is_grad_enabled())


# By their own names here: they are asked in every call.
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_profiling = torch.autograd._profiler_enabled
# Is any functorch transform active, whatever tensor is at hand?
transforms_active = torch._C._are_functorch_transforms_active


def wait_plain(x: torch.Tensor) -> None:
    """Wait for a plain tensor. Below autograd, whose Python kernel takes twice the time of it."""
    with below_autograd():
        torch.ops._c10d_functional.wait_tensor.default(x)


@functools.cache
def native_op(name: str) -> Callable[..., torch.Tensor]:
    """The bare function of fcoll_native::name, without OpOverload's Python around it."""
    return getattr(torch.ops.fcoll_native, name).default._op


def transforming(x: torch.Tensor) -> bool:
    """Is x inside vmap, grad or another functorch transform?"""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def has_tangent(x: torch.Tensor) -> bool:
    """Is x a dual number of forward-mode AD?"""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


below_autograd = torch._C._AutoDispatchBelowAutograd

# An autograd.Function for use inside an op's autograd kernel: under torch.func.grad that kernel
# runs for one level at a time.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
single_level_functions = _functorch_autograd.enable_single_level_autograd_function


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


# -- graphs ---


@functools.cache
def op_writes(op: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an op writes to."""
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    arguments = enumerate(op._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


@functools.cache
def op_returns_written(op: Any) -> bool:
    """Does it return nothing but the arguments that it writes to?"""
    return all(r.alias_info and r.alias_info.is_write for r in op._schema.returns)


@functools.cache
def op_is_view(op: Any) -> bool:
    """Is the result a view: its argument's memory, and nothing to compute?"""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    # torch calls it a new tensor for autograd's sake; it is a view as any other.
    if op is torch.ops.aten._unsafe_view.default:
        return True
    returns = op._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


@functools.cache
def op_fuses(op: Any) -> bool:
    """Does Inductor make loops of it that it can join with others: pointwise, reductions, and what
    torch decomposes into them?"""
    if not isinstance(op, torch._ops.OpOverload) or flop_formula(op):
        return False
    if torch.Tag.pointwise in op.tags or torch.Tag.reduction in op.tags:
        return True
    # copy_ and the ops on lists of tensors (optimizers) have no tag, and become loops all the same.
    lists = op.name().startswith("aten::_foreach_") or op is torch.ops.aten.copy_.default
    return lists or op in torch._decomp.decomposition_table


@functools.cache
def op_only_allocates(op: Any) -> bool:
    return getattr(op, "overloadpacket", op) in (
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    )


@functools.cache
def op_reduces(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.reduction in op.tags


@functools.cache
def flop_formula(op: Any) -> Callable[..., Any] | None:
    """torch's formula for the flops of an op, called with its arguments and out_val=.

    The CPU forms of attention have none of their own; their arguments are those of the others.
    """
    packet = getattr(op, "overloadpacket", op)
    found = flop_registry.get(packet)
    name = getattr(packet, "__name__", "")
    if found is None and "_for_cpu" in name:
        found = flop_registry.get(getattr(torch.ops.aten, name.replace("_for_cpu", ""), None))
    return found


def size_expr(size: Any) -> Any:
    """An int as it is; a symbolic size as its sympy expression."""
    node = getattr(size, "node", None)
    return size if node is None else int(node.expr) if node.expr.is_number else node.expr


# -- AOTAutograd ---


def teach_partitioner(ops: Sequence[Any]) -> None:
    """Tell AOTAutograd's partitioner, if it is in use, what it knows of torch's own collectives.

    It copies to the forward and to the backward graph whatever could be computed there, and then
    removes what is dead. Of ours it would leave collectives that nobody uses or waits for, and run
    a send of the forward in the backward once more.
    """
    partitioners = sys.modules.get("torch._functorch.partitioners")
    if partitioners is None or hasattr(partitioners, "taught_fcoll"):
        return
    partitioners.taught_fcoll = True  # type: ignore[attr-defined]
    with_effect = torch.fx.node._side_effectful_functions.intersection(ops)
    pure = set(ops) - with_effect

    def source(node: torch.fx.Node) -> Any:
        """The op that a wait or an element of a list comes from."""
        while node.target in (torch.ops._c10d_functional.wait_tensor.default, operator.getitem):
            node = node.args[0]  # type: ignore[assignment]
        return node.target

    def has_effect(node: torch.fx.Node) -> bool:
        return source(node) in with_effect

    extract = partitioners._extract_graph_with_inputs_outputs
    is_not_collective = partitioners.is_not_collective
    in_forward, in_backward = partitioners._must_be_in_forward, partitioners._must_be_in_backward
    is_backward = partitioners._has_tag_is_backward

    def extract_without_the_dead(*args: Any, **kwargs: Any) -> torch.fx.Graph:
        graph = extract(*args, **kwargs)
        graph.eliminate_dead_code(is_impure_node=lambda node: source(node) not in pure)
        return graph

    vars(partitioners).update(
        _extract_graph_with_inputs_outputs=extract_without_the_dead,
        is_not_collective=lambda node: has_effect(node) or is_not_collective(node),
        _must_be_in_forward=lambda node: (
            in_forward(node) or (has_effect(node) and not is_backward(node))
        ),
        _must_be_in_backward=lambda node: (
            in_backward(node) or (has_effect(node) and is_backward(node))
        ),
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
    from torch._inductor.virtualized import V

    # Inductor keeps the order in which collectives start, but not that of a wait and what started
    # before it: of two ranks that send to each other, each would wait before it starts to receive.
    def wait(x: Any) -> Any:
        out = stock_wait(x)
        node = V.graph.operations[-1]
        if isinstance(node, ir._WaitKernel):
            started = node.inputs[0]
            started = started.inputs[0] if isinstance(started, ir.MultiOutput) else started
            if getattr(started, "op_overload", None) in ordered:
                in_order(node)
        return out

    for op in ops:
        if op not in lowering.lowerings:
            lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
            lower = functools.partial(collective_kernel, op)
            lowering.register_lowering(op, type_promotion_kind=None)(lower)
    ordered = torch.fx.node._side_effectful_functions.intersection(ops)
    torch_wait = torch.ops._c10d_functional.wait_tensor.default
    stock_wait = lowering.lowerings[torch_wait]
    lowering.register_lowering(torch_wait, type_promotion_kind=None)(wait)


def collective_kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Lower a call of a collective to an extern kernel, as Inductor does torch's own."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V
    from torch.utils._pytree import tree_map

    create = ir._CollectiveKernel.create_out_of_place
    if not any("Tensor" in str(a.type) for a in op._schema.arguments):
        create = ir.FallbackKernel.create  # barrier: a collective kernel must have an input
    out = create(op, *args, **kwargs)
    made = reversed(V.graph.operations)
    in_order(next(node for node in made if isinstance(node, ir.FallbackKernel)))
    return tree_map(ir.TensorBox.create, out)


def in_order(node: Any) -> None:
    """Keep an operation of the graph that Inductor is lowering after the last one so marked."""
    from torch._inductor.virtualized import V

    last = getattr(V.graph, "last_in_order", None)
    if last is not None:
        V.graph.additional_buffer_deps[node.get_operation_name()].add(last)
    V.graph.last_in_order = node.get_name()
