"""Greedy decoding with a small Llama on 2 local ranks, and what the compiler made of it.

Three ways to decode the same tokens with the same random weights, taking turns in one run:

    1 process   the whole model, 1 thread a core, torch.compile
    stock       split over 2 ranks, torch's functional collectives on gloo, torch.compile
    fcoll       split over 2 ranks, fcoll's collectives, torch.compile(backend="fcoll")

python examples/tp_llama.py [--layers 8] [--dim 512] [--tokens 64] [--rounds 5] [--out fcoll_demo]

Each rank has its heads and its part of the hidden units: the first matrix of a pair is split by
columns, the second by rows, and the ranks' results are summed. Shapes: B batch (1), D model width,
H heads, K key-value heads, E width of a head, F hidden units, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn

import fcoll
import inductor_ext


@dataclass(frozen=True)
class Split:
    """How a model is split: this rank's place, and the collectives that put it together."""

    rank: int
    n: int
    sum: Callable[[Tensor], Tensor]
    gather: Callable[[Tensor], Tensor]

    def columns(self, w_OI: Tensor) -> nn.Parameter:
        """This rank's share of what a matrix gives."""
        return nn.Parameter(w_OI.chunk(self.n, 0)[self.rank].clone(), requires_grad=False)

    def rows(self, w_OI: Tensor) -> nn.Parameter:
        """This rank's share of what a matrix takes: the results of the ranks are to be summed."""
        return nn.Parameter(w_OI.chunk(self.n, 1)[self.rank].clone(), requires_grad=False)


def splits() -> dict[str, Split]:
    rank, n, world = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    return {
        "1 process": Split(0, 1, lambda x: x, lambda x: x),
        "stock": Split(
            rank,
            n,
            partial(funcol.all_reduce, reduceOp="sum", group=world),
            partial(funcol.all_gather_single, gather_dim=0, group=world),
        ),
        "fcoll": Split(
            rank,
            n,
            partial(fcoll.all_reduce, group=world),
            partial(fcoll.all_gather_into_tensor, group=world),
        ),
    }


# -- the model ---


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) / columns**0.5


def rotate(x_BHTE: Tensor, angles_TE: Tensor) -> Tensor:
    """Rotary position embedding: halves of a head as the two coordinates."""
    a, b = x_BHTE.chunk(2, -1)
    return x_BHTE * angles_TE.cos() + torch.cat([-b, a], -1) * angles_TE.sin()


class Attention(nn.Module):
    def __init__(self, args: argparse.Namespace, split: Split) -> None:
        super().__init__()
        self.split, self.width = split, args.dim // args.heads
        self.heads, self.kv_heads = args.heads // split.n, args.kv_heads // split.n
        kv = args.kv_heads * self.width
        q, k, v = (split.columns(matrix(rows, args.dim)) for rows in (args.dim, kv, kv))
        self.qkv = nn.Parameter(torch.cat([q, k, v]), requires_grad=False)
        self.out = split.rows(matrix(args.dim, args.dim))
        cache = torch.zeros(1, self.kv_heads, args.context, self.width)
        self.register_buffer("keys", cache)
        self.register_buffer("values", cache.clone())

    def forward(self, x_BTD: Tensor, at_T: Tensor, angles_TE: Tensor, mask: Tensor) -> Tensor:
        E = self.width
        parts = F.linear(x_BTD, self.qkv).split([self.heads * E, *[self.kv_heads * E] * 2], -1)
        q, k, v = (part.unflatten(-1, (-1, E)).transpose(1, 2) for part in parts)
        q, k = rotate(q, angles_TE), rotate(k, angles_TE)
        keys = self.keys.index_copy_(2, at_T, k)
        values = self.values.index_copy_(2, at_T, v)
        y_BHTE = F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
        return self.split.sum(F.linear(y_BHTE.transpose(1, 2).flatten(2), self.out))


