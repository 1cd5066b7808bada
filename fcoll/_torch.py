"""The private torch APIs that fcoll uses. No other file of the package names one.

Tested with torch 2.13.0, 2.14.1 and 2.15.0: a name is in all of them where nothing else is said.
What a newer one lacks raises MissingInTorch when it is used (imports.py). Dynamo, DTensor and
sympy, which take longer to import than all of fcoll, are imported by those who need them.
"""

from __future__ import annotations

import functools
import math
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from fcoll.imports import private, private_names, say_what_is_missing, warn_of_untested

F = TypeVar("F", bound=Callable[..., Any])

warn_of_untested(torch.__version__)

symmetric_memory = private("torch.distributed._symmetric_memory")
get_proxy_mode = private("torch.fx.experimental.proxy_tensor", "get_proxy_mode")
FakeTensor = private("torch._subclasses.fake_tensor", "FakeTensor")
TracingContext = private("torch._guards", "TracingContext")
# The dispatch modes of this thread, and a context in which none of them sees what is done.
dispatch_modes, no_modes = private_names(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", "_disable_current_modes"
)
# One level of vmap: begun with a size, ended; a tensor in it, and out of it.
begin_vmap, end_vmap, add_batch_dim, remove_batch_dim = private_names(
    "torch._C._functorch",
    *("_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim"),
)
_C = "torch._C"

# The class that DTensor, FSDP2 and AOTAutograd recognise by isinstance: ours derives from it.
TorchAsyncCollectiveTensor = funcol.AsyncCollectiveTensor

# All that torch's module has, as it is now: compat.py may be put in its place later.
FUNCTIONAL_COLLECTIVES = dict(vars(funcol))

Future = private(_C, "Future")  # what hooks return: torch.futures.Future is a subclass of it

# torch's registry of outstanding work, keyed by storage: `_c10d_functional.wait_tensor` finds
# there what a collective of ours left, and ours finds theirs.
register_work = private(_C, "_distributed_c10d._register_work")
work_registry_size = private(_C, "_distributed_c10d._get_work_registry_size")


_dump_flight_records = private(_C, "_distributed_c10d._dump_fr_trace")


def flight_records() -> list[dict[str, Any]]:
    """What torch's own recorder has of this process: gloo's calls, in the order they were made."""
    return pickle.loads(_dump_flight_records())["entries"]


def dtype_name(name: str) -> str:
    """Python's name of a dtype that C++ calls "Float", "BFloat16" and so on."""
    names = {"Float": "float32", "Double": "float64", "Half": "float16", "Char": "int8"}
    more = {"Short": "int16", "Int": "int32", "Long": "int64", "Byte": "uint8"}
    complex_ = {"ComplexFloat": "complex64", "ComplexDouble": "complex128"}
    return {**names, **more, **complex_}.get(name, name.lower())


# -- the ops of c10d, torch.distributed's own ---

FakeStore = private("torch.testing._internal.distributed.fake_pg", "FakeStore")
FakeWork = private(_C, "_distributed_c10d.FakeWork")


def c10d_ops() -> list[str]:
    """The names of the ops of the namespace."""
    names = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("c10d::")}
    return sorted(name.removeprefix("c10d::") for name in names)


def c10d_arguments(name: str) -> tuple[str, ...]:
    """The names of the op's arguments; a version of torch may not have it."""
    return tuple(a.name for a in getattr(torch.ops.c10d, name).default._schema.arguments)


def c10d_returns(name: str) -> int:
    """How many values the op returns."""
    return len(getattr(torch.ops.c10d, name).default._schema.returns)


def unboxed_group(group: Any) -> dist.ProcessGroup:
    """The process group that such an op got."""
    return dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


_REDUCE_OPS = {int(op): name.lower() for name, op in dist.ReduceOp.RedOpType.__members__.items()}


def reduce_op_name(reduce_op: Any) -> str:
    """The name of the reduce op that such an op got."""
    op = reduce_op.op
    return _REDUCE_OPS[int(op() if callable(op) else op)]


def completed_work() -> Any:
    """A Work that is complete, as such ops return it."""
    return dist.Work.boxed(FakeWork())


# -- groups ---

resolve_process_group, default_group = private_names(
    c10d.__name__, "_resolve_process_group", "_get_default_group"
)


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
    world = default_group()
    backend, store = c10d._world.pg_map[world]
    pg, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(world.rank()),
        list(ranks),
        c10d.Backend(backend),
        store,
        c10d.GroupName(name),
        timeout=timedelta(seconds=group_timeout_s(world)),
        device_id=world.bound_device_id,
        group_desc=str(list(ranks)),
    )
    c10d._world.pg_group_ranks[pg] = {rank: i for i, rank in enumerate(ranks)}
    return pg


