"""Comm hooks: what is done with a full bucket instead of adding it up over the ranks.

A hook is torch's, ``hook(state, bucket) -> Future[Tensor]``, one of the two that torch has in C++
(``ALLREDUCE``, ``FP16_COMPRESS``), or a function from tensor to tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fcoll.errors import BadCommHook
from fcoll.training import _torch
from fcoll.training.bucket import GradBucket
from fcoll.training.bucket_collectives import Collectives

Hook = Callable[[GradBucket], Any]  # -> a future


def done(value: Any) -> Future:
    """A future that has its value."""
    future: Future = Future()
    future.set_result(value)
    return future


def python_hook(state: object, hook: Callable[..., Any]) -> Hook:
    """torch's kind of hook."""
    if not callable(hook):
        raise BadCommHook(
            why=f"a communication hook is a function, got {type(hook).__name__}",
            hint="Write hook(state, bucket) -> torch.futures.Future[torch.Tensor].",
        )

    def run(bucket: GradBucket) -> Any:
        future = hook(state, bucket)
        if not isinstance(future, _torch.Future):
            raise BadCommHook(
                why=f"callback must return a torch.futures.Future object, but got {type(future)}",
                hint="Return dist.all_reduce(..., async_op=True).get_future(), or a Future with "
                "its result set.",
            )
        return future

    return run


def functional_hook(hook: Callable[[Tensor], Tensor]) -> Hook:
    """A hook from tensor to tensor, as in ``lambda x: fcoll.all_reduce(x, "avg", group)``."""

    def run(bucket: GradBucket) -> Any:
        return done(_torch.completed(hook(bucket.buffer())))

    return run


def allreduce(collectives: Callable[[], Collectives]) -> Hook:
    """The mean over the ranks."""

    def run(bucket: GradBucket) -> Any:
        group = collectives()
        return done(group.sum_(bucket.buffer().div_(group.n)).wait())

    return run


def fp16_compress(collectives: Callable[[], Collectives]) -> Hook:
    """The mean over the ranks, half as many bytes on the way."""

    def run(bucket: GradBucket) -> Any:
        group, buffer = collectives(), bucket.buffer()
        compressed = buffer.to(torch.float16).div_(group.n)
        return done(buffer.copy_(group.sum_(compressed).wait()))

    return run


BUILTIN = {
    dist.BuiltinCommHookType.ALLREDUCE: allreduce,
    dist.BuiltinCommHookType.FP16_COMPRESS: fp16_compress,
}


def result_of(future: Any) -> Tensor:
    """The tensor that a hook's future comes to; torch's collectives give a list of one."""
    value = future.wait()
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        raise BadCommHook(
            why=f"the future of a communication hook came to {type(value).__name__}",
            hint="It must come to the reduced tensor.",
        )
    return value
