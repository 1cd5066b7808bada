"""Numbers of Python's that stand for elements: what ``.item()`` gives may be put into a tensor.

They are signaling NaNs with a place in a list. Moving one keeps its bits, and all arithmetic makes
a quiet NaN of it: what was computed from one unseen (numpy, C) is known to stand for no element.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

_SIGNALING = 0x7FF0_0000_0000_0000  # the exponent of NaNs, without the bit of quiet ones
_NEGATIVE = 1 << 63
_PLACES = 2**51


def token(place: int) -> float:
    return float(struct.unpack("<d", struct.pack("<Q", _SIGNALING | (place + 1)))[0])


def place_of(value: float) -> tuple[int, bool] | None:
    """The place that a number stands for, and whether it is negated; None of other numbers."""
    bits = int(struct.unpack("<Q", struct.pack("<d", value))[0])
    place = (bits & ~_NEGATIVE) - _SIGNALING
    return (place - 1, bits >= _NEGATIVE) if 0 < place < _PLACES else None


def tokens_in(x: Tensor) -> Tensor:
    """Which elements of a float64 tensor stand for others."""
    places = (x.contiguous().view(torch.int64) & (_NEGATIVE - 1)) - _SIGNALING
    return (places > 0) & (places < _PLACES)
