"""megatron-core in exact arithmetic: which of its tensor parallel parts are one device's function?

Every build() below is written as for a process of its own: Megatron keeps its groups in globals of
megatron.core.parallel_state, which each simulated rank has for itself. No GPU and no launcher.

python examples/clients/megatron_prove.py
fcoll prove examples/clients/megatron_prove.py:smoothed --mesh tp=2
"""

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import nn

import fcoll

DIM, HIDDEN, VOCAB, TOKENS, BATCH = 8, 32, 16, 4, 2


def set_up(mesh, sequence_parallel=False):
    tp = mesh["tp"].size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(0)
    return ModelParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=sequence_parallel and tp > 1,
        use_cpu_initialization=True,
    )


# -- the loss over a vocabulary that is cut over tp ---


def language_model(mesh, label_smoothing):
    config = set_up(mesh)
    embedding = VocabParallelEmbedding(VOCAB, DIM, init_method=nn.init.normal_, config=config)
    options = {"config": config, "init_method": nn.init.normal_, "bias": True}
    head = ColumnParallelLinear(DIM, VOCAB, gather_output=False, **options)

    def step(tokens, targets):
        logits, _ = head(embedding(tokens))
        loss = vocab_parallel_cross_entropy(logits, targets, label_smoothing).mean()
        loss.backward()
        return loss

    tokens, targets = torch.randint(VOCAB, (2, TOKENS, BATCH))
    return step, (tokens, targets)


def plain(mesh):
    return language_model(mesh, label_smoothing=0.0)


def smoothed(mesh):
    return language_model(mesh, label_smoothing=0.1)


# -- a block whose activations are cut along the sequence between its layers ---


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        options = {"config": config, "init_method": nn.init.normal_, "bias": True}
        self.norm = nn.RMSNorm(DIM)
        self.norm.weight.sequence_parallel = config.sequence_parallel  # as Megatron's own norms do
        self.up = ColumnParallelLinear(DIM, HIDDEN, gather_output=False, **options)
        self.down = RowParallelLinear(
            HIDDEN, DIM, input_is_parallel=True, skip_bias_add=False, **options
        )

    def forward(self, x):
        if self.config.sequence_parallel:
            x = scatter_to_sequence_parallel_region(x)
        y, _ = self.up(self.norm(x))
        y, _ = self.down(nn.functional.gelu(y))
        if self.config.sequence_parallel:
            y = gather_from_sequence_parallel_region(y, tensor_parallel_output_grad=False)
        return y


def block(mesh, sequence_parallel=True, summed=True):
    model = Block(set_up(mesh, sequence_parallel))

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():  # what finalize_model_grads does
            if summed and getattr(p, "sequence_parallel", False):
                dist.all_reduce(p.grad, group=parallel_state.get_tensor_model_parallel_group())
        return loss

    return step, (torch.randn(TOKENS, BATCH, DIM),)


def tensor_parallel(mesh):
    return block(mesh, sequence_parallel=False)


def norm_summed(mesh):
    return block(mesh)


def norm_not_summed(mesh):
    return block(mesh, summed=False)


def main() -> None:
    for build in (plain, smoothed, tensor_parallel, norm_summed, norm_not_summed):
        print(f"{build.__name__}: {fcoll.prove(build, mesh={'tp': 2})}\n")


if __name__ == "__main__":
    main()
