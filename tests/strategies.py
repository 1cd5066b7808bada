"""Cases by the hundred: every placement of a shape's dims, and hypothesis's random ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import cases
import torch
from cases import DTYPES, FORMS, LAYOUTS, REDUCE_OPS, Case, default_args
from hypothesis import strategies as st

SHAPES = [(), (0,), (1,), (3,), (2, 3), (0, 3), (3, 0), (2, 0, 3), (1, 2, 2)]

# One for each layout: as they are on the wire, as bytes, as pairs of floats, folded here.
WIRES = (torch.float32, torch.uint16, torch.complex64, torch.bool, torch.bfloat16)


def takes(op: str, argument: str) -> bool:
    """Does the row's schema have an argument of this name?"""
    return argument in {a.name for a in getattr(torch.ops.fcoll, op).default._schema.arguments}


def least_dims(op: str) -> int:
    """0-dim tensors cannot be cut."""
    return 1 if op in cases.SCATTERS else 0


def placements(op: str, shape: cases.Shape) -> Iterator[dict[str, Any]]:
    """The arguments that say along which dims, for a tensor of this shape: all that are legal."""
    dims = range(-len(shape), len(shape)) if shape else [0]
    if op == "shard_dim_alltoall":
        yield from ({"gather_dim": g, "shard_dim": s} for g in dims for s in dims if g * s >= 0)
    elif takes(op, "dims"):
        yield from ({"dims": [d]} for d in dims)
    elif takes(op, "dim"):
        yield from ({"dim": d} for d in dims)
    else:
        yield {}


def layouts(op: str) -> list[str]:
    """An op that writes its argument cannot take one whose elements share memory."""
    return [x for x in LAYOUTS if x != "expanded" or not Case(op).overwrites]


def grid(op: str, n: int) -> Iterator[Case]:
    """Every shape in every layout, with every placement of its dims."""
    for position, shape in enumerate(SHAPES):
        if len(shape) < least_dims(op):
            continue
        for args in placements(op, shape):
            for i, layout in enumerate(layouts(op)):
                # the dtypes take turns; one element has strides of its own, so there all of them
                turn = WIRES[(i + position) % len(WIRES)]
                for dtype in WIRES if math.prod(shape) == 1 else [turn]:
                    args = default_args(op, n) | args
                    yield Case(op, (shape,), (dtype,), args, layout=layout, op_level=i % 3 == 0)


def uneven(op: str, n: int) -> Iterator[Case]:
    """Parts of unequal sizes, some of them empty."""
    for dtype in (torch.float32, torch.bool, torch.float8_e5m2, cases.SCALES):
        if dtype == cases.SCALES and op in cases.REDUCING:
            continue
        if takes(op, "sizes"):
            for dim in (0, 1, -1):
                for sizes in ([2, 0, 3, 1][:n], [0] * n, [0, 4, 0, 0][:n]):
                    args = default_args(op, n) | {"dim": dim, "sizes": sizes}
                    yield Case(op, ((2, 3, 2),), (dtype,), args, layout="transposed")
        if op == "all_to_all_single":
            for splits in (
                [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)],
                [[0] * n for i in range(n)],
                [[3 * (i == 0) for j in range(n)] for i in range(n)],
                [[i * (i == j) for j in range(n)] for i in range(n)],
            ):
                for shape in ((1, 3), (1,), (1, 0)):
                    yield Case(op, (shape,), (dtype,), {"splits": splits}, layout="strided")


# -- hypothesis ---

sizes = st.integers(0, 3)


@st.composite
def a_case(draw: st.DrawFn, op: str, world: int) -> Case:
    """Any legal call of a row on any group."""
    p2p = op in cases.P2P
    form = draw(st.sampled_from([f for f in FORMS if not p2p or cases.size_of(f, world) > 1]))
    n = cases.size_of(form, world)
    args = default_args(op, n)
    dtypes = list(DTYPES)
    if op in cases.REDUCING:
        args["reduce_op"] = draw(st.sampled_from(REDUCE_OPS))
        dtypes = [d for d in DTYPES if cases.has_meaning(args["reduce_op"], d)]
    count = draw(st.integers(1, 4)) if op in cases.LISTS else 1
    a_shape = st.lists(sizes, min_size=least_dims(op), max_size=3).map(tuple)
    shapes = tuple(draw(a_shape) for _ in range(count))
    args |= draw(roots(op, n)) | draw(dims_of(op, shapes)) | draw(parts(op, shapes[0], n))
    return Case(
        op,
        shapes,
        tuple(draw(st.sampled_from(dtypes)) for _ in range(count)),
        args,
        form,
        draw(st.sampled_from(layouts(op))),
        draw(st.booleans()),
        # exact only: elsewhere the oracle allows for rounding, here all must be equal
    )


def dims_of(op: str, shapes: tuple[cases.Shape, ...]) -> st.SearchStrategy[dict]:
    each = [list(placements(op, shape)) for shape in shapes]
    if "dims" in each[0][0]:
        one_each = st.tuples(*[st.sampled_from(options) for options in each])
        return one_each.map(lambda chosen: {"dims": [d for c in chosen for d in c["dims"]]})
    return st.sampled_from(each[0])


def roots(op: str, n: int) -> st.SearchStrategy[dict]:
    """Source and target ranks."""
    rank = st.integers(0, n - 1)
    if op in cases.P2P:
        return st.fixed_dictionaries({"shift": st.integers(1, n - 1)})
    if op == "permute":
        # a permutation of which some ranks send to nobody
        partial = st.tuples(st.permutations(range(n)), st.lists(st.booleans(), min_size=n))
        kept = partial.map(lambda p: [d if k else -1 for d, k in zip(*p, strict=False)])
        return st.fixed_dictionaries({"dst": kept})
    return st.fixed_dictionaries({name: rank for name in ("src", "dst") if takes(op, name)})


def parts(op: str, shape: cases.Shape, n: int) -> st.SearchStrategy[dict]:
    """Uneven parts, now and then."""
    n_sizes = st.lists(sizes, min_size=n, max_size=n)
    if op == "all_to_all_single":
        matrix = st.lists(n_sizes, min_size=n, max_size=n)
        return st.one_of(st.just({}), matrix.map(lambda m: {"splits": m}))
    if takes(op, "sizes") and shape:
        return st.one_of(st.just({}), n_sizes.map(lambda s: {"sizes": s}))
    return st.just({})
