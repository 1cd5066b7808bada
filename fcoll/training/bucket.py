"""One bucket: gradients side by side in a flat tensor, and what a comm hook sees of it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.errors import BadBuckets, BadGradient
from fcoll.training import _torch, tags

LARGE = 1 << 14  # elements; from here on one call that copies and scales beats two passes


class GradBucket:
    """The argument of a comm hook: torch.distributed.GradBucket's methods, on a bucket of ours.

    torch's class cannot be made from Python; this one passes for an instance of it.
    """

    def __init__(
        self,
        index: int,
        count: int,
        buffer: Tensor,
        params: Sequence[Tensor],
        sizes: Sequence[torch.Size],
    ) -> None:
        self._index, self._count = index, count
        self._buffer = buffer
        self._params = params
        self._sizes = sizes

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return dist.GradBucket

    def index(self) -> int:
        """The bucket's place in the order in which buckets are reduced."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients of the bucket, flat."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Have other tools see another tensor, as hooks that compress do."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """A view of the buffer for each parameter, in the parameter's shape."""
        if self._buffer.is_sparse:
            return [self._buffer]
        parts = self._buffer.split([size.numel() for size in self._sizes])
        return [part.view(size) for part, size in zip(parts, self._sizes, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of :meth:`gradients`."""
        return list(self._params)

    def is_last(self) -> bool:
        """Is it the last bucket of the backward pass?"""
        return self._index == self._count - 1


class GradientBucket:
    """Parameters whose gradients are sent together; ``views`` are those of each in the buffer."""

    sparse = False
    buffer: Tensor
    message: Tensor  # what is sent: the buffer, and behind it the tag
    tail: Tensor | None = None  # the tag's place
    views: list[Any]
    shared: Any = None  # its Place, if it is in memory that all ranks can map
    work: Any = None

    def __init__(self, indices: Sequence[int], params: Sequence[Tensor]) -> None:
        self.indices = tuple(indices)
        self.params = [params[i] for i in indices]
        self.sizes = [p.shape for p in self.params]

    @property
    def bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.params)

    def check_strides(self) -> None:
        """Warn of a gradient whose strides are not its parameter's: copying it is slow."""

    def fill(
        self, scale: float, share: bool, dtype: torch.dtype | None, indices: Sequence[int]
    ) -> None:
        """Copy these parameters' gradients in, times ``scale``; those that are not there are zero.

        With ``share`` the gradients become views of the bucket, and those that are need no copy.
        """
        raise NotImplementedError

    def spread(self, result: Tensor, share: bool, keep: Sequence[bool]) -> None:
        """Give each parameter its part of the result; where ``keep``, its gradient stays."""
        raise NotImplementedError

    def adopt(self) -> None:
        """Have gradients that are there already live in this bucket: it replaces another one."""