def mesh_group_name(mesh: DeviceMesh, axis: int) -> str:
    return mesh._dim_group_names[axis]


def mesh_group_names(mesh: DeviceMesh) -> list[str]:
    """The group names of all axes; none of a mesh that has no groups."""
    return list(getattr(mesh, "_dim_group_names", ()))


def mesh_process_group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The group as an object of the graph, when one graph is traced for all ranks."""
    return torch.ops._dtensor.mesh_get_process_group(mesh, axis)


def find_group(ranks: list[int], tag: str) -> dist.ProcessGroup | None:
    """The group of these ranks, in any order, that was made with this tag."""
    return c10d._find_pg_by_ranks_and_tag(tag, ranks)


# Where compile_on_one_rank is set: in torch.distributed.config until 2.13, and deprecated there.
ONE_RANK_CONFIG = torch.compiler.config
if not hasattr(ONE_RANK_CONFIG, "compile_on_one_rank"):
    ONE_RANK_CONFIG = dist.config


def for_all_ranks() -> bool:
    """Is one graph traced for all ranks?"""
    return ONE_RANK_CONFIG.compile_on_one_rank


def torch_ops_only() -> bool:
    """Does someone listen who knows torch's ops only: LocalTensorMode, or a trace for all ranks?"""
    if for_all_ranks() and tracing():
        return True
    local = None if torch.compiler.is_compiling() else sys.modules.get(_LOCAL_TENSOR)
    return local is not None and local.local_tensor_mode() is not None


_LOCAL_TENSOR = "torch.distributed._local_tensor"


def group_timeout_s(pg: dist.ProcessGroup) -> float:
    """How long the group's collectives wait; torch's default for groups that do not say."""
    try:
        options = pg._get_backend(torch.device("cpu")).options
        return options._timeout.total_seconds()
    except (RuntimeError, AttributeError):  # no backend for CPU tensors, or one written in Python
        return c10d.default_pg_timeout.total_seconds()


def cpu_backend(pg: dist.ProcessGroup) -> Any:
    """What moves the group's CPU tensors; None for a group that is written in Python."""
    try:
        backend = pg._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def group_store(pg: dist.ProcessGroup) -> dist.Store | None:
    """The store of a group, with a prefix of its own; None for a group that has none."""
    try:
        return pg.get_group_store()
    except RuntimeError:
        return None


def process_groups() -> list[dist.ProcessGroup]:
    """The groups of this rank, in the order they were made."""
    return [pg for pg in c10d._world.pg_map if pg is not None and pg.rank() >= 0]


def is_fake_group(pg: dist.ProcessGroup) -> bool:
    """Is it a group of which only this rank is there?"""
    return c10d._world.pg_map.get(pg, ("", None))[0] == "fake"


def device_types(pg: dist.ProcessGroup) -> tuple[str, ...]:
    """The device types the group's backends serve; a fake group serves all, so gives none."""
    return () if is_fake_group(pg) else tuple(d.type for d in pg._device_types)


def is_gloo(pg: dist.ProcessGroup) -> bool:
    """Does gloo move the group's CPU tensors, or those messages that fcoll's backend hands it?"""
    if "cpu" not in device_types(pg):
        return False
    backend = cpu_backend(pg)
    return backend is not None and backend.name() in ("gloo", "fcoll")


def has_native_avg(pg: dist.ProcessGroup, device: torch.device) -> bool:
    """Only NCCL averages by itself."""
    return device.type == "cuda" and pg._get_backend(device).name() == "nccl"


# -- tracing ---


