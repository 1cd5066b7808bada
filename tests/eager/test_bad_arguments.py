"""Calls with bad arguments: an fcoll error before a byte moves; the group is usable after each."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll._torch import work_registry_size


class Odd:
    """Nothing that a collective could take."""

    def __repr__(self) -> str:
        return "<odd>"


NOT_TENSORS = [None, 3, 1.5, "x", [1.0, 2.0], {}, Odd()]
LAYOUTS = {
    "sparse": lambda: torch.ones(4, 4).to_sparse(),
    "csr": lambda: torch.ones(4, 4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
}
NOT_INTS = [0.5, "0", None, [0], {}, Odd(), 1j, torch.tensor(0.5), torch.tensor([0, 1])]
RANKS = [-1, -2, 2, 3, 99, 1 << 40, *NOT_INTS]
DIMS = [-3, 2, 7, 1 << 40, *NOT_INTS]
SIZES = [[4], [4, 4, 4], [-1, 5], [3, 5], [0.5, 3.5], ["a", "b"], [None, 4], 4, "44", {}, Odd()]
GROUPS = ["nosuch", 3, 0.5, Odd(), [0, 0], [0, 9], [-1, 0], ["a"], [0.5, 1], {}, {0, 1}, (), []]

#: parameter of a public function -> values that it must not take
BAD: dict[str, list[Any]] = {
    "x": [*NOT_TENSORS, *LAYOUTS],
    "like": [*NOT_TENSORS, *LAYOUTS],
    "xs": [None, 3, "x", Odd(), [], [None], [1.0], [[torch.ones(2)]], {}],
    "op": ["summ", "", 3.5, None, [], Odd(), b"sum", "premul_sum"],
    "group": GROUPS,
    "factor": ["2", [], Odd(), {}, torch.ones(2), 2.0],
    "grad": ["Sum", "", None, 1, [], Odd()],
    "dim": DIMS,
    "gather_dim": DIMS,
    "shard_dim": DIMS,
    "sizes": SIZES,
    "output_splits": SIZES,
    "input_splits": SIZES,
    "src": RANKS,
    "dst": RANKS,
    "tag": [-1, *NOT_INTS],
    "transfers": [None, 3, "ab", Odd(), [], [1], [("isend",)], [("send", torch.ones(1), 0)]],
}
#: permute's dst is a list
TARGETS = [None, 3, [0], [0, 0], [0, 2], [0, -2], [0.5, 0], [torch.tensor(0), 0], ["a", 0], Odd()]
#: arguments that the functions need, as they are right
GOOD: dict[str, Any] = {"x": torch.ones(4, 4), "like": torch.ones(4, 4), "src": 0, "dst": 0}
GOOD |= {"xs": [torch.ones(4, 4)], "gather_dim": 0, "shard_dim": 1}
GOOD |= {"output_splits": [2, 2], "input_splits": [2, 2]}


def calls() -> Iterator[tuple[str, str, int]]:
    """(function, parameter, number of the bad value)."""
    for name in fcoll.functions.__all__:
        if name == "wait_tensor":
            continue
        for parameter in inspect.signature(getattr(fcoll, name)).parameters:
            yield from ((name, parameter, i) for i in range(len(bad_values(name, parameter))))


def bad_values(name: str, parameter: str) -> list[Any]:
    if (name, parameter) == ("permute", "dst"):
        return TARGETS
    if parameter == "dim" and name.endswith("coalesced"):
        return [dim for dim in DIMS if dim != [0]]  # one for each tensor
    return BAD[parameter]


def arguments(name: str, parameter: str, bad: Any) -> dict[str, Any]:
    parameters = inspect.signature(getattr(fcoll, name)).parameters
    given = {p: GOOD[p] for p in parameters if p in GOOD}
    if name == "permute":
        given["dst"] = [1, 0]
    if name == "batch_p2p":
        given["transfers"] = [("isend", torch.ones(1), dist.get_rank())]
    if isinstance(bad, str) and bad in LAYOUTS:
        with warnings.catch_warnings(action="ignore"):  # torch's, of features in beta
            bad = LAYOUTS[bad]()
    return given | {parameter: bad}


def make_all(rank: int) -> tuple[int, list[str]]:
    """Make every call: how many there were, and what was wrong with them."""
    made, wrong = 0, []
    total = fcoll.all_reduce(torch.ones(3)).tolist()
    before = work_registry_size()  # what other tests on these ranks did not wait for
    for name, parameter, i in calls():
        bad = bad_values(name, parameter)[i]
        what = f"{name}({parameter}={bad!r})"
        made += 1
        try:
            out = getattr(fcoll, name)(**arguments(name, parameter, bad))
            wrong.append(f"{what} gave {type(out).__name__}")
        except fcoll.FcollError as error:
            if "test_bad_arguments.py:" not in str(error):
                wrong.append(f"{what} does not say where: {error}")
        except Exception as error:
            wrong.append(f"{what} raised {type(error).__name__}: {str(error)[:80]}")
        if work_registry_size() != before or fcoll.all_reduce(torch.ones(3)).tolist() != total:
            wrong.append(f"{what} left something behind")
    return made, wrong


@pytest.mark.parametrize("pool", ["ranks2", "shared2"])
def test_bad_arguments_are_fcoll_errors(pool, request):
    for made, wrong in request.getfixturevalue(pool).run(make_all, timeout=120):
        assert not wrong, "\n".join(wrong[:40])
        assert made >= 500


def test_other_layouts_say_what_to_do(solo):
    with pytest.raises(fcoll.errors.WrongLayout, match=r"x is a sparse_coo tensor.*to_dense"):
        fcoll.broadcast(torch.ones(2, 2).to_sparse(), 0)


def test_what_stands_for_an_int_is_one(solo):
    x = torch.ones(4)
    assert torch.equal(fcoll.broadcast(x, torch.tensor(0)), x)
    assert torch.equal(fcoll.permute(x, torch.tensor([0])), x)
    assert torch.equal(fcoll.all_to_all_single(x, None, (4,), torch.Size([4])), x)
