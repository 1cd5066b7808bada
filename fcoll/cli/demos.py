"""Models to trace without code of one's own: ``fcoll report --demo llama3-8b --mesh dp=8,tp=8``.

Each is a ``build(mesh) -> (step, args)``, written as a user would write it: ``step`` is a whole
training step. The tensors are on the meta device, so a model of any size fits. What an axis of the
mesh is for follows from its name: dp shards or replicates the parameters, tp splits layers, ep
spreads experts, pp stages. B is the batch, L the sequence, D the width, V the vocabulary.

The ``*-ddp`` demos are no torch DistributedDataParallel: they all-reduce every gradient by itself
as soon as it is there, where DDP's reducer does so bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils.parametrize import register_parametrization

from fcoll import functions as fcoll

Step = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True)
class ModelConfig:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128256
    seq: int = 8192
    batch: int = 1
    experts: int = 0


LLAMA3_8B = ModelConfig(layers=32, dim=4096, heads=32, kv_heads=8, hidden=14336)
LLAMA3_70B = ModelConfig(layers=80, dim=8192, heads=64, kv_heads=8, hidden=28672)
LLAMA3_405B = ModelConfig(layers=126, dim=16384, heads=128, kv_heads=8, hidden=53248)
MIXTRAL_8X7B = replace(LLAMA3_8B, vocab=32000, experts=8)
TINY = ModelConfig(layers=2, dim=64, heads=8, kv_heads=8, hidden=128, vocab=256, seq=32)


# -- the model ---


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return (x.float() * scale).type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.head_dim = c.dim // c.heads
        kv = c.kv_heads * self.head_dim
        self.wq = nn.Linear(c.dim, c.dim, bias=False)
        self.wk = nn.Linear(c.dim, kv, bias=False)
        self.wv = nn.Linear(c.dim, kv, bias=False)
        self.wo = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.heads(self.wq(x)), cos, sin)
        k = rotate(self.heads(self.wk(x)), cos, sin)
        v = self.heads(self.wv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class FeedForward(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(c.dim, c.hidden, bias=False)
        self.w2 = nn.Linear(c.hidden, c.dim, bias=False)
        self.w3 = nn.Linear(c.dim, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, c: ModelConfig, feed_forward: Callable[[ModelConfig], nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(c.dim), Attention(c)
        self.ffn_norm, self.feed_forward = RMSNorm(c.dim), feed_forward(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids (B, L) -> logits (B, L, V)."""

    def __init__(
        self, c: ModelConfig, feed_forward: Callable[[ModelConfig], nn.Module] = FeedForward
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab, c.dim)
        self.layers = nn.ModuleList(TransformerBlock(c, feed_forward) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim)
        self.output = nn.Linear(c.dim, c.vocab, bias=False)
        half = c.dim // c.heads // 2
        self.register_buffer("cos", torch.ones(c.seq, half))
        self.register_buffer("sin", torch.ones(c.seq, half))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


# -- tensor parallelism: DTensor splits the layers ---


def tensor_parallel(model: Llama, tp: DeviceMesh) -> None:
    """Every layer split by columns, then by rows: an all-reduce after each pair."""
    whole = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(),
    }
    block = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
    }
    parallelize_module(model, tp, whole)
    for layer in model.layers:
        parallelize_module(layer, tp, block)


def sequence_parallel(model: Llama, tp: DeviceMesh) -> None:
    """As above, and what is between the pairs is split along the sequence: an all-gather before
    each pair, a reduce-scatter after it."""
    split, gathered = Shard(1), Replicate()
    whole = {
        "tok_embeddings": RowwiseParallel(input_layouts=gathered, output_layouts=split),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=split),
    }
    block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(split, None, None), desired_input_layouts=(gathered, None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=split),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(
            input_layouts=(split,), desired_input_layouts=(gathered,)
        ),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=split),
    }
    parallelize_module(model, tp, whole)
    for layer in model.layers:
        parallelize_module(layer, tp, block)


def cross_entropy(logits: Tensor, targets: Tensor, tp: DeviceMesh | None) -> Tensor:
    """The mean loss. With tp the logits are this rank's part of the vocabulary."""
    logits_NV, targets_N = logits.flatten(0, 1).float(), targets.flatten()
    if tp is None:
        return F.cross_entropy(logits_NV, targets_N)
    first = tp.get_local_rank() * logits_NV.shape[1]
    top_N = fcoll.all_reduce(logits_NV.detach().amax(1), "max", tp)
    logits_NV = logits_NV - top_N[:, None]
    sum_N = fcoll.all_reduce(logits_NV.exp().sum(1), "sum", tp, grad="identity")
    mine_N = (targets_N >= first) & (targets_N < first + logits_NV.shape[1])
    picked_N = logits_NV.gather(1, ((targets_N - first) * mine_N)[:, None])[:, 0] * mine_N
    picked_N = fcoll.all_reduce(picked_N, "sum", tp, grad="identity")
    return (sum_N.log() - picked_N).mean()


