"""The tests of test_values.py again, on groups that shared memory serves."""

from __future__ import annotations

import pytest
from ranks import RankPool
from test_values import (  # noqa: F401
    test_any_call,
    test_barrier,
    test_coalesced_mixes_dtypes_shapes_and_dims,
    test_dtypes,
    test_groups,
    test_in_place_writes_through_a_view,
    test_rounding,
    test_same_bits_of_a_big_sum,
    test_shapes_dims_and_layouts,
    test_special_values,
    test_uneven_parts,
)


@pytest.fixture(scope="module")
def ranks2(shared2) -> RankPool:
    return shared2


@pytest.fixture(scope="module", params=["shared2", "shared4"])
def ranks(request) -> RankPool:
    return request.getfixturevalue(request.param)
