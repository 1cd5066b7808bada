"""linear, matmul and bmm with sharded tensors.

A plain input and a sharded matrix: each rank has its own input and gets its own result, as with the
whole matrix. A rank sends each holder the columns of its input that the holder's block meets, and
gets back what the block makes of them; where blocks share columns of the result, they are added in
the order of the metadata.

A sharded input whose last dim is whole: each rank multiplies its rows; the result is sharded as the
input is. The other matrix is plain, or gathered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fcoll.sharded._torch import Shard
from fcoll.sharded.block_exchange import assemble, exchange_lists
from fcoll.sharded.errors import BadProduct, LayoutsDiffer
from fcoll.sharded.layout_agreement import gather_fitting
from fcoll.sharded.ops.rules import is_sharded, rule
from fcoll.sharded.shards import (
    anchors_of,
    blocks_of,
    check_whole,
    cut_dims,
    empty_of,
    local_tensors,
    probe_of,
    result_of,
)
from fcoll.sharded.transfer_plan import Box


def _gathered(value: Any) -> Any:
    return value.all_gather() if is_sharded(value) else value


@rule(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    bias = _gathered(bias)
    if is_sharded(input):
        return _by_rows("linear", input, _gathered(weight).t(), bias)
    if not is_sharded(weight):
        return F.linear(input, weight, bias)
    out = product("linear", input, weight, contracted=1)
    return out if bias is None else out + bias


@rule(torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
def matmul(input: Any, other: Any) -> Any:
    if len(other.shape) != 2 or (is_sharded(input) and len(input.shape) < 2):
        return NotImplemented
    if is_sharded(input):
        return _by_rows("matmul", input, _gathered(other))
    return product("matmul", input, other, contracted=0)


@rule(Tensor.__rmatmul__)
def rmatmul(input: Any, other: Any) -> Any:
    return matmul(other, input)


@rule(torch.bmm, Tensor.bmm)
def bmm(input: Any, mat2: Any) -> Any:
    """Batches that lie on the same ranks: each multiplies its own."""
    both = input, mat2
    if not all(is_sharded(st) and len(st._metadata.size) == 3 for st in both):
        return NotImplemented
    for st in both:
        check_whole("bmm", st, 1, 2)
    one, other = (
        {(b.rank, b.box.offsets[0], b.box.sizes[0]) for b in blocks_of(st)} for st in both
    )
    if one != other:
        why = f"the batches are on other ranks: {input._sharding_spec}, {mat2._sharding_spec}"
        hint = "Both st and st2 need to have same placements for bmm: reshard one of them."
        raise LayoutsDiffer(func="bmm", why=why, hint=hint)
    batches = {s.metadata.shard_offsets[0]: s.tensor for s in mat2._local_shards}

    def times(shard: Shard) -> Tensor:
        return torch.bmm(shard.tensor, batches[shard.metadata.shard_offsets[0]])

    probe = torch.bmm(probe_of(input), probe_of(mat2))
    return result_of(input, times, probe, partial(_widened, mat2._metadata.size[2]))


def _by_rows(func: str, x: Any, matrix: Tensor, bias: Tensor | None = None) -> Any:
    """``x @ matrix + bias`` on the rows of each rank."""
    check_whole(func, x, len(x._metadata.size) - 1)

    def times(block: Tensor) -> Tensor:
        return block @ matrix if bias is None else block @ matrix + bias

    width = matrix.shape[1]
    return result_of(x, lambda s: times(s.tensor), times(probe_of(x)), partial(_widened, width))


def _widened(width: int, box: Box) -> Box:
    """The block with another last dim, which each shard holds from end to end."""
    return Box(box.offsets, (*box.sizes[:-1], width))


def product(func: str, x: Tensor, st: Any, contracted: int) -> Tensor:
    """``x`` times a sharded matrix, summed over x's last dim and the matrix' dim ``contracted``."""
    free = 1 - contracted
    counts, grad = _agreed_rows(func, x, st, contracted)
    g, blocks = st.group, [block for block in blocks_of(st) if block.box.volume]
    flat_x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    by_rank = [[b.box for b in blocks if b.rank == rank] for rank in g.ranks]
    mine = by_rank[g.rank]

    sent = [
        [flat_x.narrow(1, box.offsets[contracted], box.sizes[contracted]) for box in boxes]
        for boxes in by_rank
    ]
    width = sum(box.sizes[contracted] for box in mine)
    expected = [count * width for count in counts]
    anchors = [torch.empty(0, dtype=x.dtype, device=x.device).requires_grad_()] if grad else []
    arrived, inputs = exchange_lists(g, sent, expected, flat_x.new_empty(0), anchors)

    tensors = [t for t in local_tensors(st) if t.numel()]
    answers = _answers(inputs, counts, mine, tensors, contracted)
    anchors = [arrived[:0], *anchors_of(st)]
    count = flat_x.shape[0]
    expected = [count * sum(box.sizes[free] for box in boxes) for boxes in by_rank]
    back, _ = exchange_lists(g, answers, expected, empty_of(st), anchors)
    out = _summed(back, by_rank, count, free, st)
    return out.reshape(*x.shape[:-1], st._metadata.size[free])


def _answers(
    inputs: list[Tensor], counts: list[int], boxes: list[Box], tensors: list[Tensor], dim: int
) -> list[list[Tensor]]:
    """What this rank's blocks make of all ranks' inputs: for each rank, in the blocks' order."""
    widths = [box.sizes[dim] for box in boxes]
    answers: list[list[Tensor]] = [[] for _ in counts]
    parts = [
        flat.split([count * w for w in widths]) for flat, count in zip(inputs, counts, strict=True)
    ]
    for i, (width, matrix) in enumerate(zip(widths, tensors, strict=True)):
        columns = [p[i].view(n, width) for p, n in zip(parts, counts, strict=True)]
        products = torch.cat(columns) @ (matrix if dim == 0 else matrix.t())
        for answer, part in zip(answers, products.split(counts), strict=True):
            answer.append(part)
    return answers


