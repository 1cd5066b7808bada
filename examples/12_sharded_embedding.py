"""The numbers of an embedding whose rows are sharded over 8 ranks, unevenly, in one process.

python examples/12_sharded_embedding.py
"""

import torch
import torch.distributed as dist
from torch.nn.functional import embedding

import fcoll

RANKS, ROWS, DIM = 8, 50, 4  # 50 rows: two ranks have 7, six have 6


def lookup(rank):
    """Each rank asks the owners of its rows for them: two all-to-alls of uneven splits."""
    table = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
    parts = torch.arange(ROWS).tensor_split(RANKS)
    starts = torch.tensor([int(part[0]) for part in parts])
    shard = table[parts[rank]].clone().requires_grad_()

    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(ROWS, (3 + rank,), generator=generator).sort().values
    owner = torch.searchsorted(starts, ids, right=True) - 1
    asked = torch.bincount(owner, minlength=RANKS).tolist()
    answered = torch.empty(RANKS, dtype=torch.int64)
    dist.all_to_all_single(answered, torch.tensor(asked))
    answered = answered.tolist()

    wanted = fcoll.all_to_all_single(ids, None, answered, asked)
    rows = embedding(wanted - starts[rank], shard)
    mine = fcoll.all_to_all_single(rows, None, asked, answered)  # back to who asked
    mine.sum().backward()  # the gradient of each row is how often anyone asked for it
    assert torch.equal(mine.detach(), table[ids])
    return len(shard), shard.grad[:, 0].sum().item(), sum(answered)


def main() -> None:
    results = fcoll.simulate_ranks(lookup, RANKS)
    for rank, (rows, gradient, answered) in enumerate(results):
        print(f"rank {rank}: {rows} rows, asked for {answered}, gradient {gradient:g}")
        assert gradient == answered
    assert sum(answered for _, _, answered in results) == sum(3 + r for r in range(RANKS))


if __name__ == "__main__":
    main()
