"""What torch.distributed calls on a group of simulated ranks, which passes no op of c10d."""

from __future__ import annotations

from fcoll.tracing import c10d

# Names that newer versions of torch call a group's methods by
_OTHERS = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "recv_anysource": "recv",
    "monitored_barrier": "barrier",
}

_METHOD_OF = {"gather_into_tensor_": "gather_single"}  # others have the op's name

_OWN = {_METHOD_OF.get(op, op.removesuffix("_")): row for op, row in c10d.ROWS.items()}

#: A method of SimulatedGroup -> the row that it is a call of
METHODS = {**_OWN, **{name: _OWN[other] for name, other in _OTHERS.items()}}
