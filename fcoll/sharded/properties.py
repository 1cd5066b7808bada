"""What a sharded tensor says of itself: the torch functions that look at no element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fcoll.groups import resolve
from fcoll.sharded import _torch
from fcoll.sharded.dispatch import as_plain, built_in, unsupported


def _of_tensor(*names: str) -> list[Any]:
    """The getters of torch.Tensor's properties, as __torch_function__ is asked with them."""
    return [getattr(Tensor, name).__get__ for name in names]


as_plain(
    *_of_tensor("shape", "dtype", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf"),
    *_of_tensor("is_sparse", "is_quantized", "is_nested", "output_nr", "_version"),
    *_of_tensor("is_sparse_csr", "is_mkldnn"),
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_signed,
    Tensor.__len__,
    torch.numel,
    torch.is_floating_point,
    torch.is_complex,
    torch.is_tensor,
)


@built_in(Tensor.grad.__set__)  # type: ignore[attr-defined]
def set_grad(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> None:
    """Gradients are its shards'; that of the whole may be set to none."""
    if args[1] is not None:
        raise unsupported(Tensor.grad.__set__, args, kwargs)  # type: ignore[attr-defined]


@built_in(*_of_tensor("device"))
def device(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> torch.device:
    """That of this rank's shards; of a rank without any, the one that the group serves."""
    shards = args[0]._local_shards
    if shards:
        return shards[0].tensor.device
    serves = resolve(process_group).serves if _torch.is_member(process_group) else ()
    return torch.device("cpu" if not serves or "cpu" in serves else serves[0])


def _is_on(kind: str) -> None:
    @built_in(*_of_tensor(f"is_{kind}"))
    def is_on(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> bool:
        return device(types, args, kwargs, process_group).type == kind


for _kind in ("cpu", "cuda", "meta", "mps", "xpu", "xla", "mtia", "ipu", "maia", "vulkan"):
    _is_on(_kind)
