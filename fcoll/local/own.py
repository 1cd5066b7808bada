"""fcoll's own collectives on LocalTensors: each by the row of the table that declares it."""

from __future__ import annotations

from collections.abc import Mapping
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
    names = (a.name for a in row.arguments)
    named = dict(zip(names, args, strict=False)) | kwargs
    group = _torch.resolve_group(named.pop("group_name"))
    first, out = named.pop(row.arguments[0].name), named.pop("out", None)
    rest = {k: v for k, v in named.items() if k != "group_size"}
    if not isinstance(first, (list, tuple)):
        return _one(row, first, first if out is None else out, group, rest)
    dims = rest.pop("dims", None) or [0] * len(first)
    single = COLLECTIVES[COLLECTIVES[row.message].single or row.message]
    at = "dim" in single.position
    each = [{**rest, "dim": d} if at else rest for d in dims]
    return [_one(row, x, x, group, one, single.name) for x, one in zip(first, each, strict=True)]


def _one(
    row: Any, x: LocalTensor, out: Any, group: Any, args: Mapping[str, Any], name: str | None = None
) -> Any:
    result = collectives.run(name or row.message, collectives.local(x), group, **args)
    if not row.mutates:
        return collectives.fresh(result, x)
    collectives.write(result, collectives.local(out, "Output"))
    return out