def at_trace_time(fn: F) -> F:
    """Dynamo calls ``fn`` while tracing, on constants, instead of tracing into it.

    It is torch.compiler.assume_constant_result, which imports Dynamo.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


#: Modules of torch's compiler that are to know of fcoll as soon as they are imported.
TRACES_FUNCTIONS = "torch._dynamo.symbolic_convert"
PARTITIONER = "torch._functorch.partitioners"
COMPILER = "torch._inductor.compile_fx"


def no_guards_on_globals_of(package: str) -> tuple[Any, str, Callable[[Any], Any]]:
    """What to wrap so that Dynamo takes the globals of the package's modules for constant, as it
    does those of the standard library: (module, name, wrapper). One all_reduce reads fifty; guards
    on them would take 5 us a call."""

    def make(is_constant: Any) -> Callable[[Any], bool]:
        return lambda module: (
            getattr(module, "__name__", "").split(".")[0] == package or is_constant(module)
        )

    return sys.modules[TRACES_FUNCTIONS], "is_stdlib", make


def guard_or_false(condition: Any) -> bool:
    """The condition; of symbolic sizes that only a run knows, False."""
    # In Dynamo a symbolic one is a bool by type.
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def is_faking() -> bool:
    """Does this thread run on fake tensors, as a trace does?"""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def has_no_data(x: torch.Tensor) -> bool:
    """Is it a fake or a meta tensor?"""
    return x.is_meta or isinstance(x, FakeTensor)


def storage_id(x: torch.Tensor) -> int:
    """Tensors with the same one share memory, as long as one of them lives."""
    return x.untyped_storage()._cdata


def backward_pass() -> int:
    """A number of the backward pass that this thread runs; -1 if it runs none."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(fn: Callable[[], Any]) -> None:
    """Call fn when the backward pass that is running has computed all its gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)  # type: ignore[attr-defined]


def tracing() -> bool:
    """Is a compiler or tracer recording (Dynamo, AOT, make_fx, fake tensors)?"""
    return (
        torch.compiler.is_compiling()
        or is_faking()
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
        and modes_active() == 0
        and function_modes_active() == 0
        and not profiled()
    )


def unobserved() -> bool:
    """Is there no mode and no profiler that wants to see which ops are called?"""
    return modes_active() == 0 and function_modes_active() == 0 and not profiled()


def plain(x: torch.Tensor) -> bool:
    """Is x ordinary, and autograd has no part in it?"""
    return ordinary(x) and not (x.requires_grad and torch.is_grad_enabled())


# By their own names here: they are asked in every call.
_TENSORS = (torch.Tensor, torch.nn.Parameter)
modes_active = private(_C, "_len_torch_dispatch_stack")
function_modes_active = private(_C, "_len_torch_function_stack")
profiled = private("torch.autograd", "_profiler_enabled")
# Is any functorch transform active, whatever tensor is at hand?
transforms_active = private(_C, "_are_functorch_transforms_active")


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


below_autograd = private(_C, "_AutoDispatchBelowAutograd")

#: A tensor of a subclass with a size, strides and so on, and no storage of its own.
make_wrapper = private("torch", "Tensor._make_wrapper_subclass")

# The stack of this thread, noted in 0.3 us without looking at it: for what hardly anybody asks.
stack_here = functools.partial(private(_C, "_profiler.gather_traceback"), True, False, False)
_read_stacks = private(_C, "_profiler.symbolize_tracebacks")


def frames_of(stack: Any) -> list[dict[str, Any]]:
    """What ``stack_here`` noted: filename, line and name of each function, innermost first."""
    return _read_stacks([stack])[0]


def views_untracked() -> Any:
    """Inside, a view is a tensor of its own to autograd."""
    return torch._C._ExcludeDispatchKeyGuard(_views())


@functools.cache
def _views() -> Any:
    return torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


# An autograd.Function for use inside an op's autograd kernel: under torch.func.grad that kernel
# runs for one level at a time.
SingleLevelFunction = private(
    "torch.autograd.function", "_SingleLevelFunction", instead=torch.autograd.Function
)
single_level_functions = private(
    "torch._functorch.autograd_function", "enable_single_level_autograd_function"
)


def traced_stack() -> Sequence[Any]:
    """The user's frames that Dynamo is tracing right now, outermost first."""
    return () if tracing_context() is None else TracingContext.extract_stack()


def tracing_context() -> Any:
    """What Dynamo or AOTAutograd is making a graph of, None if they are not."""
    return TracingContext.try_get()


def op_name(op: Any) -> str:
    """ "namespace::name" of an op or of one of its overloads; anything else as it prints."""
    if isinstance(op, torch._ops.OpOverload):
        return op.name().partition(".")[0]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    return str(op)


def is_view_op(op: Any) -> bool:
    return bool(funcol._is_view_op(op))


def completed(x: torch.Tensor) -> torch.Tensor:
    """The tensor itself, complete, if it is a functional collective's result; without autograd."""
    return x.trigger_wait() if isinstance(x, TorchAsyncCollectiveTensor) else x


# -- torch's ops of other namespaces ---

_libraries: dict[str, torch.library.Library] = {}


def add_kernel(namespace: str, name: str, key: str, kernel: Callable[..., Any]) -> None:
    """Make a function the kernel of an op for a dispatch key ("CPU", "Meta"), unless it has one, or
    this version of torch has no such op."""
    if not hasattr(getattr(torch.ops, namespace), name):
        return
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key):
        return
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    _libraries[namespace].impl(name, kernel, key)


def as_dtypes(dtypes: Sequence[Any]) -> Sequence[torch.dtype | None]:
    """dtypes, which reach a kernel as numbers when they are in a list."""
    return symmetric_memory._maybe_convert_scalar_types_to_dtypes(list(dtypes))


