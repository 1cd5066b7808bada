"""Agreement on a layout: ranks compare what they know of a sharded tensor before it moves.

Nothing is sent when a tensor is made by its spec, so ranks may hold different ones. The first call
that communicates gathers a digest of what each rank knows of the layout; where they differ the
ranks gather the rest, and all raise an error that names the rank and the property. The digest is in
traces, which check it where they are run, and a lookup's sizes go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fcoll.eager import small_messages
from fcoll.eager.small_messages import gather_objects
from fcoll.groups import Group
from fcoll.sharded import _torch
from fcoll.sharded._torch import ShardMetadata
from fcoll.sharded.errors import FailedElsewhere, LayoutsDisagree, OnOneRank
from fcoll.tracing.values import assume
from fcoll.transport.handshake import digest, first_difference

T = TypeVar("T")
View = dict[str, Any]  # what a rank knows of a layout

WRONG = 0  # the digest of a rank that has found a mistake of its own
SAME_SIZES = "the graph was traced for ranks whose inputs have the same sizes, and they have not"


def is_traced() -> bool:
    """Is a step being traced, so that values are unknown?"""
    return assume(False, True)


def gather_numbers(group: Group, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Every rank's numbers, in rank order. In a trace, which has no values, all ranks are taken to
    say the same as this one; a run of the traced graph checks it."""
    if group.n == 1 or not is_traced():
        return small_messages.gather_numbers(group, numbers, device)
    # torch.tensor of one number is a constant to fake tensors, on which ops run for real
    mine = torch.stack([torch.full((), x, dtype=torch.int64, device=device) for x in numbers])[None]
    everyone = small_messages.gathered(mine, group)
    _torch.check_in_graph((everyone == mine).all(), SAME_SIZES)
    return [list(numbers)] * group.n


def view_of(st: Any) -> View:
    """What all ranks must know alike of a tensor."""
    properties = st._metadata.tensor_properties
    return {
        "size": tuple(st._metadata.size),
        "dtype": str(properties.dtype),
        "requires_grad": properties.requires_grad,
        **view_of_layout("shard", st._metadata.shards_metadata),
    }


def view_of_layout(what: str, shards: Sequence[ShardMetadata]) -> View:
    """A layout, as properties of a view."""
    view: View = {f"number of {what}s": len(shards)}
    for i, shard in enumerate(shards):
        holder = str(shard.placement).split("/")[0]  # not its device: each rank names its own
        view[f"{what} {i}"] = (
            f"{list(shard.shard_sizes)} at {list(shard.shard_offsets)} on {holder}"
        )
    return view


def digest_of(st: Any) -> int:
    return digest(repr(view_of(st)))


def check_digests(func: str, st: Any, digests: Sequence[int]) -> None:
    """Raise unless all ranks have the same digest of the tensor."""
    if len(set(digests)) > 1:
        raise _difference(func, st.group, view_of(st))
    st._agreed = not is_traced()  # in a trace no rank was asked


def check_agreement(func: str, st: Any) -> None:
    """Raise on all ranks unless they know the same of the tensor; compared once in its life."""
    if not st._agreed:
        check_digests(
            func, st, [d for (d,) in gather_numbers(st.group, [digest_of(st)], st.device)]
        )


def gather_fitting(
    func: str, st: Any, kind: type[OnOneRank], why: str, hint: str, *numbers: int
) -> list[list[int]]:
    """Every rank's numbers, once all know the same of the tensor and what each passes with it fits.

    ``why`` says what is wrong with what this rank passes, if anything is; then all raise a ``kind``
    that names it.
    """
    g = st.group
    everyone = gather_numbers(g, [digest_of(st), int(not why), *numbers], st.device)
    check_digests(func, st, [theirs for theirs, *_ in everyone])
    if why:
        raise kind(func=func, rank=g.ranks[g.rank], why=why, hint=hint)
    for rank, (_, fits, *_) in zip(g.ranks, everyone, strict=True):
        if not fits:
            hint = hint or "See that rank's error."
            raise kind(func=func, rank=rank, why=kind.on_others, hint=hint)
    return [theirs for _, _, *theirs in everyone]


def agree_on(func: str, group: Group, device: Any, find: Callable[[], tuple[T, View]]) -> T:
    """What ``find`` returns, once all ranks have found it and have the same view.

    If it fails on one rank, that rank raises its own error and the others one that names it.
    """
    answer, mistake = attempt(find)
    value, view = answer or (None, {})
    mine = WRONG if mistake else digest(repr(view))
    digests = [d for (d,) in gather_numbers(group, [mine], device)]
    if mistake is not None:
        if group.n > 1 and any(digests):
            gather_objects((view, str(mistake)), group)
        raise mistake
    if len(set(digests)) > 1:
        raise _difference(func, group, view)
    return value  # type: ignore[return-value]


def attempt(find: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """(result, None) or (None, the exception): other ranks are sent it before it is raised."""
    try:
        return find(), None
    except Exception as error:
        return None, error


def _difference(func: str, group: Group, view: View) -> Exception:
    """The error that names a rank and the property it knows otherwise than most. All ranks call
    it."""
    everyone = gather_objects((view, None), group)
    for rank, (_, mistake) in zip(group.ranks, everyone, strict=True):
        if mistake is not None:
            return FailedElsewhere(func=func, rank=rank, why=mistake)
    difference = first_difference([view for view, _ in everyone])
    assert difference is not None, "views that are equal have equal digests"
    odd, usual = difference.odd()
    return LayoutsDisagree(
        func=func,
        name=difference.name,
        rank=group.ranks[odd],
        value=difference.values[odd],
        other=group.ranks[usual],
        usual=difference.values[usual],
    )
