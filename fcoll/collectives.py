"""The table: one row a collective, and everything else is derived from it.

A row's ``schema`` starts like that of torch's op of the same name, where there is one, and goes on
with arguments that have defaults: a call of torch's op is a call of ours. ``targets`` names those
ops. ``check``, ``shape`` and ``run`` take the schema's arguments; ``adjoint`` gives the gradient.

``wire_bytes`` and ``steps`` are of the bandwidth-optimal algorithm on n ranks: the bytes that each
rank sends, where b is the size of its largest argument or result in bytes, and how many messages
follow one another. They are written so that n and b may be sympy symbols. ``one_shot_bytes`` is
what the busiest rank sends where everything goes to its place in one step; ``personal`` says that
each pair of ranks has bytes of its own, which nobody can combine or pass on for others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fcoll import _torch, adjoints, rules, runs
from fcoll.rules import gathered, scattered

Expr = Any  # an int, a float, or a sympy expression


@dataclass(frozen=True)
class Collective:
    """One row: everything there is to know of a collective."""

    name: str
    schema: str
    check: Callable[..., None]
    shape: Callable[..., Any]
    run: Callable[..., Any]
    adjoint: Callable[..., Any] | None
    wire_bytes: Callable[[Expr, Expr], Expr]
    steps: Callable[[Expr], Expr]
    targets: tuple[str, ...] = ()
    saves: Callable[[Any], tuple[str, ...]] | None = None
    contiguous: bool = False
    side_effect: bool = False
    one_shot_bytes: Callable[[Expr, Expr], Expr] | None = None  # None: wire_bytes, in one step
    personal: bool = False

    @property
    def mutates(self) -> bool:
        """Does it write to an argument (the in-place and out forms)?"""
        return "!" in self.schema

    @property
    def batched(self) -> bool:
        """Can vmap run it? All that return new tensors: the mapped dim goes along, last."""
        return not self.mutates and self.schema.startswith("(Tensor")

    @property
    def on_lists(self) -> bool:
        return self.schema.endswith("Tensor[]")


def _ring(n: Expr, b: Expr) -> Expr:
    """Each rank passes on all parts but one."""
    return b * (n - 1) / n


def _ring_twice(n: Expr, b: Expr) -> Expr:
    return 2 * _ring(n, b)


def _all(n: Expr, b: Expr) -> Expr:
    return b


def _to_each(n: Expr, b: Expr) -> Expr:
    """The whole message to every other rank."""
    return b * (n - 1)


def _none(n: Expr, b: Expr) -> Expr:
    return 0 * b


def _n_minus_1(n: Expr) -> Expr:
    return n - 1


def _twice_n_minus_1(n: Expr) -> Expr:
    return 2 * (n - 1)


def _one(n: Expr) -> Expr:
    return 1


def _zero(n: Expr) -> Expr:
    return 0


def _shapes(of_one: Callable[..., Any]) -> Callable[..., Any]:
    """The shapes of a list's results: of_one(input, *args, dim) for each."""

    def shapes(inputs, *args, dims=None):  # type: ignore[no-untyped-def]
        dims = dims if dims is not None else [0] * len(inputs)
        return [of_one(x, *args, dim=d) for x, d in zip(inputs, dims, strict=True)]

    return shapes


def _shape_all_to_all(input, output_split_sizes, input_split_sizes, group_name):  # type: ignore
    return [sum(output_split_sizes), *input.shape[1:]]


def _shape_shard_dim(input, gather_dim, shard_dim, group_name):  # type: ignore[no-untyped-def]
    n = rules.group_size(group_name)
    shape = list(input.shape)
    shape[shard_dim] = shape[shard_dim] // n
    shape[gather_dim] = shape[gather_dim] * n
    return shape


def _shape_p2p(op_list, peer_list, tag_list, tensors, group_name):  # type: ignore[no-untyped-def]
    return [[0] if op == "isend" else list(x.shape) for op, x in zip(op_list, tensors, strict=True)]


