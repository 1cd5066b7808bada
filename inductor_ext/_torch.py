"""The private torch._inductor and torch._dynamo APIs that inductor_ext uses; no other file but
``stock/_torch.py`` names one. Importing this file imports Inductor, which takes 1 s.

Tested with torch 2.13.0, 2.14.1 and 2.15.0, which all have these names.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor import compile_fx as _compile_fx
from torch._inductor import config as _inductor_config
from torch._inductor import custom_graph_pass as _custom_graph_pass
from torch._inductor import ir as _ir
from torch._inductor import lowering as _lowering  # type: ignore[attr-defined]
from torch._inductor import virtualized as _virtualized
from torch._inductor.codegen import wrapper as _wrapper

from fcoll._torch import symmetric_memory as _symm_mem
from fcoll.graph._torch import op_only_allocates
from fcoll.imports import is_missing, private, say_what_is_missing

# -- Inductor ---

# Its settings: the list of passes is one of them.
inductor_config = _inductor_config
# A pass that Inductor runs on graphs, with a key for its caches.
CustomGraphPass = _custom_graph_pass.CustomGraphPass
# The nodes that graphs are lowered to, and the table op -> lowering.
ir, lowering = _ir, _lowering
# Kernels of collectives and of their waits: their inputs live until the wait.
CollectiveKernel = private("torch._inductor.ir", "_CollectiveKernel")
WaitKernel = private("torch._inductor.ir", "_WaitKernel")
# V.graph is the graph that is being lowered; ops are what the body of a loop may do.
V, ops = _virtualized.V, _virtualized.ops
# Apply a function to all leaves of a result: a tensor or a list of them.
tree_map = private("torch.utils._pytree", "tree_map")
# Run real collectives while a graph is traced with fake tensors.
unset_fake_temporarily = private("torch._subclasses.fake_tensor", "unset_fake_temporarily")
FakeScriptObject = private("torch._library.fake_class_registry", "FakeScriptObject")
_comm_lowering = private("torch._inductor.comm_lowering")

# torch's symmetric memory: a tensor in it, what every rank of a group does with one to reach the
# peers', and the bytes that a rank has for signals.
_SYMM_MEM = "torch.distributed._symmetric_memory"
symmetric_empty = private(_SYMM_MEM, "empty")
rendezvous = private(_SYMM_MEM, "rendezvous")
signal_pad_size = private(_SYMM_MEM, "get_signal_pad_size")

# torch's own ops that are lowered here as well.
wait_tensor = torch.ops._c10d_functional.wait_tensor.default
all_reduce = torch.ops._c10d_functional.all_reduce.default
all_reduce_ = torch.ops._c10d_functional.all_reduce_.default


def is_wait_for_list(op: Any) -> bool:
    """Is it ``wait_tensors``, which torch has from 2.15 on?"""
    return op is _wait_tensors


_wait_tensors = getattr(getattr(torch.ops._c10d_functional, "wait_tensors", None), "default", "")


def compile_with_inductor(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]
) -> Callable:
    """What ``torch.compile`` does, with some settings changed."""
    return stock_compile_fx(graph, inputs, config_patches=patches)


stock_compile_fx = _compile_fx.compile_fx


def before_every_compile(hook: Callable[[Any], None] | None) -> None:
    """Call a function with each graph that Dynamo gives to Inductor; with None no more."""

    @functools.wraps(stock_compile_fx)
    def hooked(graph: Any, *args: Any, **kwargs: Any) -> Any:
        hook(graph)  # type: ignore[misc]
        return stock_compile_fx(graph, *args, **kwargs)

    _compile_fx.compile_fx = hooked if hook else stock_compile_fx  # type: ignore[assignment]


def real_object(x: Any) -> Any:
    """The object that a fake stands for in what Dynamo traces."""
    return x.real_obj if isinstance(x, FakeScriptObject) else x


def is_group_name(name: str) -> bool:
    """Is there a process group of this name?"""
    return name in torch.distributed.distributed_c10d._world.pg_names.values()


def mode_options(mode: str) -> dict[str, Any]:
    """The settings that a mode of ``torch.compile`` stands for."""
    return torch._inductor.list_mode_options(mode)


def is_view(op: Any) -> bool:
    """Is the result of an op its argument's memory?"""
    return isinstance(op, torch._ops.OpOverload) and op.is_view


def is_pure(op: Any) -> bool:
    """Does an op give equal results for equal arguments?"""
    if not isinstance(op, torch._ops.OpOverload):
        return op is operator.getitem
    random = torch.Tag.nondeterministic_seeded in op.tags
    # What new_empty and its like return is whatever was in memory.
    return not (random or op._schema.is_mutable or op_only_allocates(op))


def realize_in_symmetric_memory(x: Any, group_name: str) -> None:
    """Have a CUDA buffer allocated by torch's symmetric memory, the same at every call."""
    _comm_lowering.realize_as_comm_buffer(x, ir.CommBufferType.SYMM_MEM, group_name)


def selects_one_shot(size: int, reduce_op: str, group_name: str) -> bool:
    """Is torch's own choice of one-shot all-reduces switched on, and would it take this one?"""
    settings = inductor_config._collective
    return (
        settings.auto_select
        and reduce_op == "sum"
        and size <= settings.one_shot_all_reduce_threshold_bytes
        and _symm_mem.is_symm_mem_enabled_for_group(group_name)  # type: ignore[arg-type]
    )


def symmetric_groups() -> list[str]:
    """The groups for which torch's own choice may take symmetric memory."""
    return sorted(_symm_mem._group_name_to_store)


