"""The carrier of a group whose ranks lie on several hosts: shared memory inside, messages between.

Ranks that can map one another's memory are an *island* (islands.py). A collective runs inside each
island on its shared memory, and between islands by messages of the group's own process group, so
that each byte crosses once: where islands are of one size, every rank exchanges its share with the
rank at its place of each other island (*rails*), else the first rank of each does (*leaders*).

The order of summation is fixed: within an island by rank, then island by island; so all ranks have
the same bits. A call is carried out when it is made, small, or by a thread of the group, in the
order of the calls; nobody has to wait for a result for its peers to get theirs.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.groups import Group
from fcoll.reductions import REDUCTIONS, Reduction, fold
from fcoll.transport import process_group, shared_memory
from fcoll.transport.island_messages import Exchange, blocks, flat, flat_bytes
from fcoll.transport.islands import Islands
from fcoll.transport.ordered_calls import INLINE, OrderedCalls
from fcoll.transport.protocol import (
    Started,
    Transfer,
    all_reduce_by_gather,
    reduce_scatter_by_exchange,
    running,
)

DEPTH = 2  # blocks under way
SMALL = 32 << 10  # bytes that go between leaders alone: one message a pair, no share a rank

native = torch.ops.fcoll_native


class Hosts:
    """The carrier of one group; see the module."""

    def __init__(self, g: Group, islands: Islands, handle: int) -> None:
        self.name, self.rank, self.n = g.name, g.rank, g.n
        self.islands, self.handle = islands, handle
        self.home, self.place = islands.at(g.rank)
        self.mine = islands.ranks[self.home]
        self.peers = {  # at this place of each other island: with whom a rail exchanges
            i: ranks[self.place]
            for i, ranks in enumerate(islands.ranks)
            if i != self.home and self.place < len(ranks)
        }
        self.pg = weakref.ref(g.pg)
        self.calls = OrderedCalls(self.close)

    def start(self, nbytes: int, run: Callable[[Exchange], None]) -> dist.Work | None:
        signed, pg = running.signed() if running.signed else None, self.pg()

        def call(number: int) -> Callable[[], None]:
            exchange = Exchange(pg, self.rank, self.islands, number, signed)
            return lambda: run(exchange)

        return self.calls.start(nbytes, call)

    def close(self, why: str) -> None:
        """The other ranks of this island hear of an error."""
        if self.handle:
            native.fail(self.handle, why)

    def end(self) -> None:
        """The group is gone."""
        self.calls.end()
        if self.handle:
            native.close(self.handle)
        self.handle = 0

    # -- reductions ---

    def all_reduce_(self, buf: Tensor, row: Reduction, g: Group) -> Started:
        if buf.dtype not in shared_memory.REDUCED:
            return all_reduce_by_gather(self, buf, row, g)
        whole, add = flat(buf), _unscaled(row)
        rails = self.islands.even and len(self.mine) > 1 and _nbytes(buf) > SMALL
        reduce = self._by_rails if rails else self._by_leaders

        def run(exchange: Exchange) -> None:
            pipelined(reduce(block, add, exchange) for block in blocks(whole))
            if add is not row:
                whole.div_(self.n)

        return self.start(_nbytes(buf), run), None

    def _by_rails(self, block: Tensor, row: Reduction, exchange: Exchange) -> Iterator[None]:
        """Each rank of the island adds up a share of it and exchanges that."""
        m = len(self.mine)
        share = -(-block.numel() // m)
        whole = block if share * m == block.numel() else _padded(block, share * m)
        part = block.new_empty(share)
        native.reduce_scatter_(part, whole, row.name, self.handle, exchange.signature)
        yield from self._summed(part, self.peers, row, exchange)
        native.all_gather_(whole, part, self.handle, exchange.signature)
        if whole is not block:
            block.copy_(whole[: block.numel()])

    def _by_leaders(self, block: Tensor, row: Reduction, exchange: Exchange) -> Iterator[None]:
        """The first rank of each island exchanges all of it."""
        if self.handle:
            native.all_reduce_(block, row.name, self.handle, exchange.signature)
        if self.place == 0:
            yield from self._summed(block, self._leaders(), row, exchange)
        else:
            yield
        if self.handle:
            native.broadcast_(block, 0, self.handle, exchange.signature)

    def _summed(
        self, part: Tensor, peers: Mapping[int, int], row: Reduction, exchange: Exchange
    ) -> Iterator[None]:
        """Add up what the peers of all islands have, island by island, into part. Of more than two
        islands each adds up a share: 2 (k - 1) / k of the bytes instead of k - 1."""
        k = len(self.islands.ranks)
        if k == 2 or _nbytes(part) <= SMALL:
            parts = {i: part if i == self.home else torch.empty_like(part) for i in range(k)}
            others = {peer: parts[i] for i, peer in peers.items()}
            arrive = exchange.post(dict.fromkeys(others, part), others)
            yield
            arrive()
            part.copy_(fold(row, [parts[i] for i in range(k)]))
            return
        share = -(-part.numel() // k)
        whole = _padded(part, share * k).view(k, share)
        theirs = torch.empty_like(whole)
        theirs[self.home] = whole[self.home]
        arrive = exchange.post(
            {peer: whole[i] for i, peer in peers.items()},
            {peer: theirs[i] for i, peer in peers.items()},
        )
        yield
        arrive()
        own = fold(row, theirs)
        whole[self.home] = own
        exchange.post(
            dict.fromkeys(peers.values(), own), {peer: whole[i] for i, peer in peers.items()}
        )()
        part.copy_(whole.view(-1)[: part.numel()])

    def reduce_(self, buf: Tensor, dst: int, row: Reduction, g: Group) -> Started:
        return self.all_reduce_(buf, row, g)

    def reduce_scatter(self, out: Tensor, chunks: Tensor, row: Reduction, g: Group) -> Started:
        if chunks.dtype not in shared_memory.REDUCED:
            return reduce_scatter_by_exchange(self, out, chunks, row, g)
        rows, add = chunks.view(self.n, -1), _unscaled(row)

        def run(exchange: Exchange) -> None:
            (self._scattered_by_rails if self.islands.even else self._scattered_by_leaders)(
                flat(out), rows, add, exchange
            )
            if add is not row:
                out.div_(self.n)

        return self.start(_nbytes(chunks), run), None

    def _scattered_by_rails(
        self, out: Tensor, rows: Tensor, row: Reduction, exchange: Exchange
    ) -> None:
        """Inside each rank gets what the ranks at its place of all islands want."""
        parts = rows.new_empty((len(self.islands.ranks), rows.shape[1]))
        mine = rows[self.islands.by_place]
        if self.handle:
            native.reduce_scatter_(parts, mine, row.name, self.handle, exchange.signature)
        else:
            parts.copy_(mine.view_as(parts))
        received = torch.empty_like(parts)
        received[self.home] = parts[self.home]
        exchange.post(
            {peer: parts[i] for i, peer in self.peers.items()},
            {peer: received[i] for i, peer in self.peers.items()},
        )()
        out.copy_(fold(row, received))

    def _scattered_by_leaders(
        self, out: Tensor, rows: Tensor, row: Reduction, exchange: Exchange
    ) -> None:
        rows = rows.clone()
        if self.handle:
            native.all_reduce_(rows, row.name, self.handle, exchange.signature)
        own = rows[list(self.mine)]
        if self.place == 0:
            received = {i: torch.empty_like(own) for i in self._leaders()} | {self.home: own}
            exchange.post(
                {peer: rows[list(self.islands.ranks[i])] for i, peer in self._leaders().items()},
                {peer: received[i] for i, peer in self._leaders().items()},
            )()
            own = fold(row, [received[i] for i in range(len(self.islands.ranks))])
        if self.handle:
            native.broadcast_(own, 0, self.handle, exchange.signature)
        out.copy_(own[self.place])

    # -- moves ---

    def all_gather(self, out: Tensor, x: Tensor, g: Group) -> dist.Work | None:
        rows, part = flat_bytes(out).view(self.n, -1), flat_bytes(x)
        gather = self._gathered_by_rails if self.islands.even else self._gathered_by_leaders
        return self.start(_nbytes(out), lambda exchange: gather(rows, part, exchange))

    def _gathered_by_rails(self, rows: Tensor, part: Tensor, exchange: Exchange) -> None:
        parts = part.new_empty((len(self.islands.ranks), part.numel()))
        parts[self.home] = part
        exchange.post(
            dict.fromkeys(self.peers.values(), part),
            {peer: parts[i] for i, peer in self.peers.items()},
        )()
        rows[self.islands.by_place] = self._gathered_inside(parts, exchange).view(rows.shape)

    def _gathered_inside(self, part: Tensor, exchange: Exchange) -> Tensor:
        parts = part.new_empty((len(self.mine), *part.shape))
        if not self.handle:
            return parts.copy_(part.unsqueeze(0))
        native.all_gather_(parts, part, self.handle, exchange.signature)
        return parts

    def _gathered_by_leaders(self, rows: Tensor, part: Tensor, exchange: Exchange) -> None:
        own = self._gathered_inside(part, exchange)
        others = {
            i: part.new_empty((len(self.islands.ranks[i]), part.numel()))
            for i in range(len(self.islands.ranks))
            if i != self.home
        }
        if self.place == 0:
            leaders = self._leaders()
            exchange.post(
                dict.fromkeys(leaders.values(), own),
                {peer: others[i] for i, peer in leaders.items()},
            )()
        for i, block in (others | {self.home: own}).items():
            if i != self.home and self.handle:
                native.broadcast_(block, 0, self.handle, exchange.signature)
            rows[list(self.islands.ranks[i])] = block

    def exchange(
        self,
        out: Tensor,
        x: Tensor,
        g: Group,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
    ) -> dist.Work | None:
        sends, receives = _split(x, input_splits, self.n), _split(out, output_splits, self.n)
        run = self._exchanged_by_rails if self.islands.even else self._exchanged_by_pairs
        # how much is sent is each rank's own matter, so how much there is decides nothing
        return self.start(INLINE + 1, lambda exchange: run(receives, sends, exchange))

    def _exchanged_by_rails(self, outs: list[Tensor], xs: list[Tensor], exchange: Exchange) -> None:
        """Inside each rank gets what is for its place of all islands: one message an island."""
        islands, home = self.islands.ranks, self.home
        for_places = [[xs[ranks[q]] for ranks in islands] for q in range(len(self.mine))]
        given = torch.tensor([x.numel() for x in xs])
        sizes = self._gathered_inside(given, exchange).tolist()  # of each rank of the island
        mine = [[sizes[p][ranks[self.place]] for ranks in islands] for p in range(len(self.mine))]
        sent = [torch.cat(parts) for parts in for_places]
        received = [sent[0].new_empty(sum(parts)) for parts in mine]
        self._exchanged_inside(received, sent, exchange)
        parts = [x.split(of) for x, of in zip(received, mine, strict=True)]
        packed = {
            peer: sent[0].new_empty(sum(outs[r].numel() for r in islands[i]))
            for i, peer in self.peers.items()
        }
        exchange.post(
            {peer: torch.cat([part[i] for part in parts]) for i, peer in self.peers.items()}, packed
        )()
        for i, peer in self.peers.items():
            arrived = packed[peer].split([outs[r].numel() for r in islands[i]])
            for r, part in zip(islands[i], arrived, strict=True):
                outs[r].copy_(part)
        for r, part in zip(self.mine, parts, strict=True):
            outs[r].copy_(part[home])

    def _exchanged_inside(
        self, outs: Sequence[Tensor], xs: Sequence[Tensor], exchange: Exchange
    ) -> None:
        if not self.handle:
            outs[0].copy_(xs[0])
            return
        sizes = [[x.numel() for x in parts] for parts in (outs, xs)]
        received = xs[0].new_empty(sum(sizes[0]))
        native.exchange_(received, torch.cat(list(xs)), *sizes, self.handle, exchange.signature)
        for out, part in zip(outs, received.split(sizes[0]), strict=True):
            out.copy_(part)

    def _exchanged_by_pairs(self, outs: list[Tensor], xs: list[Tensor], exchange: Exchange) -> None:
        others = [r for r in range(self.n) if r not in self.mine]
        arrive = exchange.post({r: xs[r] for r in others}, {r: outs[r] for r in others})
        self._exchanged_inside([outs[r] for r in self.mine], [xs[r] for r in self.mine], exchange)
        arrive()

    def broadcast_(self, buf: Tensor, src: int, g: Group) -> dist.Work | None:
        whole = flat_bytes(buf)
        home, place = self.islands.at(src)
        entries = [ranks[min(place, len(ranks) - 1)] for ranks in self.islands.ranks]

        def pass_on(block: Tensor, exchange: Exchange) -> Iterator[None]:
            others = [r for r in entries if r != src] if self.rank == src else []
            comes = {src: block} if self.rank in entries and self.home != home else {}
            arrive = exchange.post(dict.fromkeys(others, block), comes)
            yield
            arrive()
            if self.handle:
                entry = self.mine.index(entries[self.home])
                native.broadcast_(block, entry, self.handle, exchange.signature)

        def run(exchange: Exchange) -> None:
            pipelined(pass_on(block, exchange) for block in blocks(whole))

        return self.start(_nbytes(buf), run)

    def barrier(self, g: Group) -> dist.Work | None:
        def run(exchange: Exchange) -> None:
            token = torch.zeros(1)
            pipelined([self._by_leaders(token, REDUCTIONS["sum"], exchange)])

        return self.start(0, run)

    def transfer(self, transfers: Sequence[Transfer], g: Group) -> list[dist.Work]:
        return process_group.transfer(transfers, g)

    def _leaders(self) -> dict[int, int]:
        """The first rank of each other island."""
        firsts = {i: ranks[0] for i, ranks in enumerate(self.islands.ranks)}
        return {i: r for i, r in firsts.items() if i != self.home}


def pipelined(works: Any) -> None:
    """Run the first half of each block's work, up to its ``yield``, while others are under way."""
    under_way: deque[Iterator[None]] = deque()
    for work in works:
        next(work)
        under_way.append(work)
        if len(under_way) > DEPTH:
            next(under_way.popleft(), None)
    for work in under_way:
        next(work, None)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _padded(flat: Tensor, count: int) -> Tensor:
    padded = flat.new_zeros(count)
    padded[: flat.numel()] = flat
    return padded


def _unscaled(row: Reduction) -> Reduction:
    """An average is a sum until the last step."""
    return REDUCTIONS["sum"] if row.name == "avg" else row


def _split(x: Tensor, splits: Sequence[int], n: int) -> list[Tensor]:
    """The bytes of each rank's rows."""
    rows = list(splits) or [x.shape[0] // n] * n
    row_bytes = _nbytes(x) // max(x.shape[0], 1)
    return list(flat_bytes(x).split([r * row_bytes for r in rows]))