def _torch_ops(name: str, *more: str) -> tuple[str, ...]:
    spaces = ("_c10d_functional", "c10d_functional", *more)
    return tuple(f"{space}::{name}" for space in spaces)


_ROWS = (
    Collective(
        "all_reduce",
        "(Tensor input, str reduce_op, str group_name, str grad='sum') -> Tensor",
        check=rules.check_all_reduce,
        shape=rules.same,
        run=runs.all_reduce,
        adjoint=adjoints.all_reduce,
        saves=adjoints.needs_values,
        wire_bytes=_ring_twice,
        steps=_twice_n_minus_1,
        one_shot_bytes=_to_each,
        targets=_torch_ops("all_reduce"),
    ),
    Collective(
        "all_gather_into_tensor",
        "(Tensor input, int group_size, str group_name, int dim=0, SymInt[]? sizes=None) -> Tensor",
        check=rules.check_all_gather,
        shape=lambda input, n, group_name, dim=0, sizes=None: gathered(input, n, dim, sizes),
        run=runs.all_gather_into_tensor,
        adjoint=adjoints.all_gather_into_tensor,
        wire_bytes=_ring,
        steps=_n_minus_1,
        targets=_torch_ops("all_gather_into_tensor", "_c10d_functional_autograd"),
        contiguous=True,
    ),
    Collective(
        "reduce_scatter_tensor",
        "(Tensor input, str reduce_op, int group_size, str group_name, int dim=0,"
        " SymInt[]? sizes=None) -> Tensor",
        check=rules.check_reduce_scatter,
        shape=lambda input, reduce_op, n, group_name, dim=0, sizes=None: scattered(
            input, n, group_name, dim, sizes
        ),
        run=runs.reduce_scatter_tensor,
        adjoint=adjoints.reduce_scatter_tensor,
        saves=adjoints.needs_values,
        wire_bytes=_ring,
        steps=_n_minus_1,
        targets=_torch_ops("reduce_scatter_tensor", "_c10d_functional_autograd"),
        contiguous=True,
    ),
    Collective(
        "all_to_all_single",
        "(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name)"
        " -> Tensor",
        check=rules.check_all_to_all,
        shape=_shape_all_to_all,
        run=runs.all_to_all_single,
        adjoint=adjoints.all_to_all_single,
        wire_bytes=_ring,
        steps=_n_minus_1,
        personal=True,
        targets=_torch_ops("all_to_all_single", "_c10d_functional_autograd"),
        contiguous=True,
    ),
    Collective(
        "shard_dim_alltoall",
        "(Tensor input, int gather_dim, int shard_dim, str group_name) -> Tensor",
        check=rules.check_shard_dim_alltoall,
        shape=_shape_shard_dim,
        run=runs.shard_dim_alltoall,
        adjoint=adjoints.shard_dim_alltoall,
        wire_bytes=_ring,
        steps=_n_minus_1,
        personal=True,
        targets=("_dtensor::shard_dim_alltoall",),
    ),
    Collective(
        "broadcast",
        "(Tensor input, int src, str group_name) -> Tensor",
        check=rules.check_broadcast,
        shape=rules.same,
        run=runs.broadcast,
        adjoint=adjoints.broadcast,
        wire_bytes=_all,
        steps=_n_minus_1,
        one_shot_bytes=_to_each,
        targets=_torch_ops("broadcast"),
    ),
    Collective(
        "reduce",
        "(Tensor input, str reduce_op, int dst, str group_name) -> Tensor",
        check=rules.check_reduce,
        shape=rules.same,
        run=runs.reduce,
        adjoint=adjoints.reduce,
        saves=adjoints.needs_values,
        wire_bytes=_all,
        steps=_n_minus_1,
        one_shot_bytes=_to_each,
    ),
    Collective(
        "gather",
        "(Tensor input, int dst, int group_size, str group_name, int dim=0,"
        " SymInt[]? sizes=None) -> Tensor",
        check=rules.check_gather,
        shape=lambda input, dst, n, group_name, dim=0, sizes=None: gathered(input, n, dim, sizes),
        run=runs.gather,
        adjoint=adjoints.gather,
        wire_bytes=_ring,
        steps=_n_minus_1,
    ),
    Collective(
        "scatter",
        "(Tensor input, int src, int group_size, str group_name, int dim=0,"
        " SymInt[]? sizes=None) -> Tensor",
        check=rules.check_scatter,
        shape=lambda input, src, n, group_name, dim=0, sizes=None: scattered(
            input, n, group_name, dim, sizes
        ),
        run=runs.scatter,
        adjoint=adjoints.scatter,
        wire_bytes=_ring,
        steps=_n_minus_1,
    ),
    Collective(
        "permute",
        "(Tensor input, int[] dst, str group_name) -> Tensor",
        check=rules.check_permute,
        shape=rules.same,
        run=runs.permute,
        adjoint=adjoints.permute,
        wire_bytes=_all,
        steps=_one,
        personal=True,
    ),
    Collective(
        "isend",
        "(Tensor tensor, int dst, int tag, str group_name) -> Tensor",
        check=rules.check_isend,
        shape=rules.nothing,
        run=runs.isend,
        adjoint=adjoints.none_for_p2p,
        wire_bytes=_all,
        steps=_one,
        personal=True,
        targets=_torch_ops("isend"),
        side_effect=True,
    ),
    Collective(
        "irecv",
        "(Tensor tensor, int src, int tag, str group_name) -> Tensor",
        check=rules.check_irecv,
        shape=rules.same,
        run=runs.irecv,
        adjoint=adjoints.none_for_p2p,
        wire_bytes=_all,
        steps=_one,
        personal=True,
        targets=_torch_ops("irecv"),
        side_effect=True,
    ),
    Collective(
        "batch_p2p_ops",
        "(str[] op_list, int[] peer_list, int[] tag_list, Tensor[] tensors, str group_name)"
        " -> Tensor[]",
        check=rules.check_batch_p2p,
        shape=_shape_p2p,
        run=runs.batch_p2p_ops,
        adjoint=adjoints.none_for_p2p,
        wire_bytes=_all,
        steps=_one,
        personal=True,
        targets=_torch_ops("batch_p2p_ops"),
        side_effect=True,
    ),
    Collective(
        "barrier",
        "(str group_name) -> Tensor",
        check=rules.check_barrier,
        shape=rules.nothing,
        run=runs.barrier,
        adjoint=None,
        wire_bytes=_none,
        steps=_twice_n_minus_1,
        side_effect=True,
    ),
    Collective(
        "all_reduce_coalesced",
        "(Tensor[] inputs, str reduce_op, str group_name, str grad='sum') -> Tensor[]",
        check=rules.check_all_reduce_coalesced,
        shape=rules.same_each,
        run=runs.all_reduce_coalesced,
        adjoint=adjoints.all_reduce_coalesced,
        saves=adjoints.needs_values,
        wire_bytes=_ring_twice,
        steps=_twice_n_minus_1,
        one_shot_bytes=_to_each,
        targets=_torch_ops("all_reduce_coalesced"),
    ),
    Collective(
        "all_gather_into_tensor_coalesced",
        "(Tensor[] inputs, int group_size, str group_name, int[]? dims=None) -> Tensor[]",
        check=rules.check_all_gather_coalesced,
        shape=lambda inputs, n, group_name, dims=None: _shapes(gathered)(inputs, n, dims=dims),
        run=runs.all_gather_into_tensor_coalesced,
        adjoint=adjoints.all_gather_into_tensor_coalesced,
        wire_bytes=_ring,
        steps=_n_minus_1,
        targets=_torch_ops("all_gather_into_tensor_coalesced"),
        contiguous=True,
    ),
    Collective(
        "reduce_scatter_tensor_coalesced",
        "(Tensor[] inputs, str reduce_op, int group_size, str group_name, int[]? dims=None)"
        " -> Tensor[]",
        check=rules.check_reduce_scatter_coalesced,
        shape=lambda inputs, reduce_op, n, group_name, dims=None: _shapes(scattered)(
            inputs, n, group_name, dims=dims
        ),
        run=runs.reduce_scatter_tensor_coalesced,
        adjoint=adjoints.reduce_scatter_tensor_coalesced,
        saves=adjoints.needs_values,
        wire_bytes=_ring,
        steps=_n_minus_1,
        targets=_torch_ops("reduce_scatter_tensor_coalesced"),
        contiguous=True,
    ),
    Collective(
        "all_reduce_",
        "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
        check=rules.check_all_reduce,
        shape=rules.same,
        run=runs.all_reduce_,
        adjoint=adjoints.none_in_place,
        wire_bytes=_ring_twice,
        steps=_twice_n_minus_1,
        one_shot_bytes=_to_each,
        targets=("_c10d_functional::all_reduce_",),
    ),
    Collective(
        "all_reduce_coalesced_",
        "(Tensor[](a!) inputs, str reduce_op, str group_name) -> Tensor[](a!)",
        check=rules.check_all_reduce_coalesced,
        shape=rules.same_each,
        run=runs.all_reduce_coalesced_,
        adjoint=adjoints.none_in_place,
        wire_bytes=_ring_twice,
        steps=_twice_n_minus_1,
        one_shot_bytes=_to_each,
        targets=("_c10d_functional::all_reduce_coalesced_",),
    ),
    Collective(
        "broadcast_",
        "(Tensor(a!) input, int src, str group_name) -> Tensor(a!)",
        check=rules.check_broadcast,
        shape=rules.same,
        run=runs.broadcast_,
        adjoint=adjoints.none_in_place,
        wire_bytes=_all,
        steps=_n_minus_1,
        one_shot_bytes=_to_each,
        targets=("_c10d_functional::broadcast_",),
    ),
    Collective(
        "all_gather_into_tensor_out",
        "(Tensor input, int group_size, str group_name, *, Tensor(a!) out) -> Tensor(a!)",
        check=rules.check_all_gather_out,
        shape=lambda input, n, group_name, *, out: gathered(input, n),
        run=runs.all_gather_into_tensor_out,
        adjoint=adjoints.none_in_place,
        wire_bytes=_ring,
        steps=_n_minus_1,
        targets=("_c10d_functional::all_gather_into_tensor_out",),
        contiguous=True,
    ),
    Collective(
        "reduce_scatter_tensor_out",
        "(Tensor input, str reduce_op, int group_size, str group_name, *, Tensor(a!) out)"
        " -> Tensor(a!)",
        check=rules.check_reduce_scatter_out,
        shape=lambda input, reduce_op, n, group_name, *, out: scattered(input, n, group_name),
        run=runs.reduce_scatter_tensor_out,
        adjoint=adjoints.none_in_place,
        wire_bytes=_ring,
        steps=_n_minus_1,
        targets=("_c10d_functional::reduce_scatter_tensor_out",),
        contiguous=True,
    ),
    # It moves nothing and its result is its argument, so it has no kernel of its own: it is
    # torch's wait, the one that AOTAutograd's partitioner and Inductor know.
    Collective(
        "wait_tensor",
        "(Tensor tensor) -> Tensor",
        check=lambda tensor: None,
        shape=rules.same,
        run=lambda tensor: torch.ops._c10d_functional.wait_tensor(tensor),
        adjoint=adjoints.wait_tensor,
        wire_bytes=_none,
        steps=_zero,
        targets=_torch_ops("wait_tensor"),
        side_effect=True,
    ),
)

COLLECTIVES: dict[str, Collective] = {row.name: row for row in _ROWS}

_BY_TARGET = {target: row for row in _ROWS for target in (f"fcoll::{row.name}", *row.targets)}


def row_of(op: Any) -> Collective | None:
    """The row that describes an op (or a graph node's target), or None if it is no collective.

    >>> row_of(torch.ops._c10d_functional.all_reduce.default).name
    'all_reduce'
    >>> row_of(torch.ops.aten.add.Tensor) is None
    True
    """
    return _BY_TARGET.get(_torch.op_name(op))
