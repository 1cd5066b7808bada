"""A compiled gather moves values of every dtype."""

from __future__ import annotations

import torch
from programs import bits, compiled, no_graph_cache

import fcoll

Tensor = torch.Tensor
DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
]


def gathered(rank: int) -> list[str]:
    xs = [(torch.arange(64, dtype=torch.uint8) * 2 + rank).view(dtype) for dtype in DTYPES]

    def f(xs: list[Tensor]) -> list[Tensor]:
        return [fcoll.all_gather_into_tensor(x) for x in xs]

    with no_graph_cache():
        got = compiled(f)(xs)
    want = map(fcoll.wait_tensor, f(xs))
    alike = zip(DTYPES, got, want, strict=True)
    return [str(dtype) for dtype, a, b in alike if bits(a) != bits(b)]


def test_gather_of_every_dtype(shared2):
    assert shared2.run(gathered, timeout=170) == [[], []]
