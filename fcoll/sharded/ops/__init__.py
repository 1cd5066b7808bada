"""Rules for torch functions on sharded tensors: importing this package registers all of them."""

from fcoll.sharded.ops import conversion, dims, embedding, matmul, pointwise, reduction

__all__ = ["conversion", "dims", "embedding", "matmul", "pointwise", "reduction"]
