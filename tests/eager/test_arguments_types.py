"""What type checkers are told of arguments is what there is."""

from __future__ import annotations

from typing import get_args

from fcoll.eager.arguments import ReduceOpName
from fcoll.reductions import PREMUL_SUM, REDUCTIONS


def test_the_names_of_reduce_ops_are_all_of_them():
    assert get_args(ReduceOpName) == (*REDUCTIONS, PREMUL_SUM)
