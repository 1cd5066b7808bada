"""Have all ranks the same parameters? Compared before the first gradient is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcoll.errors import ParametersDiffer
from fcoll.training import _torch


def verify_params_across_processes(
    process_group: dist.ProcessGroup,
    params: Sequence[Tensor],
    logger: Any = None,
    names: Sequence[str] = (),
) -> None:
    """Raise on all ranks unless all have as many parameters, of the same dtypes, sizes and strides.

    >>> from fcoll.training.verify import verify_params_across_processes
    >>> verify_params_across_processes(dist.group.WORLD, [torch.ones(2, 3)])
    """
    if not params or _torch.is_fake(params[0]):
        return  # no data, so nothing to compare: all ranks are the same program
    cards = _exchange(process_group, [_card(p) for p in params])
    names = names or [""] * len(params)
    try:
        _compare(process_group.rank(), cards, names)
    except ParametersDiffer as error:
        if logger is not None:
            logger.set_error_and_log(str(error))
        raise


Card = tuple[list[int], list[int], str]  # sizes, strides, dtype


def _card(p: Tensor) -> Card:
    return list(p.shape), list(p.stride()), str(p.dtype).removeprefix("torch.")


def _exchange(pg: dist.ProcessGroup, mine: list[Card]) -> list[list[Card]]:
    """The cards of all ranks."""
    cards: list[Any] = [None] * pg.size()
    if pg.size() > 1:
        dist.all_gather_object(cards, mine, group=pg)
        return cards
    return [mine]


def _compare(me: int, cards: list[list[Card]], names: Sequence[str]) -> None:
    mine = cards[me]
    for rank, theirs in enumerate(cards):
        if len(theirs) != len(mine):
            raise ParametersDiffer(
                message=f"DDP expects same model across all ranks, but Rank {me} has {len(mine)} "
                f"params, while rank {rank} has inconsistent {len(theirs)} params"
            )
    for i, card in enumerate(mine):
        # with rank 0, as torch does; there, with the first that differs from it
        others = range(1, len(cards)) if me == 0 else (0,)
        for rank in others:
            for what, here, there in zip(_WHAT, card, cards[rank][i], strict=True):
                if here != there:
                    name = f" ({names[i]})" if names[i] else ""
                    raise ParametersDiffer(
                        message=f"[{me}]: params[{i}]{name} in this process with {what} {here} "
                        f"appears not to match {what} of the same param in process {rank}: {there}"
                    )


_WHAT = ("sizes", "strides", "dtype")
