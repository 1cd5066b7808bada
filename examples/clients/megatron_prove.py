"""megatron-core in exact arithmetic: which of its tensor parallel parts are one device's function?

Every build() below is written as for a process of its own: Megatron keeps its groups in globals of
megatron.core.parallel_state, which each simulated rank has for itself. No GPU and no launcher.

python examples/clients/megatron_prove.py
fcoll prove examples/clients/megatron_prove.py:smoothed --mesh dp=2,tp=2
"""

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    vocab_parallel_cross_entropy,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import nn

import fcoll

DIM, HIDDEN, VOCAB, TOKENS, BATCH = 8, 32, 16, 4, 2


def set_up(mesh, sequence_parallel=False):
    tp = mesh["tp"].size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(0)
    return TransformerConfig(
        num_layers=1,
        num_attention_heads=2,
        hidden_size=DIM,
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
    return step, (tokens, targets)  # the same on all ranks of dp


def plain(mesh):
    return language_model(mesh, label_smoothing=0.0)


def smoothed(mesh):
    return language_model(mesh, label_smoothing=0.1)


# -- a block whose activations are cut along the sequence between its layers ---


class Block(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
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


def block(mesh, sequence_parallel=True, finalized=True):
    config = set_up(mesh, sequence_parallel)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Block(config))

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        if finalized:
            finalize_model_grads([model])  # over dp, and those of norms over tp
        else:
            model.finish_grad_sync()  # over dp
        for p in model.parameters():
            p.grad = p.main_grad.clone()  # where gradients are looked for
        return loss

    dp = mesh["dp"]
    x = torch.randn(TOKENS, BATCH, DIM)
    return step, (x.chunk(dp.size(), 1)[dp.get_local_rank()],)


def tensor_parallel(mesh):
    return block(mesh, sequence_parallel=False)


def finalized(mesh):
    return block(mesh)


def not_finalized(mesh):
    return block(mesh, finalized=False)


def main() -> None:
    for build in (plain, smoothed, tensor_parallel, finalized, not_finalized):
        print(f"{build.__name__}: {fcoll.prove(build, mesh={'dp': 2, 'tp': 2})}\n")


if __name__ == "__main__":
    main()
