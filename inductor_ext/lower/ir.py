"""Comm buffers and the nodes that read them: what a collective is to Inductor's scheduler.

A *comm buffer* is memory of the group's arena (``fcoll/transport/native/arena.h``), one place of
one lane: the kernel that computes this rank's part of a collective writes it there, and the peers
read it there. It is claimed by an operation of its own, ``ClaimKernel``, over whose result the
producer's buffer is a view; so it belongs to no pool of Inductor's, whatever the wrapper.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from fcoll.groups import group_size
from fcoll.table.collectives import COLLECTIVES
from fcoll.transport.native.build import has_fast_path
from inductor_ext import comparison
from inductor_ext._torch import (
    V,
    call_of,
    ir,
    is_generated,
    is_view,
    needs,
    reads_of,
    result_layout,
)
from inductor_ext.lowered import note
from inductor_ext.state import in_order, lanes
from inductor_ext.stock.inductor import last_kernel
from inductor_ext.watch import RUNS

_native = torch.ops.fcoll_native

# What generated code says to have the extension's functions.
_IMPORT = "from fcoll.transport.native.build import fast as fcoll_fast"


class ArenaKernel(ir.FallbackKernel):
    """A call of an op of the arena (``fcoll/transport/native/compiled.h``).

    In a Python wrapper it is one of the extension's functions instead, where there is one: 1 us
    less a call than through torch.ops, and errors are of fcoll's classes.
    """

    note: str | None = None

    def has_side_effects(self) -> bool:
        """A rank that does not use a result still meets the others, who may use it."""
        return True

    def codegen(self, wrapper: Any) -> None:
        if self.note:
            wrapper.writeline(wrapper.comment + self.note)
        if V.graph.cpp_wrapper or not has_fast_path():
            return super().codegen(wrapper)
        wrapper.add_import_once(_IMPORT)
        name = self.op_overload._schema.name.partition("::")[2]
        args = [*(x.codegen_reference() for x in self.inputs), *self.constants(wrapper)]
        wrapper.writeline(f"{self.get_name()} = fcoll_fast.{name}({', '.join(args)})")

    def constants(self, wrapper: Any) -> list[str]:
        """The arguments that are no tensors, as code."""
        return [repr(arg) for arg in self.constant_args]


class ClaimKernel(ArenaKernel):
    """The claim of a comm buffer. Its lane is chosen when the code is written: only then is it
    known which of the parts before it have been read."""

    parts: Sequence[str]  # names of the buffers through which it is read

    def codegen(self, wrapper: Any) -> None:
        claimed = lanes()
        lane = next(i for i in range(len(claimed) + 1) if i not in claimed or _is_free(*claimed[i]))
        claimed[lane] = V.graph, self
        group_name, _, *rest = self.constant_args  # type: ignore[has-type]
        self.constant_args = (group_name, lane, *rest)
        super().codegen(wrapper)

    def constants(self, wrapper: Any) -> list[str]:
        group_name, lane, *_ = self.constant_args
        layout = result_layout(self)
        shapes = [wrapper.codegen_shape_tuple(shape) for shape in (layout.size, layout.stride)]
        return [repr(group_name), str(lane), *shapes, str(layout.dtype)]


class CompareKernel(ir.FallbackKernel):
    """The comparison of what the graph issues, when it first runs. Afterwards it counts runs."""

    def has_side_effects(self) -> bool:
        return True

    def codegen(self, wrapper: Any) -> None:
        if V.graph.cpp_wrapper:
            return super().codegen(wrapper)
        (card,) = self.constant_args
        wrapper.add_import_once("from inductor_ext.comparison import Runs")
        wrapper.add_import_once(f"{RUNS} = Runs({card!r})")
        wrapper.writeline(f"{RUNS}()")


def _is_free(graph: Any, claimed: ClaimKernel) -> bool:
    """Has all that reads what was last in the lane been generated? Of another graph, which this
    one is nested in or the other way round, that is not known."""
    if graph is not V.graph:
        return False
    return all(is_generated(op) for name in claimed.parts for op in reads_of(name))


def realize_as_comm_buffer(x: ir.TensorBox, group_name: str) -> tuple[ir.TensorBox, ClaimKernel]:
    """x as contiguous memory of the arena, and the claim of that memory.

    If nothing else uses x, its producer writes there; else it is copied there.
    """
    node = V.graph.current_node.args[0]
    own, buffer, claim = _write_into(x, node, ClaimKernel, _native.claim.default, group_name, 0)
    claim.parts = [buffer.get_name()]
    return own, claim


def realize_as_symmetric_memory(
    x: ir.TensorBox, node: torch.fx.Node, group_name: str
) -> ir.TensorBox:
    """x as contiguous memory of torch's symmetric memory, the same at every call of the graph."""
    static = all(isinstance(s, (int, sympy.Integer)) for s in x.get_size())
    alloc_id = random.getrandbits(62) if static else -1  # not by name: graphs are cached on disk
    op = _native.symmetric_empty.default
    own, _, _ = _write_into(x, node, ir.FallbackKernel, op, group_name, alloc_id)
    return own


