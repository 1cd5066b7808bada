"""Have all ranks the same parameters? Compared before the first gradient is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcoll.errors import ParametersDiffer
from fcoll.training import _torch, tags


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
    names = names or [""] * len(params)
    mine = [(*_card(p), name) for p, name in zip(params, names, strict=False)]
    given = _exchange(process_group, (dict(options or {}), mine, tags.proposed()))
    me = process_group.rank()
    try:
        _compare_options(me, [theirs for theirs, _, _ in given])
        _compare(me, [cards for _, cards, _ in given])
    except ParametersDiffer as error:
        if logger is not None:
            logger.set_error_and_log(str(error))
        raise
    number: int = given[0][-1]
    return number


Card = tuple[list[int], list[int], str, str]  # sizes, strides, dtype, name


def _card(p: Tensor) -> tuple[list[int], list[int], str]:
    return list(p.shape), list(p.stride()), str(p.dtype).removeprefix("torch.")


def _exchange(pg: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What all ranks have."""
    found: list[Any] = [None] * pg.size()
    if pg.size() > 1:
        dist.all_gather_object(found, mine, group=pg)
        return found
    return [mine]


def _others(me: int, n: int) -> Sequence[int]:
    """With whom a rank compares: with rank 0, as torch does; there, with the first that differs."""
    return range(1, n) if me == 0 else (0,)


def _compare_options(me: int, options: list[dict[str, Any]]) -> None:
    for rank in _others(me, len(options)):
        for name, here in options[me].items():
            if here != options[rank][name]:
                raise ParametersDiffer(
                    message=f"[{me}]: {name} is {here} in this process, and {options[rank][name]} "
                    f"in process {rank}"
                )


def _compare(me: int, cards: list[list[Card]]) -> None:
    mine = cards[me]
    for rank, theirs in enumerate(cards):
        if len(theirs) != len(mine):
            raise ParametersDiffer(
                message=f"DDP expects same model across all ranks, but Rank {me} has {len(mine)} "
                f"params, while rank {rank} has inconsistent {len(theirs)} params"
            )
    for i, card in enumerate(mine):
        for rank in _others(me, len(cards)):
            for what, here, there in zip(_WHAT, card, cards[rank][i], strict=True):
                if here != there:
                    name = f" ({card[-1]})" if card[-1] and what != "name" else ""
                    raise ParametersDiffer(
                        message=f"[{me}]: params[{i}]{name} in this process with {what} {here} "
                        f"appears not to match {what} of the same param in process {rank}: {there}"
                    )


_WHAT = ("sizes", "strides", "dtype", "name")
