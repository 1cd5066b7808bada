"""The private torch APIs that reading a graph takes. Tested with torch 2.13.0,
2.14.1 and 2.15.0, which all have these names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch.utils.flop_counter import flop_registry

from fcoll._torch import op_name as op_name
from fcoll.imports import is_missing, private, say_what_is_missing

# -- calls ---


def call_arguments(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; the dispatcher leaves out those that have their default."""
    named = dict(_defaults(op))
    named.update(zip(named, args, strict=False))
    named.update(kwargs)
    return named


# -- what an op does ---


def _by_identity(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """functools.cache of an op, without its hash: that is Python code and takes 1 us."""
    cache: dict[int, tuple[Any, Any]] = {}

    @functools.wraps(fn)
    def ask(op: Any) -> Any:
        entry = cache.get(id(op))
        if entry is None or entry[0] is not op:
            entry = cache[id(op)] = (op, fn(op))
        return entry[1]

    return ask


@_by_identity
def _defaults(op: Any) -> dict[str, Any]:
    """The default of each argument of an op, None without one. Torch makes a schema's objects anew
    each time: 4 us a call."""
    return {a.name: a.default_value for a in op._schema.arguments}


@_by_identity
def op_text(op: Any) -> str:
    """ "aten.mm.default"; torch puts it together anew each time."""
    return str(op)


@_by_identity
def op_writes(op: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an op writes to."""
    if not isinstance(op, torch._ops.OpOverload):
        return ()
    arguments = enumerate(op._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write)


@_by_identity
def op_returns_written(op: Any) -> bool:
    """Does it return nothing but the arguments that it writes to?"""
    return all(r.alias_info and r.alias_info.is_write for r in op._schema.returns)


@_by_identity
def op_is_view(op: Any) -> bool:
    """Is the result a view: its argument's memory, and nothing to compute?"""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    # torch calls it a new tensor for autograd's sake; it is a view as any other.
    if op is torch.ops.aten._unsafe_view.default:
        return True
    returns = op._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


@_by_identity
def op_fuses(op: Any) -> bool:
    """Does Inductor make loops of it that it can join with others: pointwise, reductions, and what
    torch decomposes into them?"""
    if not isinstance(op, torch._ops.OpOverload) or flop_formula(op):
        return False
    if torch.Tag.pointwise in op.tags or torch.Tag.reduction in op.tags:
        return True
    # copy_ and the ops on lists of tensors (optimizers) have no tag, and become loops all the same.
    lists = op.name().startswith("aten::_foreach_") or op is torch.ops.aten.copy_.default
    return lists or op in torch._decomp.decomposition_table


@_by_identity
def op_only_allocates(op: Any) -> bool:
    return getattr(op, "overloadpacket", op) in (
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    )


@_by_identity
def op_reduces(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.reduction in op.tags


@_by_identity
def op_is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in getattr(op, "tags", ())


@_by_identity
def op_is_random(op: Any) -> bool:
    return not isinstance(op, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in op.tags


@_by_identity
def op_namespace(op: Any) -> str:
    """ "aten" of aten.mm; "higher_order" of an op on functions; empty of anything else."""
    if isinstance(op, torch._ops.HigherOrderOperator):
        return "higher_order"
    return op.namespace if isinstance(op, torch._ops.OpOverload) else ""


@_by_identity
def flop_formula(op: Any) -> Callable[..., Any] | None:
    """torch's formula for the flops of an op, called with its arguments and out_val=.

    The CPU forms of attention have none of their own; their arguments are those of the others.
    """
    packet = getattr(op, "overloadpacket", op)
    formula = flop_registry.get(packet)
    name = getattr(packet, "__name__", "")
    if formula is None and "_for_cpu" in name:
        formula = flop_registry.get(getattr(torch.ops.aten, name.replace("_for_cpu", ""), None))
    return formula


# -- symbolic sizes ---


def size_expr(size: Any) -> Any:
    """An int as it is; a symbolic size as its sympy expression."""
    node = getattr(size, "node", None)
    return size if node is None else int(node.expr) if node.expr.is_number else node.expr


def symbol_name(size: Any) -> str | None:
    """ "u0" of an integer that is that symbol, None of anything else."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else None
    return str(expr) if isinstance(expr, sympy.Symbol) else None


def symbols_of(value: Any) -> set[str]:
    """The symbols in a number that only a run knows: {"u0"}, {"zuf1"}."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return set()
    return {str(x) for x in value.node.expr.free_symbols}


#: The functions that torch's expressions of sizes have besides sympy's own.
_sympy_functions = private("torch.utils._sympy.functions")
SYMPY_FUNCTIONS = {
    name: fn
    for name, fn in ({} if is_missing(_sympy_functions) else vars(_sympy_functions)).items()
    if isinstance(fn, type) and issubclass(fn, sympy.Function)
}


def symbol_value(node: Any, symbol: Any) -> int | None:
    """The value of a symbol in the trace that a SymInt's node is of, else its upper bound."""
    env = node.shape_env
    if (value := env.backed_var_to_val.get(symbol)) is not None:
        return int(value)
    bound = env.var_to_range[symbol].upper if symbol in env.var_to_range else None
    return int(bound) if bound is not None and bound.is_Integer and bound < _ENDLESS else None


_ENDLESS = 2**48  # torch has bounds such as 2**63 - 1 for what has none


# -- modules ---

#: Of (root, graph): its code is made when it is first called or printed, which takes 2 s for 13,000
#: nodes; most graphs are only read.
lazy_graph_module = private("torch.fx._lazy_graph_module", "_LazyGraphModule", torch.fx.GraphModule)


say_what_is_missing(__name__)
