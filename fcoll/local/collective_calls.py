"""Collectives on LocalTensors, each by the row of the table that declares it: torch's functional
ones, fcoll's own, and torch.distributed's, which ``table/c10d.py`` reads.

A call is made for all groups at once: the ranks' groups come from ``rank_groups.py``. Tensors of
one shape go through the row's ``stacked`` rule, others through its rule on lists
(``table/pieces.py``). In a group that not all ranks have a counterpart of, the other ranks make no
call and keep what they have. Imported at a first call: ``fcoll.local`` may be served in torch's
place before there is a table.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fcoll._torch import op_name
from fcoll.errors import MismatchedLists, RaggedRanks, UnevenShard
from fcoll.local import _c10d, _torch, premul, rank_groups, rank_stacks
from fcoll.local.local_tensor import LocalTensor, apart, local, stacked
from fcoll.local.op_by_rank import on_rank
from fcoll.reductions import PREMUL_SUM, parse
from fcoll.table import c10d
from fcoll.table.collectives import COLLECTIVES, functional_row, row_named, single_row
from fcoll.table.partition import Partition
from fcoll.table.pieces import received
from fcoll.table.plans import prepared
from fcoll.table.row import Collective

_WAITS = ("wait_tensor", "wait_tensors", "_wrap_tensor_autograd")  # of torch's namespaces


@dataclass(frozen=True)
class ResultOnRanks:
    """What the ranks that made the call get: rows of a stack, or a tensor each."""

    ranks: tuple[int, ...]
    stack: Tensor | None = None
    parts: Mapping[int, Tensor] | None = None

    def items(self) -> Any:
        if self.parts is not None:
            return self.parts.items()
        assert self.stack is not None
        return zip(self.ranks, rank_stacks.unbound(self.stack), strict=True)


@dataclass(frozen=True)
class Calling:
    """Who makes a call together: the groups, their ranks, and the groups as rows of a stack."""

    groups: rank_groups.Groups
    ranks: tuple[int, ...]
    partition: Partition


# group -> ranks of a tensor -> (rank_groups.changes when it was made, Calling)
_calling: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def calling(group: Any, order: tuple[int, ...]) -> Calling:
    """Kept: to sort 64 ranks and look them up would take as long as the rest of a collective."""
    kept = _calling.setdefault(group, {})
    found = kept.get(order)
    if found is None or found[0] != rank_groups.changes:  # a mesh of this group was made since
        made = rank_groups.calling(group, order)
        ranks = tuple(sorted(r for g in made for r in g))
        place = {r: i for i, r in enumerate(ranks)}
        partition = Partition(tuple(tuple(place[r] for r in g) for g in made))
        found = kept[order] = rank_groups.changes, Calling(made, ranks, partition)
    return found[1]


# ---- one tensor


def run(row: Collective, x: Any, group: Any, args: dict[str, Any]) -> ResultOnRanks:
    """A row's collective for all ranks of ``x``; ``args`` are its others by name."""
    local(x)
    who = calling(group, x._order)
    if "reduce_op" in args:
        args["reduce_op"] = reduce_op = parse(row.name, args["reduce_op"])
        if reduce_op == PREMUL_SUM:
            x, args["reduce_op"] = premul.scaled(row.name, x), "sum"
    stack = x._as_stack()
    if stack is not None and not ragged(args) and stack.layout is torch.strided:
        check_divisible(row.name, stack.shape[1:], len(who.groups[0]), args)
        if who.ranks != x._order:
            stack = stack[[x._order.index(r) for r in who.ranks]]
        rule = prepared(row, args, who.partition, stack.dtype)
        return ResultOnRanks(who.ranks, stack=rule(stack))
    if row.uneven is None or args.get("dim"):
        raise RaggedRanks(op=row.name, why="the ranks' tensors have different shapes")
    parts: dict[int, Tensor] = {}
    for g in who.groups:
        mine = [x._tensors()[r] for r in g]
        for t in mine:
            check_divisible(row.name, t.shape, len(g), args)
        of_ranks = [{k: _of_rank(v, r) for k, v in args.items()} for r in g]
        parts |= zip(g, row.uneven(mine, of_ranks), strict=True)
    return ResultOnRanks(who.ranks, parts=parts)


_SIZES = ("input_split_sizes", "output_split_sizes", "sizes")


def ragged(args: Mapping[str, Any]) -> bool:
    """Do splits or sizes make results of different shapes, or differ between ranks?"""
    splits = [n for name in _SIZES for n in args.get(name) or ()]
    return any(isinstance(s, torch.SymInt) for s in splits) or len(set(splits)) > 1


def _of_rank(value: Any, rank: int) -> Any:
    """An argument as a rank has it."""
    if isinstance(value, (list, tuple)):
        return [int(on_rank(v, rank)) for v in value]
    return value


