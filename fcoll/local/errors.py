"""Mistakes with LocalTensors, one class each. All are AssertionErrors too: torch's class raises
these, and programs may catch them."""

from __future__ import annotations

from fcoll.errors import FcollError


class NotLocal(FcollError):
    what = "{what} tensor must be a LocalTensor, not {got}"
    fix = "Make it inside the LocalTensorMode, or by LocalTensor({{rank: tensor}})."


class NoMode(FcollError):
    what = "{what} needs a LocalTensorMode that is enabled"
    fix = "Call it inside `with LocalTensorMode(world_size):`."


class BadRanks(FcollError):
    what = "LocalTensorMode: ranks={ranks!r} is neither a number nor a frozenset"
    fix = "Give the number of ranks, or a frozenset of them."


class NotInMesh(FcollError):
    what = "ranks {ranks} of the LocalTensorMode are not in the mesh {mesh}"
    fix = "Enter a mode of the mesh's ranks alone."


class IncompleteGroup(FcollError):
    what = "no group of {n} ranks like {like} has all its ranks among {ranks}"
    fix = "Give a tensor of all ranks that make the call."


class MixedRanks(FcollError):
    what = "tensors of different ranks in one call{at}: {first} and {other}"
    fix = "All must be of the same ranks, and these among the LocalTensorMode's."


class MismatchedShards(FcollError):
    what = "Tensors representing LocalTensor shards must have the same {what}{at}, and have {found}"
    fix = "Make them alike on all ranks first."


class ShardNeedsGrad(FcollError):
    what = "the tensors of ranks {ranks} require grad, and their graph would be lost"
    fix = "Detach them, and pass requires_grad=True to LocalTensor."


class RanksDiffer(FcollError):
    what = "the ranks differ{at}: {what}"

    BRANCH = "Branch for each rank in a function under maybe_run_for_local_tensor, or by rank_map."


class BadRunner(FcollError):
    what = "LocalRunnerMode: {what}"


class BadCallback(FcollError):
    what = "{what}"
