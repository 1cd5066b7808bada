"""Matrix products on stacks: one batched product, with the bits of one product a rank.

A library's product may round differently for matrices that begin at other places within a cache
line: ranks with equal values would differ. So each rank's matrices begin at one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch
from fcoll.local.elementwise import NotStackable
from fcoll.local.local_tensor import LocalTensor, apart
from fcoll.local.rank_stacks import extent

aten = torch.ops.aten
_LINE = 64  # bytes


def _lined_up(stack: Tensor) -> bool:
    if isinstance(stack, _torch.FakeTensor):
        return True
    size = stack.element_size()
    return stack.stride(0) * size % _LINE == 0 and stack.data_ptr() % _LINE == 0


def in_own_memory(value: Any) -> Any:
    """For a call rank by rank: a LocalTensor whose ranks' tensors begin at cache lines."""
    if not isinstance(value, LocalTensor) or value._stack is None or _lined_up(value._stack):
        return value
    return apart({r: t.clone() for r, t in value._tensors().items()}, owned=True)


def _empty(n: int, shape: tuple[int, ...], strides: tuple[int, ...], like: Tensor) -> Tensor:
    unit = max(1, _LINE // like.element_size())
    step = -(-extent(shape, strides) // unit) * unit
    memory = torch.empty(n * step, dtype=like.dtype, device=like.device)
    return memory.as_strided((n, *shape), (step, *strides))


def _placed(stack: Tensor) -> Tensor:
    """The stack, or a copy whose matrices begin at cache lines."""
    if _lined_up(stack):
        return stack
    shape, strides = stack.shape[1:], stack.stride()[1:]
    if extent(shape, strides) != stack[0].numel():
        strides = stack[0].contiguous().stride()
    return _empty(stack.shape[0], shape, strides, stack).copy_(stack)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, **scales: Any) -> Tensor:
    """[N, m, k] @ [N, k, n] (+ bias), on memory whose matrices begin at cache lines."""
    m, n = a.shape[1], b.shape[2]
    out = _empty(a.shape[0], (m, n), (n, 1), a)
    if bias is None:
        return torch.bmm(_placed(a), _placed(b), out=out)
    whole = bias.expand(a.shape[0], m, n)
    return torch.baddbmm(whole, _placed(a), _placed(b), out=out, **scales)


def _check(*tensors: Tensor, dims: int) -> None:
    if any(t.dim() != dims for t in tensors) or any(t.is_conj() for t in tensors):
        raise NotStackable


def _mm(a: Tensor, b: Tensor) -> Tensor:
    _check(a, b, dims=3)
    return product(a, b)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    _check(a, b, dims=3)
    if bias.dtype != a.dtype:
        raise NotStackable
    ranks, *shape = bias.shape
    aligned = bias.reshape(ranks, *(1,) * (2 - len(shape)), *shape)
    return product(a, b, aligned, beta=beta, alpha=alpha)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    _check(a, b, dims=4)
    ranks, batch = a.shape[:2]
    made = product(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, (ranks, batch))
    return made.contiguous()


PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
}
