"""What kind of op it is: decides whether it runs on the stack, under vmap, or rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fcoll.local import _torch, matrix_products

aten = torch.ops.aten

# Ops on a stack are the ops on its rows, with the leading dim along: elementwise with broadcasting
# (beside those with torch's tag), or blind to shapes.
_ELEMENTWISE = {"copy_", "masked_fill", "masked_fill_", "where", "zero_", "fill_", "fill"}
_SHAPELESS = {
    "alias", "clone", "detach", "empty_like", "full_like", "lift", "lift_fresh", "ones_like",
    "zeros_like", "_to_copy", "zero", "view_as_real", "_conj", "_neg_view", "conj_physical",
    "resolve_conj", "resolve_neg",
}  # fmt: skip

# The same bits whether a kernel's vector loop or its scalar tail computes them. For all others
# (sigmoid, pow, atan2, ...) the last bits depend on the place in memory, so ranks with equal
# values would get unequal results from one call on the stack: see elementwise.py.
_EXACT = {
    "abs", "add", "add_", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil",
    "clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "copy_", "div",
    "div_", "eq", "fill", "fill_", "floor", "ge", "gt", "isinf", "isnan", "le", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "masked_fill_", "maximum",
    "minimum", "mul", "mul_", "ne", "neg", "neg_", "reciprocal", "relu", "relu_", "round", "sgn",
    "sign", "signbit", "sqrt", "sqrt_", "square", "sub", "sub_", "threshold",
    "threshold_backward", "trunc", "where", "zero_",
}  # fmt: skip

# They write to arguments that their schemas do not mark, or look at values.
_LOOP = {
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats",
    "equal", "item", "is_nonzero", "nonzero", "unique_dim", "_unique2", "masked_select",
    "hash_tensor", "set_", "resize_", "resize_as_", "record_stream",
}  # fmt: skip
# The same bits of complex numbers as well: no product or quotient of two of them is taken.
_EXACT_COMPLEX = {
    "add", "add_", "copy_", "eq", "fill", "fill_", "isinf", "isnan", "logical_and", "logical_not",
    "logical_or", "logical_xor", "masked_fill", "masked_fill_", "ne", "neg", "neg_", "sub", "sub_",
    "where", "zero_",
}  # fmt: skip
# Products inside, whose last bits depend on where a matrix begins (matrix_products.py).
# So have all of linear algebra.
_PRODUCTS = {
    "mv", "addmv", "dot", "vdot", "addbmm", "baddbmm", "linear", "addr", "_trilinear", "cdist",
    "_cdist_forward", "_cdist_backward", "convolution", "convolution_backward", "_convolution",
    "_convolution_double_backward", "mkldnn_convolution", "cholesky_solve", "lu_solve", "matmul",
    "triangular_solve", "lu_unpack", "ormqr", "geqrf", "_euclidean_dist", "cholesky_inverse",
    "cholesky",
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """How to run one op on the tensors of all ranks."""

    way: str  # "elementwise" | "shapeless" | "product" | "view" | "vmap" | "loop"
    exact: bool
    exact_complex: bool
    placed: bool  # do its last bits depend on where a rank's tensor begins?
    random: bool
    view: bool  # do results share memory with arguments?
    mutates: bool
    moves: bool  # does it change the shape or strides of its argument in place?
    outs: tuple[str, ...]  # the arguments that it writes its results into
    writes: tuple[tuple[int, str], ...]  # all arguments that it writes to: (position, name)
    #: For each result that is a written argument: that argument's (position, name).
    written: tuple[tuple[int, str] | None, ...]


@cache
def kind(func: Any) -> Kind:
    """The kind of an op.

    >>> kind(torch.ops.aten.add.Tensor).way, kind(torch.ops.aten.mm.default).way
    ('elementwise', 'product')
    """
    schema, name = func._schema, func._schema.name.partition("::")[2]
    random = torch.Tag.nondeterministic_seeded in func.tags
    mutates = schema.is_mutable
    moves = torch.Tag.inplace_view in func.tags
    return Kind(
        way=_way(func, name, random, mutates, moves),
        exact=name in _EXACT,
        exact_complex=name in _EXACT_COMPLEX,
        placed=_has_products(name),
        random=random or func.namespace not in ("aten", "prims", "prim"),
        view=_is_view(schema),
        mutates=mutates,
        moves=moves,
        outs=tuple(a.name for a in schema.arguments if a.is_out),
        writes=tuple(
            (i, a.name)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ),
        written=tuple(_written(schema, r) for r in schema.returns),
    )


def _way(func: Any, name: str, random: bool, mutates: bool, moves: bool) -> str:
    schema = func._schema
    to_out = any(a.is_out for a in schema.arguments)
    data_dependent = torch.Tag.data_dependent_output in func.tags
    if random or moves or to_out or data_dependent or name in _LOOP or func.namespace != "aten":
        return "loop"
    if func in matrix_products.PRODUCTS:
        return "product"
    if _has_products(name):
        return "loop"
    lists = any("[]" in str(a.type) and "Tensor" in str(a.type) for a in schema.arguments)
    if name in _SHAPELESS and not mutates:
        return "shapeless"
    if _is_view(schema):
        return "view"
    if any(a.name == "storage_offset" for a in schema.arguments):  # in a rank's own memory
        return "loop"
    if (torch.Tag.pointwise in func.tags or name in _ELEMENTWISE) and not lists:
        return "elementwise"
    if mutates or not _torch.has_batching_rule(func):
        return "loop"
    return "vmap"


def _is_view(schema: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _has_products(name: str) -> bool:
    linear_algebra = name.lstrip("_").startswith("linalg_") and name != "linalg_vector_norm"
    return name in _PRODUCTS or linear_algebra


def _written(schema: Any, result: Any) -> tuple[int, str] | None:
    alias = result.alias_info
    if alias is None or not alias.is_write:
        return None
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.before_set & alias.before_set:
            return i, a.name
    return None
