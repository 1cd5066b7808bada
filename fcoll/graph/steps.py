"""A graph as the steps that take time: what each computes, moves, needs, allocates and frees.

Views, ``getitem`` and the graph's inputs are no steps: dependencies pass through them. A step that
writes in place is ordered after all that used the old value. Pointwise ops and reductions that a
compiler would make one kernel are a *fusion group*: what stays inside the group is neither written
to memory nor read back nor allocated, and a tensor that several of its steps use is read once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fcoll.graph import _torch
from fcoll.graph.nodes import effect_of, origin_of, row_of_node, tensors_of, written_by
from fcoll.graph.symbolic_sizes import Hints
from fcoll.graph.symbolic_sizes import sizes_of as sizes_of
from fcoll.source import line_in
from fcoll.table.row import Expr

#: node -> (source line, module path, phase)
Where = Callable[[Node], tuple[str, str, str]]


@dataclass(frozen=True)
class Step:
    """One step of a graph. ``name`` is the name of its node.

    ``flops``, ``read_bytes`` and ``write_bytes`` are what it adds to its kernel; they are sympy
    expressions where shapes are symbolic. ``out_bytes`` is the memory it allocates, which is freed
    after the step that has its name in ``last_use_of``.
    """

    name: str
    kind: str  # "compute" | "start" | "wait"
    inputs: tuple[str, ...]
    stream: str  # "compute", or the group's label for a start
    flops: Expr
    read_bytes: Expr
    write_bytes: Expr
    dtype: str
    out_bytes: int
    last_use_of: tuple[str, ...]
    collective: int | None
    op: str
    source: str
    module: str
    phase: str
    fused_with: str | None = None  # the first step of its fusion group
    uses: tuple[str, ...] = ()  # the steps whose memory it reads, writes or, as a wait, needs
    effect: str = ""  # what else keeps it in its place: see effect_of


def steps_of(
    graph_module: GraphModule,
    issued: Sequence[Any],
    where: Where | None = None,
    sizes: Mapping[str, int] | None = None,
    fuse: bool = True,
    priced: Collection[str] = (),
) -> tuple[Step, ...]:
    """The steps of a graph in its order. ``issued`` are its collectives, ``sizes``
    the values of symbols that the trace has none for. Without ``fuse`` every step is a kernel.
    Of nodes that are ``priced`` already, flops and bytes are not counted."""
    walk = _StorageWalk(issued, where or _origin, Hints(sizes), fuse, priced)
    for node in graph_module.graph.nodes:
        walk.visit(node)
    return tuple(walk.steps())


def input_bytes(graph_module: GraphModule) -> int:
    """The memory of the graph's inputs (parameters, optimizer state, batch), held all along."""
    inputs = (n for n in graph_module.graph.nodes if n.op in ("placeholder", "get_attr"))
    return sum(Hints()(_nbytes(n)) for n in inputs)


def _origin(node: Node) -> tuple[str, str, str]:
    """(line, module, phase) of a node, as the trace recorded them."""
    origin = origin_of(node)
    return _line_in(origin.frames), origin.module, origin.phase


_line_in = cache(line_in)  # a step's nodes are from few lines, and paths take long to shorten


def _nbytes(node: Node) -> Any:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.numel() * value.dtype.itemsize
    return sum((x.numel() * x.dtype.itemsize for x in tensors_of(node)), 0)


def _dtype(node: Node) -> str:
    tensors = tensors_of(node)
    return _dtype_name(tensors[0].dtype) if tensors else ""


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(eq=False)
class _Kernel:
    """A fusion group while it is being made; ``open`` until something outside it uses a result."""

    first: str | None  # None while there are allocations only
    elements: int
    phase: str
    position: int  # of its first step
    open: bool = True
    read: dict[str, Any] = field(default_factory=dict)  # storage -> bytes read of it so far
    joined: _Kernel | None = None  # the group that it became a part of

    def now(self) -> _Kernel:
        kernel = self
        while kernel.joined is not None:
            kernel = kernel.joined
        return kernel


@dataclass
class _Draft:
    """A step while later ones may still change it."""

    node: Node
    kind: str
    where: tuple[str, str, str]
    inputs: list[str] = field(default_factory=list)
    flops: Any = 0
    read: Any = 0
    write: Any = 0
    result: Any = 0  # bytes of the new tensors it gives
    kernel: _Kernel | None = None
    escapes: bool = False  # is the result used outside its kernel?
    filled: bool = True  # does the step, or another of its kernel, give the result its values?
    frees: list[str] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)
    effect: str = ""
    collective: Any = None


