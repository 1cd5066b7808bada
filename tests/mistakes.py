"""Calls that cannot be carried out, each with the error that says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fcoll
from fcoll import errors
from fcoll.errors import FcollError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Mistake:
    """A call that cannot be carried out: of ``make(x)``, the last line is at fault."""

    error: type[FcollError]
    says: tuple[str, ...]
    make: Callable[[Tensor], Any]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def line(self) -> str:
        lines, start = inspect.getsourcelines(self.make)
        return f"{Path(inspect.getfile(self.make)).name}:{start + len(lines) - 1}"


MISTAKES: dict[str, Mistake] = {}

# Made on the ranks before the mistakes: all of them must take part.
MESH: list[Any] = []
CUDA_GROUP: list[Any] = []


def mistake(error: type[FcollError], *says: str, shape=(4, 6), dtype=torch.float32):
    """Parts of the message: what is wrong and how to put it right."""

    def keep(make: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        MISTAKES[make.__name__] = Mistake(error, says, make, shape, dtype)
        return make

    return keep


# -- the mistakes, made by rank 0 of 2 ---


@mistake(errors.UnknownReduceOp, "all_reduce: no reduce op 'summ'", "Use one of sum, avg,")
def misspelt_reduce_op(x):
    return fcoll.all_reduce(x, "summ")


@mistake(errors.UnknownReduceOp, "reduce: no reduce op 3.5", "or a dist.ReduceOp")
def number_for_reduce_op(x):
    return fcoll.reduce(x, 0, 3.5)


@mistake(errors.WrongType, "broadcast: src is float '0.5'", "Pass an int")
def half_a_rank(x):
    return fcoll.broadcast(x, 0.5)


@mistake(errors.WrongType, "permute: dst[1] is str 'a'", "Pass an int")
def text_for_a_target(x):
    return fcoll.permute(x, [1, "a"])


@mistake(errors.BadSplits, "rank 0 sends itself 3 rows and expects 1", "output_splits=[1, 1]")
def other_splits_for_itself(x):
    return fcoll.all_to_all_single(x, None, [1, 1], [3, 1])


@mistake(errors.MissingFactor, "all_reduce:", "'premul_sum' and factor=None", "factor=0.5")
def no_factor(x):
    return fcoll.all_reduce(x, "premul_sum")


@mistake(errors.MissingFactor, "reduce_scatter_tensor:", "'sum' and factor=2.0")
def factor_of_a_sum(x):
    return fcoll.reduce_scatter_tensor(x, "sum", factor=2.0)


@mistake(errors.UnknownGroup, "no process group 'tp'", "Pass a ProcessGroup")
def name_of_no_group(x):
    return fcoll.all_reduce(x, "sum", "tp")


@mistake(errors.UnknownGroup, "no process group [0, 7]", "Ranks are 0 to 1.")
def rank_outside_the_world(x):
    return fcoll.all_reduce(x, "sum", [0, 7])


@mistake(errors.UnknownGroup, "no process group [0, 0]", "A rank is there twice.")
def rank_given_twice(x):
    return fcoll.broadcast(x, 0, [0, 0])


@mistake(errors.UnknownGroup, "no process group 3.5", "a list of ranks")
def number_for_group(x):
    return fcoll.all_gather_into_tensor(x, 3.5)


@mistake(errors.UnknownGroup, "It has 2 dimensions: name one, as in (mesh, 'dp')")
def whole_mesh(x):
    return fcoll.all_reduce(x, "sum", MESH[0])


@mistake(errors.UnknownGroup, "dimension 'pp'", "Its dimensions are ['dp', 'tp']")
def no_such_axis(x):
    return fcoll.all_reduce(x, "sum", (MESH[0], "pp"))


@mistake(errors.NotInGroup, "rank 0 is not a member of the group [1]", "`if rank in [1]`")
def group_of_others(x):
    return fcoll.all_reduce(x, "sum", [1])


@mistake(errors.RankOutOfGroup, "broadcast: src=2 is outside the group of 2 ranks", "0 to 1")
def source_outside(x):
    return fcoll.broadcast(x, 2)


@mistake(errors.RankOutOfGroup, "reduce: dst=-1 is outside the group of 2 ranks", "0 to 1")
def negative_target(x):
    return fcoll.reduce(x, -1)


@mistake(errors.RankOutOfGroup, "isend: dst=2", "Ranks are counted within the group")
def send_outside(x):
    return fcoll.isend(x, 2)


@mistake(errors.RankOutOfGroup, "batch_p2p_ops: peer=9")
def transfer_from_outside(x):
    return fcoll.batch_p2p([("isend", x, 1), ("irecv", x, 9)])


@mistake(errors.BadPermutation, "permute: dst=[0, 0] does not map the 2 ranks", "at most once")
def two_to_one(x):
    return fcoll.permute(x, [0, 0])


@mistake(errors.BadPermutation, "dst=[1]", "Give one target for each rank")
def half_a_permutation(x):
    return fcoll.permute(x, [1])


@mistake(errors.BadPermutation, "dst=[1, 2]")
def permutation_outside(x):
    return fcoll.permute(x, [1, 2])


@mistake(errors.BadDim, "all_gather_into_tensor: dim 2 is outside a tensor of 2", "Use 0 to 1.")
def gather_along_a_third_dim(x):
    return fcoll.all_gather_into_tensor(x, dim=2)


@mistake(errors.BadDim, "dim -3 is outside a tensor of 2 dim", "Use 0 to 1.")
def dim_too_negative(x):
    return fcoll.all_gather_into_tensor(x, dim=-3)


@mistake(errors.BadDim, "scatter: dim 0 is outside a tensor of 0", "Reshape", shape=())
def scatter_a_number(x):
    return fcoll.scatter(x, 0)


@mistake(errors.BadDim, "gather: dim 1 is outside", "gathered along a new dim 0", shape=())
def gather_numbers_along_dim_1(x):
    return fcoll.gather(x, 0, dim=1)


@mistake(errors.BadDim, "all_to_all_single: dim 0 is outside", shape=())
def exchange_a_number(x):
    return fcoll.all_to_all_single(x)


@mistake(errors.BadDim, "all_gather_into_tensor_coalesced: dim 5 is outside a tensor of 2")
def one_bad_dim_of_two(x):
    return fcoll.all_gather_into_tensor_coalesced([x, x], dim=[0, 5])


SHARD = "needs dim 1 (5) divisible by 2"


@mistake(
    errors.UnevenShard,
    "reduce_scatter_tensor over",
    SHARD,
    "Pad to 6, or pass sizes=.",
    shape=(4, 5),
)
def scatter_five_columns(x):
    return fcoll.reduce_scatter_tensor(x, dim=1)


@mistake(errors.UnevenShard, "scatter over", SHARD, "Pad to 6", shape=(4, 5))
def scatter_five_columns_from_one(x):
    return fcoll.scatter(x, 0, dim=-1)


@mistake(errors.UnevenShard, "all_to_all_single over", "dim 0 (3)", "output_splits=", shape=(3,))
def exchange_three_rows(x):
    return fcoll.all_to_all_single(x)


@mistake(errors.UnevenShard, "shard_dim_alltoall over", SHARD, "Pad to 6", shape=(4, 5))
def reshard_five_columns(x):
    return fcoll.shard_dim_alltoall(x, 0, 1)


@mistake(errors.UnevenShard, "reduce_scatter_tensor_coalesced over", "dim 0 (3)", shape=(3, 2))
def scatter_a_list_of_three_rows(x):
    return fcoll.reduce_scatter_tensor_coalesced([x.t(), x])


@mistake(errors.BadSizes, "sizes=[4] do not fit", "there are 1 of them", "each of 2 ranks")
def too_few_sizes(x):
    return fcoll.all_gather_into_tensor(x, sizes=[4])


@mistake(errors.BadSizes, "the tensor has 4 along dim 0, sizes[0] is this rank's")
def not_my_size(x):
    return fcoll.gather(x, 0, sizes=[3, 4])


@mistake(errors.BadSizes, "sizes=[5, -1]", "one is negative")
def negative_size(x):
    return fcoll.reduce_scatter_tensor(x, sizes=[5, -1])


@mistake(errors.BadSizes, "scatter: sizes=[1, 2]", "they add up to 3, the tensor has 4")
def sizes_that_do_not_add_up(x):
    return fcoll.scatter(x, 0, sizes=[1, 2])


@mistake(errors.BadSplits, "input_splits=[2, 2]", "the other one is missing", "both or neither")
def input_splits_alone(x):
    return fcoll.all_to_all_single(x, input_splits=[2, 2])


@mistake(errors.BadSplits, "output_splits=[2, 2]", "the other one is missing")
def output_splits_alone(x):
    return fcoll.all_to_all_single(x, output_splits=[2, 2])


@mistake(errors.BadSplits, "input_splits=[1, 2]", "they add up to 3, the tensor has 4")
def splits_that_do_not_add_up(x):
    return fcoll.all_to_all_single(x, None, [1, 2], [1, 2])


@mistake(errors.BadSplits, "output_splits=[4]", "there are 1 of them", "Give 2 sizes")
def too_few_splits(x):
    return fcoll.all_to_all_single(x, None, [4], [2, 2])


@mistake(errors.WrongDtype, "all_reduce: avg has no meaning for torch.int64", dtype=torch.int64)
def mean_of_integers(x):
    return fcoll.all_reduce(x, "avg")


@mistake(
    errors.WrongDtype, "max has no meaning for torch.complex64", "abs()", dtype=torch.complex64
)
def largest_complex_number(x):
    return fcoll.reduce_scatter_tensor(x, "max")


@mistake(errors.WrongDtype, "bor has no meaning for torch.float32", "Bitwise ops take integers")
def bits_of_floats(x):
    return fcoll.all_reduce_coalesced([x, x], "bor")


@mistake(errors.WrongDtype, "premul_sum has no meaning for torch.int64", dtype=torch.int64)
def half_of_integers(x):
    return fcoll.all_reduce(x, "premul_sum", factor=0.5)


@mistake(errors.WrongDevice, "all_reduce: the tensor is on cpu, the group's backend serves cuda")
def tensor_on_another_device(x):
    return fcoll.all_reduce(x, "sum", CUDA_GROUP[0])


@mistake(errors.MismatchedLists, "all_reduce_coalesced: the list of tensors is empty", "Skip")
def empty_list(x):
    return fcoll.all_reduce_coalesced([])


@mistake(errors.MismatchedLists, "there are 2 tensors and 1 dims", "one for each tensor")
def too_few_dims(x):
    return fcoll.all_gather_into_tensor_coalesced([x, x], dim=[0])


@mistake(errors.MismatchedLists, "the tensors are on cpu, meta", "a call for each device")
def list_on_two_devices(x):
    return fcoll.all_reduce_coalesced([x, x.to("meta")])


@mistake(errors.BadOption, "all_reduce: grad='mean'", "Use one of sum, identity.")
def unknown_gradient(x):
    return fcoll.all_reduce(x, grad="mean")


@mistake(errors.BadOption, "batch_p2p_ops: op='send'", "Use one of isend, irecv.")
def unknown_transfer(x):
    return fcoll.batch_p2p([("send", x, 1)])