class DenseBucket(GradientBucket):
    """Gradients of one dtype and device; ``views`` have the strides that their gradients have."""

    def __init__(
        self, indices: Sequence[int], params: Sequence[Tensor], tagged: bool = True
    ) -> None:
        super().__init__(indices, params)
        first = self.params[0]
        if any(p.device != first.device for p in self.params):
            raise BadBuckets(
                why="All parameters in a bucket must be placed on the same device",
                hint="compute_bucket_assignment_by_size keeps devices apart.",
            )
        if any(p.dtype != first.dtype for p in self.params):
            raise BadBuckets(
                why="All parameters in a bucket must have the same dtype",
                hint="compute_bucket_assignment_by_size keeps dtypes apart.",
            )
        # autograd makes gradients so: in the layout of a parameter without gaps, else row by row
        self.strides = [
            p.stride() if torch.ops.aten.is_non_overlapping_and_dense(p) else _rows(p.shape)
            for p in self.params
        ]
        lengths = [p.numel() for p in self.params]
        self.offsets = [0, *itertools.accumulate(lengths)][:-1]
        self.length = sum(lengths)
        # reading a tag of another device's memory would wait for it
        tagged = tagged and first.device.type == "cpu" and not _torch.has_no_data(first)
        # not zeros: every gradient is written, or zeroed, before it is sent
        whole = self.length + (tags.BITS if tagged else 0)
        self.lay_into(torch.empty(whole, dtype=first.dtype, device=first.device))
        self.place = {i: k for k, i in enumerate(self.indices)}

    def lay_into(self, message: Tensor) -> None:
        """Have the gradients in this tensor, and behind them the tag."""
        self.message = message
        self.buffer = message[: self.length]
        self.tail = message[self.length :] if message.numel() > self.length else None
        self.views = self.views_of(self.buffer)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """A view of a flat tensor for each parameter, with the strides of its gradient."""
        start = flat.storage_offset()
        return [
            flat.as_strided(size, stride, start + at)
            for size, stride, at in zip(self.sizes, self.strides, self.offsets, strict=True)
        ]

    def fill(
        self, scale: float, share: bool, dtype: torch.dtype | None, indices: Sequence[int]
    ) -> None:
        to, grads, here = [], [], []
        for place in map(self.place.__getitem__, indices):
            view, grad = self.views[place], self.params[place].grad
            if grad is None:
                view.zero_()
                continue
            if grad is view or (share and _torch.same_memory(grad, view)):
                here.append(view)
                continue
            if grad.dtype is not (dtype or view.dtype) or grad.layout is not torch.strided:
                raise BadGradient(want=dtype or view.dtype, got=_kind(grad), hint=_HINT)
            if grad.requires_grad:
                grad = grad.detach()
            if scale != 1.0 and grad.numel() >= LARGE and grad.dtype is view.dtype:
                torch.mul(grad, scale, out=view)
            else:
                to.append(view)
                grads.append(grad)
        if to:
            _torch.copy_into(to, grads)
        if scale != 1.0 and len(to) + len(here) == len(self.views):
            self.buffer.mul_(scale)
        elif scale != 1.0 and (to or here):
            _torch.scale_(to + here, scale)
        if share:
            for p, view in zip(self.params, self.views, strict=True):
                if p.grad is not None and p.grad is not view:
                    p.grad = view

    def check_strides(self) -> None:
        for p, view in zip(self.params, self.views, strict=True):
            if p.grad is not None and not p.grad.is_sparse and p.grad.stride() != view.stride():
                warnings.warn(
                    "Grad strides do not match bucket view strides. The gradient was not made in "
                    "the layout of its parameter, or the parameter's strides changed since the "
                    f"reducer was made: sizes {list(view.shape)}, strides {list(p.grad.stride())} "
                    f"for {list(view.stride())}. It is right, but slow.",
                    stacklevel=2,
                )
                return

    def spread(self, result: Tensor, share: bool, keep: Sequence[bool]) -> None:
        own = _torch.same_memory(result, self.buffer)
        views = self.views if own else self.views_of(result)
        if share and not own:
            _torch.copy_into(self.views, views)
        to, parts = [], []
        keep_each = keep or [False] * len(self.params)
        for p, view, inside, keeps in zip(self.params, views, self.views, keep_each, strict=True):
            if keeps:
                continue
            grad = p.grad
            if share:
                if grad is None:
                    p.grad = inside
                elif not _torch.same_memory(grad, inside):
                    raise BadGradient(want="a view of its bucket", got="another tensor", hint=_VIEW)
            elif grad is None:
                p.grad = torch.empty_strided(
                    inside.shape, inside.stride(), dtype=p.dtype, device=p.device
                ).copy_(view)
            else:
                to.append(grad.detach() if grad.requires_grad else grad)
                parts.append(view)
        if to:
            _torch.copy_into(to, parts)

    def adopt(self) -> None:
        for p, view in zip(self.params, self.views, strict=True):
            if p.grad is not None and p.grad is not view:
                view.copy_(p.grad)
                p.grad = view


class SparseBucket(GradientBucket):
    """The one sparse gradient that is sent by itself, without a tag."""

    sparse = True

    def __init__(self, index: int, params: Sequence[Tensor]) -> None:
        super().__init__((index,), params)
        self.buffer = torch.empty(0, dtype=params[index].dtype, device=params[index].device)
        self.views = [None]

    def fill(
        self, scale: float, share: bool, dtype: torch.dtype | None, indices: Sequence[int]
    ) -> None:
        """The gradient itself is what is sent."""
        grad = self.params[0].grad
        if grad is None:
            want = "Expected sparse gradient to be defined"
            hint = "Use the embedding in the loss, or freeze it: requires_grad=False."
            raise BadGradient(want=want, got="None", hint=hint)
        if grad.layout is not torch.sparse_coo:
            want = "Expected variable to have sparse gradient"
            raise BadGradient(want=want, got=_kind(grad), hint="Make the embedding sparse=True.")
        self.buffer = grad
        if scale != 1.0:
            self.buffer.mul_(scale)

    def spread(self, result: Tensor, share: bool, keep: Sequence[bool]) -> None:
        if result is not self.buffer:
            self.buffer.copy_(result)


_HINT = "Did the parameter's dtype change after the reducer was made? Make the reducer anew."
_VIEW = (
    "Detected at least one parameter gradient is not the expected DDP bucket view with "
    "gradient_as_bucket_view=True. Do other hooks set the gradient of the same parameter?"
)


def _rows(size: torch.Size) -> tuple[int, ...]:
    return torch.empty(size, device="meta").stride()


def _kind(x: Tensor) -> str:
    return f"{x.dtype}" if x.layout is torch.strided else f"{x.dtype} ({x.layout})"


def make(
    indices: Sequence[int], params: Sequence[Tensor], sparse: Sequence[bool], tagged: bool = True
) -> GradientBucket:
    """The bucket of the parameters with these indices."""
    if not indices:
        raise BadBuckets(why="Empty bucket specified", hint="Leave it out.")
    if any(not 0 <= i < len(params) for i in indices):
        why = f"Out of range variable index specified: {max(indices)} of {len(params)}"
        raise BadBuckets(why=why, hint="Indices count the parameters.")
    if len(indices) == 1 and sparse[indices[0]]:
        return SparseBucket(indices[0], params)
    if any(sparse[i] for i in indices):
        why = (
            "Buckets with more than one variable cannot include variables that expect a "
            "sparse gradient"
        )
        raise BadBuckets(why=why, hint="Give each of those a bucket of its own.")
    return DenseBucket(indices, params, tagged)