def check_divisible(name: str, shape: Sequence[int], n: int, args: Mapping[str, Any]) -> None:
    """A scattered dim must be divisible: torch's own simulation drops the rest."""
    if (name == "reduce_scatter_tensor" and not args.get("sizes")) or (
        name == "all_to_all_single" and not args.get("input_split_sizes")
    ):
        size = shape[0] if shape else 0
        if not shape or size % n:
            facts = {"group": n, "dim": 0, "size": size, "n": n, "padded": -(-size // n) * n}
            raise UnevenShard(op=name, remedy="output_split_sizes= and input_split_sizes=", **facts)


def arguments_of(row: Collective, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """(its tensor or tensors, the group, the others by name) of a call of the row."""
    named = {**dict(zip(row.position, args, strict=False)), **kwargs}
    group = _torch.resolve_group(named.pop("group_name"))
    first = named.pop(row.arguments[0].name)
    for name in ("out", "group_size"):
        named.pop(name, None)
    for name in ("output_split_sizes", "input_split_sizes"):
        if name in named:
            named[name] = list(named[name] or ())
    for name in ("gather_dim", "shard_dim"):
        if name in named:
            named[name] %= first.dim()
    return first, group, named


def results(row: Collective, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[ResultOnRanks]:
    """What the ranks get from a call of the row: of one on lists, for each tensor."""
    (first, group, named), single = arguments_of(row, args, kwargs), single_row(row)
    if not isinstance(first, (list, tuple)):
        return [run(single, first, group, named)]
    dims = named.pop("dims", None) or [0] * len(first)
    at = "dim" in single.position
    each = [{**named, "dim": d} if at else dict(named) for d in dims]
    return [run(single, x, group, one) for x, one in zip(first, each, strict=True)]


# ---- what comes out


def fresh(result: ResultOnRanks, x: LocalTensor) -> LocalTensor:
    """A new LocalTensor of the result; ranks that made no call have a copy of theirs."""
    if result.ranks == x._order and result.stack is not None:
        return stacked(result.stack, x._order)
    parts = {r: t.clone() for r, t in result.items()}
    others = {r: t.clone() for r, t in x._tensors().items() if r not in parts}
    return apart({r: parts[r] if r in parts else others[r] for r in x._order})


def cut(result: ResultOnRanks, outs: Sequence[LocalTensor]) -> list[ResultOnRanks]:
    """The result cut up into one for each of these tensors, one behind the other."""
    if len(outs) == 1:
        return [result]
    if result.stack is not None:
        flat = result.stack.flatten(1)
        return [
            ResultOnRanks(result.ranks, x) for x in flat.split([out.numel() for out in outs], 1)
        ]
    cuts = {}
    for r, t in result.items():
        cuts[r] = t.reshape(-1).split([local(out, "Output")._tensors()[r].numel() for out in outs])
    return [
        ResultOnRanks(result.ranks, None, {r: c[i] for r, c in cuts.items()})
        for i in range(len(outs))
    ]


def write(
    result: ResultOnRanks, out: LocalTensor, only: Sequence[int] | None = None, take: bool = True
) -> None:
    """Write the result into the tensors of the ranks that made the call (of ``only`` these); where
    it has memory of its own, they may take that instead."""
    local(out, "Output")
    whole = only is None and result.ranks == out._order
    if whole and out._stack is not None and result.stack is not None:
        write_stack(result.stack, out, take)
        return
    for r, t in result.items():
        if only is None or r in only:
            target = out._tensors()[r]
            target.copy_(t.reshape(target.shape))


def write_stack(stack: Tensor, out: LocalTensor, take: bool = True) -> None:
    """The same of a stack of all of its ranks."""
    if not take or not out._replace_stack(stack):
        own = out._own_stack()
        own.copy_(stack.reshape(own.shape))


# ---- ops of fcoll, and torch's functional ones

# tensors -> what waits for the messages to them
_receiving: WeakIdKeyDictionary = WeakIdKeyDictionary()


def run_op(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op of fcoll, or a functional one of torch's."""
    row = row_named(name := op_name(func))
    waits = row.is_wait if row is not None else name.partition("::")[2] in _WAITS
    if waits:
        return _waited(args[0])
    if row is None or not (row.is_p2p or row.arguments[0].is_tensor):
        raise NotImplementedError(f"{func} not implemented for LocalTensors")
    if row.is_p2p:
        return _messages(row.name, args)
    if func.namespace == "fcoll":
        row.check(*args, **kwargs)
    first, out = args[0], kwargs.get("out")
    made = results(row, args, kwargs)
    if not isinstance(first, (list, tuple)):
        return _outcome(row, made[0], first, first if out is None else out)
    return [_outcome(row, result, x, x) for result, x in zip(made, first, strict=True)]


def _outcome(row: Collective, result: ResultOnRanks, x: LocalTensor, out: Any) -> Any:
    if not row.mutates:
        return fresh(result, x)
    write(result, out)
    return out


def _messages(name: str, args: Sequence[Any]) -> Any:
    """isend, irecv, or a batch of both."""
    if name == "batch_p2p_ops":
        ops, peers, tags, tensors, group = args
        each = zip(ops, tensors, peers, tags, strict=True)
        return [_messages(op, (x, peer, tag, group)) for op, x, peer, tag in each]
    tensor, peer, tag, group = args
    group = _torch.resolve_group(group)
    if name == "isend":
        _c10d.send(tensor, peer, tag, group)
    else:
        receive = _c10d.receiving(tensor, peer, tag, group)
        _receiving.setdefault(tensor, []).append(receive)
    return tensor


def _waited(given: Any) -> Any:
    for tensor in given if isinstance(given, (list, tuple)) else [given]:
        for receive in _receiving.pop(tensor, ()):
            receive()
    return given


def permuted(x: LocalTensor, dst: Sequence[int], group: Any) -> LocalTensor:
    return fresh(run(COLLECTIVES["permute"], x, group, {"dst": list(dst)}), x)


# ---- torch.distributed's own ops


def run_c10d(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op of ``torch.ops.c10d``."""
    name = op_name(func).removeprefix("c10d::")
    if name == "check_for_nan":
        return check_for_nan(*args)
    if name not in c10d.OPS:
        raise NotImplementedError(f"{func} not implemented")
    op = c10d.OPS[name]
    named = op.named(args, kwargs)
    group = _torch.unboxed_group(named["process_group"])
    if op.row == "irecv":
        return _receive(op.read(named, with_size))
    if op.row == "isend":
        _c10d.send(*op.read(named, with_size).args)
    else:
        named["process_group"] = group
        carry_out(op, named)
    return op.returned(args)


def with_size(group: Any) -> tuple[Any, int]:
    return group, group.size()


def carry_out(op: c10d.Op, named: dict[str, Any]) -> None:
    """A collective of c10d with these arguments."""
    message = op.read(named, with_size)
    row, order = functional_row(COLLECTIVES[message.row]), None
    if message.lists and not row.replicates:
        _exchange_pieces(op, message)
        return
    if not message.outs:
        return
    args = message.args
    for out in message.outs[0]:
        order = local(out, "Output")._order
    if op.name in _OF_OBJECTS and not isinstance(args[0], LocalTensor) and order is not None:
        args = stacked(args[0].expand(len(order), *args[0].shape), order), *args[1:]
    only = None
    if message.root is not None and order is not None:
        only = [g[message.root] for g in rank_groups.calling(message.options["group_name"], order)]
    for result, outs in zip(results(row, args, {}), message.outs, strict=True):
        for out, part in zip(outs, cut(result, outs), strict=True):
            write(part, out, only, take=len(outs) == 1)


# all_gather_object has one plain tensor for all ranks
_OF_OBJECTS = {"allgather_", *(("_allgather_base_",) if _torch.OBJECTS_IN_ONE_TENSOR else ())}


def _exchange_pieces(op: c10d.Op, message: c10d.Message) -> None:
    """Lists whose tensors go from rank to rank as they are: one flat tensor of all, as rows take
    it, would cost ten times as much."""
    if message.missing:
        why, hint = f"{message.missing} has 0 tensors", "Give one for each rank of the group."
        raise MismatchedLists(op=op.called, why=why, hint=hint)
    options = message.options
    group, reduce_op = options["group_name"], options.get("reduce_op", "")
    root = options.get("src", options.get("dst", -1))
    given, taken = op.pieces(message, group.size())
    ins, outs = [local(x) for x in given], [local(x, "Output") for x in taken]
    if reduce_op == PREMUL_SUM:
        ins, reduce_op = [premul.scaled(op.called, x) for x in ins], "sum"
    arrived: dict[int, list[Tensor]] = {}
    for g in rank_groups.calling(group, ins[0]._order):
        pieces = [[x._tensors()[r] for x in ins] for r in g]
        arrived |= zip(g, received(op.route, pieces, reduce_op, root), strict=True)
    each = [{r: ys[i] for r, ys in arrived.items() if ys} for i in range(len(outs))]
    for out, result in zip(
        outs, list(map(_result, each)), strict=True
    ):  # all, before any is written
        write(result, out)


def _result(parts: dict[int, Tensor]) -> ResultOnRanks:
    ranks = tuple(sorted(parts))
    if len({t.shape for t in parts.values()}) == 1:
        return ResultOnRanks(ranks, stack=torch.stack([parts[r] for r in ranks]))
    return ResultOnRanks(ranks, parts={r: parts[r].clone() for r in ranks})


def tensors_in(given: Any) -> list[Any]:
    if isinstance(given, (list, tuple)):
        return [x for some in given for x in tensors_in(some)]
    return [given]


def check_for_nan(tensor: Any) -> None:
    bad = [r for r, t in local(tensor)._tensors().items() if bool(t.isnan().any())]
    if bad:
        raise RuntimeError(f"NaN on ranks {bad}")


def _receive(message: c10d.Message) -> Any:
    receive = _c10d.receiving(*message.args)

    def wait(timeout: timedelta) -> bool:
        receive()
        return True

    return _torch.boxed(_torch.PythonCallbackWork(wait))
