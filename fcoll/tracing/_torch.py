"""The private torch APIs that tracing uses. Tested with torch 2.13.0, 2.14.1 and 2.15.0,
which all have these names; each says what it is for."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import Enum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from fcoll._torch import FakeTensor as FakeTensor
from fcoll._torch import FakeWork, no_modes, resolve_process_group, tracing_context
from fcoll._torch import dispatch_modes as dispatch_modes
from fcoll._torch import op_name as op_name
from fcoll._torch import storage_id as storage_id
from fcoll._torch import unboxed_group as unboxed_group
from fcoll.graph._torch import call_arguments as call_arguments
from fcoll.graph._torch import lazy_graph_module, op_writes
from fcoll.imports import private, say_what_is_missing
from fcoll.ranks.patches import patched


class _Never(Exception):
    """Stands for an exception that this version of torch does not have."""


detect_fake_mode = private("torch._guards", "detect_fake_mode")
FakeTensorMode = private("torch._subclasses.fake_tensor", "FakeTensorMode")
_engine_run_backward = private("torch.autograd.graph", "_engine_run_backward")
ShapeEnv = private("torch.fx.experimental.symbolic_shapes", "ShapeEnv")
is_traceable_wrapper_subclass = private(
    "torch.utils._python_dispatch", "is_traceable_wrapper_subclass"
)
tree_iter = private("torch.utils._pytree", "tree_iter")
_device_constructors = private("torch.utils._device", "_device_constructors")

# -- patches ---


#: Inside, a class or module has these attributes; what it had comes back at the end.
replaced = functools.partial(patched, "a trace")


def _ahead_of(owner: Any, names: Sequence[str], call: Callable[..., object]) -> Any:
    """Inside, ``call`` is made with the arguments of each call of these functions, ahead of it."""

    def around(name: str) -> Any:
        original = getattr(owner, name)

        def both(*args: Any, **kwargs: Any) -> Any:
            call(*args, **kwargs)
            return original(*args, **kwargs)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        return staticmethod(both) if is_static else both

    return replaced(owner, {name: around(name) for name in names})


def around_new_groups(
    note: Callable[[Sequence[int], bool], None],
) -> AbstractContextManager[None]:
    """Call note(ranks, by members only) where torch names a group that is about to be made."""

    def named(ranks: Sequence[int], use_hashed_name: bool) -> None:
        note(ranks, use_hashed_name)

    return _ahead_of(c10d, ["_process_group_name"], named)


@contextmanager
def all_groups_fake() -> Iterator[None]:
    """Inside, a group communicates nothing, also one that names another backend: "gloo" beside the
    world's, as Megatron makes them."""
    make = c10d._new_process_group_helper

    def fake(
        n: int, rank: int, ranks: Sequence[int], backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return make(n, rank, ranks, c10d.Backend("fake"), *args, **kwargs)

    with replaced(c10d, {"_new_process_group_helper": fake}):
        yield


@contextmanager
def functions_replaced(functions: dict[str, Any]) -> Iterator[None]:
    """Inside, torch has these functions.

    Which of them torch.device("meta") is for, torch notes when that is first used: if it were used
    inside, it would have no effect afterwards.
    """
    _device_constructors()
    with replaced(torch, functions):
        yield


# -- running under fake tensors ---


def fake_mode() -> Any:
    """Sizes are as they are; a value taken from a tensor is a symbol, as its size may be."""
    shape_env = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)


#: Where torch logs what an op raises on fake tensors, besides raising it.
FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"

#: What integers, floats and bools that only a run knows are.
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

#: What asking for a value that a trace does not have raises.
NO_VALUE = (
    private("torch._subclasses.fake_tensor", "DataDependentOutputException", _Never),
    private("torch._subclasses.fake_tensor", "DynamicOutputShapeException", _Never),
    private("torch.fx.experimental.symbolic_shapes", "GuardOnDataDependentSymNode", _Never),
)