# -- data parallelism: on functional collectives ---


class Gathered(nn.Module):
    """A parameter that every rank of dp holds a part of, gathered where it is used.

    The gradient of the all-gather is the reduce-scatter that FSDP does. With tp the local part of a
    DTensor is what is gathered.
    """

    def __init__(self, param: Tensor, dp: DeviceMesh | None) -> None:
        super().__init__()
        self.dp = dp
        self.spec = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
        self.shape = local(param).shape

    def part(self, param: Tensor) -> nn.Parameter:
        """What this rank holds of it, flat and padded to equal parts."""
        if self.dp is None:
            return nn.Parameter(local(param).detach())
        size = -(-local(param).numel() // self.dp.size())
        return nn.Parameter(local(param).new_empty(size))

    def forward(self, part: Tensor) -> Tensor:
        whole = part
        if self.dp is not None:
            flat = fcoll.all_gather_into_tensor(part, self.dp)
            whole = flat[: self.shape.numel()].view(self.shape)
        return DTensor.from_local(whole, *self.spec, run_check=False) if self.spec else whole


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def shard_parameters(model: nn.Module, dp: DeviceMesh | None) -> None:
    for module in list(model.modules()):
        for name, param in list(module.named_parameters(recurse=False)):
            gathered = Gathered(param, dp)
            setattr(module, name, gathered.part(param))
            register_parametrization(module, name, gathered, unsafe=True)


def average_gradients(model: nn.Module, group: DeviceMesh) -> None:
    """Each gradient is averaged as soon as it is there; torch's DDP does so bucket by bucket."""

    def average(param: Tensor) -> None:
        assert param.grad is not None
        param.grad = fcoll.all_reduce(param.grad, "avg", group)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(average)


# -- training steps ---


def axis(mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    return mesh[name] if name in (mesh.mesh_dim_names or ()) else None


def llama(
    mesh: DeviceMesh,
    config: ModelConfig = LLAMA3_8B,
    split: Callable[[Llama, DeviceMesh], None] = tensor_parallel,
    replicate: bool = False,
) -> Step:
    """A training step: FSDP over dp, ``split`` over tp, AdamW. If ``replicate``, every rank of dp
    has all parameters and all-reduces each gradient by itself, which is not torch's DDP."""
    dp, tp = axis(mesh, "dp"), axis(mesh, "tp")
    with torch.device("meta"):
        model = Llama(config).bfloat16()
        tokens = torch.empty(config.batch, config.seq, dtype=torch.long)
    if tp is not None:
        split(model, tp)
    shard_parameters(model, None if replicate else dp)
    if replicate and dp is not None:
        average_gradients(model, dp)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(tokens), targets, tp)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, (tokens, tokens)


class Experts(nn.Module):
    """A mixture of experts spread over ep. Each takes up to ``capacity`` tokens of every rank."""

    def __init__(self, c: ModelConfig, ep: DeviceMesh) -> None:
        super().__init__()
        self.ep, self.n = ep, c.experts
        self.capacity = 2 * c.batch * c.seq // c.experts
        mine = c.experts // ep.size()
        self.router = nn.Linear(c.dim, c.experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(mine, c.dim, c.hidden))
        self.w2 = nn.Parameter(torch.empty(mine, c.hidden, c.dim))

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        # Experts choose tokens: the sizes do not depend on the data.
        weight_EC, token_EC = self.router(x_TD).softmax(-1).t().topk(self.capacity, dim=-1)
        chosen_ECD = x_TD[token_EC]
        # to the ranks of the experts, and every rank's share for my experts side by side
        arrived = fcoll.all_to_all_single(chosen_ECD, self.ep)
        mine = arrived.unflatten(0, (self.ep.size(), -1)).transpose(0, 1).flatten(1, 2)
        done = torch.bmm(F.silu(torch.bmm(mine, self.w1)), self.w2)
        sent = done.unflatten(1, (self.ep.size(), -1)).transpose(0, 1).flatten(0, 1)
        back_ECD = fcoll.all_to_all_single(sent, self.ep)
        y_TD = torch.zeros_like(x_TD).index_add(
            0, token_EC.flatten(), (back_ECD * weight_EC[..., None]).flatten(0, 1)
        )
        return y_TD.view_as(x_BLD)


def mixture(mesh: DeviceMesh, config: ModelConfig = MIXTRAL_8X7B) -> Step:
    """A training step of a mixture of experts: experts over ep, the rest replicated over it."""
    ep = axis(mesh, "ep")
    if ep is None:
        raise ValueError(f"{mesh} has no axis ep: use --mesh ep=8")
    with torch.device("meta"):
        model = Llama(config, partial(Experts, ep=ep)).bfloat16()
        tokens = torch.empty(config.batch, config.seq, dtype=torch.long)
    experts = {p for m in model.modules() if isinstance(m, Experts) for p in (m.w1, m.w2)}
    shared = nn.ParameterList(p for p in model.parameters() if p not in experts)
    average_gradients(shared, ep)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = cross_entropy(model(tokens), targets, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, (tokens, tokens)


def pipeline(mesh: DeviceMesh, config: ModelConfig = LLAMA3_8B, microbatches: int = 8) -> Step:
    """A training step in stages over pp, one forward and one backward in turn (1F1B)."""
    pp = axis(mesh, "pp")
    if pp is None:
        raise ValueError(f"{mesh} has no axis pp: use --mesh pp=4")
    rank, n = pp.get_local_rank(), pp.size()
    with torch.device("meta"):
        c = replace(config, layers=config.layers // n)
        model = Llama(c).bfloat16()
        tokens = torch.empty(microbatches, c.batch, c.seq, dtype=torch.long)
        like = torch.empty(c.batch, c.seq, c.dim, dtype=torch.bfloat16)
    first, last = rank == 0, rank == n - 1

    def step(tokens: Tensor, like: Tensor) -> None:
        running, sent = [], []

        def forward(i: int) -> None:
            x = like if first else fcoll.irecv(like, rank - 1, pp).requires_grad_()
            y = model.tok_embeddings(tokens[i]) if first else x
            for layer in model.layers:
                y = layer(y, model.cos, model.sin)
            if last:
                y = cross_entropy(model.output(model.norm(y)), tokens[i], None)
            else:
                sent.append(fcoll.isend(y.detach(), rank + 1, pp))
            running.append((x, y))

        def backward() -> None:
            x, y = running.pop(0)
            y.backward(None if last else fcoll.irecv(like, rank + 1, pp))
            if not first:
                sent.append(fcoll.isend(x.grad, rank - 1, pp))

        ahead = min(n - 1 - rank, microbatches)
        for i in range(microbatches):
            forward(i)
            if i >= ahead:
                backward()
        while running:
            backward()
        for token in sent:
            fcoll.wait_tensor(token)

    return step, (tokens, like)


#: name -> build(mesh). The axes each takes: dp and tp, ep for mixtral, pp for the pipeline.
DEMOS: dict[str, Callable[..., Step]] = {
    "llama3-8b": llama,
    "llama3-70b": partial(llama, config=LLAMA3_70B),
    "llama3-405b": partial(llama, config=LLAMA3_405B),
    "llama3-8b-sp": partial(llama, split=sequence_parallel),
    "llama3-8b-ddp": partial(llama, replicate=True),
    "mixtral-8x7b": mixture,
    "llama3-8b-pipeline": pipeline,
    "tiny": partial(llama, config=TINY),
    "tiny-sp": partial(llama, config=TINY, split=sequence_parallel),
    "tiny-ddp": partial(llama, config=TINY, replicate=True),
    "tiny-moe": partial(mixture, config=replace(TINY, experts=8)),
    "tiny-pipeline": partial(pipeline, config=replace(TINY, layers=8), microbatches=4),
}

_ABOUT = {
    llama: "FSDP over dp, tensor parallel over tp",
    mixture: "a mixture of experts, spread over ep",
    pipeline: "stages over pp, 1F1B",
}


def about(name: str) -> str:
    """A demo in a line.

    >>> about("tiny-ddp")
    "an all-reduce for each gradient over dp, tensor parallel over tp; not torch's DDP"
    """
    made = DEMOS[name]
    build, given = (made.func, made.keywords) if isinstance(made, partial) else (made, {})
    text = _ABOUT[build]
    if given.get("split") is sequence_parallel:
        text = text.replace("tensor parallel", "tensor and sequence parallel")
    if given.get("replicate"):
        text = text.replace("FSDP", "an all-reduce for each gradient") + "; not torch's DDP"
    return text
