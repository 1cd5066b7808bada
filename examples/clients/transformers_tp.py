"""transformers: a random Llama or Qwen3 in tensor parallel layers generates and is trained.

torchrun --nproc-per-node 2 examples/clients/transformers_tp.py [fcoll|gloo] [llama|qwen3]
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.distributed import DistributedConfig

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {"llama": LlamaConfig(**SIZES), "qwen3": Qwen3Config(**SIZES, head_dim=16)}


def sharded(config, folder: str):
    """from_pretrained shards a model; this one has random weights, the same for all ranks."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    distributed = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=distributed)


def generate(model) -> list[int]:
    prompt = torch.arange(8).view(1, 8)
    tokens = model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=0)
    return tokens[0, 8:].tolist()


def train(model, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(backend: str = "fcoll", name: str = "llama") -> None:
    dist.init_process_group(backend)  # transformers takes the group that is there
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model = sharded(CONFIGS[name], folder[0])
    tokens, losses = generate(model), train(model)
    if dist.get_rank() == 0:
        print("tokens", *tokens)
        print("losses", *losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
