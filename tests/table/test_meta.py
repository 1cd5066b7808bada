"""What tracers see of a collective: fake results, symbolic sizes, side effects, schemas, tags."""

from __future__ import annotations

from collections.abc import Sequence

import cases
import pytest
import strategies
import sympy
import torch
import torch.distributed as dist
from cases import COLLECTIVES, ROWS, Case, default_case
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fcoll
from fcoll._torch import work_registry_size
from fcoll.table.collectives import row_of

Tensor = torch.Tensor
WITH_TENSORS = [op for op in ROWS if op != "barrier"]


# -- fake results are like real ones ---


def metadata(x: Tensor) -> tuple:
    return (tuple(x.shape), x.stride(), x.dtype, str(x.device), x.storage_offset(), x.layout)


def real_and_fake_metadata(rank: int, wanted: Sequence[Case]) -> list[str]:
    """Where a fake result is unlike the real one."""
    found = []
    for _, case, xs, group in cases.each_case(rank, wanted):
        returns_argument = case.overwrites or case.op == "wait_tensor"
        if returns_argument and case.layout not in ("contiguous", "transposed"):
            continue  # torch's fake wait is an empty_like: it forgets gaps and offsets
        works = work_registry_size()
        try:
            real = [metadata(y) for y in cases.call(case, xs, group)]
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(x) for x in xs]
                outs = cases.call(case, fakes, group)
        except Exception as error:
            error.add_note(f"in {case}")
            raise
        if not all(isinstance(y, FakeTensor) for y in outs):
            found.append(f"{case}: {[type(y) for y in outs]}")
        if [metadata(y) for y in outs] != real:
            found.append(f"{case}: fake {[metadata(y) for y in outs]}, real {real}")
        if work_registry_size() != works:
            found.append(f"{case}: work left outstanding")
    return found


def check_fake(pool, wanted: Sequence[Case]) -> None:
    __tracebackhide__ = True
    found = [text for texts in pool.run(real_and_fake_metadata, wanted) for text in texts]
    if found:
        pytest.fail("\n".join(found[:5]), False)


@pytest.mark.parametrize("op", ROWS)
def test_fake_results_in_every_layout(ranks2, op):
    some = list(strategies.grid(op, 2))[::3]  # every shape, and of five layouts each in its turn
    check_fake(ranks2, [*some, *strategies.uneven(op, 2)])


@pytest.mark.parametrize("op", ROWS)
def test_fake_results_of_any_call(ranks2, op):
    @settings(max_examples=8, derandomize=True, database=None)
    @given(strategies.a_case(op, 2))
    def property(case):
        check_fake(ranks2, [case])

    property()


# Nobody sends to itself; wait_tensor gives its argument back, as torch's does.
@pytest.mark.parametrize("op", [op for op in ROWS if op not in (*cases.P2P, "wait_tensor")])
def test_opcheck(solo, op):
    """torch's own checks: no alias of an input comes back, nothing unnamed is written."""
    case = default_case(op, 1, op_level=True)
    xs = cases.inputs_of(case, 0, [0])
    named = cases.arguments(case, xs, None)
    overload, names = cases.target_of(op, True)
    kwargs = cases.keywords(op, names, xs, named)
    torch.library.opcheck(overload, (), kwargs, test_utils=("test_schema", "test_faketensor"))


# -- symbolic sizes ---


def at_size(op: str, rows: int, columns: int) -> Case:
    """A call with sizes above 1, which tracers keep symbolic."""
    shapes = ((rows, columns), (rows, columns, 5)) if op in cases.LISTS else ((rows, columns),)
    return default_case(op, dist.get_world_size(), shapes=shapes)


def inputs_at(op: str, rank: int, rows: int, columns: int) -> list[Tensor]:
    return cases.inputs_of(at_size(op, rows, columns), rank, range(dist.get_world_size()))


def a_function(op: str, rank: int):
    """The call as a function of its tensors, of any size."""
    case = at_size(op, 4, 6)
    return cases.prepared(case, cases.arguments(case, inputs_at(op, rank, 4, 6), None))


def assert_like_eager(traced, eager, xs: list[Tensor]) -> None:
    ys = [x.clone() for x in xs]
    got, want = traced(*xs), eager(*ys)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(xs, ys, rtol=0, atol=0)  # in-place ops wrote the same