@dataclass(frozen=True)
class _Flight:
    """A collective that is under way. What it sends must stay until it is waited for."""

    issued: Any
    sent: dict[str, str | None]  # storage -> its writer when the collective was issued


class _StorageWalk:
    """Visits the nodes in order and keeps, for each storage, who wrote and who reads it.

    A storage has the name of the node that made it; a value may lie in several (a list).
    """

    def __init__(
        self,
        collectives: Sequence[Any],
        where: Where,
        hint: Hints,
        fuse: bool = True,
        priced: Collection[str] = (),
    ) -> None:
        self.where, self.hint, self.fuse, self.priced = where, hint, fuse, priced
        self.started = {c.start: c for c in collectives}
        self.streams = _stream_names(collectives)
        self.drafts: dict[str, _Draft] = {}
        self.storages: dict[Node, tuple[str, ...]] = {}
        self.sizes: dict[Node, Any] = {}  # bytes of each value
        self.bytes: dict[str, Any] = {}  # of each storage
        self.writer: dict[str, str | None] = {}
        self.readers: dict[str, list[str]] = {}
        self.last_use: dict[str, str | None] = {}  # None: used to the end
        self.in_flight: dict[str, _Flight] = {}  # by the storage of the result
        self.flops: dict[Any, Any] = {}  # of products of known sizes

    def visit(self, node: Node) -> None:
        row = row_of_node(node)
        if node.op in ("placeholder", "get_attr"):
            self.new_storage(node, writer=None)
        elif node.op == "output":
            for storage in self.storages_of(node.all_input_nodes):
                self.last_use[storage] = None
                self.keep(storage)
        elif row is None and _is_free(node) and not effect_of(node):
            self.storages[node] = tuple(self.storages_of(node.all_input_nodes))
        elif row is not None and row.is_wait:
            self.wait(node)
        elif node.name in self.started:
            self.start(node)
        else:
            self.compute(node)

    def new_storage(self, node: Node, writer: str | None) -> None:
        self.storages[node] = (node.name,)
        self.bytes[node.name] = self.nbytes(node)
        self.writer[node.name] = writer
        self.readers[node.name] = []

    def nbytes(self, node: Node) -> Any:
        if node not in self.sizes:
            self.sizes[node] = _nbytes(node)
        return self.sizes[node]

    def storages_of(self, nodes: Sequence[Node]) -> Sequence[str]:
        if len(nodes) == 1:
            return self.storages.get(nodes[0], ())
        return list(dict.fromkeys([s for node in nodes for s in self.storages.get(node, ())]))

    def keep(self, storage: str) -> None:
        if storage in self.drafts:
            self.drafts[storage].escapes = True

    # -- the three kinds of step ---

    def wait(self, node: Node) -> None:
        """A wait completes its argument: it counts as a write to it, so that readers follow it."""
        storages = self.storages_of(node.all_input_nodes)
        self.storages[node] = tuple(storages)
        flights = [self.in_flight[s] for s in storages if s in self.in_flight]
        issued = flights[0].issued if flights else None
        draft = _Draft(node, "wait", self.place(node, issued), collective=issued)
        sent = {s: writer for f in flights for s, writer in f.sent.items() if s not in storages}
        draft.inputs = self.needs(storages, storages)
        # Who wrote to what was sent while it was under way comes before the wait, as it did.
        late = [w for s, writer in sent.items() if (w := self.writer[s]) and w != writer]
        draft.inputs = list(dict.fromkeys([*draft.inputs, *late]))
        self.add(draft, [*storages, *sent], storages)

    def start(self, node: Node) -> None:
        issued = self.started[node.name]
        sent = {s: self.writer[s] for s in self.storages_of(node.all_input_nodes)}
        draft = _Draft(node, "start", self.place(node, issued), collective=issued, escapes=True)
        draft.effect = effect_of(node)
        self.run(draft)
        self.in_flight.update((s, _Flight(issued, sent)) for s in self.storages[node])

    def compute(self, node: Node) -> None:
        flops = 0 if node.name in self.priced else self.flops_of(node)
        draft = _Draft(node, "compute", self.place(node, None), flops=flops)
        draft.filled = not _torch.op_only_allocates(node.target)
        draft.effect = effect_of(node)
        self.run(draft)

    def flops_of(self, node: Node) -> Any:
        """Layers repeat: of equal products they are counted once, which takes torch 40 us."""
        formula = _torch.flop_formula(node.target)
        if formula is None:
            return 0
        key = _same_product(node)
        if key is None:
            return _flops(node, formula)
        if key not in self.flops:
            self.flops[key] = _flops(node, formula)
        return self.flops[key]

    def place(self, node: Node, issued: Any) -> tuple[str, str, str]:
        return (issued.source, issued.module, issued.phase) if issued else self.where(node)

    def run(self, draft: _Draft) -> None:
        node = draft.node
        used = self.storages_of(node.all_input_nodes)
        written_nodes = written_by(node)
        written = self.storages_of(written_nodes) if written_nodes else ()
        draft.inputs = self.needs(used, written)
        if draft.kind == "compute":
            if self.fuse and _torch.op_fuses(node.target):
                draft.kernel = self.kernel_for(draft, used)
            if node.name not in self.priced:
                self.count_bytes(draft, written_nodes)
        for storage in used:
            self.leave_kernel(storage, draft)
        if written and _torch.op_returns_written(node.target):
            self.storages[node] = tuple(written)
        else:
            self.new_storage(node, node.name)
            draft.result = self.bytes[node.name]
        self.add(draft, used, written)

    def needs(self, used: Sequence[str], written: Sequence[str]) -> list[str]:
        """The steps that must come before: writers of what is used, readers of what is written."""
        before = [w for s in used if (w := self.writer[s])]
        before += [reader for s in written for reader in self.readers[s]]
        return list(dict.fromkeys(before))

    def add(self, draft: _Draft, used: Sequence[str], written: Sequence[str]) -> None:
        name = draft.node.name
        self.drafts[name] = draft
        draft.uses = [storage for storage in used if storage in self.drafts]
        for storage in used:
            self.readers[storage].append(name)
            self.last_use[storage] = name
        for storage in written:
            self.writer[storage] = name
            self.readers[storage] = []
            if not self.made_in(draft.kernel, storage):
                self.keep(storage)
        if name in self.writer:
            self.last_use[name] = name  # until somebody uses it

    # -- fusion ---

    def kernel_for(self, draft: _Draft, used: Sequence[str]) -> _Kernel:
        """The group that a fusible step joins: those of all its producers, made one, if they are
        still open, of the same phase and loop over the same elements; else a new one.

        The group's kernel runs where its last step stands. That is right because nothing outside
        has used any of its results by then.
        """
        elements, phase = self.elements(draft.node), draft.where[2]
        mine: _Kernel | None = None
        kernels = {k.position: k for s in used if (k := self.kernel_of(s))}
        for _, kernel in sorted(kernels.items()):
            if not kernel.open or kernel.phase != phase:
                continue
            if mine is not None and not _same_loop(mine.elements, kernel.elements):
                continue
            if _same_loop(elements, kernel.elements):
                mine = self.join(mine, kernel)
        mine = mine or _Kernel(None, elements, phase, position=len(self.drafts))
        if mine.first is None and draft.filled:
            mine.first = draft.node.name
        mine.elements = max(mine.elements, elements)
        return mine

    def elements(self, node: Node) -> int:
        """How many elements a fusible op loops over: those of its result, of a reduction its
        input."""
        nodes = [node, *node.all_input_nodes] if _torch.op_reduces(node.target) else [node]
        return max((self.hint(x.numel()) for n in nodes for x in tensors_of(n)), default=1)

    def join(self, one: _Kernel | None, other: _Kernel) -> _Kernel:
        if one is None:
            return other
        other.joined = one  # the one that came first
        one.elements = max(one.elements, other.elements)
        one.first = one.first or other.first
        for storage, nbytes in other.read.items():
            before = one.read.get(storage, 0)
            one.read[storage] = nbytes if self.smaller(before, nbytes) is before else before
        return one

    def smaller(self, a: Any, b: Any) -> Any:
        """The smaller of two sizes, by hints, so that no guard is added to a symbolic graph."""
        return a if self.hint(a) < self.hint(b) else b

    def made_in(self, kernel: _Kernel | None, storage: str) -> bool:
        """Was this storage allocated in this kernel?"""
        owner = self.drafts.get(storage)
        allocating = owner.kernel.now() if owner and owner.kernel else None
        return allocating is not None and kernel is not None and allocating is kernel.now()

    def kernel_of(self, storage: str) -> _Kernel | None:
        writer = self.writer[storage]
        kernel = self.drafts[writer].kernel if writer else None
        return kernel.now() if kernel else None

    def leave_kernel(self, storage: str, user: _Draft) -> None:
        """A step outside a storage's kernel uses it: it is written, and the kernel is complete."""
        kernel = self.kernel_of(storage)
        if kernel is None or user.kernel is None or kernel is not user.kernel.now():
            self.keep(storage)
            if kernel is not None:
                kernel.open = False

    def count_bytes(self, draft: _Draft, written_nodes: list[Node]) -> None:
        """The bytes that the step reads from outside its kernel, and writes in place.

        What only moves elements (embedding, index) reads no more of an argument than it gives.
        """
        node, kernel = draft.node, draft.kernel
        if not draft.filled:
            return
        for x in written_nodes:
            mine = [s for s in self.storages[x] if self.made_in(kernel, s)]
            for storage in mine:
                self.drafts[storage].filled = True
            if not mine:
                draft.write += self.nbytes(x)
        moves = not (_torch.flop_formula(node.target) or _torch.op_reduces(node.target))
        result_bytes = self.nbytes(node)
        most = result_bytes if self.hint(result_bytes) else draft.write
        read = kernel.read if kernel else {}
        for argument in node.all_input_nodes:
            nbytes = self.smaller(most, self.nbytes(argument)) if moves else self.nbytes(argument)
            for storage in self.storages.get(argument, ()):
                if kernel and self.kernel_of(storage) is kernel:
                    continue  # it is still in registers
                amount = self.smaller(self.bytes[storage] - read.get(storage, 0), nbytes)
                read[storage] = read.get(storage, 0) + amount
                draft.read += amount

    # -- the result ---

    def steps(self) -> Iterator[Step]:
        for storage, user in self.last_use.items():
            if user is not None and storage in self.drafts:
                self.drafts[user].frees.append(storage)
        for name, draft in self.drafts.items():
            kernel = draft.kernel.now() if draft.kernel else None
            in_memory = kernel is None or draft.escapes
            allocated = draft.result if in_memory else 0
            stored = allocated if draft.kind == "compute" and draft.filled else 0
            issued, (source, module, phase) = draft.collective, draft.where
            yield _step(
                name=name,
                kind=draft.kind,
                inputs=tuple(draft.inputs),
                stream=self.streams[issued.group] if draft.kind == "start" else "compute",
                flops=_torch.size_expr(draft.flops),
                read_bytes=_torch.size_expr(draft.read),
                write_bytes=_torch.size_expr(draft.write + stored),
                dtype=_dtype(draft.node),
                out_bytes=self.hint(allocated),
                last_use_of=tuple(draft.frees),
                collective=issued.id if issued else None,
                op=issued.op if issued else _torch.op_name(draft.node.target),
                source=source,
                module=module,
                phase=phase,
                fused_with=kernel.first if kernel else None,
                uses=tuple(draft.uses),
                effect=draft.effect,
            )