def with_hooks_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y, with the hooks that run when x has its gradient."""
    for hook in (x._backward_hooks or {}).values():
        y.register_hook(hook)
    for hook in (x._post_accumulate_grad_hooks or {}).values():
        y.register_post_accumulate_grad_hook(hook)
    return y


@contextmanager
def around_sharding_propagation(pause: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter pause() whenever DTensor runs ops on whole-sized tensors only to learn shapes."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def paused(*args: Any, **kwargs: Any) -> Any:
        with pause():
            return original(*args, **kwargs)

    with replaced(ShardingPropagator, {original.__name__: paused}):
        yield


@contextmanager
def real_meshes() -> Iterator[None]:
    """Inside, a mesh computes on real tensors of its ranks (``mesh["tp"]``), also in a trace."""
    slices, ranks = DeviceMesh.__getitem__, DeviceMesh.mesh

    def real(fn: Callable[..., Any]) -> Callable[..., Any]:
        def outside(*args: Any) -> Any:
            with no_modes():
                return fn(*args)

        return outside

    ours = {"__getitem__": real(slices), "mesh": property(real(ranks.fget))}  # type: ignore[attr-defined]
    with replaced(DeviceMesh, ours):
        yield


def around_axes(note: Callable[[Any], None]) -> AbstractContextManager[None]:
    """Call note(axes) whenever a mesh is asked for axes, by name or number."""

    def note_all(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        for axes in (*args, *kwargs.values()):
            note(axes)

    return _ahead_of(DeviceMesh, ("__getitem__", "get_group", "get_local_rank", "size"), note_all)


@contextmanager
def around_waits(before: Callable[[dist.Work], None]) -> Iterator[None]:
    """Call before(work) whenever the program waits for a handle of a fake or real group."""
    with ExitStack() as stack:
        for cls in (dist.Work, FakeWork):
            if "wait" in vars(cls):
                stack.enter_context(_ahead_of(cls, ["wait"], lambda work, *_, **__: before(work)))
        yield


@contextmanager
def around_exchanges(with_symbols: Callable[..., Any]) -> Iterator[None]:
    """Inside, an exchange by a group's own method whose splits only a run knows is this function's:
    with_symbols(group, output, input, output_splits, input_splits) -> a handle."""
    names = [
        name for name in ("all_to_all_single", "alltoall_base") if name in vars(dist.ProcessGroup)
    ]

    def around(original: Any) -> Any:
        def exchange(group: Any, output: Any, input: Any, *rest: Any, **options: Any) -> Any:
            splits = [*rest, *options.values()][:2]
            if any(isinstance(n, torch.SymInt) for some in splits for n in some):
                return with_symbols(group, output, input, *splits)
            return original(group, output, input, *rest, **options)

        return exchange

    ours = {name: around(getattr(dist.ProcessGroup, name)) for name in names}
    with replaced(dist.ProcessGroup, ours):
        yield


def has_value(x: torch.Tensor) -> bool:
    """Does a trace know what is in it? Of a real tensor, and of a constant of the program."""
    return not isinstance(x, FakeTensor) or x.constant is not None


@contextmanager
def around_objects(ours: Callable[..., Any]) -> Iterator[None]:
    """Inside, the collectives of objects of torch.distributed are ours(name, ...), under whatever
    name a program has them: each is a wrapper around another, which is put in its place."""
    cells = []
    for name in _OF_OBJECTS:
        wrapper: Any = getattr(c10d, name)
        inner = getattr(wrapper, "__wrapped__", None)
        fn = functools.partial(ours, name)
        cells += [(c, fn, inner) for c in wrapper.__closure__ or () if c.cell_contents is inner]
    for cell, fn, _ in cells:
        cell.cell_contents = fn
    try:
        yield
    finally:
        for cell, _, inner in cells:
            cell.cell_contents = inner


_OF_OBJECTS = (
    *("all_gather_object", "gather_object", "broadcast_object_list"),
    *("scatter_object_list", "send_object_list", "recv_object_list"),
)


def sharded_group(frame: FrameType | None) -> tuple[Any, bool] | None:
    """The group of FSDP2's parameters that a frame gathers or reduces for, innermost, and is it
    after its backward pass?"""
    while frame is not None and frame.f_code is not ENGINE_CODE:
        if frame.f_code.co_filename.endswith(_FSDP_GROUP):
            group = frame.f_locals.get("self")
            if hasattr(group, "fsdp_params"):
                return group, frame.f_code.co_name == "post_backward"
        frame = frame.f_back
    return None


_FSDP_GROUP = os.path.join("_fully_shard", "_fsdp_param_group.py")


def fsdp_objects(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """All objects in which FSDP2 keeps the state of these modules: what is gathered, whose turn."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # 0.3 s to import; a user has done so
    if fsdp is None:
        return []
    todo: list[Any] = [m._get_fsdp_state() for m in modules if isinstance(m, fsdp.FSDPModule)]
    objects: dict[int, Any] = {}
    while todo:
        x = todo.pop()
        if isinstance(x, (list, tuple, set)):
            todo += x
        elif isinstance(x, dict):
            todo += x.values()
        elif id(x) not in objects and _is_of_fsdp(x):
            objects[id(x)] = x
            todo += vars(x).values()
    return list(objects.values())


def _is_of_fsdp(x: Any) -> bool:
    """Is it an object of FSDP2's own?"""
    mine = type(x).__module__.startswith("torch.distributed.fsdp._fully_shard")
    return mine and hasattr(x, "__dict__") and not isinstance(x, (torch.nn.Module, Enum))


