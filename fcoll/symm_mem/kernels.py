"""torch's ``symm_mem`` ops that take ordinary tensors, on CPU tensors, by fcoll's collectives.

The ops on tensors in symmetric memory are C++ (``transport/native/symm_backend.cpp``). These also
work where a group has no shared memory. Strides are those of torch's meta kernels, because code
that Inductor generates asserts them.

>>> x, w = torch.ones(2, 3), torch.ones(3, 4)
>>> _, [y] = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, dist.group.WORLD.group_name)
>>> y.shape == (2 * n, 4)
True
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll import _torch
from fcoll.errors import BadSymmetricCall
from fcoll.groups import group_size
from fcoll.symm_mem import exchanges


def register() -> None:
    """Give torch the kernels; not those of ops that have one already."""
    for kernel in (*_KERNELS, *exchanges.KERNELS):
        _torch.add_kernel("symm_mem", kernel.__name__, "CPU", kernel)
    for name, fake in _FAKES.items():
        _torch.add_kernel("symm_mem", name, "Meta", fake)


# -- collectives alone: waited for by ``_c10d_functional.wait_tensor`` ---


def _low_contention_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    return torch.ops.fcoll.all_gather_into_tensor(tensor, group_size(group_name), group_name)


def _low_contention_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    n = group_size(group_name)
    return torch.ops.fcoll.reduce_scatter_tensor(tensor, reduce_op, n, group_name)


# -- a gather and the matmuls of what is gathered ---


def fused_all_gather_matmul(
    A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """``all_gather(A, gather_dim)``, and its product with each of Bs."""
    _check("fused_all_gather_matmul", A, Bs, gather_dim)
    front = _front(A, gather_dim)
    whole = _gathered(A.movedim(gather_dim, front), front, group_name)
    products = [(whole @ B).movedim(front, gather_dim) for B in Bs]
    return whole.movedim(front, gather_dim) if return_A else None, products


def fused_all_gather_scaled_matmul(
    A: Tensor,
    Bs: Sequence[Tensor],
    A_scale: Tensor,
    B_scales: Sequence[Tensor],
    gather_dim: int,
    group_name: str,
    biases: Sequence[Tensor | None],
    result_scales: Sequence[Tensor | None],
    out_dtypes: Sequence[Any],
    use_fast_accum: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """``fused_all_gather_matmul`` of scaled numbers. ``A_scale`` is one number, a column for the
    rows of this rank's A, or one for the rows of the whole."""
    op = "fused_all_gather_scaled_matmul"
    _check(op, A, Bs, gather_dim)
    lists = (B_scales, biases, result_scales, out_dtypes, use_fast_accum)
    if any(len(each) != len(Bs) for each in lists):
        lengths = ", ".join(str(len(each)) for each in lists)
        raise BadSymmetricCall(message=f"{op}: there are {len(Bs)} Bs, and lists of {lengths}")
    front = _front(A, gather_dim)
    whole = _gathered(A.movedim(gather_dim, front), front, group_name)
    scale = _scale_of_whole(A, A_scale, gather_dim, group_name)
    dtypes = _torch.as_dtypes(out_dtypes)
    products = [
        _scaled_matmul(whole, B, scale, *rest).movedim(front, gather_dim)
        for B, *rest in zip(
            Bs, B_scales, biases, result_scales, dtypes, use_fast_accum, strict=True
        )
    ]
    return whole.movedim(front, gather_dim), products


def _check(op: str, A: Tensor, Bs: Sequence[Tensor], dim: int) -> None:
    if A.dim() < 2:
        raise BadSymmetricCall(message=f"{op}: A has {A.dim()} dimensions, it needs 2 or more")
    if any(B.dim() != 2 for B in Bs):
        shapes = ", ".join(str(list(B.shape)) for B in Bs)
        raise BadSymmetricCall(message=f"{op}: B must be a matrix, got {shapes}")
    if not -1 <= dim < A.dim():
        raise BadSymmetricCall(message=f"{op}: no dim {dim} in A of {A.dim()} dimensions")


def _front(A: Tensor, dim: int) -> int:
    """Where the dim of the ranks' parts is in memory: first, unless it is the one summed over."""
    return -1 if dim in (-1, A.dim() - 1) else 0


def _gathered(x: Tensor, dim: int, group_name: str) -> Tensor:
    dim, n = dim % x.dim(), group_size(group_name)
    out = torch.ops.fcoll.all_gather_into_tensor(x.contiguous(), n, group_name, dim)
    return torch.ops.fcoll.wait_tensor(out)


