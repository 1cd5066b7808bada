"""Training steps in small, as the tests of compiled schedules share them."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist

import fcoll

Tensor = torch.Tensor
LAYERS = 4


class Reduced(torch.autograd.Function):
    """A weight whose gradient is summed over all ranks, as DDP does."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return fcoll.all_reduce(g)


def ddp(x: Tensor, ws: list[Tensor]) -> Tensor:
    for w in ws:
        x = torch.tanh(x @ Reduced.apply(w))
    return x


def fsdp(x: Tensor, ws: list[Tensor]) -> Tensor:
    """Each rank has a part of the rows of every weight; the gradients are scattered."""
    for w in ws:
        x = torch.tanh(x @ fcoll.all_gather_into_tensor(w))
    return x


def torchs_fsdp(x: Tensor, ws: list[Tensor]) -> Tensor:
    """The same by torch's own functional collectives, forward only."""
    c10d, name, n = torch.ops._c10d_functional, dist.group.WORLD.group_name, dist.get_world_size()
    for w in ws:
        x = torch.tanh(x @ c10d.wait_tensor(c10d.all_gather_into_tensor(w, n, name)))
    return x


def events(code: str) -> list[str]:
    """What the generated code does, in order: "start", "wait", "both" and "mm"."""
    call = code[code.rindex("def call(") :].split("\ndef ")[0]
    return [next(k for k, v in m.groupdict().items() if v) for m in _EVENT.finditer(call)]


_EVENT = re.compile(
    r"(?P<wait>wait_tensor\.default\(|\bcollect(\.default)?\()"
    r"|(?P<both>\bmeet(_and_reduce)?(\.default)?\()"
    r"|(?P<start>\bannounce(\.default)?\(|ops\.(_c10d_functional|fcoll)\.(?!wait)\w+\.default\()"
    r"|(?P<mm>extern_kernels\.\w*mm\(|_mkl_linear|mkldnn)"
)