def trace_with_symbols(rank: int, op: str) -> None:
    fn = a_function(op, rank)
    graph = make_fx(fn, tracing_mode="symbolic")(*inputs_at(op, rank, 4, 6))
    for node in graph.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        assert all(isinstance(s, torch.SymInt) for s in fake.shape[:2]), f"{node} became {fake}"
    assert_like_eager(graph, fn, inputs_at(op, rank, 10, 14))


@pytest.mark.parametrize("op", WITH_TENSORS)
def test_make_fx_keeps_sizes_symbolic(ranks2, op):
    ranks2.run(trace_with_symbols, op)


class Graphs:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        torch.compiler.reset()  # what earlier tests compiled would count towards Dynamo's limit
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list):
        self.count += 1
        return graph


def compile_with_symbols(rank: int, op: str) -> int:
    """How many graphs three sizes took."""
    graphs = Graphs()
    fn = a_function(op, rank)
    compiled = torch.compile(fn, fullgraph=True, dynamic=True, backend=graphs)
    for rows, columns in ((4, 6), (10, 14), (6, 5)):
        assert_like_eager(compiled, fn, inputs_at(op, rank, rows, columns))
    return graphs.count


@pytest.mark.parametrize("op", WITH_TENSORS)
def test_compile_keeps_sizes_symbolic(ranks2, op):
    assert ranks2.run(compile_with_symbols, op) == [1, 1]


def exchange(x: Tensor, output_splits: Tensor, input_splits: Tensor) -> Tensor:
    return fcoll.all_to_all_single(x, None, output_splits.tolist(), input_splits.tolist())


def exchange_by_data(rank: int) -> int:
    """Expert parallelism: how many rows go where is known when the step runs, not before."""
    graphs = Graphs()
    traced = None
    for rows in ([[1, 2], [3, 4]], [[5, 0], [2, 6]], [[0, 4], [0, 7]]):
        splits = torch.tensor(rows)
        args = (torch.arange(sum(rows[rank])) * 1.0 + rank, splits[:, rank].clone(), splits[rank])
        if traced is None:
            traced = make_fx(exchange, tracing_mode="symbolic")(*args)
            with torch._dynamo.config.patch(capture_scalar_outputs=True):
                compiled = torch.compile(exchange, fullgraph=True, dynamic=True, backend=graphs)
                compiled(*args)
        want = exchange(*args)
        torch.testing.assert_close(fcoll.wait_tensor(traced(*args)), fcoll.wait_tensor(want))
        torch.testing.assert_close(compiled(*args), fcoll.wait_tensor(want))
    return graphs.count


def test_splits_from_data(ranks2):
    assert ranks2.run(exchange_by_data) == [1, 1]


# -- what has an effect stays in a graph ---