class FeedForward(nn.Module):
    def __init__(self, args: argparse.Namespace, split: Split) -> None:
        super().__init__()
        self.split = split
        gate, up = (split.columns(matrix(args.hidden, args.dim)) for _ in range(2))
        self.gate_up = nn.Parameter(torch.cat([gate, up]), requires_grad=False)
        self.down = split.rows(matrix(args.dim, args.hidden))

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = F.linear(x_BTD, self.gate_up).chunk(2, -1)
        return self.split.sum(F.linear(F.silu(gate_BTF) * up_BTF, self.down))


class Layer(nn.Module):
    def __init__(self, args: argparse.Namespace, split: Split) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(args.dim) for _ in range(2)).requires_grad_(False)
        self.attention, self.mlp = Attention(args, split), FeedForward(args, split)

    def forward(self, x_BTD: Tensor, *where: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norms[0](x_BTD), *where)
        return x_BTD + self.mlp(self.norms[1](x_BTD))


class Llama(nn.Module):
    """The token at a place -> the most likely next one."""

    def __init__(self, args: argparse.Namespace, split: Split) -> None:
        super().__init__()
        torch.manual_seed(0)  # all ranks, and all ways, draw the same whole weights
        self.split, self.context = split, args.context
        self.embedding = nn.Parameter(torch.randn(args.vocab, args.dim), requires_grad=False)
        self.layers = nn.ModuleList(Layer(args, split) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim).requires_grad_(False)
        self.head = split.columns(matrix(args.vocab, args.dim))
        E = args.dim // args.heads
        steps = 10000.0 ** (-torch.arange(0, E, 2) / E)
        self.register_buffer("steps", torch.cat([steps, steps]))

    def forward(self, token_BT: Tensor, at_T: Tensor) -> Tensor:
        mask = torch.arange(self.context) <= at_T[:, None]
        angles_TE = at_T[:, None] * self.steps
        x_BTD = F.embedding(token_BT, self.embedding)
        for layer in self.layers:
            x_BTD = layer(x_BTD, at_T, angles_TE, mask)
        return self.most_likely(F.linear(self.norm(x_BTD[:, -1]), self.head))

    def most_likely(self, logits_BV: Tensor) -> Tensor:
        """Of the best of each rank's part of the vocabulary the best."""
        best, index = logits_BV.max(-1)
        index = index + self.split.rank * logits_BV.shape[-1]
        best_NB, index_NB = (self.split.gather(x[None]) for x in (best, index))
        return index_NB.gather(0, best_NB.argmax(0, keepdim=True)).T


# -- decoding ---


def decode(step: Callable, args: argparse.Namespace) -> tuple[list[int], float]:
    """The tokens, and how many a second. The prompt goes in token by token: one graph for all."""
    prompt = torch.arange(1, args.prompt + 1)
    tokens: list[int] = []
    token_BT = prompt[:1, None]
    for at in range(args.prompt + args.tokens - 1):
        if at == args.prompt - 1:
            start = time.perf_counter()
        token_BT = step(token_BT, torch.tensor([at]))
        if at + 1 < args.prompt:
            token_BT = prompt[at + 1 : at + 2, None]
        else:
            tokens.append(token_BT.item())
    return tokens, args.tokens / (time.perf_counter() - start)


class Way:
    """One way to decode: a compiled model, and the cores and threads it runs on."""

    def __init__(self, name: str, split: Split, args: argparse.Namespace, cores: list[int]) -> None:
        self.name, self.args = name, args
        self.runs = split.n > 1 or dist.get_rank() == 0
        self.cores = [cores[dist.get_rank() % len(cores)]] if split.n > 1 else cores
        self.tokens: list[int] = []
        self.rates: list[float] = []
        self.step = torch.compile(
            Llama(args, split) if self.runs else nn.Identity(),
            backend="fcoll" if name == "fcoll" else "inductor",
            fullgraph=True,
            dynamic=False,
            isolate_recompiles=True,  # the three have their code in common, not their guards
        )

    def turn(self) -> None:
        if self.runs:
            os.sched_setaffinity(0, self.cores)
            torch.set_num_threads(len(self.cores))
            self.tokens, rate = decode(self.step, self.args)
            self.rates.append(rate)
        dist.barrier()  # sleeps, does not spin, while rank 0 runs alone

    @property
    def rate(self) -> float:
        """Tokens a second, the median of all rounds but the first, which compiles."""
        return statistics.median(self.rates[1:])