def _step(**fields: Any) -> Step:
    """A Step with all its fields. What a frozen dataclass does instead, field by field, takes three
    times as long."""
    step = object.__new__(Step)
    step.__dict__.update(fields)
    return step


def _stream_names(collectives: Iterable[Any]) -> dict[str, str]:
    """A stream a group, named after its mesh axis where no other group has that name."""
    names: dict[str, str] = {}
    for c in collectives:
        if c.group not in names:
            label = c.label
            is_taken = label in names.values() or label == "compute"
            names[c.group] = f"{label} ({c.group})" if is_taken else label
    return names


def _same_product(node: Node) -> Any:
    """Equal of products that take the same flops: the op and the sizes of two or three matrices.
    None of other calls, and of sizes that are symbols."""
    if node.kwargs or not 2 <= len(node.args) <= 3:
        return None
    vals = [x.meta.get("val") if isinstance(x, Node) else None for x in node.args]
    if not all(isinstance(x, torch.Tensor) for x in vals):
        return None
    shapes = [tuple(x.shape) for x in vals if x is not None]
    plain = all(type(size) is int for shape in shapes for size in shape)
    return (id(node.target), *shapes) if plain else None


def _flops(node: Node, formula: Callable[..., Any]) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return formula(*args, **kwargs, out_val=node.meta.get("val"))


def _is_free(node: Node) -> bool:
    """A view, or arithmetic on sizes: it takes no time and passes on what it was given."""
    if node.target is operator.getitem or _torch.op_is_view(node.target):
        return True
    return not tensors_of(node) and not _torch.op_writes(node.target)


def _same_loop(a: int, b: int) -> bool:
    """Do they loop over the same elements, or one over a value for each row of the other?"""
    return a == b or (a > 0 and b > 0 and max(a, b) % min(a, b) == 0)
