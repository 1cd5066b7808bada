"""Libraries on the backend "fcoll" and on gloo, 2 ranks, ms of a step or of a generated token.

Each workload is run in a world of each backend in turn, in the same processes, which are pinned to
cores; the worlds take turns until the end. Median on the slower rank and its share of gloo's.
"accelerate_ddp" is fcoll's reducer under torch's DDP, on the backend "fcoll"; "nothing" is torch's
DDP with a comm hook that sends nothing, the least that any backend can reach. A library that is not
installed is left out. --busy 4 has four other programs keep the cores busy meanwhile.

python benchmarks/clients.py [--only ddp,fsdp2,generate,megatron] [--turns 4] [--rounds 20]
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import small_layers, transformer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fcoll

Step = Callable[[], object]
RANKS, WARM_UP, TOKENS = 2, 3, 32
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def training(module: nn.Module, x: torch.Tensor) -> Step:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(build: Callable[[], tuple[nn.Module, torch.Tensor]]) -> Step:
    module, x = build()
    return training(DistributedDataParallel(module), x)


def fsdp2() -> Step:
    module, x = transformer()
    for layer in module.layers:
        fully_shard(layer)
    return training(fully_shard(module), x)


def generate(kind: str) -> Step:
    """TOKENS tokens of a random model in tensor parallel layers."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        config = LlamaConfig(**SIZES) if kind == "llama" else Qwen3Config(**SIZES, head_dim=32)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder[0])
    dist.barrier()
    plan = DistributedConfig(tp_size=RANKS, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder[0], distributed_config=plan)
    prompt, length = torch.arange(16).view(1, 16), {"min_new_tokens": TOKENS}
    length["max_new_tokens"] = TOKENS
    return lambda: model.generate(prompt, **length, do_sample=False, pad_token_id=0)


def megatron(tokens: int) -> Step:
    """A column parallel layer, a row parallel one behind it, forward, backward and SGD."""
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    config = ModelParallelConfig(
        tensor_model_parallel_size=RANKS, use_cpu_initialization=True, params_dtype=torch.float32
    )
    options: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_}
    up = ColumnParallelLinear(256, 1024, gather_output=False, bias=True, **options)
    down = RowParallelLinear(
        1024, 256, input_is_parallel=True, skip_bias_add=False, bias=True, **options
    )

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return down(nn.functional.gelu(up(x)[0]))[0]

    block = Block()
    block.up, block.down = up, down
    return training(block, torch.randn(tokens // 4, 4, 256))


# title -> the package that it needs, what is made in a world, steps in one call of it
WORKLOADS: dict[str, tuple[str, Callable[[], Step], int]] = {
    "ddp, 200 small layers": ("torch", partial(ddp, small_layers), 1),
    "ddp, transformer of 10 M": ("torch", partial(ddp, transformer), 1),
    "fsdp2, transformer of 10 M": ("torch", fsdp2, 1),
    "generate, llama, a token": ("transformers", partial(generate, "llama"), TOKENS),
    "generate, qwen3, a token": ("transformers", partial(generate, "qwen3"), TOKENS),
    "megatron, 64 tokens": ("megatron", partial(megatron, 64), 1),
    "megatron, 256 tokens": ("megatron", partial(megatron, 256), 1),
}
# -> backend
WAYS = {"gloo": "gloo", "fcoll": "fcoll", "accelerate_ddp": "fcoll", "nothing": "gloo"}


@contextmanager
def sending_nothing() -> Iterator[None]:
    """Models that torch's DDP wraps inside keep their gradients to themselves."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, not strings
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    original = DistributedDataParallel.__init__

    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_comm_hook(None, hook)

    DistributedDataParallel.__init__ = init
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = original


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """Others that use all the time they get."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextmanager
def world(backend: str, folder: str, number: int, rank: int) -> Iterator[None]:
    meet = f"file://{folder}/{number}"  # gloo finds old addresses in a store that was used
    dist.init_process_group(backend, init_method=meet, rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measured(step: Step, rounds: int) -> list[float]:
    """ms of each call on the slower rank."""
    taken = []
    for _ in range(WARM_UP + rounds):
        dist.barrier()
        start = time.perf_counter()
        step()
        ms = torch.tensor([time.perf_counter() - start], dtype=torch.float64) * 1e3
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        taken.append(ms.item())
    return taken[WARM_UP:]


def rank_main(rank: int, folder: str, titles: list[str], turns: int, rounds: int) -> None:
    os.sched_setaffinity(0, {rank % (os.cpu_count() or 1)})
    # what libraries look at to see that there are ranks
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    number = 0
    for title in titles:
        _, make, steps = WORKLOADS[title]
        ways = WAYS if title.startswith("ddp") else ("gloo", "fcoll")
        ms: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(turns):
            for way in ways:
                number += 1
                with ExitStack() as stack:
                    stack.enter_context(world(WAYS[way], folder, number, rank))
                    if way == "accelerate_ddp":
                        stack.enter_context(fcoll.accelerate_ddp())
                    elif way == "nothing":
                        stack.enter_context(sending_nothing())
                    torch.manual_seed(0)
                    ms[way] += [each / steps for each in measured(make(), rounds)]
        if rank == 0:
            show(title, {way: statistics.median(each) for way, each in ms.items()})


def show(title: str, ms: dict[str, float]) -> None:
    figures = [f"{way} {each:9.3f} ({each / ms['gloo']:.2f})" for way, each in ms.items()]
    print(f"{title:<28}" + "  ".join(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="beginnings of titles, with commas")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0, help="other programs beside the ranks")
    args = parser.parse_args()
    chosen = []
    for title, (package, *_) in WORKLOADS.items():
        if not title.startswith(tuple(args.only.split(","))):
            continue
        if importlib.util.find_spec(package) is None:
            print(f"{title:<28}{package} is not installed")
            continue
        chosen.append(title)
    beside = f" beside {args.busy} busy programs" if args.busy else ""
    print(f"{RANKS} ranks{beside}, {args.turns} turns of {args.rounds}: median ms (of gloo's)")
    with tempfile.TemporaryDirectory() as folder, busy_programs(args.busy):
        facts = folder, chosen, args.turns, args.rounds
        torch.multiprocessing.spawn(rank_main, facts, nprocs=RANKS)


if __name__ == "__main__":
    main()