# -- what the compiler did ---


def lowered() -> str:
    """What became of the collectives of the compiled graphs, a line for those that are alike."""
    rows = Counter(
        (e.op, f"{list(e.shape)} {e.dtype}", e.form, e.kernel or e.why, Path(e.source).name)
        for e in inductor_ext.report()
    )
    lines = []
    for (op, shape, form, reader, line), count in rows.items():
        lines.append(f"  {count:>3} x {op:<23}{shape:<22}{form:<7}{line}")
        if reader:
            lines.append(f"        {'read by' if form == 'fused' else 'because'} {reader[:84]}")
    return "\n".join(lines)


def save_kernel(out: Path) -> str:
    """Write the kernel that reads most all-reduces, and its graph, to files; its name."""
    readers = Counter((e.kernel, e.code) for e in inductor_ext.report() if e.op == "all_reduce")
    ((kernel, code), _), *_ = readers.most_common(1)
    graph = Path(code).read_text()
    found = re.search(rf"^{kernel} = .*?r\'\'\'(.*?)\'\'\'", graph, re.S | re.M)
    assert found, f"no {kernel} in {code}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "fused_kernel.cpp").write_text(found[1].lstrip())
    (out / "graph.py").write_text(graph)
    return kernel


def show(ways: list[Way], out: Path) -> None:
    alone, stock, ours = ways
    print(f"\n{'tokens/s':<12}{'':<10}(median of {alone.args.rounds} rounds; lowest to highest)")
    for way in ways:
        rates = way.rates[1:]
        print(f"{way.name:<12}{way.rate:<10.1f}({min(rates):.1f} to {max(rates):.1f})")
    print(f"fcoll/stock {ours.rate / stock.rate:.2f}, fcoll/1 process {ours.rate / alone.rate:.2f}")
    print("\nthe collectives of a step with fcoll")
    print(lowered())
    kernel = save_kernel(out)
    print(f"\n{out / 'fused_kernel.cpp'}: {kernel}")
    print(f"{out / 'graph.py'}: what calls it")


@torch.no_grad()
def ranks(args: argparse.Namespace) -> None:
    rank, cores = dist.get_rank(), sorted(os.sched_getaffinity(0))
    ways = [Way(name, split, args, cores) for name, split in splits().items()]
    if rank == 0:
        size = sum(p.numel() for p in ways[0].step.parameters()) / 1e6
        print(f"{args.layers} layers, {size:.0f} M parameters, f32; {len(cores)} cores")
    for i in range(args.rounds + 1):
        for way in ways:
            if rank == 0 and i == 0:
                print(f"compiling: {way.name} ...", flush=True)
            way.turn()
        if rank == 0 and i:
            rates = ", ".join(f"{way.name} {way.rates[-1]:.1f}" for way in ways)
            print(f"round {i} of {args.rounds}, tokens/s: {rates}", flush=True)
    if rank == 0:
        for way in ways:
            assert way.tokens == ways[0].tokens, f"{way.name}: {way.tokens}"
        print(f"all three decode {ways[0].tokens[:12]} ...")
        show(ways, Path(args.out))
    fcoll.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="to decode in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="fcoll_demo", help="folder for the generated code")
    fcoll.launch(ranks, parser.parse_args(), world_size=2)


if __name__ == "__main__":
    main()
