"""Ranks that ask the holders of a sharded tensor for something: what lookups and products share.

Every rank has an input of its own, of any length. The ranks first tell each other a few numbers;
a rank whose input is wrong says so there, so that all raise and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fcoll import functions
from fcoll.groups import Group
from fcoll.sharded import _torch
from fcoll.tracing.values import assume


def told(group: Group, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Every rank's numbers, in rank order. In a trace, which has no values, all ranks are taken to
    say the same as this one; a run of the traced graph checks it."""
    if group.n == 1:
        return [list(numbers)]
    mine = _row(numbers, device)
    everyone = functions.wait_tensor(functions.all_gather_into_tensor(mine, group.name))
    if traced():
        _torch.check_in_graph((everyone == mine).all(), SAME)
    if traced() or is_fake(group):
        return [list(numbers)] * group.n
    return everyone.tolist()  # type: ignore[no-any-return]


def _row(numbers: Sequence[int], device: torch.device) -> Tensor:
    if not traced():
        return torch.tensor([list(numbers)], device=device)
    # torch.tensor of one number is a constant to fake tensors, on which ops run for real
    return torch.stack([torch.full((), x, dtype=torch.int64, device=device) for x in numbers])[None]


SAME = "the graph was traced for ranks whose inputs have the same sizes, and they have not"


def traced() -> bool:
    """Is a step being traced, so that values are unknown?"""
    return assume(False, True)


def is_fake(group: Group) -> bool:
    """Is it of a fake world, so that nothing is sent?"""
    return not group.serves


def all_to_all(packed: Tensor, group: Group, outs: Sequence[int], ins: Sequence[int]) -> Tensor:
    """``outs[r]`` elements from each rank r of the group, for ``ins[r]`` of the flat tensor."""
    if is_fake(group) and not traced():  # torch's fake groups refuse ranks that send nothing
        return packed.new_zeros(sum(outs))
    came = functions.all_to_all_single(packed, group.name, list(outs), list(ins))
    return functions.wait_tensor(came)


def swapped(
    group: Group,
    sent: Sequence[Sequence[Tensor]],
    expected: Sequence[int],
    like: Tensor,
    anchors: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]]:
    """What the ranks sent to this one, as one flat tensor and by rank.

    ``sent[r]`` are tensors for rank r of the group, ``expected[r]`` is the number of elements that
    come from it. ``anchors`` are empty tensors that tie a rank which sends nothing to the graph.
    """
    pieces = [piece.reshape(-1) for to in sent for piece in to]
    splits = [sum(piece.numel() for piece in to) for to in sent]
    packed = torch.cat([*pieces, *anchors]) if pieces or anchors else like
    came = all_to_all(packed, group, expected, splits)
    return came, list(came.split(list(expected)))
