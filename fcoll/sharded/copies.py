"""clone, detach and their like, and comparing two tensors: each rank its own shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fcoll import functions
from fcoll.sharded import _torch
from fcoll.sharded.dispatch import built_in, is_sharded, name_of, unsupported
from fcoll.sharded.errors import LayoutsDiffer, NotBothSharded
from fcoll.sharded.layout import like
from fcoll.sharded.moving import Wanted, to
from fcoll.sharded.results import changed, probe_of, result_of, set_requires_grad


@built_in(Tensor.clone, torch.clone)
def clone(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st = args[0]
    if kwargs.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        why = "Only support torch.preserve_format for ShardedTensor!"
        raise LayoutsDiffer(func="clone", why=why, hint="Leave memory_format out.")
    return result_of(st, [s.tensor.clone() for s in st._local_shards], probe_of(st).clone())


@built_in(Tensor.detach, torch.detach)
def detach(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    """The same memory, off the graph."""
    st = args[0]
    shards = [s.tensor.detach() for s in st._local_shards]
    return result_of(st, shards, probe_of(st).detach(), pin_memory=st.is_pinned())


@built_in(Tensor.requires_grad_)
def requires_grad_(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, requires = args[0], (*args[1:], kwargs.get("requires_grad", True))[0]
    if requires != st._metadata.tensor_properties.requires_grad:
        for shard in st._local_shards:
            shard.tensor.requires_grad_(requires)
        set_requires_grad(st, requires)
    return st


@built_in(Tensor.copy_)
def copy_(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, source, *flags = args
    if not (is_sharded(st) and is_sharded(source)):
        raise unsupported(Tensor.copy_, args, kwargs)
    mine, theirs = st._local_shards, source._local_shards
    if [s.metadata for s in mine] != [s.metadata for s in theirs]:
        why = "inplace copy can only happen between two ShardedTensor with same metadata!"
        hint = "Copy from fcoll.sharded.reshard(source, st.sharding_spec())."
        raise LayoutsDiffer(func="copy_", why=why, hint=hint)
    for to_, from_ in zip(mine, theirs, strict=True):
        to_.tensor.copy_(from_.tensor, *flags, **kwargs)
    return changed(st, probe_of(st).copy_(probe_of(source)))


@built_in(Tensor.type_as)
def type_as(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, other = args
    if not is_sharded(st):  # a plain one as a sharded one
        return st.type_as(like(other))
    return to(st, Wanted(dtype=other.dtype))


def _dtype_method(name: str, dtype: torch.dtype) -> None:
    @built_in(getattr(Tensor, name))
    def as_dtype(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
        return to(args[0], Wanted(dtype=dtype))


for _name in ("float", "double", "half", "bfloat16", "long", "int", "short", "bool", "cfloat"):
    _dtype_method(_name, getattr(torch, _name))


@built_in(*_torch.SHALLOW_COPY_CHECKS)
def may_be_shallow_copied(
    types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any
) -> bool:
    """nn.Module.to asks: a sharded parameter is replaced, not overwritten through .data."""
    return False


def _compare(func: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> bool:
    """The same answer on every rank: same metadata, and ``func`` of all pairs of shards."""
    one, other = args
    if not (is_sharded(one) and is_sharded(other)):
        kinds = " and ".join(type(x).__name__ for x in args)
        raise NotBothSharded(func=name_of(func), kinds=kinds)
    if process_group is not None and not _torch.is_member(process_group):
        return True  # as in torch: of what it does not hold, a rank has nothing to say
    mine, theirs = one._local_shards, other._local_shards
    same = one._metadata == other._metadata and len(mine) == len(theirs)
    same = same and all(
        a.metadata == b.metadata and func(a.tensor, b.tensor, **kwargs)
        for a, b in zip(mine, theirs, strict=True)
    )
    agree = torch.tensor([int(same)], device=one.device)
    least = functions.all_reduce(agree, "min", one.group.name)
    return bool(functions.wait_tensor(least).item())


@built_in(torch.equal, Tensor.equal)
def equal(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> bool:
    return _compare(torch.equal, args, kwargs, process_group)


@built_in(torch.allclose, Tensor.allclose)
def allclose(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> bool:
    names = ("rtol", "atol", "equal_nan")
    kwargs = kwargs | dict(zip(names, args[2:], strict=False))
    return _compare(torch.allclose, args[:2], kwargs, process_group)
