"""embedding and embedding_bag in a sharded table.

Each rank looks up its own ids and gets what the whole table would give it. The ids that it needs,
each once, go to all ranks; the holders send their parts of these rows back, so that a row's bytes
travel once to a rank that needs it, whatever the layout: rows, columns, grids. The rest is torch's
own function on the rows that came, so its modes, weights and padding are torch's.

The gradient takes the way back: a holder adds up what all ranks' losses ask of its rows.

In a trace, which has no values, ids are taken to be as many as they can be, all different, sorted
and spread evenly over the table: so a trace has sizes. A run of the traced graph checks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fcoll import functions
from fcoll.sharded import _torch
from fcoll.sharded.block_exchange import assemble, exchange_lists
from fcoll.sharded.errors import BadLookup, NoSuchLookup
from fcoll.sharded.layout_agreement import gather_fitting, is_traced
from fcoll.sharded.ops.rules import is_sharded, name_of, rule_of_each
from fcoll.sharded.shards import anchors_of, blocks_of, cut_dims, empty_of, local_tensors
from fcoll.sharded.specs import box_of
from fcoll.sharded.transfer_plan import Box, HeldBlock

#: what torch's renorm adds to a norm before it divides by it
EPSILON = 1e-7
EVEN = (
    "the graph was traced for ids that are sorted, all different and spread evenly over the table, "
    "and these are not: run the function itself"
)


def _embed(func: Callable, input: Any, weight: Any, **options: Any) -> Any:
    if is_sharded(input) or not isinstance(input, Tensor):
        return NotImplemented
    rows, places, padding = Lookup.of(func, input, weight, options).run()
    names = ("offsets", "mode", "per_sample_weights", "include_last_offset")  # of embedding_bag
    bag_options = {name: options[name] for name in names if options.get(name) is not None}
    return func(places, rows, padding_idx=padding, **bag_options)


rule_of_each([F.embedding, F.embedding_bag], _embed)


@dataclass
class Lookup:
    """The ids that a rank looks up in a table, and the options of torch's functions for it."""

    func: str
    ids: Tensor
    table: Any
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0

    @classmethod
    def of(cls, func: Callable, ids: Tensor, table: Any, options: dict[str, Any]) -> Lookup:
        for flag in ("scale_grad_by_freq", "sparse"):
            if options.get(flag):
                raise NoSuchLookup(func=name_of(func), flag=flag)
        names = ("padding_idx", "max_norm", "norm_type")
        lookup_options = {name: options[name] for name in names if name in options}
        return cls(name_of(func), ids, table, **lookup_options)

    @property
    def count(self) -> int:
        """The number of the table's rows."""
        return self.table._metadata.size[0]  # type: ignore[no-any-return]

    def run(self) -> tuple[Tensor, Tensor, int | None]:
        """The rows that the ids name, each once; where each id's row is among them; and where the
        padding's is, if it was looked up."""
        self._check_options()
        own_ids, places = distinct(self.ids, self.count)
        lengths = self._agreed_lengths(own_ids)
        name = self.table.group.name
        gathered = functions.all_gather_into_tensor(own_ids.long(), name, sizes=lengths)
        ids_by_rank = list(functions.wait_tensor(gathered).split(lengths))
        if self.max_norm is not None:
            everyones, _ = distinct(torch.cat(ids_by_rank), self.count)
            _renorm(self.table, everyones, self.max_norm, self.norm_type)
        padding = self.padding_idx
        if padding is not None:
            padding = place_of(padding % self.count, own_ids)
        return rows_of(self.table, ids_by_rank), places, padding

    def _check_options(self) -> None:
        """Check options, which are the same on all ranks: no rank need tell the others."""
        size, padding = self.table._metadata.size, self.padding_idx
        if len(size) != 2:
            why = f"Weight needs to have exactly 2 dims, not {len(size)}"
            raise self._error(why, "Make a table of rows.")
        if self.max_norm is not None and self.max_norm <= 0:
            why = f'"max_norm" must be larger than zero! It is {self.max_norm}'
            raise self._error(why, "Raise it.")
        if padding is not None and not -size[0] <= padding < size[0]:
            why = f"Padding_idx must be within num_embeddings, {size[0]}: it is {padding}"
            raise self._error(why, "Name a row of the table.")

    def _agreed_lengths(self, ids: Tensor) -> list[int]:
        """How many rows each rank asks for, once all have said that theirs exist."""
        why, hint = wrong_id(ids, self.count), f"Ids are 0 to {self.count - 1}."
        renorms = self.max_norm is not None
        numbers = ids.numel(), int(renorms)
        everyone = gather_fitting(self.func, self.table, BadLookup, why, hint, *numbers)
        for rank, (_, theirs_renorms) in enumerate(everyone):
            if theirs_renorms != int(renorms):
                why = f"max_norm is {'not ' * renorms}given there and {'not ' * (not renorms)}here"
                raise self._error(why, "Give it on all ranks.", rank)
        return [length for length, _ in everyone]

    def _error(self, why: str, hint: str, rank: int | None = None) -> BadLookup:
        g = self.table.group
        rank = g.ranks[g.rank if rank is None else rank]
        return BadLookup(func=self.func, rank=rank, why=why, hint=hint)


