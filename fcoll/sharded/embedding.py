"""embedding and embedding_bag in a sharded table.

Each rank looks up its own ids and gets what the whole table would give it. The ids that it needs,
each once, go to all ranks; the holders send their parts of these rows back, so that a row's bytes
travel once to a rank that needs it, whatever the layout: rows, columns, grids. The rest is torch's
own function on the rows that came, so its modes, weights and padding are torch's.

The gradient takes the way back: a holder adds up what all ranks' losses ask of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fcoll import functions
from fcoll.groups import Group
from fcoll.sharded.agreement import compare, mark_of
from fcoll.sharded.asking import swapped, told
from fcoll.sharded.boxes import Box
from fcoll.sharded.dispatch import built_in, is_sharded, name_of, unsupported
from fcoll.sharded.errors import BadLookup, NoSuchLookup
from fcoll.sharded.gathering import placed
from fcoll.sharded.ids import distinct, place_of, ranges, union, wrong_id
from fcoll.sharded.layout import anchor_of, held, like, local_tensors
from fcoll.sharded.plan import Held
from fcoll.sharded.results import cut_dims

#: what torch's renorm adds to a norm before it divides by it
EPSILON = 1e-7


@built_in(F.embedding)
def embedding(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Tensor:
    ids, table = _checked(F.embedding, args, kwargs)
    rows, places, padding = _looked_up(F.embedding, ids, table, kwargs)
    return F.embedding(places, rows, padding_idx=padding)


@built_in(F.embedding_bag)
def embedding_bag(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    ids, table = _checked(F.embedding_bag, args, kwargs)
    rows, places, padding = _looked_up(F.embedding_bag, ids, table, kwargs)
    names = ("offsets", "mode", "per_sample_weights", "include_last_offset")
    given = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
    return F.embedding_bag(places, rows, padding_idx=padding, **given)


def _checked(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    """The ids and the table. What is the same on all ranks is checked here, without telling."""
    ids, table = args
    if is_sharded(ids) or not isinstance(ids, Tensor):
        raise unsupported(func, args, kwargs)
    for flag in ("scale_grad_by_freq", "sparse"):
        if kwargs.get(flag):
            raise NoSuchLookup(func=name_of(func), flag=flag)
    largest = kwargs.get("max_norm")
    if len(table._metadata.size) != 2:
        why = f"Weight needs to have exactly 2 dims, not {len(table._metadata.size)}"
        raise _bad(func, table, why, "Make a table of rows.")
    if largest is not None and largest <= 0:
        raise _bad(
            func, table, f'"max_norm" must be larger than zero! It is {largest}', "Raise it."
        )
    rows, padding = table._metadata.size[0], kwargs.get("padding_idx")
    if padding is not None and not -rows <= padding < rows:
        why = f"Padding_idx must be within num_embeddings, {rows}: it is {padding}"
        raise _bad(func, table, why, "Name a row of the table.")
    return ids, table


def _bad(func: Callable, table: Any, why: str, hint: str, rank: int | None = None) -> BadLookup:
    g = table.group
    return BadLookup(
        func=name_of(func), rank=g.ranks[g.rank if rank is None else rank], why=why, hint=hint
    )


def _looked_up(
    func: Callable, ids: Tensor, table: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, int | None]:
    """The rows that the ids name, each once; where each id's row is among them; and where the
    padding's is, if it was looked up."""
    count = table._metadata.size[0]
    needed, places = distinct(ids, count)
    largest = kwargs.get("max_norm")
    lengths = _agreed(func, table, needed, largest is not None)
    g = table.group
    everyone = functions.all_gather_into_tensor(needed.long(), g.name, sizes=lengths)
    asked = list(functions.wait_tensor(everyone).split(lengths))
    if largest is not None:
        _renorm(table, union(asked, count), largest, kwargs.get("norm_type", 2.0))
    rows = rows_of(table, asked)
    padding = kwargs.get("padding_idx")
    if padding is not None:
        padding = place_of(padding % count, needed)
    return rows, places, padding


def _agreed(func: Callable, table: Any, needed: Tensor, renorms: bool) -> list[int]:
    """How many rows each rank asks for, once all have said that theirs exist."""
    g, count = table.group, table._metadata.size[0]
    wrong = wrong_id(needed, count)
    numbers = [needed.numel(), int(not wrong), int(renorms), mark_of(table)]
    everyone = told(g, numbers, table.device)
    compare(name_of(func), table, [mark for _, _, _, mark in everyone])
    if wrong:
        raise _bad(func, table, wrong, f"Ids are 0 to {count - 1}.")
    for rank, (_, theirs_fit, theirs_renorms, _) in enumerate(everyone):
        if not theirs_fit:
            why = "Index out of range in Input of that rank, or no integers: no rank looks up"
            raise _bad(func, table, why, f"Ids are 0 to {count - 1}.", rank)
        if theirs_renorms != int(renorms):
            why = f"max_norm is {'not ' * renorms}given there and {'not ' * (not renorms)}here"
            raise _bad(func, table, why, "Give it on all ranks.", rank)
    return [length for length, *_ in everyone]


def rows_of(table: Any, asked: list[Tensor]) -> Tensor:
    """The rows that this rank asked for; ``asked[r]`` are rank r's, sorted, each once."""
    g, blocks = table.group, [block for block in held(table) if block.box.volume]
    tensors = [t for t in local_tensors(table, held(table)) if t.numel()]
    mine = [block.box for block in blocks if block.rank == g.ranks[g.rank]]
    count = table._metadata.size[0]
    sent: list[list[Tensor]] = []
    for ids in asked:
        found = ranges(ids, mine, count)
        sent.append(
            [
                tensor.index_select(0, ids[a:b] - box.offsets[0])
                for tensor, box, (a, b) in zip(tensors, mine, found, strict=True)
            ]
        )
    boxes = _answers(g, blocks, asked[g.rank], count)
    expected = [sum(box.volume for box in theirs) for theirs in boxes]
    anchor = anchor_of(table)
    flat, _ = swapped(g, sent, expected, like(table), [] if anchor is None else [anchor])
    size = (asked[g.rank].numel(), table._metadata.size[1])
    return placed(flat, [box for theirs in boxes for box in theirs], size)


def _answers(g: Group, blocks: list[Held], ids: Tensor, count: int) -> list[list[Box]]:
    """The parts of the rows asked for that come from each rank, in the order in which it sends."""
    found = ranges(ids, [block.box for block in blocks], count)
    answers: dict[int, list[Box]] = {rank: [] for rank in g.ranks}
    for block, (a, b) in zip(blocks, found, strict=True):
        columns, width = block.box.offsets[1], block.box.sizes[1]
        answers[block.rank].append(Box((a, columns), (b - a, width)))
    return list(answers.values())


@torch.no_grad()
def _renorm(table: Any, ids: Tensor, largest: float, p: float) -> None:
    """Scale the rows with these ids, in place, to a norm of ``largest`` at most."""
    shards = [s for s in table._local_shards if s.tensor.numel()]
    boxes = [Box.of(s.metadata.shard_offsets, s.metadata.shard_sizes) for s in shards]
    found = ranges(ids, boxes, table._metadata.size[0])
    parts = [
        (shard.tensor.detach(), ids[a:b] - box.offsets[0], slice(a, b))
        for shard, box, (a, b) in zip(shards, boxes, found, strict=True)
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
    norms = norms if p == math.inf else norms.pow(1 / p)
    scale = torch.where(norms > largest, largest / (norms + EPSILON), 1.0)
    for tensor, rows, place in parts:
        tensor.index_copy_(0, rows, tensor.index_select(0, rows) * scale[place, None])