def comm_buffers_on_cpu(on: bool) -> None:
    """Have Inductor allocate its own comm buffers on CPU, too: by itself it writes "cuda"."""
    allocate = _allocate_comm_buffer if on else _stock_allocate
    _wrapper.AllocateLine._codegen_comm_buffer = allocate  # type: ignore[method-assign]
    _symm_mem.is_symm_mem_enabled_for_group = _is_enabled if on else _stock_enabled  # type: ignore[assignment]


_stock_allocate = private("torch._inductor.codegen.wrapper", "AllocateLine._codegen_comm_buffer")
_stock_enabled = private(_SYMM_MEM, "is_symm_mem_enabled_for_group")


def _is_enabled(group_name: str) -> bool:
    """From 2.15 on torch asks only if the accelerator has symmetric memory. Here the CPU has."""
    if _stock_enabled(group_name) or torch.accelerator.is_available():
        return _stock_enabled(group_name)
    registered = getattr(_symm_mem, "_is_process_group_registered", lambda group_name: False)
    on_cpu = _symm_mem._SymmetricMemory.get_backend(torch.device("cpu")) is not None
    return on_cpu and registered(group_name)


def _allocate_comm_buffer(line: Any, code: Any) -> None:
    node = line.node
    if node.get_device().type != "cpu":
        return _stock_allocate(line, code)
    shape, stride = map(line.wrapper.codegen_shape_tuple, (node.get_size(), node.get_stride()))
    group_name = node.get_output_spec().group_name
    code.writeline(
        f"{node.get_name()} = empty_strided_p2p({shape}, {stride}, {node.get_dtype()}, "
        f'torch.device("cpu"), group_name="{group_name}", alloc_id={_memory_id(node)})'
    )


def _memory_id(node: Any) -> int:
    """A number for a comm buffer's memory, which a graph has again at its next call.

    The same on all ranks, and whenever the same graph is compiled: a random one could be in the
    cache that ranks share, and be another one than that with which a rank has met the others.
    """
    facts = (
        V.graph.graph,
        node.get_name(),
        node.get_output_spec(),
        node.get_output_spec().group_name,
    )
    return int(hashlib.sha256(repr(list(map(str, facts))).encode()).hexdigest()[:15], 16)


def call_of(result: Any) -> Any:
    """The call of an op that returns one tensor, of its result: from 2.14 on that is the same."""
    return result.inputs[0] if isinstance(result, ir.MultiOutput) else result


def result_layout(call: Any) -> Any:
    """The layout of the one tensor that a call returns."""
    own = call.layout
    return call.outputs[0].layout if isinstance(own, ir.MultiOutputLayout) else own


def needs(operation: str, buffer: str) -> None:
    """Have an operation of the graph that is being lowered come after a buffer that it does not
    read, which lives until then."""
    strong = getattr(V.graph, "additional_star_deps", None)  # until 2.14
    if strong is None:
        strong = vars(V.graph).setdefault("fcoll_needs", {})
        strong.setdefault(operation, set())
    strong[operation].add(buffer)


def _with_needs(compute: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(compute)
    def compute_dependencies(scheduler: Any) -> None:
        extra_deps = vars(V.graph).get("fcoll_needs", {})
        for node in scheduler.nodes if extra_deps else ():
            for buffer in sorted(extra_deps.get(node.get_name(), ())):
                node.add_fake_dep(StarDep(buffer))
        compute(scheduler)

    return compute_dependencies


StarDep = private("torch._inductor.dependencies", "StarDep")
_Scheduler = private("torch._inductor.scheduler", "Scheduler")
if not is_missing(_Scheduler):
    _Scheduler.compute_dependencies = _with_needs(_Scheduler.compute_dependencies)


def bytes_of(buffer: Any) -> int:
    """The size of a buffer of the graph that is being lowered, by the sizes of the trace."""
    count = V.graph.sizevars.optimization_hint(buffer.get_numel(), fallback=0)
    return int(count) * buffer.get_dtype().itemsize


def torchs_collectives() -> list[Any]:
    """torch's own functional collectives that Inductor has a lowering of."""
    ops = [op for op in lowering.lowerings if isinstance(op, torch._ops.OpOverload)]
    return [op for op in ops if op.namespace == "_c10d_functional"]


def ops_on_functions() -> list[Any]:
    """The ops that Inductor lowers and that are given graphs: regions, branches, loops."""
    return [op for op in lowering.lowerings if isinstance(op, torch._ops.HigherOrderOperator)]


def runs_region(node: torch.fx.Node) -> bool:
    """Does a node run the graph that it is given, once and whatever the values are?"""
    region = torch.ops.higher_order.invoke_subgraph
    return region in (node.target, *node.args[1:2])  # with_effects has it as its second argument


def regions_in(operation: Any) -> list[torch.fx.GraphModule]:
    """The graphs that an operation of the graph that is being lowered runs."""
    return [subgraph.graph_module for subgraph in operation.get_subgraphs()]


PyCodeCache = private("torch._inductor.codecache", "PyCodeCache")


def loaded_graphs() -> list[Path]:
    """The files of the graphs that are loaded in this process, in the order of their loading."""
    files = [Path(module.__file__ or "") for module in PyCodeCache.modules]
    return [file for file in files if file.is_file()]


def reads_of(buffer_name: str) -> list[str]:
    """The names of the operations that read a buffer, in the graph that is being generated."""
    buffer = V.graph.scheduler.name_to_buf[buffer_name]
    return [name for user in buffer.users if user.node for name in _operations(user.node)]


def _operations(node: Any) -> list[str]:
    return list(node.get_operation_names()) if hasattr(node, "get_operation_names") else []


def is_generated(operation: str) -> bool:
    """Has the code of an operation been written already, in the graph that is being generated?"""
    return operation in V.graph.scheduler.completed_operations


say_what_is_missing(__name__)