def nodes_after_cleaning(rank: int, op: str, op_level: bool) -> list[str]:
    """The collectives in a traced call whose results nobody uses, after dead code is gone."""
    case = default_case(op, dist.get_world_size(), op_level=op_level)
    xs = cases.inputs_of(case, rank, range(dist.get_world_size()))
    fn = cases.prepared(case, cases.arguments(case, xs, None))

    def unused(*xs):
        fn(*xs)

    graph = make_fx(unused, tracing_mode="fake")(*xs)
    graph.graph.eliminate_dead_code()
    rows = [row_of(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [row.name for row in rows if row is not None]


@pytest.mark.parametrize("op_level", [False, True], ids=["function", "op"])
@pytest.mark.parametrize("op", ROWS)
def test_waits_and_effects_survive(ranks2, op, op_level):
    for names in ranks2.run(nodes_after_cleaning, op, op_level):
        assert op in names
        assert "wait_tensor" in names


@pytest.mark.parametrize("op", [*cases.P2P, "barrier", "wait_tensor"])
def test_effects_survive_without_a_wait(op):
    graph = torch.fx.Graph()
    graph.call_function(getattr(torch.ops.fcoll, op).default, ())
    graph.eliminate_dead_code()
    assert len(graph.nodes) == 1


def swap(x: Tensor, peer: int) -> Tensor:
    token = fcoll.isend(x, peer)
    y = fcoll.irecv(x, peer)
    fcoll.wait_tensor(token)
    return y


def traced_swap(rank: int) -> bool:
    """Messages larger than a socket's buffers: a send is complete when its receive has begun."""
    x = torch.full((1 << 22,), float(rank))
    graph = make_fx(swap, tracing_mode="fake")(x, 1 - rank)
    return bool(graph(x, 1 - rank).eq(1 - rank).all())


def test_ranks_that_send_to_each_other_do_not_wait_for_ever(ranks2):
    assert ranks2.run(traced_swap) == [True, True]


# -- the table and torch's own ops ---


def overload_of(target: str):
    namespace, name = target.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


# Every functional collective that torch has; the row has the op's own name.
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor")
NO_COLLECTIVES = ("_c10d_functional::_wrap_tensor_autograd", "_dtensor::mesh_get_process_group")
NO_COLLECTIVES += ("_c10d_functional::wait_tensors",)  # from 2.15 on: wait_tensor of each
TORCH_OPS = [
    name
    for name in sorted(torch._C._dispatch_get_all_op_names())
    if name.split("::")[0] in NAMESPACES and name not in NO_COLLECTIVES
]


@pytest.mark.parametrize("name", TORCH_OPS)
def test_torchs_collectives_have_rows(name):
    assert row_of(name) is COLLECTIVES[name.split("::")[1]]


TARGETS = [(op, target) for op, row in COLLECTIVES.items() for target in row.targets]
# c10d_functional is the older namespace: its ops name the group by tag, ranks and size.
TWINS = [(op, target) for op, target in TARGETS if not target.startswith("c10d_functional::")]


@pytest.mark.parametrize(("op", "target"), TARGETS)
def test_row_of_every_target(op, target):
    assert row_of(overload_of(target)) is COLLECTIVES[op]
    assert row_of(target) is COLLECTIVES[op]


@pytest.mark.parametrize("op", ROWS)
def test_row_of_own_ops(op):
    assert row_of(getattr(torch.ops.fcoll, op).default) is COLLECTIVES[op]
    assert row_of(getattr(torch.ops.fcoll, op)) is COLLECTIVES[op]


def test_row_of_other_ops():
    assert row_of(torch.ops.aten.add.Tensor) is None
    assert row_of(len) is None


def writes(argument) -> tuple | None:
    alias = argument.alias_info
    return alias and (alias.is_write, alias.before_set, alias.after_set)


@pytest.mark.parametrize(("op", "target"), TWINS)
def test_schema_begins_like_torchs(op, target):
    ours = getattr(torch.ops.fcoll, op).default._schema
    theirs = overload_of(target)._schema
    for mine, its in zip(ours.arguments, theirs.arguments, strict=False):
        assert mine.name == its.name
        assert mine.kwarg_only == its.kwarg_only
        assert writes(mine) == writes(its)
        # torch takes Any for a group or its name, and from 2.15 on for a reduce op or its name
        if its.name != "group_name" and (its.name, str(its.type)) != ("reduce_op", "Any"):
            assert str(mine.type) == str(its.type), mine.name
    added = ours.arguments[len(theirs.arguments) :]
    assert len(ours.arguments) >= len(theirs.arguments)
    assert all(a.has_default_value() for a in added)
    assert [str(r.type) for r in ours.returns] == [str(r.type) for r in theirs.returns]


@pytest.mark.parametrize(("op", "target"), TWINS)
def test_tags_are_torchs(op, target):
    ours = getattr(torch.ops.fcoll, op).default
    for tag in (torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides, torch.Tag.out):
        assert (tag in ours.tags) == (tag in overload_of(target).tags), tag


@pytest.mark.parametrize("op", ROWS)
def test_row_is_complete(op):
    row = COLLECTIVES[op]
    assert all(callable(rule) for rule in (row.check, row.shape, row.run))
    assert row.adjoint is not None or op in ("barrier", "wait_tensor"), "no rule for the gradient"


@pytest.mark.parametrize("op", ROWS)
def test_cost_takes_numbers_and_symbols(op):
    row = COLLECTIVES[op]
    n, b = sympy.symbols("n b", positive=True)
    symbolic = sympy.sympify(row.wire_bytes(n, b)).subs({n: 4, b: 1024})
    assert float(symbolic) == row.wire_bytes(4, 1024) <= 2 * 1024
    assert (symbolic > 0) == (op not in ("barrier", "wait_tensor")), "only these move nothing"
    assert int(sympy.sympify(row.steps(n)).subs(n, 4)) == row.steps(4)
