"""torch.distributed's in-place calls, in a form that torch.compile(fullgraph=True) traces.

``from fcoll import dist`` takes the place of ``import torch.distributed as dist``: same names, same
signatures. Outside a trace each call is torch.distributed's own. In a trace it is the functional
collective, and the wait copies its result into the caller's tensors: at once, or where the handle
of an ``async_op=True`` call is waited for, so that what is computed in between overlaps.

>>> from fcoll import dist
>>> @torch.compile(backend="eager", fullgraph=True)
... def step(x, y):
...     handle = dist.all_reduce(x, async_op=True)
...     z = y * 2
...     handle.wait()
...     return x + z
>>> step(torch.ones(2), torch.ones(2)).tolist() == [dist.get_world_size() + 2] * 2
True

As in torch.distributed, no gradient passes through these calls, and a tensor that is being sent
stays as it is until the wait. In a trace, besides:

- Wait for every handle. Until then the caller's tensor has its old values, a collective that
  nothing waits for may be left out, and a compiler may reuse the memory of a message under way. A
  handle that the compiled function returns can be waited for outside.
- ``is_completed()`` says whether the handle has been waited for: a loop on it never ends.
- ``irecv`` and ``recv`` must be told from whom; timeouts are the group's.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fcoll._torch import at_trace_time, guard_or_false, traced_stack, tracing
from fcoll.eager.arguments import scaled
from fcoll.eager.dispatch import start
from fcoll.errors import BadOption, BadOutput, MismatchedLists, fail
from fcoll.groups import by_name, group_name, group_rank, group_size
from fcoll.source import user_line
from fcoll.table import c10d
from fcoll.table.collectives import COLLECTIVES, functional_row
from fcoll.table.exchange import check_even_splits

Group: TypeAlias = ProcessGroup | None
Rank: TypeAlias = int | None
Tensors: TypeAlias = Sequence[Tensor]


def __getattr__(name: str) -> Any:
    # not __path__ and its like: with torch's, `import fcoll.dist.x` would load torch's x again
    if name.startswith("__"):
        raise AttributeError(f"module 'fcoll.dist' has no attribute {name!r}")
    return getattr(torch_dist, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(torch_dist)})


class TracedWork:
    """The handle of a traced call with ``async_op=True``: torch.distributed's Work in a trace."""

    def __init__(self, result: Tensor, *outs: Tensor) -> None:
        self._result = result
        self._outs = outs
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the bytes and copy them to where the caller wants them."""
        if self._waited:
            return True
        self._waited = True
        with torch.no_grad():
            result = torch.ops.fcoll.wait_tensor(self._result)
            if len(self._outs) == 1:
                _copy(self._outs[0], result)
            elif self._outs:
                parts = result.split(_numels(self._outs))
                for out, part in zip(self._outs, parts, strict=True):
                    _copy(out, part)
        return True

    def is_completed(self) -> bool:
        return self._waited

    def is_success(self) -> bool:
        return self._waited


def _copy(out: Tensor, result: Tensor) -> None:
    differ = [guard_or_false(a != b) for a, b in zip(out.shape, result.shape, strict=False)]
    out.copy_(result.view(out.shape) if out.dim() != result.dim() or any(differ) else result)


def _traceable(
    fn: Callable[..., Any], root: int | None = None, blocks: bool = False, outside: Any = None
) -> Callable[..., Any]:
    """torch.distributed's function of fn's name and signature; in a trace, fn.

    fn takes the group as messages of c10d do, and then, by name, those of torch's arguments that it
    needs; src and dst come as ranks of the group, ``root`` if not given. It returns the message
    that torch's own call sends. A call that ``blocks`` returns the rank that a message came from,
    if it has one; on a rank that is not in the group ``outside``.
    """
    op, own_args = fn.__name__, tuple(inspect.signature(fn).parameters)[1:]
    parameters = inspect.signature(getattr(torch_dist, op)).parameters
    defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    names = tuple(parameters)

    # not torch's docstring: its examples are not for doctest
    @functools.wraps(getattr(torch_dist, op), assigned=("__name__", "__qualname__"), updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if not tracing():
            return getattr(torch_dist, op)(*args, **kwargs)
        named = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        group = named.pop("group")
        if group is torch_dist.GroupMember.NON_GROUP_MEMBER:
            _warn(op, "does nothing on a rank that is not in the group")
            return outside
        name = group_name(group)
        for arg in ("src", "dst"):
            if arg in named:
                named[arg] = _peer(op, arg, name, named[arg], named.pop(f"group_{arg}"), root)
        message = fn((name, group_size(name)), **{arg: named[arg] for arg in own_args})
        handle = _started(op, name, message)
        if named.get("async_op", not blocks):
            return handle
        handle.wait()
        return _ranks(name)[named["src"]] if blocks and "src" in named else None

    call.__doc__ = f"torch.distributed.{op}, also in a trace."
    return call


def _started(op: str, name: str, message: c10d.Message) -> TracedWork:
    """Issue a message by the row that returns a new tensor."""
    row, args = functional_row(COLLECTIVES[message.row]), list(message.args)
    if (at := row.position.get("reduce_op")) is not None:
        args[0], args[at] = scaled(op, args[0], args[at], None)
    result = _issue(row.name, *args)
    here = message.root is None or message.root == group_rank(name)
    outs = list(message.outs[0]) if message.outs and here else []
    for out in outs:
        if out.dtype != result.dtype:
            fail(BadOutput, op=op, got=f"{out.dtype}", want=f"{result.dtype}")
        if torch.is_grad_enabled() and out.requires_grad and not out.is_leaf:
            _warn(op, "overwrites a tensor that requires grad: no gradient passes through it")
    have = sum(_numels(outs))
    if outs and guard_or_false(have != result.numel()):
        fail(BadOutput, op=op, got=f"{have} elements", want=f"{result.numel()}")
    return TracedWork(result, *outs)


def _issue(name: str, *args: Any) -> Any:
    with torch.no_grad():
        return start(name, *args)


@at_trace_time
def _warn(op: str, what: str) -> None:
    warnings.warn(f"{op} at {user_line(traced_stack())} {what}", stacklevel=1)


@at_trace_time
def _ranks(name: str) -> tuple[int, ...]:
    return by_name(name).ranks


def _peer(op: str, arg: str, name: str, rank: Rank, in_group: Rank, root: Rank = None) -> int:
    """A global rank or one within the group, just one of them given -> the rank in the group."""
    ranks = _ranks(name)
    if rank is None and in_group is None:
        rank = root
    if rank is not None and in_group is not None:
        fail(BadOption, op=op, arg=f"{arg} and group_{arg}", value="both", known="the two")
    if in_group is not None:
        arg, rank, ranks = f"group_{arg}", in_group, tuple(range(len(ranks)))
    for i, r in enumerate(ranks):
        if r == rank:  # compared one by one: so Dynamo makes a constant of an int argument
            return i
    value = None if rank is None else int(f"{rank}")
    fail(BadOption, op=op, arg=arg, value=value, known=f"{ranks}")


def _one_each(op: str, n: int, tensors: Tensors) -> Tensors:
    if len(tensors) != n:
        why = f"there are {len(tensors)} tensors for {n} ranks"
        fail(MismatchedLists, op=op, why=why, hint="Give one for each rank of the group.")
    for x in tensors:
        if x.dtype != tensors[0].dtype:
            why = f"there are tensors of {x.dtype} and {tensors[0].dtype}"
            fail(MismatchedLists, op=op, why=why, hint="Give all the same dtype.")
    return tensors


def _on_root(
    op: str, arg: str, n: int, tensors: Tensors | None, like: Tensor, root: bool
) -> list[Tensors]:
    """The list that gather and scatter take on the root alone, n tensors of like's size; as c10d
    takes it."""
    if bool(tensors) != root:
        why = f"{arg} is {'missing on' if root else 'not for others than'} the root"
        fail(MismatchedLists, op=op, why=why, hint="Give it on the root, None elsewhere.")
    if not tensors:
        return []
    for x in _one_each(op, n, tensors):
        if guard_or_false(x.numel() != like.numel()):
            why = f"{arg} has one of {x.numel()} elements, tensor has {like.numel()}"
            fail(MismatchedLists, op=op, why=why, hint="Give all the same size.")
    return [tensors]


def _numels(tensors: Tensors) -> list[int]:
    return [x.numel() for x in tensors]


# -- all ranks with all ranks: the messages of torch's own calls (table/c10d.py) ---


@_traceable
def all_reduce(g, tensor, op):
    return c10d.allreduce_([tensor], g, op)


@_traceable
def all_gather(g, tensor_list, tensor):
    return c10d.allgather_([_one_each("all_gather", g[1], tensor_list)], [tensor], g)


@_traceable
def all_gather_single(g, output_tensor, input_tensor):
    return c10d._allgather_base_(output_tensor, input_tensor, g)


@_traceable
def reduce_scatter(g, output, input_list, op):
    return c10d.reduce_scatter_([output], [_one_each("reduce_scatter", g[1], input_list)], g, op)


@_traceable
def reduce_scatter_single(g, output, input, op):
    return c10d._reduce_scatter_base_(output, input, g, op)


# as in torch, but for its deprecation warning
all_gather_into_tensor = all_gather_single
reduce_scatter_tensor = reduce_scatter_single


@_traceable
def all_to_all(g, output_tensor_list, input_tensor_list):
    outs, ins = (_one_each("all_to_all", g[1], x) for x in (output_tensor_list, input_tensor_list))
    return c10d.alltoall_(outs, ins, g)


@_traceable
def all_to_all_single(g, output, input, output_split_sizes, input_split_sizes):
    for x, sizes in ((output, output_split_sizes), (input, input_split_sizes)):
        if not sizes:
            check_even_splits(x, None, None, g[0])
    return c10d.alltoall_base_(output, input, g, output_split_sizes or (), input_split_sizes or ())


@_traceable
def barrier(g):
    return c10d.barrier(g)


# -- from or to one rank ---


@_traceable
def broadcast(g, tensor, src):
    return c10d.broadcast_([tensor], g, src)


@_traceable
def reduce(g, tensor, dst, op):
    # torch may leave anything in the other ranks' tensors: here they keep their values
    return c10d.reduce_([tensor], g, op, dst)


@functools.partial(_traceable, root=0)
def gather(g, tensor, gather_list, dst):
    name, n = g
    outs = _on_root("gather", "gather_list", n, gather_list, tensor, dst == group_rank(name))
    return c10d.gather_(outs, [tensor], g, dst)


@functools.partial(_traceable, root=0)
def scatter(g, tensor, scatter_list, src):
    name, n = g
    parts = _on_root("scatter", "scatter_list", n, scatter_list, tensor, src == group_rank(name))
    return c10d.scatter_([tensor], parts, g, src)


# -- between two ranks ---


@_traceable
def isend(g, tensor, dst, tag):
    return c10d.send([tensor], g, dst, tag)


@_traceable
def irecv(g, tensor, src, tag):
    return c10d.recv_([tensor], g, src, tag)


@functools.partial(_traceable, blocks=True)
def send(g, tensor, dst, tag):
    if dst == group_rank(g[0]):
        fail(BadOption, op="send", arg="dst", value="this rank", known="the others")
    return c10d.send([tensor], g, dst, tag)


@functools.partial(_traceable, blocks=True, outside=-1)
def recv(g, tensor, src, tag):
    return c10d.recv_([tensor], g, src, tag)


class P2POp(torch_dist.P2POp):
    """torch.distributed's P2POp; ``op`` is isend or irecv, this module's or torch's."""

    __signature__ = inspect.signature(torch_dist.P2POp)

    def __new__(cls, op: Callable, *args: Any, **kwargs: Any) -> P2POp:
        if tracing():
            return object.__new__(cls)
        return super().__new__(cls, _torchs(op), *args, **kwargs)

    def __init__(
        self,
        op: Callable,
        tensor: Tensor,
        peer: Rank = None,
        group: Group = None,
        tag=0,
        group_peer: Rank = None,
    ) -> None:
        if not tracing():
            super().__init__(_torchs(op), tensor, peer, group, tag, group_peer)
            return
        self.op, self.tensor, self.group, self.tag = op, tensor, group, tag
        name = group_name(group)
        self.group_peer = _peer("P2POp", "peer", name, peer, group_peer)
        self.peer = _ranks(name)[self.group_peer]


def _torchs(op: Callable) -> Callable:
    return {isend: torch_dist.isend, irecv: torch_dist.irecv}.get(op, op)


@at_trace_time
def _name_of(op: Callable) -> str:
    """A function's name, which Dynamo by itself takes from its code (torch 2.15)."""
    return op.__name__


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Any]:
    if not tracing():
        return torch_dist.batch_isend_irecv(p2p_op_list)
    names = {group_name(p.group) for p in p2p_op_list}
    if len(names) != 1:
        why = f"the transfers are in {len(names)} groups"
        fail(MismatchedLists, op="batch_isend_irecv", why=why, hint="Make a call for each group.")
    ops = [_name_of(p.op) for p in p2p_op_list]  # Dynamo cannot compare torch's isend
    peers, tags = [p.group_peer for p in p2p_op_list], [p.tag for p in p2p_op_list]
    tensors = [p.tensor for p in p2p_op_list]
    results = _issue("batch_p2p_ops", ops, peers, tags, tensors, *names)
    return [
        TracedWork(result) if op == "isend" else TracedWork(result, tensor)
        for op, result, tensor in zip(ops, results, tensors, strict=True)
    ]
