"""The functional collectives (``_c10d_functional``, ``_dtensor``) on LocalTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fcoll.local import _c10d, _torch, collectives
from fcoll.local.tensor import LocalTensor

# tensors -> what waits for the messages to them
_receiving: WeakIdKeyDictionary = WeakIdKeyDictionary()
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The op of torch, by its name."""
    found = OPS.get(func._schema.name.partition("::")[2])
    if found is None:
        raise NotImplementedError(f"{func} not implemented")
    return found(*args, **kwargs)


def _new(name: str, x: Any, group: Any, **args: Any) -> LocalTensor:
    x = collectives.local(x)
    result = collectives.run(name, x, _torch.resolve_group(group), **args)
    return collectives.fresh(result, x)


def _into(out: Any, name: str, x: Any, group: Any, **args: Any) -> Any:
    result = collectives.run(name, x, _torch.resolve_group(group), **args)
    collectives.write(result, out)
    return out


def all_reduce(input: Tensor, reduce_op: str, group_name: Any) -> Tensor:
    return _new("all_reduce", input, group_name, reduce_op=reduce_op)


def all_reduce_(input: Tensor, reduce_op: str, group_name: Any) -> Tensor:
    return _into(input, "all_reduce", input, group_name, reduce_op=reduce_op)


def all_gather_into_tensor(input: Tensor, group_size: int, group_name: Any) -> Tensor:
    return _new("all_gather_into_tensor", input, group_name)


def all_gather_into_tensor_out(
    input: Tensor, group_size: int, group_name: Any, *, out: Tensor
) -> Tensor:
    return _into(out, "all_gather_into_tensor", input, group_name)


def reduce_scatter_tensor(
    input: Tensor, reduce_op: str, group_size: int, group_name: Any
) -> Tensor:
    return _new("reduce_scatter_tensor", input, group_name, reduce_op=reduce_op)


def reduce_scatter_tensor_out(
    input: Tensor, reduce_op: str, group_size: int, group_name: Any, *, out: Tensor
) -> Tensor:
    return _into(out, "reduce_scatter_tensor", input, group_name, reduce_op=reduce_op)


def all_to_all_single(
    input: Tensor, output_split_sizes: Any, input_split_sizes: Any, group_name: Any
) -> Tensor:
    splits = {
        "output_split_sizes": list(output_split_sizes or ()),
        "input_split_sizes": list(input_split_sizes or ()),
    }
    return _new("all_to_all_single", input, group_name, **splits)


def shard_dim_alltoall(input: Tensor, gather_dim: int, shard_dim: int, group_name: Any) -> Tensor:
    dims = {"gather_dim": gather_dim % input.dim(), "shard_dim": shard_dim % input.dim()}
    return _new("shard_dim_alltoall", input, group_name, **dims)


def broadcast(input: Tensor, src: int, group_name: Any) -> Tensor:
    return _new("broadcast", input, group_name, src=src)


def broadcast_(input: Tensor, src: int, group_name: Any) -> Tensor:
    return _into(input, "broadcast", input, group_name, src=src)


def permuted(input: Tensor, dst: Sequence[int], group: Any) -> Tensor:
    return _new("permute", input, group, dst=list(dst))


def isend(tensor: Tensor, dst: int, tag: int, group_name: Any) -> Tensor:
    _c10d.send(tensor, dst, tag, _torch.resolve_group(group_name))
    return tensor


def irecv(tensor: Tensor, src: int, tag: int, group_name: Any) -> Tensor:
    group = _torch.resolve_group(group_name)
    _receiving.setdefault(tensor, []).append(_c10d.receiving(tensor, src, tag, group))
    return tensor


def batch_p2p_ops(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Tensor],
    group_name: Any,
) -> list[Tensor]:
    calls = {"isend": isend, "irecv": irecv}
    each = zip(op_list, tensors, peer_list, tag_list, strict=True)
    return [calls[op](x, peer, tag, group_name) for op, x, peer, tag in each]


def wait_tensor(tensor: Tensor) -> Tensor:
    for receive in _receiving.pop(tensor, ()):
        receive()
    return tensor


def _each(one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    def on_list(inputs: Sequence[Tensor], *args: Any) -> list[Tensor]:
        return [one(x, *args) for x in inputs]

    return on_list


OPS: dict[str, Callable[..., Any]] = {
    "all_reduce": all_reduce,
    "all_reduce_": all_reduce_,
    "all_reduce_coalesced": _each(all_reduce),
    "all_reduce_coalesced_": _each(all_reduce_),
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_into_tensor_out": all_gather_into_tensor_out,
    "all_gather_into_tensor_coalesced": _each(all_gather_into_tensor),
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "reduce_scatter_tensor_out": reduce_scatter_tensor_out,
    "reduce_scatter_tensor_coalesced": _each(reduce_scatter_tensor),
    "all_to_all_single": all_to_all_single,
    "shard_dim_alltoall": shard_dim_alltoall,
    "broadcast": broadcast,
    "broadcast_": broadcast_,
    "isend": isend,
    "irecv": irecv,
    "batch_p2p_ops": batch_p2p_ops,
    "wait_tensor": wait_tensor,
    "wait_tensors": _each(wait_tensor),  # from torch 2.15 on
    "_wrap_tensor_autograd": wait_tensor,
}
