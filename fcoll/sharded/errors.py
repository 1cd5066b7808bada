"""Errors of sharded tensors: one class a mistake, as in fcoll/errors.py.

Where torch's ShardedTensor raises for the same mistake, its words are in the message and the class
is of torch's kind too, so that code which looks for either goes on working.
"""

from __future__ import annotations

from fcoll.errors import FcollError


class OnOneRank(FcollError):
    """A call whose input is wrong on one rank, ``rank``; all raise it."""

    what = "{func} on rank {rank}: {why}"
    on_others = ""  # why, on ranks that cannot know more


class BadLayout(FcollError):
    """Shards that do not make up the tensor: ``shards`` are the metadata of those that clash."""

    what = "the shards do not make up the tensor{at}: {why}"
    kept = ("rank", "shards")
    shards: tuple = ()


class BadPlacement(FcollError):
    what = "a shard has no place{at}: {why}"


class NoSuchWorker(BadPlacement, RuntimeError):
    """Worker names are RPC's, which does not run."""


class BadShards(FcollError):
    """Local shards that a tensor cannot be made of; ``rank`` is whose they are."""


class ShardsDiffer(FcollError, RuntimeError):
    """Ranks that say different things of one sharded tensor."""


class CannotReshard(FcollError, NotImplementedError):
    """A layout that a tensor cannot be cut into, or shards that are not those of the metadata."""


class SeveralShards(FcollError, NotImplementedError):
    what = "Only single local shard is supported. Number of shards: {count} on rank {rank}"
    fix = "Use local_shards(), which has all of them."


class BadGather(FcollError):
    what = "gather on rank {rank}: {why}"


class BadOpFunction(FcollError, TypeError):
    what = (
        "Custom sharded op function expects signature: (types, args, kwargs, process_group), but "
        "received signature: {signature}"
    )
    fix = "Take these four; args and kwargs are the call's."


class NoShardedOp(FcollError, RuntimeError):
    # ends as torch's message does
    what = "no rule for {func}"
    fix = (
        "{supported} Write one with @fcoll.sharded.sharded_op({func}), or compute on "
        "st.local_shards() or st.all_gather(). torch function '{name}' with {given} is not "
        "supported for ShardedTensor!"
    )


class GroupsDiffer(FcollError, RuntimeError):
    what = (
        "{func}: All distributed tensors should use the same ProcessGroup if used together in an op"
    )
    fix = "Make them on one group, or gather one of them."


class BadSize(FcollError, TypeError):
    what = "size has to be a sequence of ints, found: {dims}"
    fix = "Pass the size of the whole."


class NotSharded(FcollError, TypeError):
    what = "{what} is {kind}"
    fix = "Pass {want}."


class WorldNeeded(FcollError, RuntimeError):
    what = (
        'Need to initialize default process group using "init_process_group" before loading {what}'
    )
    fix = "Its shards are of one rank: load it on that rank of as many."


class OtherRanks(FcollError, RuntimeError):
    what = "{what} at save time was {saved}, but at load time was {now}"
    fix = (
        "A pickle holds the shards of one rank: load each on the rank that saved it, or all of "
        "them on other ranks with fcoll.sharded.load_files. Checkpoints of "
        "torch.distributed.checkpoint load on any ranks."
    )


class GroupAlreadySet(FcollError, RuntimeError):
    what = (
        'ProcessGroup already set by previous "load_with_process_group" context manager (it is '
        "{group})"
    )
    fix = "Load for one group after the other."


class MeshesDiffer(FcollError):
    """A mesh or placements that a DTensor and a sharded tensor cannot share."""


class BadMove(FcollError, RuntimeError):
    """Wrong arguments of ``to``, ``cpu`` or ``cuda``."""


class LayoutsDiffer(FcollError, RuntimeError):
    """Sharded tensors that are not cut the same way, in an op that works shard by shard."""

    what = "{func}: {why}"


class LayoutsDisagree(FcollError, RuntimeError):
    """Ranks that think differently of one sharded tensor: ``rank`` is the odd one. Raised on all
    ranks, before anything was sent."""

    what = (
        "{func}: the ranks do not agree on {name}: it is {value} on rank {rank} and {usual} on "
        "rank {other}"
    )
    fix = "Make and reshard the tensor with the same size and spec on all ranks."


class FailedElsewhere(FcollError, RuntimeError):
    """Another rank could not take part; nothing was sent."""

    template = "{func}: rank {rank} could not take part{at}: {why}"


class CutDim(FcollError, NotImplementedError):
    """An op along a dim that no rank holds from end to end."""

    what = "{func} along dim {dim} of a tensor of {size}, which is cut along {cut}"
    fix = (
        "Reshard it first, as in fcoll.sharded.reshard(st, fcoll.sharded.chunk({other}, n)), or "
        "all_gather it."
    )


class DimOutOfRange(FcollError, IndexError):
    what = "Dimension out of range (expected to be in range of [{low}, {high}], but got {dim})"
    fix = "Count dims of the whole tensor."


class BadLookup(OnOneRank):
    """An embedding that cannot be looked up."""

    on_others = "Index out of range in Input of that rank, or no integers: no rank looks up"


class NoSuchLookup(FcollError, RuntimeError):
    template = (
        '{func}: nn.Embedding weight sharded with flag on "{flag}" not supported!{at} '
        "Leave it off, or look up in all_gather()."
    )


class BadProduct(OnOneRank):
    """A product whose sizes or dtypes do not fit."""

    on_others = "Its input does not fit the weight, so that no rank multiplies"


class NotBothSharded(FcollError, TypeError):
    what = "Both arguments to torch.{func} need to be of type ShardedTensor, not {kinds}"
    fix = "all_gather() the sharded one, or shard the other by fcoll.sharded.shard_tensor."


class BadInit(FcollError):
    template = "{func}: param: {name} shouldn't be None!{at} Give a number."


class NoSuchParameter(FcollError, AttributeError):
    what = "{module} has no attribute `{name}`"
    fix = "It has {found}."


class BadShardingPlan(FcollError):
    """A sharding plan that does not fit the module; nothing of it was carried out."""


class WrongKindInPlan(BadShardingPlan, TypeError):
    """Neither a spec nor a sharder."""


class BadSharderPath(BadShardingPlan, KeyError):
    __str__ = Exception.__str__  # a KeyError shows its text quoted


class PlanConflict(BadShardingPlan, RuntimeError):
    """A parameter below a module that a sharder takes."""


class NoRemoteShards(FcollError, RuntimeError):
    """Shards of other ranks that cannot be had."""


class RpcRanksDiffer(FcollError):
    what = (
        "Default ProcessGroup and RPC ranks must be the same for ShardedTensor, found process "
        "group rank: {rank} and RPC rank: {worker}"
    )
    fix = "Pass rank={rank} to init_rpc."
