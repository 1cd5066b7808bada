"""Small models as people train them, each with what all ranks' batches do to it in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 5


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, generator=made)


@dataclass(frozen=True)
class Program:
    """``loss(module, step, rank)`` is a rank's; ``options`` are DistributedDataParallel's."""

    model: Callable[[], nn.Module]
    loss: Callable[[Any, int, int], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    micro: int = 1  # backward passes for one step of the optimizer: all but the last in no_sync
    uneven: bool = False  # rank r has STEPS - r batches, with join()
    lr: float = 0.05


def on_rows(module: Any, step: int, rank: int) -> Tensor:
    return module(numbers(100 * step + rank, 4, 6)).square().mean()


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3, bias=False)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        return self.b(torch.relu(self.norm(self.a(x))))


def on_images(module: Any, step: int, rank: int) -> Tensor:
    return module(numbers(100 * step + rank, 2, 3, 8, 8)).square().mean()


def channels_last() -> nn.Module:
    return CNN().to(memory_format=torch.channels_last)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight  # shared

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)))


def on_tokens(module: Any, step: int, rank: int) -> Tensor:
    tokens = (numbers(100 * step + rank, 2, 5) * 100).long() % 16
    return F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


class Branches(nn.Module):
    """Of two branches one is used; a third never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.never = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, left: bool):
        return (self.left if left else self.right)(torch.tanh(self.first(x)))


def always_left(module: Any, step: int, rank: int) -> Tensor:
    return module(numbers(100 * step + rank, 4, 6), True).square().mean()


def changing(module: Any, step: int, rank: int) -> Tensor:
    """Branches that differ between steps and, every third step, between ranks."""
    left = (step + (rank if step % 3 == 2 else 0)) % 2 == 0
    return module(numbers(100 * step + rank, 4, 6), left).square().mean()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6, sparse=True)
        self.out = nn.Linear(6, 6)

    def forward(self, rows):
        return self.out(self.embed(rows))


def on_few_tokens(module: Any, step: int, rank: int) -> Tensor:
    rows = (numbers(100 * step + rank, 5) * 100).long() % 12
    return module(rows).square().mean()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(numbers(1, 6, 6, dtype=torch.complex128))
        self.b = nn.Parameter(numbers(2, 6))

    def forward(self, x):
        return (x.to(torch.complex128) @ self.w).abs() + self.b


class Mixed(nn.Module):
    """Parameters of three dtypes; the losses of the narrow ones are exact in them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float32))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.scale.double()


class Checkpointed(MLP):
    reentrant = False

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(lambda y, f=layer: torch.tanh(f(y)), x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


def on_rows_with_grad(module: Any, step: int, rank: int) -> Tensor:
    return module(numbers(100 * step + rank, 4, 6).requires_grad_()).square().mean()


class TwoOutputs(nn.Module):
    """Of which the second is not in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return {"used": self.a(x), "not": [self.b(x)]}


def of_used(module: Any, step: int, rank: int) -> Tensor:
    return module(numbers(100 * step + rank, 4, 6))["used"].square().mean()


FIND = {"find_unused_parameters": True}
VIEW = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}
SMALL = {"bucket_cap_mb": 0.0002}  # several buckets

PROGRAMS = {
    "mlp": Program(MLP, on_rows),
    "mlp in small buckets": Program(MLP, on_rows, SMALL),
    "mlp as views": Program(MLP, on_rows, {**VIEW, **SMALL}),
    "mlp static": Program(MLP, on_rows, {**STATIC, **SMALL}),
    "cnn": Program(CNN, on_images),
    "channels last": Program(channels_last, on_images, VIEW),
    "channels last, copied": Program(channels_last, on_images),
    "transformer with shared parameters": Program(Transformer, on_tokens),
    "unused": Program(Branches, always_left, FIND),
    "unused as views": Program(Branches, always_left, {**FIND, **VIEW}),
    "unused static": Program(Branches, always_left, STATIC),
    "unused changing": Program(Branches, changing, FIND),
    "unused changing, small as views": Program(Branches, changing, {**FIND, **VIEW, **SMALL}),
    "output not in the loss": Program(TwoOutputs, of_used, FIND),
    "sparse": Program(Sparse, on_few_tokens),
    "complex": Program(Complex, on_rows),
    "mixed": Program(Mixed, on_rows),
    "mixed as views": Program(Mixed, on_rows, VIEW),
    "no_sync": Program(MLP, on_rows, micro=3),
    "no_sync as views": Program(MLP, on_rows, VIEW, micro=2),
    "no_sync, unused": Program(Branches, changing, FIND, micro=2),
    "uneven": Program(MLP, on_rows, uneven=True),
    "uneven, small as views": Program(MLP, on_rows, {**VIEW, **SMALL}, uneven=True),
    "checkpoint": Program(Checkpointed, on_rows),
    "checkpoint, reentrant": Program(CheckpointedReentrant, on_rows_with_grad),
}


def made(program: Program) -> nn.Module:
    torch.manual_seed(7)
    model = program.model()
    return model.double() if not isinstance(model, (Complex, Mixed)) else _double(model)


def _double(model: nn.Module) -> nn.Module:
    for child in model.children():
        child.double()
    return model


def state(model: nn.Module) -> dict[str, Tensor | None]:
    """Parameters and gradients by name, dense."""
    found: dict[str, Tensor | None] = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        grad = p.grad
        found[f"{name}.grad"] = None if grad is None else grad.to_dense().clone()
    return found


def train(program: Program, rank: int, wrap: Callable[[nn.Module, dict], nn.Module]) -> Any:
    """Parameters and gradients after five steps of this rank."""
    model = made(program)
    module = wrap(model, program.options)
    optimizer = torch.optim.SGD(model.parameters(), program.lr)
    steps = STEPS - rank if program.uneven else STEPS
    with module.join() if program.uneven else contextlib.nullcontext():
        for step in range(steps):
            optimizer.zero_grad()
            for micro in range(program.micro):
                last = micro == program.micro - 1
                with contextlib.nullcontext() if last else module.no_sync():
                    program.loss(module, step * program.micro + micro, rank).backward()
            optimizer.step()
    return state(model)


def in_one_process(program: Program, n: int) -> dict[str, Tensor | None]:
    """The same, with all ranks' batches: the mean of their gradients."""
    model = made(program)
    optimizer = torch.optim.SGD(model.parameters(), program.lr)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(program.micro):
            for rank in range(n):
                if step < (STEPS - rank if program.uneven else STEPS):
                    at = step * program.micro + micro
                    (program.loss(model, at, rank) / n).backward()
        optimizer.step()
    return state(model)
