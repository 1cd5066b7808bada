"""Functional collectives for PyTorch: a tensor in, a new tensor out."""

from fcoll import errors, ops
from fcoll.async_tensor import AsyncCollectiveTensor
from fcoll.collectives import COLLECTIVES
from fcoll.errors import FcollError
from fcoll.functions import (
    all_gather_into_tensor,
    all_gather_into_tensor_coalesced,
    all_reduce,
    all_reduce_coalesced,
    all_to_all_single,
    barrier,
    batch_p2p,
    broadcast,
    gather,
    identity,
    irecv,
    isend,
    permute,
    reduce,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    scatter,
    shard_dim_alltoall,
    wait_tensor,
)
from fcoll.groups import Group, GroupLike
from fcoll.launch import launch

__version__ = "0.1.0"