# -- worlds ---

# The tables that torch.distributed keeps its groups in.
_TABLES = (
    "_pg_map",
    "_pg_names",
    "_pg_group_ranks",
    "_pg_backend_config",
    "_tags_to_pg",
    "_pg_to_tag",
)
_CHANGED = (*_TABLES, "_group_count")


class World:
    """Groups of torch.distributed that take the place of those that are there: ``enter`` it, as
    often as you like. At first there are none, as in a new process."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {t: {} for t in _TABLES}
        self.default: Any = None
        self.count = 0
        self._copies: dict[str, Any] = {}  # of the tables, for the program to write to

    def fill(self, make: Callable[[], DeviceMesh]) -> DeviceMesh:
        """The groups that ``make`` makes are the world's from now on. They stay registered by their
        names, which must be their own: to register three anew at every entry would take as long as
        three collectives."""
        with fresh_world():
            mesh = make()
            self.tables = {t: getattr(c10d, t) for t in _TABLES}
            self.default, self.count = c10d._world.default_pg, c10d._group_count
        _register(self.tables["_pg_names"])
        weakref.finalize(self, _unregister, dict(self.tables["_pg_names"]))
        return mesh

    def enter(self) -> Callable[[], None]:
        """Put this world in the place of the one that is there; returns what undoes it."""
        world, here = c10d._world, vars(c10d)
        before = {t: here[t] for t in _CHANGED}
        default, state = world.default_pg, dict(vars(world))
        _unregister(before["_pg_names"])
        tables = self._copies or {t: dict(table) for t, table in self.tables.items()}
        tables["_group_count"] = self.count
        self._copies = {}  # not for one that is entered inside this one
        here.update(tables)
        world._pg_coalesce_state, world._comms = {}, []
        world._pg_flight_recorder_hooks = {}  # 2.15: destroy_process_group clears it
        c10d._update_default_pg(self.default)

        def leave() -> None:
            mine, names = self.tables["_pg_names"], here["_pg_names"]
            if names.keys() == mine.keys():
                self._copies = tables  # no group was made or destroyed
            else:
                _unregister({pg: n for pg, n in names.items() if pg not in mine})
                _register({pg: n for pg, n in mine.items() if pg not in names})
            here.update(before)
            c10d._update_default_pg(default)
            vars(world).update(state)
            _register(before["_pg_names"])

        return leave


@contextmanager
def fresh_world() -> Iterator[None]:
    """torch.distributed as in a new process; what was there comes back at the end."""
    leave = World().enter()
    _forget_meshes()
    try:
        yield
    finally:
        leave()
        _forget_meshes()


def _register(names: dict[dist.ProcessGroup, str]) -> None:
    for pg, name in names.items():
        c10d._register_process_group(name, pg)


def _unregister(names: dict[dist.ProcessGroup, str]) -> None:
    for name in names.values():
        c10d._unregister_process_group(name)


def _forget_meshes() -> None:
    """DTensor's caches hold meshes, equal meshes of other ranks are equal keys: forget them."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug
        from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

        debug._clear_sharding_prop_cache()
        clear_redistribute_planner_cache()


def fake_mesh(
    axes: dict[str, int], rank: int, device: str, names: dict[str, str], desc: str
) -> DeviceMesh:
    """A mesh as a rank sees it, over groups that communicate nothing: one of all ranks, described
    by ``desc``, and one for each axis, as ``names`` has them. An axis of all ranks has the first,
    as in init_device_mesh."""
    shape = tuple(axes.values())
    ranks = torch.arange(math.prod(shape), device="cpu").view(shape)
    everyone = _fake_group(range(ranks.numel()), rank, names["world"], desc)
    groups = []
    for i, (axis, n) in enumerate(axes.items()):
        rows = ranks.movedim(i, -1).reshape(-1, n)
        mine = rows[(rows == rank).any(1)][0].tolist()
        whole = n == ranks.numel()
        groups.append(everyone if whole else _fake_group(mine, rank, names[axis], f"mesh_{axis}"))
    # made so, it takes no time for each other group
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=tuple(axes))


def _fake_group(ranks: Sequence[int], rank: int, name: str, desc: str) -> dist.ProcessGroup:
    """A group that communicates nothing. The first one made is the default group."""
    default = c10d._world.default_pg is None
    pg, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        [] if default else list(ranks),
        c10d.Backend("fake"),
        FakeStore(),
        c10d.GroupName(name),
        timeout=timedelta(minutes=1),
        group_desc=desc,
    )
    c10d._world.pg_group_ranks[pg] = {r: i for i, r in enumerate(ranks)}
    if default:
        c10d._update_default_pg(pg)
    return pg


say_what_is_missing(__name__)
