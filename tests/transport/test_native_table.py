"""The names, schemas and sizes that C++ has are those of the table and of Python's constants."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import fcoll
from fcoll import functions
from fcoll.reductions import REDUCTIONS
from fcoll.table.collectives import COLLECTIVES
from fcoll.transport import shared_memory
from inductor_ext.lower import one_shot

NATIVE = Path(fcoll.__file__).parent / "transport" / "native"
ROWS = COLLECTIVES.values()


def source(name: str) -> str:
    return (NATIVE / name).read_text()


def constant(file: str, name: str) -> int:
    """The value of a constexpr of a header."""
    found = re.search(rf"\b{name} = ([\d\s*<]+)[,;]", source(file))
    assert found, f"{file} has no {name}"
    return eval(found[1])


def enum(name: str) -> list[str]:
    found = re.search(rf"enum class {name} : uint8_t \{{([^}}]*)\}}", source("call.h"))
    assert found
    return [value.strip() for value in found[1].split(",")]


def defined_schemas() -> dict[str, str]:
    """Of the ops that C++ defines in fcoll_native: name -> the rest of its schema."""
    text = source("torch_ops.cpp")
    calls = re.findall(r'm\.def\(((?:\s*"[^"]*")+)', text)
    schemas = ["".join(re.findall(r'"([^"]*)"', call)) for call in calls]
    return {schema[: schema.index("(")]: schema[schema.index("(") :] for schema in schemas}


def test_rows_with_a_kernel_are_the_ops_that_cpp_implements():
    text = source("torch_ops.cpp")
    block = text[text.index("TORCH_LIBRARY_IMPL(fcoll, CPU, m)") :]
    implemented = re.findall(r'm\.impl\("(\w+)"', block[: block.index("\n}")])
    assert sorted(implemented) == sorted(row.name for row in ROWS if row.native.kernel)


@pytest.mark.parametrize("row", [r for r in ROWS if r.native.kernel], ids=lambda r: r.name)
def test_a_kernel_has_the_schema_of_its_row(row):
    assert defined_schemas()[row.name] == row.schema


def test_rows_with_a_fast_path_are_the_functions_of_the_extension():
    text = source("python.cpp")
    functions_ = dict(re.findall(r"FUNCTION\((\w+), (\d)\)", text))
    fast = {row.name: len(row.native.fast) for row in ROWS if row.native.fast is not None}
    of_graphs = {"claim", "meet", "announce", "collect", "meet_and_reduce"}
    others = {"set_callbacks", "wait_tensor", "issued_in_thread", *of_graphs}
    assert {n: int(k) for n, k in functions_.items() if n not in others} == fast
    assert others < set(functions_)


@pytest.mark.parametrize("row", [r for r in ROWS if r.native.fast], ids=lambda r: r.name)
def test_a_fast_function_takes_arguments_of_the_public_one_in_its_order(row):
    public = list(inspect.signature(getattr(functions, row.name)).parameters)
    assert [p for p in public if p in row.native.fast] == list(row.native.fast)
    comment = re.search(rf"PyObject\* {row.name}\(Args args\) \{{  // (.*)", source("python.cpp"))
    assert comment and tuple(comment[1].split(", ")) == row.native.fast


def test_rows_that_are_read_in_place():
    text = source("compiled.cpp")
    found = re.findall(r'\{"(\w+)", \{Kind::\w+, (true|false)\}\}', text)
    reads = {name: "share" if slices == "true" else "whole" for name, slices in found}
    assert reads == {row.name: row.native.arena for row in ROWS if row.native.arena}


def test_reduce_ops_have_the_names_and_the_order_of_the_enum():
    assert enum("Op") == list(REDUCTIONS)
    named = re.findall(r'\{"(\w+)", Op::(\w+)\}', source("tensors.h"))
    assert all(name == value for name, value in named)
    assert {name for name, _ in named} == set(REDUCTIONS)


def test_sizes():
    assert constant("call.h", "MAX_RANKS") == shared_memory.MAX_RANKS
    assert constant("arena_file.h", "PLACE") == one_shot.PLACE_BYTES


def names(table: str) -> list[str]:
    found = re.search(rf"{table}\[\] = \{{([^}}]*)\}}", source("call.h"))
    assert found
    return re.findall(r'"(\w+)"', found[1])


def test_errors_show_the_names_of_the_table():
    assert set(names("KIND_NAMES")) <= set(COLLECTIVES)
    assert len(names("KIND_NAMES")) == len(enum("Kind"))
    assert names("OP_NAMES") == enum("Op")
    assert len(names("TYPE_NAMES")) == len(enum("Type"))
