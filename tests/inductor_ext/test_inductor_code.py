"""The code that is generated: what is written where, and in how many kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from programs import compiled, no_graph_cache, normal
from test_inductor_ext import COMPILE_S, norm
from torch._inductor.utils import run_and_get_code

import fcoll

pytestmark = pytest.mark.usefixtures("compiled")
Tensor = torch.Tensor


@dataclass(frozen=True)
class Code:
    """The generated code of one graph."""

    text: str

    @property
    def call(self) -> str:
        """The wrapper: what runs at every call, without the kernels."""
        return self.text[self.text.rindex("def call(") :].split("\ndef ")[0]

    def count(self, op: str) -> int:
        """How often the wrapper calls an op of the arena."""
        return len(re.findall(rf"\b{op}(?:\.default)?\(", self.call))

    @property
    def kernels(self) -> list[str]:
        """The names of the C++ kernels in the order of their calls."""
        return re.findall(r"^\s*(cpp_fused\w+)\(", self.call, re.M)

    def arguments(self, kernel: str) -> list[str]:
        call = re.search(rf"^\s*{kernel}\((.*)\)", self.call, re.M)
        return [a.strip() for a in call[1].split(",")]

    def source(self, kernel: str) -> str:
        """The C++ of a kernel."""
        found = re.search(rf"{kernel} = async_compile.cpp\w*\((.*?)'''\)", self.text, re.S)
        return found[1]


def code_of(rank: int, name: str, changes: dict[str, Any]) -> list[str]:
    f = PROGRAMS[name]
    args = [normal(4, 16, rank=rank), normal(16, 16, rank=rank, seed=1), normal(4, 16, rank=0)]
    with no_graph_cache(**changes), torch.no_grad():
        got, codes = run_and_get_code(compiled(f), *args)
    want = f(*args)
    torch.testing.assert_close(got, want + 0, rtol=1e-5, atol=1e-5)
    return codes


def block(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return norm(fcoll.all_reduce(x @ w) + residual)


def two_blocks(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    h = norm(fcoll.all_reduce(x @ w) + residual)
    return norm(fcoll.all_reduce(torch.relu(h @ w) @ w) + h)


def viewed(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return fcoll.all_reduce((x @ w).view(2, 2, 16)).view(4, 16) + residual


def computed(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    """What is sent is computed by a kernel: it writes where the peers read."""
    return fcoll.all_reduce(torch.relu(x) * 2) + residual


def used_again(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    h = x @ w
    return fcoll.all_reduce(h) + torch.relu(h)


def gathered(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return torch.relu(fcoll.all_gather_into_tensor(x @ w)) + 1


def scattered(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return torch.relu(fcoll.reduce_scatter_tensor(x @ w)) + residual[:2]


def overlapped(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    total = fcoll.all_reduce(x @ w)
    return total * (residual @ w @ w)


def six_in_a_row(x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    for _ in range(6):
        x = torch.relu(fcoll.all_reduce(x @ w))
    return x


PROGRAMS: dict[str, Callable] = {
    f.__name__: f
    for f in (
        block,
        two_blocks,
        viewed,
        computed,
        used_again,
        gathered,
        scattered,
        overlapped,
        six_in_a_row,
    )
}


def generated(pool: Any, name: str, **changes: Any) -> Code:
    """The code of a program, which is the same on all ranks but for where it is."""
    codes = pool.run(code_of, name, changes, timeout=COMPILE_S)
    assert [len(c) for c in codes] == [1] * len(codes)
    assert len({Code(c[0]).call for c in codes}) == 1
    return Code(codes[0][0])


def claimed(code: Code) -> list[str]:
    """The buffers that are memory of the arena."""
    return re.findall(r"(\w+) = .*\bclaim(?:\.default)?\(", code.call)


def parts(code: Code, call: str = "meet") -> list[list[str]]:
    """For each collective the names of the ranks' parts."""
    wholes = re.findall(rf"(\w+) = .*\b{call}(?:\.default)?\(", code.call)
    return [re.findall(rf"(\w+) = {whole}\[\d+\]", code.call) for whole in wholes]


