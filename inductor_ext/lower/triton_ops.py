"""The kernels of ``triton_kernels.py`` as ops: ``torch.ops.fcoll_triton``.

They are known without triton, which is imported at the first call. Their first argument is in
torch's symmetric memory, and every rank of the group makes the same call on the same tensor.
They run on CUDA tensors, and on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from inductor_ext._torch import rendezvous, signal_pad_size
from inductor_ext.errors import NotReducible

REDUCE_OPS = ("sum", "avg", "product", "min", "max")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
MAX_RANKS = 16

_TILE_BYTES = 8192  # 16 bytes for each of the threads of 16 warps
_WARPS = 16


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not(dtype: torch.dtype, reduce_op: str, n: int) -> str:
    """The reason why the kernels do not serve a reduction; empty if they do."""
    if reduce_op not in REDUCE_OPS:
        return f"{reduce_op} is not a reduction of the Triton kernels"
    if dtype not in FLOATS and (dtype not in INTS or reduce_op == "avg"):
        return f"{reduce_op} of {dtype} is not one of the Triton kernels'"
    return (
        "" if n <= MAX_RANKS else f"{n} ranks are more than the {MAX_RANKS} of the Triton kernels"
    )


def one_shot_all_reduce(symmetric_input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """all_reduce of what is in symmetric memory, by reading every rank's part."""
    x, kernels = symmetric_input, _kernels()
    out = torch.empty_like(x)
    if x.numel():
        meeting = _meeting(x, reduce_op, group_name)
        block = _TILE_BYTES // x.element_size()
        with _on(x):
            kernels.one_shot[(_blocks(x.numel(), block),)](
                *meeting.tables,
                out,
                x.numel(),
                meeting.rank,
                WIDE=_wide(x.dtype),
                BLOCK=block,
                num_warps=_WARPS,
                **meeting.constants,
            )
    return out


def two_shot_all_reduce(symmetric_input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    """all_reduce of large parts: every rank reduces a share. It writes over its argument."""
    x, kernels = symmetric_input, _kernels()
    out = torch.empty_like(x)
    if x.numel():
        meeting = _meeting(x, reduce_op, group_name)
        block = _TILE_BYTES // x.element_size()
        share = _round_up(-(-x.numel() // meeting.constants["RANKS"]), 16)  # aligned as the whole
        with _on(x):
            kernels.two_shot[(_blocks(share, block),)](
                *meeting.tables,
                out,
                x.numel(),
                share,
                meeting.rank,
                WIDE=_wide(x.dtype),
                BLOCK=block,
                num_warps=_WARPS,
                **meeting.constants,
            )
    return out


def one_shot_all_reduce_rms_norm(
    symmetric_input: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    reduce_op: str,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total) * weight, total) of total = all_reduce(x) + residual, over the last dim."""
    x, kernels = symmetric_input, _kernels()
    if residual.shape != x.shape or weight.shape != x.shape[-1:] or not x.is_floating_point():
        shapes = ", ".join(str(list(t.shape)) for t in (x, residual, weight))
        raise NotReducible(
            why=f"all_reduce with rms_norm of {x.dtype} of shapes {shapes}",
            hint="Give floats: input and residual of one shape, weight of its last dim.",
        )
    normed, total = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        meeting = _meeting(x, reduce_op, group_name)
        width = x.shape[-1]
        block = 1 << (width - 1).bit_length()
        with _on(x):
            kernels.one_shot_norm[(_blocks(x.numel(), width),)](
                *meeting.tables,
                residual.contiguous(),
                weight.contiguous(),
                total,
                normed,
                x.numel() // width,
                width,
                eps,
                meeting.rank,
                WHOLE=block == width,
                BLOCK=block,
                num_warps=_WARPS,
                **meeting.constants,
            )
    return normed, total


# -- what the launches share ---


class _Meeting:
    """The arguments of a kernel that are of the group and its memory."""

    def __init__(self, x: Tensor, reduce_op: str, handle: Any) -> None:
        self.rank = handle.rank
        n = handle.world_size
        offset = x.data_ptr() - handle.buffer_ptrs[self.rank]
        self.tables = (handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, offset)
        self.constants = {
            "RANKS": n,
            "LANES": 1 << (n - 1).bit_length(),
            "OP": reduce_op,
            "ALIGNED": x.data_ptr() % 16 == 0,
        }


def _meeting(x: Tensor, reduce_op: str, group_name: str) -> _Meeting:
    if not x.is_contiguous():
        why = "a tensor that is reduced in symmetric memory must be contiguous"
        raise NotReducible(why=why, hint="Call contiguous() where it is written.")
    handle = rendezvous(x, group_name)
    if handle is None:
        why = "the tensor is not in symmetric memory"
        hint = "Make it with torch.distributed._symmetric_memory.empty."
        raise NotReducible(why=why, hint=hint)
    if not all(handle.buffer_ptrs):  # as in groups of several hosts
        far = handle.buffer_ptrs.index(0)
        why = f"the memory of rank {far} is not mapped by rank {handle.rank}"
        raise NotReducible(why=why, hint="Use a group of ranks on one host.")
    why = why_not(x.dtype, reduce_op, handle.world_size)
    if why:
        raise NotReducible(why=why, hint="Use fcoll.all_reduce.")
    kernels = _kernels()
    words = kernels.FIRST_WORD.value + 2 * kernels.MAX_BLOCKS.value * handle.world_size
    if signal_pad_size() < 4 * words:
        why = f"the signal pad must have {4 * words} bytes"
        raise NotReducible(why=why, hint="See set_signal_pad_size of torch's symmetric memory.")
    return _Meeting(x, reduce_op, handle)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("inductor_ext.lower.triton_kernels")


@functools.cache
def _wide(dtype: torch.dtype) -> Any:
    """The type in which a dtype is added up, as a constant of a kernel."""
    import triton.language as tl

    return getattr(tl, str(torch.float32 if dtype.itemsize == 2 else dtype).partition(".")[2])


def _blocks(count: int, block: int) -> int:
    return min(-(-count // block), _kernels().MAX_BLOCKS.value)


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def _on(x: Tensor) -> AbstractContextManager:
    """With its GPU as the current one: that is where Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


# -- ops ---

_lib = torch.library.Library("fcoll_triton", "DEF")


def _define(fn: Any, schema: str, fake: Any) -> None:
    name = fn.__name__
    _lib.define(name + schema)
    for key in ("CPU", "CUDA"):
        _lib.impl(name, fn, key)
    torch.library.register_fake(f"fcoll_triton::{name}", fake, lib=_lib)


def _like(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


def _two_like(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


_REST = "symmetric_input, str reduce_op, str group_name) -> Tensor"
_define(one_shot_all_reduce, f"(Tensor {_REST}", _like)
_define(two_shot_all_reduce, f"(Tensor(a!) {_REST}", _like)  # it writes over its argument
_define(
    one_shot_all_reduce_rms_norm,
    "(Tensor symmetric_input, Tensor residual, Tensor weight, float eps, str reduce_op,"
    " str group_name) -> (Tensor normed, Tensor total)",
    _two_like,
)
