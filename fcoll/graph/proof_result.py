"""What a proof has found: yes, no, or that it could not tell."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import Any, ClassVar, Self

from fcoll.errors import FcollError


@dataclass(frozen=True)
class ProofResult:
    """``equal`` is None where it could not be told. ``bool(result)`` is ``equal is True``."""

    error: ClassVar[type[FcollError]]  # what ``require`` raises, with the result as its text

    equal: bool | None

    def __bool__(self) -> bool:
        return self.equal is True

    def require(self) -> Self:
        """Raise unless it is proved: NotEqual for a step, GraphNotProved for a graph."""
        if not self:
            raise self.error(text=str(self))
        return self

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": str(self)}

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"
