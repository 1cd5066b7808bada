"""Shapes of the ops of transport/native/compiled.cpp, known once the C++ part is loaded."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fcoll.groups import group_size
from fcoll.table.collectives import COLLECTIVES


@functools.cache
def register() -> None:
    fake = torch.library.register_fake

    for allocates in ("claim", "symmetric_empty"):
        fake(f"fcoll_native::{allocates}")(_allocated)

    @fake("fcoll_native::meet")
    def meet(
        own: Tensor, collective: str, reduce_op: str, group_name: str, dim: int
    ) -> Sequence[Tensor]:
        return _parts(own, collective, group_name)

    @fake("fcoll_native::announce")
    def announce(own: Tensor, collective: str, reduce_op: str, group_name: str, dim: int) -> Tensor:
        return own.new_empty(1, dtype=torch.int64)

    @fake("fcoll_native::collect")
    def collect(token: Tensor, own: Tensor, collective: str, group_name: str) -> Sequence[Tensor]:
        return _parts(own, collective, group_name)

    @fake("fcoll_native::meet_and_reduce")
    def meet_and_reduce(
        own: Tensor, collective: str, reduce_op: str, group_name: str, dim: int
    ) -> Tensor:
        return _parts(own, collective, group_name)[0]


def _allocated(group_name, which, size, stride, dtype, device):  # type: ignore[no-untyped-def]
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _parts(own: Tensor, collective: str, group_name: str) -> list[Tensor]:
    n = group_size(group_name)
    shares = COLLECTIVES[collective].native.arena == "share"
    rows = own.shape[0] // n if shares else own.shape[0]
    return [own.new_empty(rows, *own.shape[1:]) for _ in range(n)]
