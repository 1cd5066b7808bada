"""Triton kernels that reduce in symmetric memory: one-shot, two-shot, one-shot with a norm.

Every rank's part is in a buffer that its peers have mapped. A kernel has two tables in memory:
``buffers``, the addresses of the ranks' buffers, and ``pads``, those of their signal pads, whose
words are 0 when no kernel runs. Both are of torch's SymmetricMemory. ``offset`` says where in the
buffers the parts are, in bytes.

Reductions are in rank order, so all ranks have the same bits; 16-bit floats are added up in f32
and rounded once. This file needs triton, and only ``triton_ops.py`` imports it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Where in a pad the words of these kernels are: torch's own signals use the first ones.
FIRST_WORD = tl.constexpr(1024)
# As many blocks a kernel has at most. Words of its own for each block and meeting, whatever
# the grid: else the second meeting of one kernel would use words of the first of the next.
MAX_BLOCKS = tl.constexpr(32)


@triton.jit
def _meet(pads, rank, MEETING: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Block b of this rank waits until block b of every rank is here.

    A word for every sender in the receiver's pad: the sender puts a 1 there, the receiver takes it
    and leaves 0. The sender does not look whether its last 1 has been taken: that would be a round
    trip to its peer. It has been, since a kernel meets exactly twice, each time in other words:

    - A rank that sends for meeting 0 has ended the kernel before, so its peer has come to meeting 1
      of that, which it does after it has taken what was sent to it for meeting 0.
    - A rank that sends for meeting 1 was met by its peer in meeting 0 of this kernel, to which the
      peer comes after it has ended the kernel before, and so taken what was sent for meeting 1.

    Kernels on one buffer run one after the other on each rank; so do those in a stream. Nothing
    counts on from call to call: a CUDA graph can be replayed.
    """
    ranks = tl.arange(0, LANES)
    real = ranks < RANKS
    table = pads.to(tl.pointer_type(tl.int64))
    words = FIRST_WORD + (MEETING * MAX_BLOCKS + tl.program_id(0)) * RANKS
    # A release is of one thread: this makes it one of what all threads of the block did before.
    tl.debug_barrier()
    theirs = tl.load(table + ranks, mask=real, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(theirs + words + rank, 1, mask=real, sem="release", scope="sys")
    mine = tl.load(table + rank).to(tl.pointer_type(tl.int32)) + words + ranks
    missing = real
    while tl.max(missing.to(tl.int32), 0) > 0:
        came = tl.atomic_xchg(mine, 0, mask=missing, sem="acquire", scope="sys")
        missing = missing & (came == 0)
    tl.debug_barrier()  # and an acquire for all threads of the block


@triton.jit
def _part(buffers, offset, r, like, ALIGNED: tl.constexpr):
    """A pointer to rank r's part, of the type of ``like``."""
    address = tl.load(buffers.to(tl.pointer_type(tl.int64)) + r) + offset
    part = address.to(like.dtype)
    if ALIGNED:  # to 16 bytes, so that a thread loads as many at once
        part = tl.multiple_of(part, 16)
    return part


@triton.jit
def _parts(buffers, offset, like, RANKS: tl.constexpr, ALIGNED: tl.constexpr):
    parts = ()
    for r in tl.static_range(RANKS):
        parts += (_part(buffers, offset, r, like, ALIGNED),)  # type: ignore[assignment]
    return parts


@triton.jit
def _load(pointer, at, end, TAIL: tl.constexpr):
    if TAIL:
        return tl.load(pointer + at, mask=at < end, other=0)
    else:  # no mask: it would keep the loads narrow where the size is odd
        return tl.load(pointer + at)


@triton.jit
def _store(pointer, at, end, x, TAIL: tl.constexpr):
    x = x.to(pointer.dtype.element_ty)
    if TAIL:
        tl.store(pointer + at, x, mask=at < end)
    else:
        tl.store(pointer + at, x)


@triton.jit
def _join(a, b, OP: tl.constexpr):
    if OP == "min":
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "max":
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    elif OP == "product":
        return a * b
    else:
        return a + b


@triton.jit
def _reduced(
    parts, at, end, RANKS: tl.constexpr, OP: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr
):
    """The elements ``at``, those before ``end``, reduced over all ranks, in a wide type."""
    # All loads come before the first addition, and the addresses were loaded before the loop: so
    # that all peers can be asked before one has answered.
    loaded = ()
    for r in tl.static_range(RANKS):
        loaded += (_load(parts[r], at, end, TAIL),)  # type: ignore[assignment]
    total = loaded[0].to(WIDE)  # type: ignore[misc]
    for r in tl.static_range(1, RANKS):
        total = _join(total, loaded[r].to(WIDE), OP)
    if OP == "avg":
        n = tl.full(total.shape, RANKS, WIDE)
        total = tl.div_rn(total, n) if tl.float32 == WIDE else total / n  # f32 / is approximate
    return total


@triton.jit(do_not_specialize=["rank"])
def one_shot(
    buffers,
    pads,
    offset,
    out,
    count,
    rank,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    OP: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every rank reads all parts, and reduces all of them."""
    count = tl.cast(count, tl.int64)  # near 2**31 it would overflow when it is rounded up
    parts = _parts(buffers, offset, out, RANKS, ALIGNED)
    _meet(pads, rank, 0, RANKS, LANES)  # what is in them is there
    for tile in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        start = tl.cast(tile, tl.int64) * BLOCK
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= count:
            x = _reduced(parts, at, count, RANKS, OP, WIDE, False)
            _store(out, at, count, x, False)
        else:
            x = _reduced(parts, at, count, RANKS, OP, WIDE, True)
            _store(out, at, count, x, True)
    # All have read what this block read: when the kernel ends, this rank may write there again.
    _meet(pads, rank, 1, RANKS, LANES)


@triton.jit(do_not_specialize=["rank"])
def two_shot(
    buffers,
    pads,
    offset,
    out,
    count,
    share,
    rank,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    OP: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every rank reduces a share of the elements, and writes the result over all parts.

    Only the rank whose share it is reads or writes it there until the second meeting; after that
    each rank copies what its peers have written to it. Block b copies what the blocks b wrote.
    """
    share = tl.cast(share, tl.int64)
    parts = _parts(buffers, offset, out, RANKS, ALIGNED)
    _meet(pads, rank, 0, RANKS, LANES)
    for tile in range(tl.program_id(0), tl.cdiv(share, BLOCK), tl.num_programs(0)):
        start = rank * share + tl.cast(tile, tl.int64) * BLOCK
        end = tl.minimum((rank + 1) * share, count)
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= end:
            x = _reduced(parts, at, end, RANKS, OP, WIDE, False)
            for r in tl.static_range(RANKS):
                _store(parts[r], at, end, x, False)
        else:
            x = _reduced(parts, at, end, RANKS, OP, WIDE, True)
            for r in tl.static_range(RANKS):
                _store(parts[r], at, end, x, True)
    _meet(pads, rank, 1, RANKS, LANES)
    own = _part(buffers, offset, rank, out, ALIGNED)
    for tile in range(tl.program_id(0), tl.cdiv(share, BLOCK), tl.num_programs(0)):
        for r in tl.static_range(RANKS):
            start = tl.cast(tile, tl.int64) * BLOCK + r * share
            end = tl.minimum((r + 1) * share, count)
            at = start + tl.arange(0, BLOCK)
            if start + BLOCK <= end:
                _store(out, at, end, _load(own, at, end, False), False)
            else:
                _store(out, at, end, _load(own, at, end, True), True)


@triton.jit(do_not_specialize=["rank"])
def one_shot_norm(
    buffers,
    pads,
    offset,
    residual,
    weight,
    total,
    normed,
    rows,
    width,
    eps,
    rank,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    OP: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """total = all_reduce(x) + residual and normed = rms_norm(total) * weight, a row at a time; all
    in f32 and rounded once. WHOLE: a row is BLOCK long, so there is no tail."""
    parts = _parts(buffers, offset, total, RANKS, ALIGNED)
    _meet(pads, rank, 0, RANKS, LANES)
    column = tl.arange(0, BLOCK)
    scale = _load(weight, column, width, not WHOLE).to(tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * width
        at, end = start + column, start + width
        x = _reduced(parts, at, end, RANKS, OP, tl.float32, not WHOLE)
        x += _load(residual, at, end, not WHOLE).to(tl.float32)
        _store(total, at, end, x, not WHOLE)
        if not WHOLE:
            x = tl.where(column < width, x, 0.0)
        mean = tl.sum(x * x, 0) / width
        _store(normed, at, end, x * tl.rsqrt(mean + eps) * scale, not WHOLE)
    _meet(pads, rank, 1, RANKS, LANES)
