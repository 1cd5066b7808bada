"""What the ranks tell each other of a sharded tensor, before a byte of it moves.

Nothing is sent when a tensor is made by its spec, so ranks may hold different ones. The first call
that communicates gathers a number of each rank, a digest of what it knows of the layout; where they
differ the ranks gather the rest, and all raise an error that names the rank and the property.
Collectives carry it, not the group's store: so it is in traces, which check it where they are run,
works on simulated ranks and in fake worlds, and a lookup's sizes go with it.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fcoll import functions
from fcoll.groups import Group
from fcoll.sharded import _torch
from fcoll.sharded._torch import ShardMetadata
from fcoll.sharded.errors import FailedElsewhere, LayoutsDisagree
from fcoll.tracing.values import assume

T = TypeVar("T")
View = dict[str, Any]  # what a rank knows of a layout: a property's name -> its value, plain data

WRONG = 0  # the digest of a rank that has found a mistake of its own
SAME_SIZES = "the graph was traced for ranks whose inputs have the same sizes, and they have not"

# -- gathering ---


def gather_numbers(group: Group, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Every rank's numbers, in rank order. In a trace, which has no values, all ranks are taken to
    say the same as this one; a run of the traced graph checks it."""
    if group.n == 1:
        return [list(numbers)]
    mine = _row(numbers, device)
    everyone = functions.wait_tensor(functions.all_gather_into_tensor(mine, group.name))
    if is_traced():
        _torch.check_in_graph((everyone == mine).all(), SAME_SIZES)
    if is_traced() or is_fake(group):
        return [list(numbers)] * group.n
    return everyone.tolist()  # type: ignore[no-any-return]


def _row(numbers: Sequence[int], device: torch.device) -> Tensor:
    if not is_traced():
        return torch.tensor([list(numbers)], device=device)
    # torch.tensor of one number is a constant to fake tensors, on which ops run for real
    return torch.stack([torch.full((), x, dtype=torch.int64, device=device) for x in numbers])[None]


def gather_objects(obj: Any, group: Group) -> list[Any]:
    """Every rank's small Python object, in rank order; the same list on each."""
    if group.n == 1 or is_fake(group):
        return [obj] * group.n
    device = "cpu" if not group.serves or "cpu" in group.serves else group.serves[0]
    pickled = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(device)
    length = torch.tensor([pickled.numel()], device=device)
    lengths = functions.wait_tensor(functions.all_gather_into_tensor(length, group.name)).tolist()
    gathered = functions.all_gather_into_tensor(pickled, group.name, sizes=lengths)
    parts = functions.wait_tensor(gathered).cpu().split(lengths)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def is_traced() -> bool:
    """Is a step being traced, so that values are unknown?"""
    return assume(False, True)


def is_fake(group: Group) -> bool:
    """Is it of a fake world, so that nothing is sent?"""
    return not group.serves


# -- agreeing ---


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


def _digest(view: View) -> int:
    """A number that is the same where the view is, and never WRONG."""
    text = repr(list(view.items())).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) + 1


def digest_of(st: Any) -> int:
    """A tensor's digest, for calls that gather it along with numbers of their own."""
    return _digest(view_of(st))


def check_digests(func: str, st: Any, digests: Sequence[int]) -> None:
    """Raise unless all ranks have the same digest of the tensor."""
    if len(set(digests)) > 1:
        raise _difference(func, st.group, view_of(st))
    st._agreed = not is_traced()  # a trace has asked nobody


def check_agreement(func: str, st: Any) -> None:
    """Raise on all ranks unless they know the same of the tensor; asked once in its life."""
    if not st._agreed:
        check_digests(
            func, st, [d for (d,) in gather_numbers(st.group, [digest_of(st)], st.device)]
        )


def agree_on(func: str, group: Group, device: Any, find: Callable[[], tuple[T, View]]) -> T:
    """What ``find`` returns, once all ranks have found it and have the same view.

    If it fails on one rank, that rank raises its own error and the others one that names it.
    """
    found, mistake = attempt(find)
    value, view = found or (None, {})
    digest = WRONG if mistake else _digest(view)
    digests = [d for (d,) in gather_numbers(group, [digest], device)]
    if mistake is not None:
        if group.n > 1 and any(digests):
            gather_objects((view, str(mistake)), group)
        raise mistake
    if len(set(digests)) > 1:
        raise _difference(func, group, view)
    return value  # type: ignore[return-value]


def attempt(find: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What it returns, or what it raises: to be told to the other ranks before it is raised."""
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
    views = [theirs for theirs, _ in everyone]
    for name in dict.fromkeys(name for theirs in views for name in theirs):
        values = [theirs.get(name) for theirs in views]
        if len(set(values)) > 1:
            usual = Counter(values).most_common(1)[0][0]
            odd = next(i for i, value in enumerate(values) if value != usual)
            return LayoutsDisagree(
                func=func,
                name=name,
                rank=group.ranks[odd],
                value=values[odd],
                other=group.ranks[values.index(usual)],
                usual=usual,
            )
    raise AssertionError("views that are equal have equal digests")
