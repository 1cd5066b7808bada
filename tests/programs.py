"""Compiled programs on ranks: what the tests of inductor_ext share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

import inductor_ext

Tensor = torch.Tensor


def normal(*shape: int, rank: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of a rank's own; small ones if they are integers."""
    g = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        return torch.randint(-5, 6, shape, generator=g).to(dtype)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def compiled(f: Callable, backend: str = "fcoll", **options: Any) -> Callable:
    """f by the backend, with nothing left of what was compiled before."""
    torch.compiler.reset()
    return torch.compile(f, backend=backend, fullgraph=True, **options)


@contextmanager
def no_graph_cache(**changes: Any) -> Iterator[None]:
    """Graphs are compiled here, not loaded; ``changes`` are of ``inductor_ext.config``.

    What the C++ compiler made of them is still shared by tests and ranks.
    """
    with ExitStack() as stack:
        stack.enter_context(inductor_config.patch(fx_graph_cache=False))
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(inductor_ext.config.patch(**changes))
        yield


def forms(before: int = 0) -> list[tuple[str, str]]:
    """(collective, form) of what is loaded, but for the first ones."""
    return [(entry.op, entry.form) for entry in inductor_ext.report()[before:]]


def loaded() -> int:
    return len(inductor_ext.report())


def leaves(tree: Any) -> list[Tensor]:
    """All tensors of a result, detached and plain."""
    flat, _ = torch.utils._pytree.tree_flatten(tree)
    return [x.detach() + 0 if x.dtype != torch.bool else x.detach() | False for x in flat]


def results_and_gradients(f: Callable, *args: Tensor) -> list[Tensor]:
    """Of every result and, for the sum of their squares, of every argument that has one."""
    args = tuple(x.detach().clone().requires_grad_(x.is_floating_point()) for x in args)
    out = leaves_with_grad(f(*args))
    sum(y.double().square().sum() for y in out if y.requires_grad).backward()
    grads = [x.grad for x in args if x.grad is not None]
    return [y.detach() + 0 for y in out] + grads


def leaves_with_grad(tree: Any) -> list[Tensor]:
    return list(torch.utils._pytree.tree_flatten(tree)[0])


def busy(us: float) -> None:
    """Compute for a while, as a slow rank does."""
    end = perf_counter() + us / 1e6
    while perf_counter() < end:
        math.sqrt(2.0)


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""
