"""A communicating call of one rank: how it compares with those of others, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fcoll._torch import frames_of
from fcoll.source import show, sites_of
from fcoll.table.pieces import amount
from fcoll.transport.protocol import running


@dataclass(frozen=True)
class RankCall:
    """``facts`` are what all ranks of the group must agree on, ``signature`` what those must that
    made the call by a row of fcoll's table: None in other calls."""

    op: str
    facts: tuple[str, ...]
    group: str
    stack: Any  # where it is made: read late, as ``line``
    signature: Any = None
    peer: str = ""  # of a message: "to rank 3"

    def agrees_with(self, other: RankCall) -> bool:
        if self.op != other.op or self.facts != other.facts:
            return False
        mine, others = self.signature, other.signature
        return mine is None or others is None or mine == others

    @property
    def line(self) -> str:
        return show(*sites_of(frames_of(self.stack))) or "?"  # it takes 20 us

    @property
    def shown(self) -> str:
        """ "all_reduce(sum, 4 float32)" """
        signature = f"; {self.signature[-1]}" if self.signature else ""
        return f"{self.op}({', '.join(self.facts)}{signature}){self.peer and ' ' + self.peer}"

    def __str__(self) -> str:
        return f'{self.shown} on "{self.group}" at {self.line}'


def signature() -> Any:
    """What the ranks compare of the call of the table that this is part of; None if there is none:
    its row, shapes, dtypes and arguments, and how people read them."""
    if running.signed is None:
        return None
    call = running.signed()
    own = call.facts.own_dim
    shapes = [tuple(-1 if d == own else s for d, s in enumerate(x.shape)) for x in call.tensors]
    dtypes = [str(x.dtype) for x in call.tensors]
    shown = f"{call.row} of {', '.join(map(str, shapes))}"
    return call.row, tuple(shapes), tuple(dtypes), call.facts, tuple(call.more), shown


def sizes(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(amount(x) for x in tensors)


def dtypes(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in tensors))
