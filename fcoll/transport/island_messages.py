"""The messages of one call between ranks of different islands, and what they check of it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.errors import CollectiveMismatch, CollectiveTimeout, FcollError, PeerDied
from fcoll.transport import messages, shared_memory
from fcoll.transport.islands import Islands

BLOCK = 1 << 20  # bytes that are under way between islands while the next are added up inside
_TAG = 3 * messages.TAGS  # tags of headers; a block has this and its length
_TEXT = 200  # characters of a call, as peers are told
_HEADER = struct.Struct(f"qq{_TEXT}s")


class Exchange:
    """The messages of one call. Its first to a rank says which call it is, so that ranks of
    different islands that make different calls both hear of it, before the data are used."""

    def __init__(self, pg: Any, rank: int, islands: Islands, number: int, signed: Any) -> None:
        self.pg, self.rank, self.islands, self.number = pg, rank, islands, number
        native = torch.ops.fcoll_native
        self.signature = native.sign(*signed) if signed else shared_memory.UNSIGNED
        self.digest = int(self.signature[0]) if signed else 0  # call.h
        self.text = _shown(signed) if signed else "a call without a row"
        self.have_header: set[int] = set()

    def post(
        self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]
    ) -> Callable[[], None]:
        """Send and receive, by rank of the group; what is returned waits for it."""
        pg = self.pg
        works: list[tuple[int, dist.Work]] = []
        headers: dict[int, tuple[Tensor, dist.Work]] = {}
        held: list[Tensor] = []
        try:
            for peer in sorted(sends.keys() | receives.keys()):
                if peer not in self.have_header:
                    self.have_header.add(peer)
                    header, theirs = self._header(), torch.empty(_HEADER.size, dtype=torch.uint8)
                    held.append(header)
                    headers[peer] = theirs, pg.recv([theirs], peer, _TAG)
                    works.append((peer, pg.send([header], peer, _TAG)))
                for block in blocks(flat_bytes(receives[peer])) if peer in receives else ():
                    works.append((peer, pg.recv([block], peer, _TAG + block.numel())))
                for block in blocks(flat_bytes(sends[peer])) if peer in sends else ():
                    held.append(block)
                    works.append((peer, pg.send([block], peer, _TAG + block.numel())))
        except RuntimeError as error:
            raise self._lost(peer, error) from None

        def arrive() -> None:
            for peer, (header, work) in headers.items():
                self._wait(peer, work)
                self._check(peer, header)
            for peer, work in works:
                self._wait(peer, work)
            held.clear()

        return arrive

    def _header(self) -> Tensor:
        raw = _HEADER.pack(self.number, self.digest, self.text.encode()[:_TEXT])
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def _check(self, peer: int, header: Tensor) -> None:
        number, digest, text = _HEADER.unpack(header.numpy().tobytes())
        if (number, digest) == (self.number, self.digest):
            return
        theirs = text.rstrip(b"\0").decode(errors="replace")
        me = self.rank
        raise CollectiveMismatch(
            message=f"call {self.number} of rank {me} is {self.text}, call {number} of rank {peer} "
            f"is {theirs}"
        )

    def _wait(self, peer: int, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(peer, error) from None

    def _lost(self, peer: int, error: RuntimeError) -> FcollError:
        """gloo says in words alone whether a connection ended or nothing came."""
        island, _ = self.islands.at(peer)
        said, ranks = str(error).partition("\n")[0], self.islands.shown(island)
        message = f"rank {self.rank} lost rank {peer} ({ranks}) in {self.text}: {said}"
        late = "imed out" in said
        return (CollectiveTimeout if late else PeerDied)(message=message, rank=peer)


def _shown(signed: Any) -> str:
    shapes = ", ".join(f"{str(x.dtype)[6:]} {list(x.shape)}" for x in signed.tensors[:2])
    return f"{signed.row}({shapes})"


def flat(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))  # not view: one element may have any stride


def flat_bytes(x: Tensor) -> Tensor:
    real = torch.view_as_real(flat(x)) if x.is_complex() else flat(x)
    return real.view(torch.uint8).view(-1)


def blocks(x: Tensor) -> Sequence[Tensor]:
    """Parts of a flat tensor that are sent one after the other."""
    return x.split(BLOCK // x.element_size()) if x.numel() else ()