# -- questions about ranks ---

_FOLDER = os.path.dirname(torch.__file__)

#: fcoll's own files.
FCOLL = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

#: Files whose functions ask on behalf of who calls them.
PASSES_ON = (
    *(c10d.__file__, c10d.__file__.replace("distributed_c10d", "c10d_logger")),
    *(contextlib.__file__, os.path.join(_FOLDER, "utils", "_contextlib.py")),
)

#: Files that use ranks to cut tensors up, or to say where a message goes: both are asked besides.
KNOWN = (
    FCOLL,
    *(
        os.path.join(_FOLDER, *parts)
        for parts in (
            ("distributed", "tensor", ""),
            ("distributed", "fsdp", ""),
            ("distributed", "device_mesh.py"),
            ("distributed", "_functional_collectives.py"),
            ("nn", "parallel", "distributed.py"),
        )
    ),
)


def known_groups() -> list[tuple[dist.ProcessGroup, dict[int, int], str]]:
    """The groups that there are: their ranks and names."""
    ranks, names = c10d._world.pg_group_ranks, c10d._world.pg_names
    return [(pg, places, str(names[pg])) for pg, places in ranks.items()]


@contextmanager
def group_ranks_replaced(groups: dict[dist.ProcessGroup, Any]) -> Iterator[None]:
    """Inside, c10d's table of the ranks of groups has these entries."""
    group_ranks = c10d._world.pg_group_ranks
    before = {pg: group_ranks[pg] for pg in groups}
    group_ranks.update(groups)
    try:
        yield
    finally:
        group_ranks.update(before)


@contextmanager
def around_shares(cut: Callable[[Any, int], None]) -> Iterator[None]:
    """Call cut(size, n) where DTensor and FSDP2 cut a dim into n parts, one for each rank."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    def split(self: Any, tensor: Any, n: int, **options: Any) -> None:
        cut(tensor.size(self.dim), n)

    def strided_size(self: Any, size: Any, n: int, *rest: Any, **options: Any) -> None:
        cut(size, n)

    with (
        _ahead_of(Shard, ["local_shard_size_and_offset"], lambda size, n, rank: cut(size, n)),
        _ahead_of(Shard, ["_split_tensor"], split),
        _ahead_of(_StridedShard, ["_split_tensor"], split),
        _ahead_of(_StridedShard, ["_local_shard_size_and_offset"], strided_size),
        _ahead_of(
            _fsdp_param, ["_chunk_with_empty"], lambda tensor, n, dim: cut(tensor.size(dim), n)
        ),
    ):
        yield


def is_ddp(module: torch.nn.Module) -> bool:
    """torch's own, which Dynamo does not look into."""
    is_one = isinstance(module, DistributedDataParallel)
    return is_one and type(module).forward is DistributedDataParallel.forward


@contextmanager
def around_backward(before: Callable[[bool], None]) -> Iterator[None]:
    """Call before(is_derivative) whenever a backward pass begins: True where it computes gradients
    that are themselves to be differentiated, autograd.grad(create_graph=True)."""

    from torch._dynamo.decorators import skip

    def run(roots: Any, grads: Any, retain_graph: bool, create_graph: bool, *args: Any, **kw: Any):
        if not is_compiling():  # else AOTAutograd's, which makes a graph of it
            before(create_graph and not kw.get("accumulate_grad", True))
        return _engine_run_backward(roots, grads, retain_graph, create_graph, *args, **kw)

    # Dynamo goes on in what the engine calls, as if this were torch's own function
    with replaced(torch.autograd, {"_engine_run_backward": skip(run)}):
        yield


# -- where the autograd engine is ---

#: The frame below which Python runs on behalf of the engine.
ENGINE_CODE = getattr(_engine_run_backward, "__code__", None)

#: The frame of a module's call, hooks and all.
MODULE_CALL_CODE = private("torch.nn", "Module._call_impl.__code__", instead=())


def sequence_nr() -> int:
    """The number of the newest node of the autograd graph."""
    return torch.autograd._get_sequence_nr() - 1


def running_node() -> Any:
    """The autograd node that is being run, None outside the backward pass."""
    return torch._C._current_autograd_node()


def node_number(node: Any) -> int:
    return node._sequence_nr()


