"""fcoll's own collectives on LocalTensors: each by the row of the table that declares it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fcoll.local import _torch, collectives
from fcoll.local.tensor import LocalTensor


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op of ``torch.ops.fcoll``."""
    from fcoll.table.collectives import COLLECTIVES  # not at import: this may be served early

    row = COLLECTIVES[func._schema.name.partition("::")[2]]
    if row.is_wait:
        return args[0]
    if row.is_p2p or "group_name" not in row.position or not row.arguments[0].is_tensor:
        raise NotImplementedError(f"{func} not implemented for LocalTensors")
    row.check(*args, **kwargs)
    made = results(row, args, kwargs)
    first, out = args[0], kwargs.get("out")
    if not isinstance(first, (list, tuple)):
        return _outcome(row, made[0], first, first if out is None else out)
    return [_outcome(row, result, x, x) for result, x in zip(made, first, strict=True)]


def results(row: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[collectives.Result]:
    """What the ranks get from a call of the row: of one on lists, for each tensor."""
    from fcoll.table.collectives import single_row

    names = (a.name for a in row.arguments)
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    group = _torch.resolve_group(named.pop("group_name"))
    first, _ = named.pop(row.arguments[0].name), named.pop("out", None)
    rest = {k: v for k, v in named.items() if k != "group_size"}
    if not isinstance(first, (list, tuple)):
        return [collectives.run(row.message, collectives.local(first), group, **rest)]
    dims = rest.pop("dims", None) or [0] * len(first)
    single = single_row(row)
    at = "dim" in single.position
    each = [{**rest, "dim": d} if at else rest for d in dims]
    return [
        collectives.run(single.name, collectives.local(x), group, **one)
        for x, one in zip(first, each, strict=True)
    ]


def _outcome(row: Any, result: collectives.Result, x: LocalTensor, out: Any) -> Any:
    if not row.mutates:
        return collectives.fresh(result, x)
    collectives.write(result, collectives.local(out, "Output"))
    return out