def rows_of(table: Any, ids_by_rank: list[Tensor]) -> Tensor:
    """The rows that this rank asked for; ``ids_by_rank[r]`` are rank r's, sorted, each once."""
    g, (count, width) = table.group, table._metadata.size
    blocks = [block for block in blocks_of(table) if block.box.volume]
    tensors = [t for t in local_tensors(table) if t.numel()]
    mine = [block.box for block in blocks if block.rank == g.ranks[g.rank]]
    sent = [
        [
            tensor.index_select(0, ids[a:b] - box.offsets[0])
            for tensor, box, (a, b) in zip(tensors, mine, ranges(ids, mine, count), strict=True)
        ]
        for ids in ids_by_rank
    ]
    own_ids = ids_by_rank[g.rank]
    boxes = _boxes_by_rank(g.ranks, blocks, own_ids, count)
    expected = [sum(box.volume for box in theirs) for theirs in boxes]
    flat, _ = exchange_lists(g, sent, expected, empty_of(table), anchors_of(table))
    return assemble(flat, [box for theirs in boxes for box in theirs], (own_ids.numel(), width))


def _boxes_by_rank(
    ranks: Sequence[int], blocks: list[HeldBlock], ids: Tensor, count: int
) -> list[list[Box]]:
    """The parts of the rows asked for that come from each rank, in the order in which it sends."""
    boxes: dict[int, list[Box]] = {rank: [] for rank in ranks}
    places = ranges(ids, [block.box for block in blocks], count)
    for block, (a, b) in zip(blocks, places, strict=True):
        boxes[block.rank].append(Box((a, block.box.offsets[1]), (b - a, block.box.sizes[1])))
    return list(boxes.values())


@torch.no_grad()
def _renorm(table: Any, ids: Tensor, largest: float, p: float) -> None:
    """Scale the rows with these ids, in place, to a norm of ``largest`` at most."""
    shards = [s for s in table._local_shards if s.tensor.numel()]
    boxes = [box_of(shard.metadata) for shard in shards]
    parts = [
        (shard.tensor.detach(), ids[a:b] - box.offsets[0], slice(a, b))
        for shard, box, (a, b) in zip(
            shards, boxes, ranges(ids, boxes, table._metadata.size[0]), strict=True
        )
    ]
    norms = torch.zeros(ids.shape, dtype=table.dtype, device=table.device)
    for tensor, rows, place in parts:
        part = tensor.index_select(0, rows).abs()
        if p == math.inf:
            norms[place] = torch.maximum(norms[place], part.amax(1))
        else:
            norms[place] += part.pow(p).sum(1)
    if 1 in cut_dims(table):
        op = "max" if p == math.inf else "sum"
        norms = functions.wait_tensor(functions.all_reduce(norms, op, table.group.name))
    norms = (norms if p == math.inf else norms.pow(1 / p)).double()  # as torch: the same last bit
    scale = torch.where(norms > largest, largest / (norms + EPSILON), 1.0).to(table.dtype)
    for tensor, rows, place in parts:
        tensor.index_copy_(0, rows, tensor.index_select(0, rows) * scale[place, None])


# -- ids: each once, and which of them lie in a block ---


def distinct(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each id once, sorted, and the place of each of ``ids`` among them; there are ``count`` rows.

    >>> distinct(torch.tensor([[3, 1], [3, 0]]), 4)
    (tensor([0, 1, 3]), tensor([[2, 1],
            [2, 0]]))
    """
    if not is_traced():
        return torch.unique(ids, return_inverse=True)
    unique = ids.reshape(-1)[: min(ids.numel(), count)].contiguous()
    _torch.check_in_graph((unique[1:] > unique[:-1]).all(), EVEN)
    places = torch.searchsorted(unique, ids.contiguous())
    return unique, places.clamp(max=max(unique.numel() - 1, 0))


def ranges(ids: Tensor, boxes: Sequence[Box], count: int) -> list[tuple[int, int]]:
    """Which of the sorted ids lie in the rows of each block: from where to where."""
    edges = [edge for box in boxes for edge in (box.offsets[0], box.ends[0])]
    places = torch.searchsorted(ids, torch.tensor(edges, device=ids.device, dtype=ids.dtype))
    if is_traced():
        even = [-(-edge * ids.numel() // count) if count else 0 for edge in edges]
        _torch.check_in_graph((places == torch.tensor(even, device=ids.device)).all(), EVEN)
        return list(zip(even[::2], even[1::2], strict=True))
    numbers = places.tolist()
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def place_of(row: int, ids: Tensor) -> int | None:
    """Where a row is among the ids; None if it was not looked up. In a trace the first."""
    if is_traced():
        return 0 if ids.numel() else None
    places = (ids == row).nonzero().flatten().tolist()
    return places[0] if places else None


def wrong_id(ids: Tensor, count: int) -> str:
    """The mistake in the ids, of which none may be outside the table; a trace takes them to be
    right."""
    if ids.is_floating_point() or ids.dtype == torch.bool or ids.is_complex():
        return f"Expected ids to be of an integer dtype, got {ids.dtype}"
    if is_traced() or ids.numel() == 0:
        return ""
    low, high = ids[0].item(), ids[-1].item()
    if low >= 0 and high < count:
        return ""
    worst = low if low < 0 else high
    return f"Index out of range in Input {worst} {count}: the table has {count} rows"
