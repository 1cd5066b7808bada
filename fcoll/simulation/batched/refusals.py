"""What vmap cannot take, in words of ranks: with the user's line and what to do instead."""

from __future__ import annotations

import re

from fcoll.errors import FcollError, NotInBatch
from fcoll.source import line_of

_ELSE = "Keep the decision inside tensors (torch.where)"

# torch's message -> (why, hint)
_KNOWN = (
    (r"data-dependent control flow", "Python decides by a value that differs between ranks", _ELSE),
    (r"\.item\(\)", "Python reads a value that differs between ranks", _ELSE),
    (
        r"backward\(\) called inside|does not require grad and does not have a grad_fn",
        "backward() is called inside the simulated function",
        "Call it outside, as in simulate(loss)(x).sum().backward(), or use torch.func.grad inside",
    ),
    (
        r"vmap: inplace|more than one element of the written-to|doesn't match the broadcast shape",
        "a tensor that is the same on all ranks is written to with values that differ",
        "Write y = y + x instead of y += x",
    ),
    (
        r"output dynamic shape|[Bb]atching rule not implemented",
        "the shape of a result would differ between ranks, or torch cannot batch the op",
        "Use ops whose shapes do not depend on values",
    ),
    (
        r"^vmap|functorch transform|BatchedTensor|access data pointer of Tensor that doesn't have",
        "torch cannot batch this op",
        "Write it with tensor ops",
    ),
)


#: The errors of torch's that may come from running ranks as a batch.
CAUGHT = (RuntimeError, ValueError, NotImplementedError, TypeError)


def explained(error: Exception) -> NotInBatch | None:
    """An error that comes from running ranks as a batch, in words of ranks; None of any other."""
    if isinstance(error, FcollError):
        return None
    message = str(error)
    for pattern, why, hint in _KNOWN:
        if re.search(pattern, message):
            return NotInBatch(line=line_of(error) or "an unknown line", why=why, hint=hint)
    return None
