"""The names and signatures of torch.distributed._functional_collectives, served by fcoll.

Use it in place of torch's module, or put it into torch before the first collective:

    for name in fcoll.compat.__all__:
        setattr(torch.distributed._functional_collectives, name, getattr(fcoll.compat, name))

Then DTensor, tensor parallelism and torch.compile run on ``torch.ops.fcoll``. In eager the result
is always an AsyncCollectiveTensor; in a trace it is waited for. Names that are not about
collectives (imported modules, torch's meta kernels and backward functions) are torch's own.

What is right here and wrong in torch 2.13:

- the gradient of broadcast is a reduce to src; avg, product, min and max have gradients;
- permute_tensor takes any shape; reduce_scatter_single_coalesced leaves the caller's list alone;
- isend, irecv and their batches work in sub-groups (torch crashes), and compiled, in order;
- uneven shards are errors at the call that name the dim; all_gather_inplace takes uneven lists;
- 0-dim tensors are gathered; complex tensors are exchanged; bool and narrow types are reduced;
- group may be None, (mesh, "name") or ranks that have no group yet; reduceOp may be a ReduceOp.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fcoll import _torch, functions, groups
from fcoll.eager.async_tensor import AsyncCollectiveTensor, Pending, _Wrap
from fcoll.eager.dispatch import returned
from fcoll.errors import NotInGroup, UnknownGroup
from fcoll.reductions import REDUCTIONS
from fcoll.source import user_sites
from fcoll.transport.carriers import Then, issued
from fcoll.transport.messages import PLAIN

_THEIRS = _torch.FUNCTIONAL_COLLECTIVES

__all__ = sorted(name for name in _THEIRS if not name.startswith("__"))


def __getattr__(name: str) -> Any:
    if name in _THEIRS:
        return _THEIRS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


_warned: dict[str, dict] = {}  # file -> what the warnings module remembers of it


def _warn(message: str) -> None:
    """A FutureWarning at the user's line, however many frames up it is; none in a trace."""
    if torch.compiler.is_compiling():
        return
    file, line = (*user_sites(), ("?", 0))[0]
    registry = _warned.setdefault(file, {})
    warnings.warn_explicit(message, FutureWarning, file, line, registry=registry)


# -- groups and results ---


def _resolve_group(group, tag=""):
    """A ProcessGroup as it is, else the group's name."""
    if isinstance(group, (str, dist.ProcessGroup)):
        return group
    if isinstance(group, list):
        _warn(
            "The combination of ranks + tag as process group identifier has been deprecated. "
            "Please switch to using ProcessGroup, DeviceMesh, or group name instead."
        )
        return _name_of_ranks(group, tag)
    if _torch.for_all_ranks():  # the name differs from rank to rank: not for the graph
        mesh, axis = group if isinstance(group, tuple) else (group, 0)
        if isinstance(mesh, DeviceMesh) and isinstance(axis, int):
            return _torch.mesh_process_group(mesh, axis)
    return groups.group_name(group)


@_torch.at_trace_time
def _name_of_ranks(ranks: list, tag: str) -> str:
    """As in torch the order of the ranks does not matter; unlike there, the group may be new."""
    nested = bool(ranks) and isinstance(ranks[0], list)
    ranks = [sorted(rs) for rs in ranks] if nested else sorted(ranks)
    pg = None if nested else _torch.find_group(ranks, tag)
    if pg is not None:
        return pg.group_name
    if tag:
        raise UnknownGroup(group=f"of ranks {ranks} with the tag {tag!r}", hint="")
    return groups.group_name(ranks)


def _resolve_group_name(group, tag=""):
    resolved = _resolve_group(group, tag)
    return resolved if isinstance(resolved, str) else resolved.group_name


def _group_or_group_name(group):
    return group if isinstance(group, str) or _torch.for_all_ranks() else group.group_name


def _expand_group(group, tag=""):
    if not isinstance(group, list):
        group = groups.resolve(group).pg
    return _THEIRS["_expand_group"](group, tag)


def _are_we_tracing():
    return _torch.tracing()


