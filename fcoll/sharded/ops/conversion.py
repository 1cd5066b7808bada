"""Copies, other dtypes and devices, comparisons and attributes: each rank on its own shards."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fcoll import functions
from fcoll.groups import GroupLike, resolve
from fcoll.sharded import _torch
from fcoll.sharded._torch import (
    ChunkShardingSpec,
    RemoteDevice,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
)
from fcoll.sharded.errors import BadMove, LayoutsDiffer, NotBothSharded
from fcoll.sharded.ops.rules import attribute_rule, is_sharded, name_of, rule, rule_of_each
from fcoll.sharded.shards import changed, empty_of, on_each_shard, probe_of, set_requires_grad
from fcoll.sharded.specs import GridShardingSpec, as_process_group, inferred_spec

# -- copies ---


@rule(Tensor.clone, torch.clone)
def clone(input: Any, *, memory_format: torch.memory_format | None = None) -> Any:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        why = "Only support torch.preserve_format for ShardedTensor!"
        raise LayoutsDiffer(func="clone", why=why, hint="Leave memory_format out.")
    return on_each_shard(input, Tensor.clone)


@rule(Tensor.detach, torch.detach)
def detach(input: Any) -> Any:
    """The same memory, off the graph."""
    return on_each_shard(input, Tensor.detach, pin_memory=input.is_pinned())


@rule(Tensor.requires_grad_)
def requires_grad_(input: Any, requires_grad: bool = True) -> Any:
    if requires_grad != input._metadata.tensor_properties.requires_grad:
        for shard in input._local_shards:
            shard.tensor.requires_grad_(requires_grad)
        set_requires_grad(input, requires_grad)
    return input


@rule(Tensor.copy_)
def copy_(input: Any, src: Any, non_blocking: bool = False) -> Any:
    if not (is_sharded(input) and is_sharded(src)):
        return NotImplemented
    mine, theirs = input._local_shards, src._local_shards
    if [s.metadata for s in mine] != [s.metadata for s in theirs]:
        why = "inplace copy can only happen between two ShardedTensor with same metadata!"
        hint = "Copy from fcoll.sharded.reshard(source, st.sharding_spec())."
        raise LayoutsDiffer(func="copy_", why=why, hint=hint)
    for to_, from_ in zip(mine, theirs, strict=True):
        to_.tensor.copy_(from_.tensor, non_blocking)
    return changed(input, probe_of(input).copy_(probe_of(src)))


@rule(*_torch.SHALLOW_COPY_CHECKS)
def may_be_shallow_copied(input: Any, other: Any) -> bool:
    """False, for nn.Module.to: a sharded parameter is replaced, not overwritten through .data."""
    return False


def _new(func: Any, input: Any, *args: Any, **kwargs: Any) -> Tensor:
    """st.new_empty(size) is a plain tensor of this rank's: of st's dtype, on its device."""
    return func(empty_of(input), *args, **kwargs)  # type: ignore[no-any-return]


rule_of_each(
    [Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor], _new
)

# -- another dtype, another device ---


@rule(Tensor.type_as)
def type_as(input: Any, other: Any) -> Any:
    if not is_sharded(input):  # a plain one as a sharded one
        return input.type_as(empty_of(other))
    return to(input, other.dtype)


def _as_dtype(func: Any, input: Any, **options: Any) -> Any:
    return to(input, getattr(torch, name_of(func)), **options)


_DTYPES = ("float", "double", "half", "bfloat16", "long", "int", "short", "bool", "cfloat")
rule_of_each([getattr(Tensor, name) for name in _DTYPES], _as_dtype)


@dataclass
class ToArguments:
    """The arguments of ``to``."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None
    non_blocking: bool = False
    copy: bool = False
    memory_format: torch.memory_format = torch.preserve_format
    process_group: GroupLike = None

    @classmethod
    def of(cls, args: tuple, kwargs: dict[str, Any]) -> ToArguments:
        """As Tensor.to takes it: a dtype, a device, both, or another tensor; then two flags."""
        rest = dict(kwargs)
        flags = []
        for value in args:
            if isinstance(value, Tensor):
                rest |= {"dtype": value.dtype, "device": value.device}
            elif isinstance(value, torch.dtype):
                rest["dtype"] = value
            elif isinstance(value, bool):
                flags.append(value)
            elif isinstance(value, (str, int, torch.device)):
                rest["device"] = value
            elif value is not None:
                why = f"ShardedTensor.to() have wrong arguments: {args}"
                raise BadMove(why=why, hint="Pass a dtype, a device, both, or a tensor.")
        rest |= dict(zip(("non_blocking", "copy"), flags, strict=False))
        if rest.get("device") is not None:
            rest["device"] = torch.device(rest["device"])
        if unknown := set(rest) - set(cls.__dataclass_fields__):
            why = f"ShardedTensor.to() have wrong arguments: {sorted(unknown)}"
            raise BadMove(why=why, hint="It takes those of Tensor.to, and process_group.")
        return cls(**{k: v for k, v in rest.items() if v is not None})