def _write_into(
    x: ir.TensorBox, node: torch.fx.Node, kernel: Any, op: Any, group_name: str, which: int
) -> tuple[ir.TensorBox, Any, Any]:
    """x in memory that a call of ``op`` gives; the buffer that it is, and the call."""
    if not can_realize_as_comm_buffer(x, node):
        x = ir.ExternKernel.copy_input(x)
    buffer = _buffer_of(x)
    layout = _contiguous(buffer.layout, buffer.layout.size)
    args = (layout.size, layout.stride, layout.dtype, layout.device)
    memory = kernel.create(op, group_name, which, *args)
    memory.skip_size_stride_alignment_checks = True
    box = ir.StorageBox(memory)
    buffer.layout = ir.NonOwningLayout(ir.ReinterpretView(data=box, layout=layout))
    needs(buffer.get_operation_name(), memory.get_name())
    V.graph.never_reuse_buffers.update((memory.get_name(), buffer.get_name()))
    own = ir.ReinterpretView(data=ir.StorageBox(buffer), layout=_contiguous(layout, x.get_size()))
    return ir.TensorBox(own), buffer, call_of(memory)


def can_realize_as_comm_buffer(x: ir.TensorBox, node: torch.fx.Node) -> bool:
    """Can the producer of x, which is the value of ``node``, write its result elsewhere, and is
    all of it, in order, x?"""
    x.realize()
    if not _used_once(node):
        return False
    buffer = _buffer_of(x)
    writes_out = isinstance(buffer, (ir.ComputedBuffer, ir.ExternKernelOut))
    owned = type(buffer.layout) in (ir.FlexibleLayout, ir.FixedLayout)
    if not (writes_out and owned) or buffer.get_name() in V.graph.never_reuse_buffers:
        return False
    whole = V.graph.sizevars.statically_known_equals(x.get_numel(), buffer.get_numel())
    return whole and _is_contiguous(buffer.layout) and _is_contiguous(x.get_layout())


def _used_once(node: torch.fx.Node) -> bool:
    """Is the value, and are all those it is a view of, used by one node only?"""
    while len(node.users) == 1:
        if node.op != "call_function" or not is_view(node.target):
            return node.op == "call_function"
        node = node.args[0]  # type: ignore[assignment]
    return False


def _buffer_of(x: ir.TensorBox) -> Any:
    node = x.data
    while not isinstance(node, ir.Buffer):
        node = node.unwrap_view() if isinstance(node, ir.BaseView) else node.data
    return node


def _contiguous(layout: Any, size: Sequence[Any]) -> ir.FixedLayout:
    stride = ir.FlexibleLayout.contiguous_strides(size)
    return ir.FixedLayout(layout.device, layout.dtype, size, stride)


def _is_contiguous(layout: Any) -> bool:
    if isinstance(layout, ir.FlexibleLayout):
        stride = layout.stride
        return list(stride) == list(ir.FlexibleLayout.contiguous_strides(layout.size))
    return layout.is_contiguous() and layout.offset == 0


def compared_first() -> str:
    """Have the graph at hand compared when it first runs; the buffer that comes after that."""
    CompareKernel.create(comparison.OP, comparison.card_of(V.graph.module))
    return last_kernel(CompareKernel).get_name()


def extern(op: Any, *args: Any) -> Any:
    """A call of an op of the arena, in the order of the graph's collectives."""
    out = ArenaKernel.create(op, *args)
    kernel = last_kernel(ArenaKernel)
    kernel.note = note(V.graph.current_node)
    in_order(kernel)
    return out


def parts_of(outputs: Sequence[Any], claim: ClaimKernel) -> list[ir.TensorBox]:
    """The ranks' parts as loads. Nothing may be written over them: they are other ranks' memory."""
    for output in outputs:
        output.skip_size_stride_alignment_checks = True
        V.graph.never_reuse_buffers.add(output.get_name())
    claim.parts = [*claim.parts, *(output.get_name() for output in outputs)]
    return [ir.TensorBox.create(output) for output in outputs]


# -- shapes of the ops ---


@functools.cache
def register_shapes() -> None:
    """Shapes of the ops of transport/native/compiled.cpp, known once the C++ part is loaded."""
    fake = torch.library.register_fake

    for allocates in ("claim", "symmetric_empty"):
        fake(f"fcoll_native::{allocates}")(_allocated)

    @fake("fcoll_native::meet")
    def meet(
        own: torch.Tensor, collective: str, reduce_op: str, group_name: str, dim: int
    ) -> Sequence[torch.Tensor]:
        return _parts(own, collective, group_name)

    @fake("fcoll_native::announce")
    def announce(
        own: torch.Tensor, collective: str, reduce_op: str, group_name: str, dim: int
    ) -> torch.Tensor:
        return own.new_empty(1, dtype=torch.int64)

    @fake("fcoll_native::collect")
    def collect(
        token: torch.Tensor, own: torch.Tensor, collective: str, group_name: str
    ) -> Sequence[torch.Tensor]:
        return _parts(own, collective, group_name)

    @fake("fcoll_native::meet_and_reduce")
    def meet_and_reduce(
        own: torch.Tensor, collective: str, reduce_op: str, group_name: str, dim: int
    ) -> torch.Tensor:
        return _parts(own, collective, group_name)[0]


def _allocated(group_name, which, size, stride, dtype, device):  # type: ignore[no-untyped-def]
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _parts(own: torch.Tensor, collective: str, group_name: str) -> list[torch.Tensor]:
    n = group_size(group_name)
    shares = COLLECTIVES[collective].native.arena == "share"
    rows = own.shape[0] // n if shares else own.shape[0]
    return [own.new_empty(rows, *own.shape[1:]) for _ in range(n)]