def memory_of(code: Code, name: str) -> str:
    """The buffer that a name stands for: in the wrapper one may be given to another."""
    given = dict(re.findall(r"^\s*(\w+) = (\w+)(?:;| *#|$)", code.call, re.M))
    while name in given:
        name = given[name]
    return name


def products(code: Code) -> list[str]:
    """The buffers that matrix products are written to."""
    outs = re.findall(r"extern_kernels\.\w*mm\(.*out=(\w+)", code.call)
    return [memory_of(code, out) for out in outs]


def test_the_product_is_written_where_the_peers_read_it(shared2):
    code = generated(shared2, "block")
    assert products(code) == claimed(code)
    assert (code.count("claim"), code.count("meet")) == (1, 1)


def test_peers_are_read_and_normalised_by_one_kernel(shared2):
    code = generated(shared2, "block")
    assert len(code.kernels) == 1
    (kernel,) = code.kernels
    (both,) = parts(code)
    assert len(both) == 2
    assert set(both) <= set(code.arguments(kernel))
    assert "rsqrt" in code.source(kernel) or "sqrt" in code.source(kernel)


def test_four_ranks_are_read_by_one_kernel_in_their_order(shared4):
    code = generated(shared4, "block")
    assert len(code.kernels) == 1
    (four,) = parts(code)
    arguments = code.arguments(code.kernels[0])
    places = [arguments.index(part) for part in four]
    assert len(four) == 4 and places == sorted(places)


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_copied(shared2, name):
    code = generated(shared2, name)
    assert not re.search(r"\b(clone|copy_)\b", code.call)
    if name != "used_again":
        # one kernel after every collective, and one before it where no matmul makes the part
        before = {"computed": 1, "two_blocks": 1}.get(name, 0)
        meetings = code.count("meet") + code.count("collect")
        assert len(code.kernels) == meetings + before, code.call
    assert code.count("claim") == code.count("meet") + code.count("announce")


def test_two_collectives(shared2):
    code = generated(shared2, "two_blocks")
    assert (code.count("claim"), code.count("meet")) == (2, 2)
    first, inner, second = products(code)
    assert [first, second] == claimed(code) and inner not in claimed(code)


def test_a_view_is_written_in_place_too(shared2):
    code = generated(shared2, "viewed")
    assert products(code) == claimed(code)
    assert len(code.kernels) == 1


def test_a_value_that_is_used_again_is_copied_once(shared2):
    code = generated(shared2, "used_again")
    assert not set(products(code)) & set(claimed(code))
    assert len(code.kernels) == 2


def test_a_gathered_value_is_read_where_it_is(shared2):
    code = generated(shared2, "gathered")
    assert set(parts(code)[0]) <= set(code.arguments(code.kernels[-1]))
    assert "all_gather_into_tensor.default" not in code.call


def test_shares_of_the_parts_are_summed_by_what_uses_them(shared2):
    code = generated(shared2, "scattered")
    assert set(parts(code)[0]) <= set(code.arguments(code.kernels[-1]))
    assert "reduce_scatter_tensor.default" not in code.call


def test_work_that_does_not_need_the_sum_is_between_the_halves(shared2):
    code = generated(shared2, "overlapped")
    assert (code.count("meet"), code.count("announce"), code.count("collect")) == (0, 1, 1)
    start = re.search(r"\bannounce(?:\.default)?\(", code.call).start()
    end = re.search(r"\bcollect(?:\.default)?\(", code.call).start()
    assert code.call[start:end].count("extern_kernels.mm(") == 2


def test_memory_is_used_again_once_it_is_read(shared2):
    code = generated(shared2, "six_in_a_row")
    lanes = re.findall(r"\bclaim(?:\.default)?\([^,]*, (\d+)", code.call)
    assert len(lanes) == 6 and len(set(lanes)) <= 2


@pytest.mark.parametrize(
    ("form", "called"),
    [("opaque", r"meet_and_reduce\("), ("kernel", r"fcoll\.all_reduce\.default\(")],
)
def test_lesser_forms(shared2, form, called):
    code = generated(shared2, "block", form=form)
    assert len(re.findall(rf"\b{called}", code.call)) == 1
    assert code.count("meet") == 0
    assert code.count("claim") == (form == "opaque")
