"""A dispatch mode that writes down every op as a node of an fx graph, with its origin.

make_fx does the same in ten times the time: 32 Llama layers with TP took it 47 s with stacks.
"""

from __future__ import annotations

import operator
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import zip_longest
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_map

from fcoll.errors import GroupDestroyed, UnknownGroup
from fcoll.graph.origin import PHASES, Frames, Origin
from fcoll.groups import Group, by_name, group_name
from fcoll.source import current_part, is_library
from fcoll.table.collectives import row_of
from fcoll.table.row import Collective
from fcoll.tracing import _torch, in_place_calls, object_collectives, pipelines
from fcoll.tracing.fake_world import publish, request
from fcoll.tracing.fakes import Results
from fcoll.tracing.shared_values import digest_of
from fcoll.tracing.values import user_line


class Recorder(_torch.TorchDispatchMode):
    """Records while it is active; ``graph`` is what was recorded.

    A tensor that no recorded op made is an input: its placeholder is made where it is first seen.
    Detached and aliased tensors are the same value, so the same node. In-place ops stay what they
    are, so the order of the nodes is part of the graph's meaning.
    """

    traces_calls = True  # groups of simulated ranks ask for it

    def __init__(
        self, names: dict[int, str], modules: dict[Any, str], outermost: FrameType, fake: Any
    ) -> None:
        super().__init__()
        self.fake = fake  # the mode that fake tensors are of
        self._run = Results(fake).call
        self._fakes: dict[int, Tensor] = {}  # id of a real tensor -> the fake one in its place
        self.graph = fx.Graph()
        self.node_origin: Origin | None = None  # of the graph node that runs, in a compiled step
        self.ran_backward = False
        self.notes: list[str] = []  # on what only a run knows
        self.by_memory = False  # a new tensor object may be a known value: go by its memory too
        self._by_memory: dict[Any, fx.Node] = {}
        self._names = names  # id of a tensor that the program had before -> its name
        self._modules = modules  # a module -> its path
        self._outermost = outermost
        self._paused = False
        self._optimizers = 0  # at work: one may be inside another
        self._in_module = False  # is the op that is being recorded in a module's call?
        self._lines_of_shards: dict[str, Frames] = {}  # a module that FSDP2 gathers -> its call
        self._nodes: dict[int, fx.Node] = {}  # id of a tensor -> the node that made it
        self._kept: list[Tensor] = []  # so that ids stay theirs
        self._origins: list[tuple[int, Origin]] = []  # by number of the autograd node they made
        self._last_input: fx.Node | None = None
        self._pending: dict[
            int, in_place_calls.StartedMessage
        ] = {}  # by the storage that is being written
        self._works: dict[
            int, tuple[Any, in_place_calls.StartedMessage]
        ] = {}  # by the handle's id, held with it
        # by id, held with it: a code's hash goes over its constants, and Dynamo's may have none
        self._is_library: dict[int, tuple[CodeType, bool]] = {}
        self._interned: dict[Any, Any] = {}
        self._op_names: dict[int, str] = {}  # an op -> what its nodes are called

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch wraps a mode's method for Dynamo, a tenth of a trace's time: here none runs."""
        return False

    # -- recording ------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], _torch.FakeTensor):
            return args[0].fake_device  # asked twice for every op
        if self._paused or func.namespace == "prim":
            return func(*args, **kwargs)
        for cls in types:
            if not issubclass(cls, _PLAIN) and cls is not Tensor:
                return NotImplemented  # a DTensor and its like: its parts come here
        if self.fake is not None and func not in _LIFTS:
            args, kwargs = self._without_real(args, kwargs)
        if self._pending:
            self._complete((args, kwargs))
        if func.namespace == "c10d":
            return self._c10d(func, args, kwargs)
        if func in _SAME_VALUE:
            out = self._run(func, args, kwargs)
            self._same(args[0], out)
            return out
        decomposed = _torch.decomposition(func)
        if decomposed is not None:
            with self:
                out = decomposed(*args, **kwargs)
            if out is not NotImplemented:
                return out
        origin = self._origin()
        out = self._run(func, args, kwargs)
        if func is torch.ops.aten.bincount.default:
            out = self._counted(out, _torch.call_arguments(func, args, kwargs)["minlength"])
        if origin is _STORING:
            self._store(func, args, kwargs, out)
        else:
            self._record(func, args, kwargs, out, origin)
        return out

    def _without_real(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call with fake tensors for the real ones: the program's own must not be written to."""
        real = [x for x in leaves_of((args, kwargs)) if _is_real(x)]
        if not real:
            return args, kwargs
        for x in real:
            if id(x) not in self._fakes:
                with self.paused():
                    fake = self.fake.from_tensor(x, static_shapes=True)
                self._nodes[id(fake)] = self.node_of(x)
                self._fakes[id(x)] = fake
        return tree_map(lambda x: self._fakes.get(id(x), x), (args, kwargs))

    def _c10d(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An in-place op of torch.distributed: the table's ops in its place, and a wait at once or,
        where the program has a handle, when it waits for it, at the latest before the first use
        of the result."""
        if (op := in_place_calls.op_of(func)) is None:
            return None
        with self:
            pending, at_once = in_place_calls.start(op, args, kwargs)
            if at_once:
                pending.complete()
        out = op.returned(args)  # with a handle
        if not at_once:
            self._pending.update(dict.fromkeys(pending.storages(), pending))
            if (work := _torch.work_of(out)) is not None:
                self._works[id(work)] = work, pending
        return out

    def _exchange(
        self, group: Any, output: Tensor, input: Tensor, *splits: Any
    ) -> in_place_calls.ExchangeWork:
        """An exchange whose splits only a run knows, which no op of c10d takes."""
        pending = in_place_calls.start_exchange(group, output, input, *splits)
        self._pending.update(dict.fromkeys(pending.storages(), pending))
        return in_place_calls.ExchangeWork(lambda: self._finish(pending))

    def _objects(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return object_collectives.call(name, self.notes, *args, **kwargs)

    def _waits(self, work: Any) -> None:
        """The program waits for a handle; dist.send and dist.recv do so at once."""
        _, pending = self._works.pop(id(work), (None, None))
        if pending is not None:
            self._finish(pending)

    def _finish(self, pending: in_place_calls.StartedMessage) -> None:
        """Wait for the messages of a call: where the program does, this mode is on."""
        for storage in pending.storages():
            self._pending.pop(storage, None)
        with torch.no_grad():
            pending.complete()

    def _complete(self, used: Any) -> None:
        """Wait for the messages into tensors that are about to be used."""
        for x in leaves_of(used):
            pending = self._pending.get(_torch.storage_id(x)) if isinstance(x, Tensor) else None
            if pending is not None:
                with self:  # an op has come here: inside, modes are off
                    self._finish(pending)

    def _store(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """What the engine does with a leaf's new gradient. It copies it, because the recorder holds
        on to it; in a run it just takes it, so the copy is the same value."""
        if func is _COPY and self.known(args[0]) is None:
            self._same(args[1], out)
        elif func is not torch.ops.aten.new_empty_strided.default:
            self._record(func, args, kwargs, out, self._of_leaf())

    @staticmethod
    def _group(row: Collective, func: Any, args: Any, kwargs: Any) -> tuple[Group, int] | None:
        """The group that a collective is called on, while it is there, and which of its like."""
        group_arg = _torch.call_arguments(func, args, kwargs).get("group_name")
        if group_arg is None:
            return None
        name = group_name(group_arg)
        try:
            return by_name(name), _torch.group_instance(name)
        except UnknownGroup:
            raise GroupDestroyed(op=row.name, group=name) from None

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, origin: Origin) -> None:
        row = row_of(func)
        has_tensors = isinstance(out, Tensor) or row is not None
        if not has_tensors and not any(map(_is_tensor, leaves_of((args, kwargs, out)))):
            return  # a mark for the profiler, a question
        group = self._group(row, func, args, kwargs) if row is not None else None
        node_args, node_kwargs = self._argument(args), self._argument(kwargs)
        name = self._op_names.get(id(func))
        node = self.graph.create_node("call_function", func, name=name)
        node.args = node_args  # set afterwards: fx searches arguments of create_node for symbols
        if node_kwargs:
            node.kwargs = node_kwargs
        if name is None:  # fx puts it together anew for each node
            self._op_names[id(func)] = _NUMBERED.sub("", node.name)
        if group is not None:
            node.meta["group"] = group
            origin = self._of_shards(origin)
        if origin.phase == "fwd" and (later := self._phase_of_inputs(node, args)) != "fwd":
            origin = self._intern(Origin(origin.frames, origin.module, later))
        node.meta["origin"] = origin
        targets = _torch.written(func, args, kwargs) if _torch.writes(func) else []
        were = [self.known(x) for x in targets]
        if isinstance(out, Tensor):
            self._bind(out, node)
        elif isinstance(out, _torch.SYMBOLS):
            node.meta["val"] = out  # which value of which tensor the symbol is
        elif isinstance(out, (tuple, list)):
            node.meta["val"] = out
            for i, part in enumerate(out):
                if isinstance(part, Tensor):
                    item = self.graph.call_function(operator.getitem, (node, i))
                    item.meta["origin"] = origin
                    self._bind(part, item)
        if targets:
            self._wrote(targets, were, list(leaves_of(out)), origin.phase)

    def _wrote(self, xs: list[Tensor], were: list[Any], outs: list[Any], phase: str) -> None:
        """After a write in place a tensor's value is the op's result, where it has one."""
        for x, was, y in zip_longest(xs, were, outs):
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                self._nodes[id(x)] = self._nodes[id(y)]
                if was is not None and "state" in was.meta:
                    self._nodes[id(y)].meta["state"] = True
            elif isinstance(x, Tensor):
                self.node_of(x).meta["written_in"] = phase

    def _bind(self, x: Tensor, node: fx.Node) -> None:
        node.meta["val"] = x
        self._nodes[id(x)] = node
        self._kept.append(x)
        if self.by_memory:
            self._by_memory[_torch.memory_of(x)] = node

    def _same(self, x: Tensor, y: Tensor) -> None:
        self._nodes[id(y)] = self.node_of(x)
        self._kept.append(y)

    def _argument(self, x: Any) -> Any:
        """What stands for an argument in the graph."""
        if isinstance(x, Tensor):
            return self.node_of(x)
        kind = type(x)
        if kind in _NUMBERS:
            return x
        if kind is tuple or kind is list:
            return kind([self._argument(y) for y in x])
        if kind is dict:
            return {k: self._argument(y) for k, y in x.items()}
        if isinstance(x, dist.ProcessGroup):  # ops take a name as well, and a graph can be printed
            return x.group_name
        return tree_map(self._argument, x) if isinstance(x, _NESTED) else _torch.expression(x)

    def node_of(self, x: Tensor) -> fx.Node:
        """The node whose value the tensor is; a new input if there is none."""
        return self.known(x) or self._input(x)

    def known(self, x: Tensor) -> fx.Node | None:
        node = self._nodes.get(id(self._fakes.get(id(x), x)))
        return node if node or not self.by_memory else self._by_memory.get(_torch.memory_of(x))

    def _input(self, x: Tensor) -> fx.Node:
        path = self._names.get(id(x), "constant")
        name = re.sub(r"\W", "_", path)
        if self._last_input is None:
            placed = self.graph.inserting_before(next(iter(self.graph.nodes), None))
        else:
            placed = self.graph.inserting_after(self._last_input)
        with placed:
            node = self.graph.placeholder(name if name.isidentifier() else "arg")
        node.target = node.name  # which is unique
        self._last_input = node
        node.meta["origin"] = Origin((), path.rpartition(".")[0], "fwd")
        if id(x) in self._names and not path.endswith(".grad"):
            node.meta["state"] = True  # a parameter, a buffer
        self._bind(x, node)
        return node

    def _phase_of_inputs(self, node: fx.Node, args: Any) -> str:
        """What works on gradients outside the backward pass belongs to it, and so on; but not the
        next forward pass, which works on parameters that the optimizer has written."""
        metas = [n.meta for n in node.all_input_nodes]
        if any("state" in meta for meta in metas) and self._is_forward(args):
            metas = [meta for meta in metas if "state" not in meta]
        phases = [meta.get("written_in", meta["origin"].phase) for meta in metas]
        return max(phases, key=PHASES.index, default="fwd")

    def _is_forward(self, args: Any) -> bool:
        """Is the op in a module's call, or one that autograd records?"""
        if self._in_module or self.node_origin is not None:
            return True
        tensors = (x for x in leaves_of(args) if isinstance(x, Tensor))
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    def _counted(self, out: Tensor, minlength: int) -> Tensor:
        """bincount's result with ``minlength`` counts where only a run knows their number."""
        if minlength == 0 or isinstance(out.shape[0], int):
            return out
        self.notes.append(f"{user_line()}: bincount is taken to give minlength={minlength} counts")
        with self.paused():
            return out.new_empty(minlength)

    def has_written(self, x: Tensor) -> bool:
        """Has a tensor that the program had before another value by now?"""
        node = self.known(x)
        return node is not None and node.op != "placeholder"

    def shared_digest(self, condition: Any) -> str | None:
        """The digest of a condition on values that were read, if all ranks share them."""
        return digest_of(condition, self.graph)

    def runs_backward(self, is_derivative: bool) -> None:
        """A backward pass begins; gradients to be differentiated again are none."""
        self.ran_backward |= not is_derivative

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    # -- who asked --------------------------------------------------------------------------------

    def _origin(self) -> Origin:
        if self.node_origin is not None:
            return self.node_origin
        frames, module, in_engine = self._python_stack()
        running = _torch.running_node()
        if not in_engine:
            phase = "opt" if self._optimizers else "fwd"
            origin = self._intern(Origin(frames, module, phase))
            number = _torch.sequence_nr()
            if not self._origins or self._origins[-1][0] < number:
                self._origins.append((number, origin))
            return origin
        leaf = _torch.accumulates_into(running)
        if leaf is not None and not frames:
            return _STORING
        if running is None:  # at the end of the backward pass
            forward = Origin(self._callers_of_engine(), "", "bwd")
        else:
            forward = self._of_leaf() if leaf is not None else self._forward_of(running)
        # frames of its own in the backward pass: a hook, or the user's autograd function
        module = current_part() or module or forward.module
        return self._intern(Origin(frames or forward.frames, module, "bwd"))

    def _forward_of(self, node: Any) -> Origin:
        """The origin of the op of the forward pass that an autograd node belongs to."""
        number = _torch.node_number(node)
        i = bisect_right(self._origins, number, key=operator.itemgetter(0))
        return self._origins[i - 1][1] if i else _NOWHERE

    def _of_leaf(self) -> Origin:
        """The origin of the first use of the leaf whose gradient has just been made."""
        leaf = _torch.accumulates_into(_torch.running_node())
        assert leaf is not None
        node = next(filter(None, map(self.known, parts_of(leaf))), None)
        user = next(iter(node.users), None) if node is not None else None
        origin = user.meta["origin"] if user is not None else _NOWHERE
        return self._intern(Origin(origin.frames, current_part() or origin.module, "bwd"))

    def _of_shards(self, origin: Origin) -> Origin:
        """The origin of a call of FSDP2's: the module whose parameters they are, and the line that
        calls it, whoever asks for them ahead."""
        sharded = _torch.sharded_group(sys._getframe(2))
        if sharded is None:
            return origin
        group, after_backward = sharded
        module = self._modules.get(group.modules[0], origin.module)
        phase = "bwd" if after_backward else origin.phase
        if phase == "fwd":
            self._lines_of_shards.setdefault(module, origin.frames)
        frames = self._lines_of_shards.get(module, origin.frames)
        return self._intern(Origin(frames, module, phase))

    def _python_stack(self) -> tuple[Frames, str, bool]:
        """The user's frames, the path of the innermost module that is being called, and whether it
        is the autograd engine that runs this; then frames are only those that it called."""
        frames, module, in_engine, self._in_module = [], None, False, False
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame is not self._outermost:
            code = frame.f_code
            if code is _torch.ENGINE_CODE:
                in_engine = True
                break
            if module is None and code is _torch.MODULE_CALL_CODE:
                self._in_module = True
                module = self._modules.get(frame.f_locals["self"])
            if not self._of_library(code):
                frames.append((code.co_filename, frame.f_lineno))
            frame = frame.f_back
        path = (module or "").partition(".parametrizations")[0]
        return self._intern(tuple(reversed(frames))), path, in_engine

    def _callers_of_engine(self) -> Frames:
        """The user's frames that lead to the backward pass, loss.backward() the innermost."""
        frame: FrameType | None = sys._getframe(2)
        frames, inside = [], True
        while frame is not None and frame is not self._outermost:
            inside = inside and frame.f_code is not _torch.ENGINE_CODE
            if not inside and not self._of_library(frame.f_code):
                frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return self._intern(tuple(reversed(frames)))

    def _of_library(self, code: CodeType) -> bool:
        entry = self._is_library.get(id(code))
        if entry is None:
            entry = self._is_library[id(code)] = code, is_library(code.co_filename)
        return entry[1]

    def _intern(self, x: Any) -> Any:
        return self._interned.setdefault(x, x)

    @contextmanager
    def listening(self) -> Iterator[Recorder]:
        """Record, knowing whether an optimizer is at work."""

        def optimizer(more: int) -> Any:
            return lambda *_: setattr(self, "_optimizers", self._optimizers + more)

        before = register_optimizer_step_pre_hook(optimizer(1))
        after = register_optimizer_step_post_hook(optimizer(-1))
        try:
            with (
                self,
                _torch.real_meshes(),
                _torch.around_sharding_propagation(self.paused),
                _torch.around_waits(self._waits),
                _torch.around_exchanges(self._exchange),
                _torch.around_objects(self._objects),
                self._pipeline_shapes(),
            ):
                yield self
                unfinished, self._pending = dict.fromkeys(self._pending.values()), {}
                for pending in unfinished:
                    pending.complete()
        finally:
            before.remove()
            after.remove()

    def _pipeline_shapes(self) -> AbstractContextManager[None]:
        """Inside, the stages of pipelines learn their shapes, where there are pipelines."""
        if "torch.distributed.pipelining" not in sys.modules:
            return nullcontext()
        return pipelines.shapes_exchanged(self.paused, publish, request)

    def _settle_phases(self) -> None:
        """A message that only the backward pass uses belongs to it: the gradient from a pipeline's
        next stage is received before any op of the backward pass. So does its copy to where it is
        to be."""
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and node.users and _is_message(node):
                origin = node.meta["origin"]
                users = [n.meta["origin"].phase for n in node.users if n.op != "output"]
                phase = min(users, key=PHASES.index, default=origin.phase)
                if origin.phase == "fwd" and phase != "fwd":
                    node.meta["origin"] = Origin(origin.frames, origin.module, phase)

    def finish(self, outputs: Sequence[Tensor]) -> fx.GraphModule:
        """The graph with the nodes of these tensors as outputs."""
        nodes = [self.known(x) for x in outputs]
        self._settle_phases()
        self.graph.output(tuple(node for node in nodes if node is not None))
        for node in self.graph.nodes:
            val = node.meta.get("val")
            if isinstance(val, Tensor) and val.requires_grad:
                # without the autograd graph behind it
                node.meta["val"] = self._run(torch.ops.aten.detach.default, (val,), {})
        return _torch.graph_module(self.graph)


class CompiledRecorder(Recorder):
    """Records a program that torch.compile makes graphs of: what these do as they run."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Dynamo compiles beside this mode; beside others it does nothing."""
        return True

    @torch.compiler.disable
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def others_paused() -> Iterator[None]:
    """Inside, traces that are under way in this thread record nothing: a trace that a traced step
    makes is no part of it."""
    with ExitStack() as stack:
        for mode in _torch.dispatch_modes():
            if isinstance(mode, Recorder):
                stack.enter_context(mode.paused())
        yield


def parts_of(x: Tensor) -> list[Tensor]:
    """The plain tensors that x is made of: of a DTensor, its local one."""
    if not _torch.is_traceable_wrapper_subclass(x):
        return [x]
    inner = (getattr(x, name) for name in x.__tensor_flatten__()[0])
    return [part for y in inner if isinstance(y, Tensor) for part in parts_of(y)]


def _is_message(node: fx.Node) -> bool:
    """Is it a collective, its wait, or what puts its result where it was to be?"""
    if row_of(node.target) is not None:
        return True
    moved = {_COPY: 1, torch.ops.aten.view.default: 0}.get(node.target)
    source = node.args[moved] if moved is not None else None
    return isinstance(source, fx.Node) and source.op == "call_function" and _is_message(source)


def leaves_of(x: Any) -> Iterator[Any]:
    """The leaves of nested lists, tuples and dicts. pytree takes ten times as long."""
    if isinstance(x, _NESTED):
        for y in x.values() if isinstance(x, dict) else x:
            if isinstance(y, _NESTED):
                yield from leaves_of(y)
            else:
                yield y
    else:
        yield x


_NUMBERED = re.compile(r"_\d+$")
_NESTED = (list, tuple, dict)
_NUMBERS = {int, float, bool, str, type(None), torch.dtype, torch.device}


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, _torch.FakeTensor)


_NOWHERE = Origin((), "", "fwd")
_STORING = Origin((), "", "bwd")
_PLAIN = (_torch.FakeTensor, torch.nn.Parameter)
# What makes a tensor of a number in the program; the mode remembers its value.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_COPY = torch.ops.aten.copy_.default
_SAME_VALUE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
