"""Do all ranks think the same of a sharded tensor, before a byte of it moves?

Nothing is sent when a tensor is made by its spec, so ranks may hold different ones. The first call
that communicates compares a number of each rank, a digest of what it thinks; where they differ the
ranks tell each other the rest, and all raise an error that names the rank and the property.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fcoll.groups import Group
from fcoll.sharded._torch import ShardMetadata
from fcoll.sharded.asking import told, traced
from fcoll.sharded.errors import FailedElsewhere, LayoutsDisagree
from fcoll.sharded.objects import all_gather_objects

T = TypeVar("T")
View = dict[str, Any]  # what a rank thinks: the property's name -> its value, as plain data

WRONG = 0  # the digest of a rank that has found a mistake of its own


def view_of(st: Any) -> View:
    """What all ranks must know alike of a tensor."""
    metadata = st._metadata
    properties = metadata.tensor_properties
    return {
        "size": tuple(metadata.size),
        "dtype": str(properties.dtype),
        "requires_grad": properties.requires_grad,
        **blocks_of("shard", metadata.shards_metadata),
    }


def blocks_of(what: str, shards: Sequence[ShardMetadata]) -> View:
    """A layout, as properties of a view."""
    found: View = {f"number of {what}s": len(shards)}
    for i, shard in enumerate(shards):
        holder = str(shard.placement).split("/")[0]  # not its device: each rank names its own
        found[f"{what} {i}"] = (
            f"{list(shard.shard_sizes)} at {list(shard.shard_offsets)} on {holder}"
        )
    return found


def digest(view: View) -> int:
    """A number that is the same where the view is, and never WRONG."""
    text = repr(list(view.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) + 1


def mark_of(st: Any) -> int:
    """A tensor's digest, for calls that send it along with numbers of their own."""
    return digest(view_of(st))


def agree(func: str, st: Any) -> None:
    """Raise on all ranks unless they think the same of the tensor; asked once in its life."""
    if not st._agreed:
        agreed(func, st.group, st.device, lambda: (None, view_of(st)))
        st._agreed = not traced()  # a trace has asked nobody


def agreed(func: str, group: Group, device: Any, find: Callable[[], tuple[T, View]]) -> T:
    """What ``find`` returns, once all ranks have found it and have the same view.

    If it fails on one rank, that rank raises its own error and the others one that names it.
    """
    mistake: Exception | None = None
    found: Any = None
    view: View = {}
    try:
        found, view = find()
    except Exception as error:
        mistake = error
    marks = [mark for (mark,) in told(group, [WRONG if mistake else digest(view)], device)]
    if mistake is not None:
        if group.n > 1 and any(marks):
            all_gather_objects((view, str(mistake)), group)
        raise mistake
    if len(set(marks)) > 1:
        raise _difference(func, group, view)
    return found  # type: ignore[no-any-return]


def compare(func: str, st: Any, marks: Sequence[int]) -> None:
    """Raise unless all ranks sent the same mark of the tensor."""
    if len(set(marks)) > 1:
        raise _difference(func, st.group, view_of(st))
    st._agreed = not traced()


def _difference(func: str, group: Group, view: View) -> Exception:
    """The error that names a rank and what it thinks otherwise than most. All ranks call it."""
    views = []
    for rank, (theirs, mistake) in zip(
        group.ranks, all_gather_objects((view, None), group), strict=True
    ):
        if mistake is not None:
            return FailedElsewhere(func=func, rank=rank, why=mistake)
        views.append(theirs)
    names = list(dict.fromkeys(name for theirs in views for name in theirs))
    for name in names:
        values = [theirs.get(name) for theirs in views]
        if len(set(values)) > 1:
            usual = Counter(values).most_common(1)[0][0]
            odd = next(i for i, value in enumerate(values) if value != usual)
            other = values.index(usual)
            return LayoutsDisagree(
                func=func,
                name=name,
                rank=group.ranks[odd],
                value=values[odd],
                other=group.ranks[other],
                usual=usual,
            )
    raise AssertionError("views that are equal have equal digests")
