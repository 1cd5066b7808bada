"""Mistakes with LocalTensors, one class each. All are AssertionErrors too: torch's class raises
these, and programs may catch them."""

from __future__ import annotations

from fcoll.errors import FcollError


class NotLocal(FcollError):
    template = (
        "{what} tensor must be a LocalTensor, not {got}{at}. Make it inside the LocalTensorMode, "
        "or by LocalTensor({{rank: tensor}})."
    )


class NoMode(FcollError):
    template = (
        "{what} needs a LocalTensorMode that is enabled{at}. Call it inside `with "
        "LocalTensorMode(world_size):`."
    )


class BadRanks(FcollError):
    template = (
        "LocalTensorMode: ranks={ranks!r} is neither a number nor a frozenset{at}. Give the number "
        "of ranks, or a frozenset of them."
    )


class NotInMesh(FcollError):
    template = (
        "ranks {ranks} of the LocalTensorMode are not in the mesh {mesh}{at}. Enter a mode of the "
        "mesh's ranks alone."
    )


class IncompleteGroup(FcollError):
    template = (
        "no group of {n} ranks like {like} has all its ranks among {ranks}{at}. Give a tensor of "
        "all ranks that make the call."
    )


class MixedRanks(FcollError):
    template = (
        "tensors of different ranks in one call{at}: {first} and {other}. All must be of the same "
        "ranks, and these among the LocalTensorMode's."
    )


class MismatchedShards(FcollError):
    template = (
        "Tensors representing LocalTensor shards must have the same {what}{at}, and have {found}. "
        "Make them alike on all ranks first."
    )


class ShardNeedsGrad(FcollError):
    template = (
        "the tensors of ranks {ranks} require grad, and their graph would be lost{at}. Detach "
        "them, and pass requires_grad=True to LocalTensor."
    )


class RanksDiffer(FcollError):
    template = "the ranks differ{at}: {what}. {hint}"

    BRANCH = "Branch for each rank in a function under maybe_run_for_local_tensor, or by rank_map."


class BadRunner(FcollError):
    template = "LocalRunnerMode: {what}{at}. {hint}"


class BadCallback(FcollError):
    template = "{what}{at}. {hint}"