def _always_async(out: Any) -> Any:
    """In eager torch's results are always async; fcoll's are plain when they are complete."""
    if _torch.transforms_active():  # in a batched simulation a result may be one for all ranks
        return out
    if isinstance(out, (list, tuple)):
        return [_always_async(x) for x in out]
    if isinstance(out, AsyncCollectiveTensor) or _are_we_tracing():
        return out
    return _Wrap.apply(out, Pending(done=True))


def _maybe_wrap_tensor(self):
    wrapped = isinstance(self, AsyncCollectiveTensor)
    return self if wrapped else _always_async(returned(self, "collective"))


def _wrap_tensor_autograd(input):
    return _maybe_wrap_tensor(input)


def _maybe_wrap_tensors(tensors):  # from torch 2.15 on, as wait_tensors
    return [_maybe_wrap_tensor(tensor) for tensor in tensors]


def wait_tensor(tensor):
    return functions.wait_tensor(tensor)


def wait_tensors(tensors):
    return [functions.wait_tensor(tensor) for tensor in tensors]


# -- collectives ---


def _served(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn; torch's function of that name in LocalTensorMode, which knows only torch's ops, in a
    trace for all ranks at once, where a group is an object of the graph and our ops take names, and
    for the shape of a result where there are no groups."""
    theirs = _THEIRS[fn.__name__]

    @functools.wraps(fn)
    def served(*args: Any, **kwargs: Any) -> Any:
        if _torch.torch_ops_only() or (not dist.is_initialized() and _on_meta(args[:1])):
            return theirs(*args, **kwargs)
        return _always_async(fn(*args, **kwargs))

    return served


def _on_meta(xs: Any) -> bool:
    """Are these tensors, or lists of them, without data?"""
    return bool(xs) and all(
        x.is_meta if isinstance(x, torch.Tensor) else isinstance(x, (list, tuple)) and _on_meta(x)
        for x in xs
    )


@_served
def broadcast(self, src, group, tag=""):
    return functions.broadcast(self, src, _resolve_group_name(group, tag))


@_served
def all_reduce(self, reduceOp, group, tag=""):
    return functions.all_reduce(self, reduceOp, _resolve_group_name(group, tag))


@_served
def all_gather_single(self, gather_dim, group, tag=""):
    return functions.all_gather_into_tensor(self, _resolve_group_name(group, tag), gather_dim)


@_served
def reduce_scatter_single(self, reduceOp, scatter_dim, group, tag=""):
    name = _resolve_group_name(group, tag)
    return functions.reduce_scatter_tensor(self, reduceOp, name, scatter_dim)


@_served
def all_to_all_single(self, output_split_sizes, input_split_sizes, group, tag=""):
    name = _resolve_group_name(group, tag)
    return functions.all_to_all_single(self, name, output_split_sizes, input_split_sizes)


@_served
def permute_tensor(self, src_dst, group, tag=""):
    """Rank m's tensor goes to rank ``src_dst[m]``; what comes from several is concatenated."""
    name = _resolve_group_name(group, tag)
    dst = [*src_dst, *[-1] * (groups.group_size(name) - len(src_dst))]
    if len(set(src_dst)) == len(src_dst):
        return functions.permute(self, dst, name)
    me, rows = groups.group_rank(name), self.shape[0]
    send = [rows if dst[me] == r else 0 for r in range(len(dst))]
    receive = [rows if d == me else 0 for d in dst]
    return functions.all_to_all_single(self, name, receive, send)


@_served
def all_reduce_coalesced(self, reduceOp, group, tag=""):
    return functions.all_reduce_coalesced(self, reduceOp, _resolve_group_name(group, tag))


@_served
def all_gather_single_coalesced(self, group, tag=""):
    return functions.all_gather_into_tensor_coalesced(self, _resolve_group_name(group, tag))


@_served
def reduce_scatter_single_coalesced(inputs, reduceOp, scatter_dim, group, tag=""):
    name = _resolve_group_name(group, tag)
    return functions.reduce_scatter_tensor_coalesced(inputs, reduceOp, name, scatter_dim)


def _alias(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn under another name; torch deprecates those with _tensor for those with _single."""
    successor = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
    path = "torch.distributed._functional_collectives"
    message = f"`{path}.{name}` is deprecated. Please use `{path}.{successor}` instead."

    @functools.wraps(fn)
    def alias(*args: Any, **kwargs: Any) -> Any:
        if successor != name:
            _warn(message)
        return fn(*args, **kwargs)

    alias.__name__ = alias.__qualname__ = name
    return alias


_ALIASES = {
    "all_gather_single_autograd": all_gather_single,
    "all_gather_tensor": all_gather_single,
    "all_gather_tensor_autograd": all_gather_single,
    "all_gather_into_tensor_coalesced": all_gather_single_coalesced,
    "reduce_scatter_single_autograd": reduce_scatter_single,
    "reduce_scatter_tensor": reduce_scatter_single,
    "reduce_scatter_tensor_autograd": reduce_scatter_single,
    "reduce_scatter_tensor_coalesced": reduce_scatter_single_coalesced,
    "all_to_all_single_autograd": all_to_all_single,
}
globals().update({name: _alias(name, fn) for name, fn in _ALIASES.items()})


# -- in place: what Dynamo puts for the functions of torch.distributed ---


def _synchronous(async_op: bool) -> None:
    if async_op:
        raise AssertionError("Can't remap async version of inplace op to functional collective")


def all_gather_tensor_inplace(
    output_tensor, input_tensor, group=None, async_op=False, tag="", gather_dim=0
):
    _synchronous(async_op)
    return output_tensor.copy_(all_gather_single(input_tensor, gather_dim, group, tag))


def reduce_scatter_tensor_inplace(
    output, input, op="sum", group=None, async_op=False, scatter_dim=0, tag=""
):
    _synchronous(async_op)
    return output.copy_(reduce_scatter_single(input, op, scatter_dim, group, tag))


def all_reduce_inplace(tensor, op="sum", group=None, async_op=False, tag=""):
    _synchronous(async_op)
    return tensor.copy_(all_reduce(tensor, op, group, tag))


def all_to_all_inplace(
    output,
    input,
    output_split_sizes=None,
    input_split_sizes=None,
    group=None,
    async_op=False,
    tag="",
):
    _synchronous(async_op)
    return output.copy_(all_to_all_single(input, output_split_sizes, input_split_sizes, group, tag))


def all_gather_inplace(tensor_list, tensor, group=None, async_op=False, tag=""):
    _synchronous(async_op)
    sizes = [t.size(0) if t.dim() else 1 for t in tensor_list]
    mine = tensor.size(0) if tensor.dim() else 1
    if all([size == mine for size in sizes]):
        out = all_gather_single(tensor, 0, group, tag)
    else:
        out = functions.all_gather_into_tensor(tensor, _resolve_group_name(group, tag), sizes=sizes)
    offset = 0  # slices, not split: that would bake symbolic sizes into a graph
    for t, size in zip(tensor_list, sizes, strict=True):
        t.copy_(out[offset : offset + size] if t.dim() else out[offset])
        offset += size
    return tensor_list


def reduce_scatter_inplace(output, input_list, op="sum", group=None, async_op=False, tag=""):
    """From torch 2.15 on: dist.reduce_scatter of a list."""
    _synchronous(async_op)
    if not all([t.size() == output.size() for t in input_list]):
        raise AssertionError("reduce_scatter: all tensors of input_list must have output's size")
    whole = torch.cat([t.reshape(-1) for t in input_list])
    out = reduce_scatter_single(whole, op, 0, group, tag)
    return output.copy_(out.reshape(output.shape))


# -- between two ranks: peers are global ranks, as in torch.distributed ---


@_torch.at_trace_time
def _peer(arg: str, name: str, rank: int | None, group_rank: int = -1) -> int:
    """The rank within the group."""
    if group_rank != -1:
        if rank is not None:
            raise ValueError(f"Cannot specify both '{arg}' and 'group_{arg}': they are one rank")
        return group_rank
    ranks = groups.by_name(name).ranks
    if rank not in ranks:
        raise NotInGroup(rank=rank, ranks=list(ranks))
    return ranks.index(rank)


def _sent(token: Any) -> Any:
    # a trace must not wait here: two ranks that send to each other would both wait for ever
    return token if _are_we_tracing() else returned(token, "isend")


def _received(into: Any, new: Any) -> Any:
    """The caller's tensor, filled from the one that irecv made: in eager when it is waited for."""
    if _are_we_tracing():
        return into.copy_(functions.wait_tensor(new))
    into = into.trigger_wait() if isinstance(into, AsyncCollectiveTensor) else into
    fill = Then((), lambda: into.data.copy_(functions.wait_tensor(new)))
    return returned(issued(into, fill), "irecv")


def isend_inplace(tensor, dst, tag=0, group=None, group_dst=-1):
    name = groups.group_name(group)
    peer = _peer("dst", name, dst, group_dst)
    return _sent(torch.ops.fcoll.isend(tensor, peer, tag + PLAIN, name))


def irecv_inplace(tensor, src, tag=0, group=None, group_src=-1):
    name = groups.group_name(group)
    peer = _peer("src", name, src, group_src)
    return _received(tensor, torch.ops.fcoll.irecv(tensor, peer, tag + PLAIN, name))


# From torch 2.15 on dst and src have defaults: group_dst and group_src may be given instead.
isend_inplace.__defaults__ = _THEIRS["isend_inplace"].__defaults__
irecv_inplace.__defaults__ = _THEIRS["irecv_inplace"].__defaults__


def batch_p2p_ops_inplace(op_list, peer_list, tag_list, tensors, group_name):
    name = _resolve_group_name(group_name or dist.group.WORLD)
    peers = [_peer("peer", name, peer) for peer in peer_list]
    tags = [tag + PLAIN for tag in tag_list]
    outs = torch.ops.fcoll.batch_p2p_ops(op_list, peers, tags, tensors, name)
    return [
        _received(into, out) if op == "irecv" else _sent(out)
        for op, into, out in zip(op_list, tensors, outs, strict=True)
    ]


# -- Dynamo's tables ---

REDUCE_OP_TO_STR = {row.c10d: name for name, row in REDUCTIONS.items()}
_GIVES_WORK = (isend_inplace, irecv_inplace, batch_p2p_ops_inplace)


def _remapped(name: str, inplace: Callable[..., Any]) -> Callable[..., Any]:
    """What Dynamo calls for a function of torch.distributed; it finds it in torch by its name."""

    def remapped(*args, **kwargs):
        if not _are_we_tracing():
            raise AssertionError(f"{name} should only be called during tracing")
        out = inplace(*args, **kwargs)
        return out if inplace in _GIVES_WORK else None

    remapped.__name__ = remapped.__qualname__ = name
    return remapped


_REMAPPED: dict[str, Callable[..., Any]] = {
    "_remapped_allgather": all_gather_tensor_inplace,
    "_remapped_reducescatter": reduce_scatter_tensor_inplace,
    "_remapped_allreduce": all_reduce_inplace,
    "_remapped_all_to_all_single": all_to_all_inplace,
    "_remapped_all_gather": all_gather_inplace,
    "_remapped_reduce_scatter": reduce_scatter_inplace,
    "_remapped_isend": isend_inplace,
    "_remapped_irecv": irecv_inplace,
    "_remapped_batch_p2p_ops": batch_p2p_ops_inplace,
}
globals().update({name: _remapped(name, fn) for name, fn in _REMAPPED.items()})

# Of those that a newer torch adds torch's own.
traceable_collective_remaps = {
    fn: globals().get(theirs.__name__, theirs)
    for fn, theirs in _THEIRS["traceable_collective_remaps"].items()
}


def _typed(fn: Any, types: dict[str, Any]) -> None:
    """The names and defaults of the arguments are written above; their types are torch's."""
    ours, none = inspect.signature(fn), inspect.Parameter.empty
    params = [p.replace(annotation=types.get(p.name, none)) for p in ours.parameters.values()]
    returns = types.get("return", none)
    fn.__signature__ = ours.replace(parameters=params, return_annotation=returns)


for _name in __all__:
    if inspect.isfunction(globals().get(_name)):
        _typed(globals()[_name], getattr(_THEIRS[_name], "__annotations__", {}))
