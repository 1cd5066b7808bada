"""Ops that move elements and compute nothing: they run as they are."""

from __future__ import annotations

_MOVES = """
    _chunk_cat _reshape_alias _reshape_copy _to_dense _unsafe_index _unsafe_view alias alias_copy
    as_strided as_strided_copy as_strided_scatter block_diag broadcast_to cat chunk clone
    concatenate contiguous copy detach detach_copy diag_embed diagonal diagonal_backward
    diagonal_copy diagonal_scatter embedding expand expand_copy flip gather im2col index index_copy
    index_select lift lift_fresh_copy masked_scatter masked_select movedim narrow new_zeros
    permute permute_copy pixel_shuffle pixel_unshuffle repeat repeat_interleave resize resize_ roll
    rot90 select select_backward select_copy select_scatter set_ slice slice_backward
    slice_copy slice_scatter split split_copy split_with_sizes split_with_sizes_copy squeeze
    squeeze_copy stack swapaxes t t_copy take tile transpose transpose_copy tril triu unbind
    unbind_copy unfold unfold_copy unsafe_chunk unsafe_split unsqueeze unsqueeze_copy value view
    view_as view_as_complex view_as_real view_copy _conj _neg_view zero zeros zeros_like
    masked_select _pin_memory record_stream reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _pack_padded_sequence _pack_padded_sequence_backward
"""
MOVES = frozenset(_MOVES.split())

UNINITIALIZED = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
)

#: Ops whose rules take numbers as elements, so that they may be values of the step.
_OF_NUMBERS = """
    add sub rsub mul div addcmul addcdiv lerp where masked_fill fill full full_like new_full
    scalar_tensor gt ge lt le eq ne maximum minimum
"""
OF_NUMBERS = frozenset(_OF_NUMBERS.split())

#: Namespaces of ops that exchange elements, or that ask and note: a reduction inside them folds by
#: the algebra (``simulate_ranks(arithmetic=)``).
NAMESPACES = frozenset(("fcoll", "_c10d_functional", "_c10d_functional_autograd", "c10d", "fsdp"))
SILENT = frozenset(("profiler", "prim", "_dtensor"))
