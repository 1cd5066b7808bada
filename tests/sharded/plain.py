"""A sharded tensor beside the plain one that it stands for, and how to compare the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll import sharded
from fcoll.sharded import ShardedTensor, ShardingSpec


def numbers(size: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on every rank, no two alike."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(size).numel()
    return (torch.randperm(count, generator=generator).view(size) - count / 2 + 0.25).to(dtype)


def cut(whole: Tensor, spec: ShardingSpec, requires_grad: bool = False) -> ShardedTensor:
    """The parts of a tensor that every rank has, without communication."""
    st = sharded.empty(spec, whole.shape, dtype=whole.dtype)
    for shard in st.local_shards():
        shard.tensor.copy_(block(whole, shard))
    return st.requires_grad_(requires_grad)


def block(whole: Tensor, shard: Any) -> Tensor:
    place = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
    return whole[tuple(slice(a, a + n) for a, n in place)]


def check_same(made: Any, plain: Any) -> None:
    """Equal where sharded or not; of sharded ones also what their shards say of themselves."""
    if isinstance(plain, (list, tuple)):
        assert len(made) == len(plain)
        for one, other in zip(made, plain, strict=True):
            check_same(one, other)
        return
    if isinstance(made, ShardedTensor):
        assert made.dtype == plain.dtype and made.shape == plain.shape
        for shard in made.local_shards():
            assert list(shard.tensor.shape) == shard.metadata.shard_sizes
            assert shard.tensor.is_contiguous() and shard.tensor.dtype == made.dtype
            assert shard.tensor.requires_grad == made.requires_grad
        made = made.all_gather()
    torch.testing.assert_close(made, plain, rtol=1e-5, atol=1e-5, equal_nan=True)


def check_gradient(st: ShardedTensor, grad: Tensor | None) -> None:
    """The shards' gradients are the parts of the sum of all ranks' gradients of the plain one."""
    assert grad is not None
    total = grad.clone()
    dist.all_reduce(total)
    for shard in st.local_shards():
        if shard.tensor.numel():
            found = shard.tensor.grad
            found = torch.zeros_like(shard.tensor) if found is None else found
            torch.testing.assert_close(found, block(total, shard), rtol=1e-4, atol=1e-4)


def check_function(
    func: Callable, size: tuple[int, ...], spec: ShardingSpec, gradient: bool = True
) -> None:
    """``func`` of a sharded tensor is that of the plain one, and so is its gradient."""
    whole = numbers(size).requires_grad_(gradient)
    st = cut(whole.detach(), spec, gradient)
    made, plain = func(st), func(whole)
    check_same(made, plain)
    if gradient:
        loss(made).backward()
        loss(plain).backward()
        check_gradient(st, whole.grad)


def loss(value: Any) -> Tensor:
    if isinstance(value, (list, tuple)):
        return torch.stack([loss(v) for v in value if v.is_floating_point()]).sum()
    value = value.all_gather() if isinstance(value, ShardedTensor) else value
    return (value * torch.arange(1.0, value.numel() + 1).view(value.shape)).sum()