def accumulates_into(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient a node of the backward pass adds to, if it is such a node."""
    return getattr(node, "variable", None)


# -- graphs ---


def graph_module(graph: torch.fx.Graph) -> torch.fx.GraphModule:
    return lazy_graph_module({}, graph)


# -- torch.compile ---


def aot_backend(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of torch.compile that splits graphs as Inductor does and gives them to these."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=forward,
        partition_fn=min_cut_rematerialization_partition,
    )


@contextmanager
def compiled_anew(backend: Callable[..., Any]) -> Iterator[None]:
    """Dynamo compiles a function for each trace's backend, however often it did so before: past
    its limit it would run it as it is, and nothing of it would be recorded. What the program
    itself compiles with any other backend is compiled with this one."""
    endless = 1_000_000
    patched = torch._dynamo.config.patch(
        recompile_limit=endless, accumulated_recompile_limit=endless
    )
    with patched, torch.compiler.set_stance("default", force_backend=backend):
        yield


def not_compiled() -> AbstractContextManager[Any]:
    """What the program compiles runs as it is written, fullgraph=True or not."""
    return torch.compiler.set_stance("force_eager")


@contextmanager
def compiled_modules(
    modules: Iterable[torch.nn.Module], backend: Callable[..., Any]
) -> Iterator[None]:
    """Inside, these modules' calls are compiled; what the program compiles stays as it is."""
    ours = [m for m in modules if m._compiled_call_impl is None]
    for module in ours:
        module._compiled_call_impl = torch.compile(module._call_impl, backend=backend)
    try:
        yield
    finally:
        for module in ours:
            module._compiled_call_impl = None


def is_of_compiler(error: Exception) -> bool:
    """Is it torch.compile that failed?"""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def is_compiling() -> bool:
    """Is it Dynamo or AOTAutograd that runs this, to make a graph of it?"""
    return tracing_context() is not None


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(fn)


# -- ops ---


@functools.cache
def decomposition(op: Any) -> Callable[..., Any] | None:
    """The op in terms of others if it is but a name for them (linear, in inference mode; the wait
    for a list, which torch has from 2.15 on)."""
    if op_name(op) == "_c10d_functional::wait_tensors":
        return lambda tensors: [torch.ops._c10d_functional.wait_tensor(x) for x in tensors]
    return op.decompose if op._can_decompose() else None


@functools.cache
def is_pure(op: Any) -> bool:
    """Does it write nothing, and do no values decide the sizes of its result?"""
    by_values = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not op._schema.is_mutable and by_values.isdisjoint(op.tags)


def new_fake(mode: Any, like: Any, storage: Any, attributes: dict[torch.device, Any]) -> Any:
    """A fake tensor with these sizes and strides, on new memory or this one. ``attributes`` keeps
    those of a device's first: a copy of them takes 4 us, FakeTensor's constructor 11."""
    with torch._C._DisableTorchDispatch():
        meta = torch.empty_strided(like.size, like.stride, dtype=like.dtype, device="meta")
        if storage is not None:
            meta.set_(storage, like.offset, like.size, like.stride)
    cached = attributes.get(like.device)
    if cached is None:
        fake = FakeTensor(mode, meta, like.device)
        attributes[like.device] = dict(vars(fake))
        return fake
    fake = torch.Tensor._make_subclass(
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=like.device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    else:
        torch._C._set_throw_on_mutable_data_ptr(fake)
    vars(fake).update(cached)
    return fake


@functools.cache
def writes(op: Any) -> bool:
    """Does it write to an argument, or complete one?"""
    return op._schema.is_mutable or op is torch.ops._c10d_functional.wait_tensor.default


def expression(x: Any) -> Any:
    """The sympy expression of a number that is known only in a run; anything else as it is."""
    return x.node.expr if isinstance(x, SYMBOLS) else x


def written(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes to, or completes: what a wait is for."""
    values = call_arguments(op, args, kwargs)
    named = [name for _, name in op_writes(op)]
    if op is torch.ops._c10d_functional.wait_tensor.default:
        named = [op._schema.arguments[0].name]
    return [x for x in tree_iter([values[name] for name in named]) if isinstance(x, torch.Tensor)]


def group_instance(group_name: str) -> int:
    """Which of the groups with the same ranks it is, in the order in which they were made."""
    pg = resolve_process_group(group_name)
    ranks = c10d._world.pg_group_ranks
    alike = [other for other in ranks if ranks[other] == ranks[pg]]
    return alike.index(pg)


def memory_of(x: torch.Tensor) -> tuple[Any, ...]:
    """What two tensor objects that are the same view of the same memory have in common."""
    return storage_id(x), x.storage_offset(), tuple(x.shape), x.stride(), x.dtype


def work_of(out: Any) -> dist.Work | None:
    """The handle among the results of an op of c10d."""
    last = out[-1] if isinstance(out, (tuple, list)) else out
    return dist.Work.unbox(last) if isinstance(last, torch.ScriptObject) else None


say_what_is_missing(__name__)