def _summed(flat: Tensor, by_rank: list[list[Box]], count: int, free: int, st: Any) -> Tensor:
    """The result of what the holders' blocks made; where they share columns, their sum."""
    size = (count, st._metadata.size[free])
    boxes = [
        Box((0, box.offsets[free]), (count, box.sizes[free]))
        for theirs in by_rank
        for box in theirs
    ]
    if 1 - free not in cut_dims(st):
        return assemble(flat, boxes, size)
    out = flat.new_zeros(size)
    whole = Box.whole(size)
    for box, part in zip(boxes, flat.split([box.volume for box in boxes]), strict=True):
        out[box.within(whole)] += part.view(box.sizes)
    return out


def _agreed_rows(func: str, x: Tensor, st: Any, contracted: int) -> tuple[list[int], bool]:
    """How many rows each rank's input has, and whether a gradient goes to one of them, once all
    ranks have said that theirs fits."""
    size = st._metadata.size
    why = hint = ""
    if x.dim() < 1 or len(size) != 2:
        why = "Input needs to have at least 1 dim" if x.dim() < 1 else "Weight needs to have 2 dims"
        hint = f"They are {tuple(x.shape)} and {tuple(size)}."
    elif x.shape[-1] != size[contracted]:
        why = f"Input dim: {x.shape[-1]} does not match appropriate weight dim: {size[contracted]}"
        hint = f"The input is {tuple(x.shape)}, the weight {tuple(size)}."
    elif x.dtype != st.dtype:
        why, hint = f"the input is {x.dtype}, the weight {st.dtype}", "Convert one of them."
    grad = x.requires_grad and torch.is_grad_enabled()
    count = 0 if why else x.shape[:-1].numel()
    everyone = gather_fitting(func, st, BadProduct, why, hint, count, int(grad))
    return [n for n, _ in everyone], any(grad for _, grad in everyone)
