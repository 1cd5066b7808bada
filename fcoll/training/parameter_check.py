"""Have all ranks the same parameters? Compared before the first gradient is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcoll.eager.small_messages import device_of, gather_numbers, gather_objects
from fcoll.errors import ParametersDiffer
from fcoll.groups import resolve
from fcoll.training import _torch, tags
from fcoll.transport.handshake import View, digest, first_difference

COUNT = "how many"  # the parameters are, in a view


def verify_params_across_processes(
    process_group: dist.ProcessGroup,
    params: Sequence[Tensor],
    logger: Any = None,
    names: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> int:
    """Raise on all ranks unless all have as many parameters, of the same dtypes, sizes and strides;
    with ``names`` and ``options``, of the same names and with the same options.

    The result is a number for their reducer, the same on all ranks.

    >>> from fcoll.training.parameter_check import verify_params_across_processes
    >>> verify_params_across_processes(dist.group.WORLD, [torch.ones(2, 3)]) > 0
    True
    """
    if not params or _torch.has_no_data(params[0]):
        return tags.UNKNOWN  # no data, so nothing to compare: all ranks are the same program
    group = resolve(process_group)
    view = _view(params, names, options or {})
    mine = [digest(repr(view)), tags.proposed()]
    everyone = gather_numbers(group, mine, device_of(group))
    if len({theirs for theirs, _ in everyone}) > 1:
        error = _difference(group.rank, gather_objects(view, group), names)
        if logger is not None:
            logger.set_error_and_log(str(error))
        raise error
    return everyone[0][1]


def _view(params: Sequence[Tensor], names: Sequence[str], options: Mapping[str, Any]) -> View:
    """What ranks must agree on: options by name, then of each parameter what it is."""
    view: dict[Any, Any] = {**options, COUNT: len(params)}
    for i, p in enumerate(params):
        view[i, "sizes"], view[i, "strides"] = list(p.shape), list(p.stride())
        view[i, "dtype"] = str(p.dtype).removeprefix("torch.")
        view[i, "name"] = names[i] if names else ""
    return view


def _difference(me: int, views: list[View], names: Sequence[str]) -> ParametersDiffer:
    """In torch's words, as this rank sees it."""
    difference = first_difference(views)
    assert difference is not None, "views that are equal have equal digests"
    name, values = difference
    other = difference.other_than(me)
    here, there = values[me], values[other]
    if name == COUNT:
        text = (
            f"DDP expects same model across all ranks, but Rank {me} has {here} params, while "
            f"rank {other} has inconsistent {there} params"
        )
    elif isinstance(name, str):
        text = f"[{me}]: {name} is {here} in this process, and {there} in process {other}"
    else:
        i, what = name
        shown = f" ({names[i]})" if names and what != "name" else ""
        text = (
            f"[{me}]: params[{i}]{shown} in this process with {what} {here} appears not to match "
            f"{what} of the same param in process {other}: {there}"
        )
    return ParametersDiffer(message=text)
