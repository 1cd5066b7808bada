"""``fcoll.register(row)``: a collective of one's own, from outside the package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.compiler import is_compiling

from fcoll.eager.dispatch import result, start
from fcoll.eager.ops import define, op_of
from fcoll.errors import BadRow
from fcoll.groups import group_name, group_size
from fcoll.table.collectives import COLLECTIVES, add
from fcoll.table.row import Collective

_POSITIONAL, _REQUIRED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty


def register(row: Collective) -> Callable[..., Any]:
    """Add a collective to the table and return the function that calls it.

    The function takes the schema's arguments; ``group_name`` may be anything that names a group.
    All that is derived from a row follows: ``torch.ops.fcoll.<name>``, gradients, vmap, traces,
    checks, prices, and a kernel in compiled graphs. Registering a row twice is
    once; another row of the same name is an error.

    ``examples/add_a_collective.py`` adds one in forty lines.
    """
    if COLLECTIVES.get(row.name, row) != row:
        raise BadRow(name=row.name, why="there is another row of this name")
    if "group_name" not in row.position or not row.batched or row.on_lists:
        why = "its schema must begin with a Tensor, have a group_name and return one new Tensor"
        raise BadRow(name=row.name, why=why)
    if row.native.kernel or row.native.fast:
        raise BadRow(name=row.name, why="it has no C++ of its own: leave native out")
    if row.name not in COLLECTIVES:
        define(row)
        add(row)
    return _function(row)


def _function(row: Collective) -> Callable[..., Any]:
    """The public function of a row: its arguments by the schema's names and defaults."""
    names, at = list(row.position), row.position["group_name"]
    schema = op_of(row)._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    if names[-1] == "group_name":
        defaults["group_name"] = None  # all ranks, as everywhere
    signature = inspect.Signature(
        [inspect.Parameter(x, _POSITIONAL, default=defaults.get(x, _REQUIRED)) for x in names]
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            signature.bind(*args, **kwargs)  # raises as a Python function does
        values = list(args) + [kwargs.get(x, defaults.get(x)) for x in names[len(args) :]]
        values[at] = group_name(values[at])
        return result(row.name, group_size(values[at]), start(row.name, *values))

    call.__name__ = call.__qualname__ = row.name
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call