def _scale_of_whole(A: Tensor, scale: Tensor, gather_dim: int, group_name: str) -> Tensor:
    """One number, or a column with the scale of each row of the gathered matrix."""
    n, dim = group_size(group_name), gather_dim % A.dim()
    whole = [size * n if d == dim else size for d, size in enumerate(A.shape)]
    if scale.shape[:-1] == A.shape[:-1] and scale.shape[-1:] == (1,):
        return _gathered(scale.movedim(dim, 0), 0, group_name).flatten(0, -2)
    if scale.numel() == 1:
        return scale
    if list(scale.shape[:-1]) == whole[:-1]:
        return scale.movedim(dim, 0).flatten(0, -2)
    raise BadSymmetricCall(
        message=f"fused_all_gather_scaled_matmul: a scale of {list(scale.shape)} fits neither A of "
        f"{list(A.shape)} nor the whole of {whole}"
    )


# -- a matmul and the reduction of its parts ---


def fused_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    """``reduce_scatter(A @ B, scatter_dim)``."""
    _check("fused_matmul_reduce_scatter", A, [B], scatter_dim)
    return _scattered(A @ B, reduce_op, scatter_dim, group_name)


def fused_scaled_matmul_reduce_scatter(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    reduce_op: str,
    orig_scatter_dim: int,
    scatter_dim_after_maybe_reshape: int,
    group_name: str,
    output_shape: Sequence[int] | None,
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``fused_matmul_reduce_scatter`` of scaled numbers. The product has ``output_shape`` when it
    is scattered along ``orig_scatter_dim``; ``A_scale`` is one number or a column for A's rows."""
    op = "fused_scaled_matmul_reduce_scatter"
    _check(op, A, [B], scatter_dim_after_maybe_reshape)
    if A_scale.numel() != 1:
        if A_scale.shape[:-1] != A.shape[:-1]:
            shapes = f"{list(A_scale.shape)} does not fit the rows of A of {list(A.shape)}"
            raise BadSymmetricCall(message=f"{op}: a scale of {shapes}")
        A_scale = A_scale.flatten(0, -2).contiguous()
    [dtype] = _torch.as_dtypes([out_dtype])
    product = _scaled_matmul(A, B, A_scale, B_scale, bias, result_scale, dtype, use_fast_accum)
    if output_shape is not None:
        product = product.view(*output_shape[:-1], B.shape[1])
    return _scattered(product, reduce_op, orig_scatter_dim, group_name)


def _scaled_matmul(
    A: Tensor,
    B: Tensor,
    A_scale: Tensor,
    B_scale: Tensor,
    bias: Tensor | None,
    result_scale: Tensor | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> Tensor:
    rows = A.flatten(0, -2).contiguous()
    options = {"out_dtype": out_dtype, "use_fast_accum": bool(use_fast_accum)}
    out = torch._scaled_mm(rows, B, A_scale, B_scale, bias, result_scale, **options)
    return out.unflatten(0, A.shape[:-1])


def _scattered(x: Tensor, reduce_op: str, dim: int, group_name: str) -> Tensor:
    n, dim = group_size(group_name), dim % x.dim()
    out = torch.ops.fcoll.reduce_scatter_tensor(x, reduce_op, n, group_name, dim)
    return torch.ops.fcoll.wait_tensor(out)


_KERNELS = (
    _low_contention_all_gather,
    _low_contention_reduce_scatter,
    fused_all_gather_matmul,
    fused_all_gather_scaled_matmul,
    fused_matmul_reduce_scatter,
    fused_scaled_matmul_reduce_scatter,
)

# -- fakes of ops on symmetric memory, so that they can be traced and compiled ---


def _first(x: Tensor, *args: Any) -> Tensor:
    """Fake of an op that writes to its input, and returns it."""
    return x


def _last(*args: Any) -> Tensor:
    """Fake of an op that writes to its last argument, and returns it."""
    return args[-1]


def _nothing(*args: Any) -> None:
    """Fake of an op that writes to arguments, and returns none."""


_FAKES = {
    "two_shot_all_reduce_": _first,
    "multimem_all_reduce_": _first,
    "memset32_": _first,
    "stream_write_value32_": _first,
    "multimem_one_shot_all_reduce": lambda x, reduce_op, group_name: torch.empty_like(x),
    "one_shot_all_reduce_out": _last,
    "one_shot_all_reduce_copy_out": _last,
    "two_shot_all_reduce_out": _last,
    "multimem_one_shot_all_reduce_out": _last,
    "multimem_one_shot_reduce_out": _last,
    "multimem_all_gather_out": _last,
    "reduce_scatter_out": _last,
    "all_to_all_vdev": _nothing,
    "tile_reduce": _nothing,
    "multi_root_tile_reduce": _nothing,
}