def to(st: Any, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.to`` of every shard, and ``process_group`` as in ``cpu``; itself if it is so
    already."""
    options = ToArguments.of(args, kwargs)
    _check_format(options.memory_format)
    device, dtype = options.device or st.device, options.dtype or st.dtype
    if device.type == "cuda":
        device = _current_cuda(device)
    if not options.copy and dtype == st.dtype and device == st.device:
        return st
    return _moved(st, replace(options, device=device, dtype=dtype))


def cpu(
    st: Any,
    memory_format: torch.memory_format = torch.preserve_format,
    process_group: GroupLike = None,
) -> Any:
    """A copy in CPU memory, or itself if all shards are there; ``process_group`` is one that
    serves CPU tensors, if this tensor's does not."""
    _check_format(memory_format)
    if all(s.placement.device().type == "cpu" for s in st._metadata.shards_metadata):
        return st
    cpu, dtype = torch.device("cpu"), st.dtype
    options = ToArguments(cpu, dtype, memory_format=memory_format, process_group=process_group)
    return _moved(st, options)


def cuda(
    st: Any,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
    process_group: GroupLike = None,
) -> Any:
    """A tensor whose shards are on each rank's current GPU."""
    _check_format(memory_format)
    here = torch.cuda.current_device()
    if device is not None and torch.device(device).index not in (None, here):
        why = (
            'Only device without device id (e.g. "cpu" or "cuda") is expected for ShardedTensor! '
            f"{device} is not this rank's current one, cuda:{here}"
        )
        raise BadMove(why=why, hint="Call torch.cuda.set_device first, or reshard.")
    gpu = torch.device("cuda", here)
    options = ToArguments(gpu, st.dtype, non_blocking, False, memory_format, process_group)
    return _moved(st, options)


def _current_cuda(device: torch.device) -> torch.device:
    here = torch.cuda.current_device()
    if device.index not in (None, here):
        warnings.warn(
            "ShardedTensor.to only move tensor to its current device. If you want to put to "
            "different device, use `reshard` instead.",
            stacklevel=4,
        )
    return torch.device("cuda", here)


def _check_format(memory_format: torch.memory_format) -> None:
    if memory_format not in (torch.preserve_format, torch.contiguous_format):
        why = "Only `torch.contiguous_format` or `torch.preserve_format` is supported!"
        raise BadMove(why=f"{why} It was {memory_format}", hint="Leave it out.")


def _moved(st: Any, options: ToArguments) -> Any:
    """A new tensor of shards that were moved; those that are there already are not copied."""
    old, device = st._metadata, options.device
    assert device is not None and options.dtype is not None

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(
            device,
            options.dtype,
            non_blocking=options.non_blocking,
            copy=options.copy,
            memory_format=options.memory_format,
        )

    def placed(shard: ShardMetadata) -> ShardMetadata:
        return replace(shard, placement=_on(shard.placement, device))

    layout = [placed(shard) for shard in old.shards_metadata]
    shards = [Shard(move(shard.tensor), placed(shard.metadata)) for shard in st._local_shards]
    properties = replace(old.tensor_properties, dtype=options.dtype)
    copies = options.copy or options.dtype != st.dtype or device != st.device
    has_gradients = options.dtype.is_floating_point or options.dtype.is_complex
    if not has_gradients or (copies and not torch.is_grad_enabled()):
        properties.requires_grad = False
    pg = st._process_group
    if options.process_group is not None:
        pg = as_process_group(options.process_group)
    return type(st)._assemble(
        _spec_on(st._sharding_spec, layout, old.size, device),
        ShardedTensorMetadata(layout, old.size, properties),
        shards,
        pg,
        init_rrefs=st._init_rrefs,
        anchor=None if st._anchor is None else move(st._anchor),
    )


def _on(placement: Any, device: torch.device) -> Any:
    """The same rank or worker, another device."""
    if placement is None:
        return None
    worker = placement.worker_name()
    return RemoteDevice(f"{worker or f'rank:{placement.rank()}'}/{device}")


def _spec_on(
    spec: ShardingSpec, layout: list[ShardMetadata], size: torch.Size, device: torch.device
) -> ShardingSpec:
    if isinstance(spec, (ChunkShardingSpec, GridShardingSpec)):
        return replace(spec, placements=[_on(p, device) for p in spec.placements])
    return inferred_spec(layout, size)


# -- comparing ---


def _same_on_all(func: Any, input: Any, other: Any, **options: Any) -> bool:
    """The same answer on every rank: same metadata, and ``func`` of all pairs of shards."""
    if not (is_sharded(input) and is_sharded(other)):
        kinds = f"{type(input).__name__} and {type(other).__name__}"
        raise NotBothSharded(func=name_of(func), kinds=kinds)
    group = input._process_group
    if group is not None and not _torch.is_member(group):
        return True  # as in torch: of what it does not hold, a rank has nothing to say
    mine, theirs = input._local_shards, other._local_shards
    same = input._metadata == other._metadata and len(mine) == len(theirs)
    same = same and all(
        a.metadata == b.metadata and func(a.tensor, b.tensor, **options)
        for a, b in zip(mine, theirs, strict=True)
    )
    same_here = torch.tensor([int(same)], device=input.device)
    least = functions.all_reduce(same_here, "min", input.group.name)
    return bool(functions.wait_tensor(least).item())


@rule(torch.equal, Tensor.equal)
def equal(input: Any, other: Any) -> bool:
    return _same_on_all(torch.equal, input, other)


@rule(torch.allclose, Tensor.allclose)
def allclose(
    input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return _same_on_all(torch.allclose, input, other, rtol=rtol, atol=atol, equal_nan=equal_nan)


# -- attributes ---


def _getters(*names: str) -> list[Any]:
    """The getters of torch.Tensor's properties, as __torch_function__ gets them."""
    return [getattr(Tensor, name).__get__ for name in names]


attribute_rule(
    [
        *_getters(
            "shape", "dtype", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf"
        ),
        *_getters("is_sparse", "is_quantized", "is_nested", "output_nr", "_version"),
        *_getters("is_sparse_csr", "is_mkldnn"),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement),
        *(Tensor.element_size, Tensor.is_contiguous, Tensor.contiguous, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_tensor),
    ]
)


@rule(Tensor.grad.__set__)  # type: ignore[attr-defined]
def set_grad(input: Any, grad: Any) -> Any:
    """Gradients are its shards'; that of the whole may be set to none."""
    return None if grad is None else NotImplemented


@rule(*_getters("device"))
def device(input: Any) -> torch.device:
    """The device of this rank's shards; of a rank without any, one that the group serves."""
    if input._local_shards:
        return input._local_shards[0].tensor.device  # type: ignore[no-any-return]
    group = input._process_group
    serves = resolve(group).serves if _torch.is_member(group) else ()
    return torch.device("cpu" if not serves or "cpu" in serves else serves[0])


def _is_on(getter: Any, input: Any) -> bool:
    return device(input).type == name_of(getter).removeprefix("is_")


_KINDS = ("cpu", "cuda", "meta", "mps", "xpu", "xla", "mtia", "ipu", "maia", "vulkan")
rule_of_each(_getters(*(f"is_{kind}" for kind in _KINDS)), _is_on)
