"""AsyncCollectiveTensor waits once, at the first real use, and is then as good as plain.

Most tests need no ranks: ``started`` puts a Work of ours behind a tensor, which counts the waits
and delivers the values when it is waited for.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Iterator

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fcoll
from fcoll import AsyncCollectiveTensor, _torch
from fcoll.eager.async_tensor import in_flight

Tensor = torch.Tensor


class Delivery(dist.Work):
    """A collective under way: its values arrive when it is waited for."""

    def __init__(self, into: Tensor, values: Tensor) -> None:
        super().__init__()
        self.into, self.values = into, values
        self.waits = 0

    def wait(self, timeout=None) -> bool:
        self.waits += 1
        self.into.copy_(self.values)
        return True

    def start(self) -> None:
        _torch.register_work(self.into, self)


@pytest.fixture(autouse=True)
def nothing_left_under_way() -> Iterator[None]:
    yield
    assert _torch.work_registry_size() == 0


def started(values: Tensor) -> tuple[Tensor, Delivery]:
    work = Delivery(torch.full_like(values, -1), values)
    work.start()
    y = in_flight(work.into, "some_op")
    assert type(y) is AsyncCollectiveTensor
    return y, work


VALUES = torch.arange(6.0).reshape(2, 3)

VIEWS = {
    "view": lambda y: y.view(3, 2),
    "t": lambda y: y.t(),
    "slice": lambda y: y[1:, :2],
    "select": lambda y: y[1],
    "expand": lambda y: y.unsqueeze(0).expand(4, 2, 3),
    "permute": lambda y: y.permute(1, 0),
    "detach": lambda y: y.detach(),
    "unbind": lambda y: y.unbind(),
    "split": lambda y: y.split([1, 2], dim=1),
    "chunk": lambda y: y.chunk(3, dim=1),
    "views of views": lambda y: y.t()[1:].unsqueeze(0).split(1, dim=1),
}

LOOKS = {
    "add": (lambda y: y + 1, VALUES + 1),
    "matmul": (lambda y: y @ torch.eye(3), VALUES),
    "as the second argument": (lambda y: torch.ones(2, 3) * y, VALUES),
    "clone": (lambda y: y.clone(), VALUES),
    "contiguous of a view": (lambda y: y.t().contiguous(), VALUES.t()),
    "cat": (
        lambda y: torch.cat([y, torch.zeros(1, 3), y]),
        torch.cat([VALUES, torch.zeros(1, 3), VALUES]),
    ),
    "out": (lambda y: torch.add(y, 1, out=torch.empty(2, 3)), VALUES + 1),
    "item": (lambda y: y.sum().item(), 15.0),
    "item of a view": (lambda y: y[1, 2].item(), 5.0),
    "bool": (lambda y: bool(y[1, 2]), True),
    "float": (lambda y: float(y[1, 2]), 5.0),
    "format": (lambda y: f"{y[1, 2]:.1f}", "5.0"),
    "tolist": (lambda y: y.tolist(), VALUES.tolist()),
    "numpy": (lambda y: y.numpy().tolist(), VALUES.tolist()),
    "numpy.asarray": (lambda y: numpy.asarray(y).tolist(), VALUES.tolist()),
    "numpy of a view": (lambda y: y.t().numpy().tolist(), VALUES.t().tolist()),
    "iteration": (lambda y: [row.tolist() for row in y], VALUES.tolist()),
    "repr": (repr, f"AsyncCollectiveTensor({VALUES})"),
    "str": (str, f"AsyncCollectiveTensor({VALUES})"),
    "equal": (lambda y: torch.equal(y, VALUES), True),
    "data": (lambda y: y.data + 0, VALUES),
    "to": (lambda y: y.to(torch.float64), VALUES.double()),
    "nonzero": (lambda y: len(y.nonzero()), 5),
    "copy_ from it": (lambda y: torch.empty(2, 3).copy_(y), VALUES),
    "dlpack": (torch.from_dlpack, VALUES),
    "copy": (copy.copy, VALUES),
    "deepcopy": (copy.deepcopy, VALUES),
    "deepcopy of a view": (lambda y: copy.deepcopy(y[1:]), VALUES[1:]),
    "deepcopy in a container": (lambda y: copy.deepcopy({"a": [y]})["a"][0], VALUES),
    "pickle": (lambda y: pickle.loads(pickle.dumps(y)), VALUES),
    "torch.save": (lambda y: saved_and_loaded(y), VALUES),
    "wait": (lambda y: y.wait(), VALUES),
    "trigger_wait": (lambda y: y.trigger_wait(), VALUES),
    "fcoll.wait_tensor": (fcoll.wait_tensor, VALUES),
    "funcol.wait_tensor": (funcol.wait_tensor, VALUES),
    "data_ptr": (lambda y: y.data_ptr() == y.elem.data_ptr(), True),
    "share_memory_": (lambda y: y.share_memory_() + 0, VALUES),
}


def saved_and_loaded(x: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()))


@pytest.mark.parametrize("name", VIEWS)
def test_views_stay_async(name):
    y, work = started(VALUES)
    views = VIEWS[name](y)
    assert work.waits == 0
    for view in views if isinstance(views, (list, tuple)) else [views]:
        assert type(view) is AsyncCollectiveTensor
        assert not view.completed
    want = VIEWS[name](VALUES)
    torch.testing.assert_close(_values(views), want)
    assert work.waits == 1


def _values(views):
    return type(views)(v + 0 for v in views) if isinstance(views, (list, tuple)) else views + 0


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_at_the_values_waits_once_and_is_right(name):
    look, want = LOOKS[name]
    y, work = started(VALUES)
    assert work.waits == 0
    assert _plain_equal(look(y), want)
    assert work.waits == 1
    work.start()  # as if the storage had more work under way: a completed tensor must not care
    assert y.completed
    assert _plain_equal(look(y), want)
    assert work.waits == 1
    torch.ops._c10d_functional.wait_tensor(work.into)


def _plain_equal(got, want) -> bool:
    if isinstance(want, Tensor):
        return type(got) is Tensor and torch.equal(got, want)
    return got == want


def test_views_of_a_completed_one_are_plain():
    y, _ = started(VALUES)
    fcoll.wait_tensor(y)
    for view in VIEWS.values():
        got = view(y)
        for part in got if isinstance(got, (list, tuple)) else [got]:
            assert type(part) is Tensor


def test_a_view_knows_that_its_base_was_waited_for_and_the_other_way_round():
    for first, then in [(lambda y, v: y, lambda y, v: v), (lambda y, v: v, lambda y, v: y)]:
        y, work = started(VALUES)
        v = y[1:].t()
        fcoll.wait_tensor(first(y, v))
        assert y.completed and v.completed
        work.start()
        assert torch.equal(then(y, v) + 0, then(VALUES, VALUES[1:].t()))
        assert work.waits == 1
        torch.ops._c10d_functional.wait_tensor(work.into)


def test_metadata_does_not_wait():
    y, work = started(VALUES)
    assert (y.shape, y.dtype, y.device.type, y.stride()) == ((2, 3), torch.float32, "cpu", (3, 1))
    assert y.is_contiguous() and len(y) == 2 and y.numel() == 6 and not y.requires_grad
    assert work.waits == 0
    fcoll.wait_tensor(y)


def test_in_place_changes_are_seen_by_all():
    y, _ = started(VALUES)
    v = y[1]
    assert torch.equal(y.add_(1) + 0, VALUES + 1)
    y[0, 0] = 7
    v.mul_(2)
    assert y.tolist() == [[7, 2, 3], [8, 10, 12]]
    assert v.tolist() == [8, 10, 12]


def test_as_out():
    y, work = started(VALUES)
    torch.add(VALUES, 10, out=y)
    assert work.waits == 1  # else the late values would overwrite those of the addition
    assert torch.equal(y + 0, VALUES + 10)


def test_it_is_torchs_class_and_does_not_nest():
    y, _ = started(VALUES)
    assert isinstance(y, funcol.AsyncCollectiveTensor)
    with pytest.raises(TypeError, match="does not hold another"):
        AsyncCollectiveTensor(y)
    assert type(y.wait()) is Tensor


def test_flatten_and_unflatten():
    y, work = started(VALUES)
    names, meta = y.__tensor_flatten__()
    inner = {name: getattr(y, name) for name in names}
    again = AsyncCollectiveTensor.__tensor_unflatten__(inner, meta, y.shape, y.stride())
    assert type(again) is AsyncCollectiveTensor
    assert work.waits == 0
    assert torch.equal(again + 0, VALUES)
    fcoll.wait_tensor(y)


def test_as_a_tangent_it_becomes_plain():
    y, work = started(VALUES)
    coerced = y.__coerce_same_metadata_as_tangent__(None, Tensor)
    assert _plain_equal(coerced, VALUES)
    assert work.waits == 1
    assert y.__coerce_same_metadata_as_tangent__(None, DTensor) is None


def test_as_a_leaf_it_has_a_gradient():
    y, _ = started(VALUES)
    y.requires_grad_()
    (y**2).sum().backward()
    assert torch.equal(y.grad, 2 * VALUES)


def test_in_inference_mode():
    with torch.inference_mode():
        y, _ = started(VALUES)
        assert torch.equal(y.t() + 0, VALUES.t())


def test_from_another_thread():
    y, work = started(VALUES)
    got = []
    thread = threading.Thread(target=lambda: got.append(y * 2))
    thread.start()
    thread.join()
    assert _plain_equal(got[0], VALUES * 2)
    assert torch.equal(y + 0, VALUES)
    assert work.waits == 1


class Held(Delivery):
    """Arrives when it is let go."""

    def __init__(self, into: Tensor, values: Tensor) -> None:
        super().__init__(into, values)
        self.waited_for, self.let_go = threading.Event(), threading.Event()

    def wait(self, timeout=None) -> bool:
        self.waited_for.set()
        assert self.let_go.wait(10)
        return super().wait(timeout)


def test_two_threads_that_wait_both_see_the_values():
    work = Held(torch.full_like(VALUES, -1), VALUES)
    work.start()
    y = in_flight(work.into, "some_op")
    got = []
    threads = [threading.Thread(target=lambda: got.append(y.tolist())) for _ in range(2)]
    threads[0].start()
    assert work.waited_for.wait(10)
    threads[1].start()
    threads[1].join(0.1)  # time enough to see values that have not arrived
    work.let_go.set()
    for thread in threads:
        thread.join()
    assert got == [VALUES.tolist()] * 2
    assert work.waits == 1


# -- on ranks ---


def plain_in_a_world_of_one() -> list[Tensor]:
    x = torch.ones(2)
    return [
        fcoll.all_reduce(x),
        fcoll.all_gather_into_tensor(x),
        fcoll.all_to_all_single(x),
        fcoll.permute(x, [0]),
        *fcoll.all_reduce_coalesced([x, x]),
    ]


def test_a_world_of_one_gives_plain_tensors(solo):
    for y in plain_in_a_world_of_one():
        assert type(y) is Tensor
        assert y.tolist() == [1, 1]


def waiting_keeps_the_graph(rank: int) -> dict[str, list[float]]:
    grads = {}
    for name, wait in {
        "y.wait()": lambda y: y.wait(),
        "fcoll.wait_tensor": fcoll.wait_tensor,
        "funcol.wait_tensor": funcol.wait_tensor,
        "nothing": lambda y: y,
        "a view, waited for": lambda y: y.view(2).wait(),
        "waited for twice": lambda y: fcoll.wait_tensor(y.wait()),
        "completed": lambda y: (fcoll.wait_tensor(y), y)[1],
    }.items():
        x = torch.tensor([1.0, rank], requires_grad=True)
        y = fcoll.all_reduce(x)
        assert isinstance(y, AsyncCollectiveTensor) and y.requires_grad and not y.is_leaf
        z = wait(y)
        assert name in ("nothing", "completed") or type(z) is Tensor
        (z * (rank + 1)).sum().backward()
        grads[name] = x.grad.tolist()
    return grads


def test_waiting_keeps_the_autograd_graph(ranks2):
    for grads in ranks2.run(waiting_keeps_the_graph):
        assert all(grad == [3, 3] for grad in grads.values()), grads


def inside_dtensor(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    y = fcoll.all_reduce(torch.ones(2, 2))
    d = DTensor.from_local(y, mesh, [Replicate()])
    assert isinstance(d.to_local(), Tensor)
    assert (d + 1).full_tensor().tolist() == [[3, 3], [3, 3]]
    assert y.completed

    y = fcoll.all_reduce(torch.ones(2, 2))
    sharded = DTensor.from_local(y, mesh, [Shard(0)])
    assert (sharded @ sharded.redistribute(placements=[Replicate()]).T).to_local().sum() == 64
    assert sharded.full_tensor().shape == (4, 2)

    x = torch.ones(2, requires_grad=True)
    d = DTensor.from_local(fcoll.all_reduce(x), mesh, [Replicate()])
    (d.to_local() * 2).sum().backward()
    assert x.grad.tolist() == [4, 4]


def test_inside_dtensor(ranks2):
    ranks2.run(inside_dtensor)


def mixed_with_torchs(rank: int) -> None:
    world = dist.group.WORLD
    x = torch.tensor([1.0, rank])
    ours, theirs = fcoll.all_reduce(x), funcol.all_reduce(x, "sum", world)
    assert isinstance(theirs, funcol.AsyncCollectiveTensor)
    for waited in (funcol.wait_tensor(ours), fcoll.wait_tensor(theirs)):
        assert type(waited) is Tensor
        assert waited.tolist() == [2, 1]
    ours, theirs = fcoll.all_reduce(x), funcol.all_reduce(x, "sum", world)
    assert (ours + theirs).tolist() == [4, 2]
    # each as the input of the other's
    assert fcoll.all_reduce(funcol.all_reduce(x, "sum", world)).tolist() == [4, 2]
    assert funcol.all_reduce(fcoll.all_reduce(x), "sum", world).tolist() == [4, 2]
    # an op of one namespace, waited for by the other's
    name = world.group_name
    raw = torch.ops.fcoll.all_reduce(x, "sum", name)
    assert torch.ops._c10d_functional.wait_tensor(raw).tolist() == [2, 1]
    raw = torch.ops._c10d_functional.all_reduce(x, "sum", name)
    assert torch.ops.fcoll.wait_tensor(raw).tolist() == [2, 1]


def test_mixing_with_torchs_functional_collectives(ranks2):
    ranks2.run(mixed_with_torchs)


def used_in_any_order(rank: int) -> None:
    xs = [torch.full((3,), float(i + rank)) for i in range(4)]
    ys = [fcoll.all_reduce(x) for x in xs] + fcoll.all_reduce_coalesced(xs)
    assert all(isinstance(y, AsyncCollectiveTensor) for y in ys)
    wants = [2 * i + 1 for i in range(4)] * 2
    for i in (6, 1, 7, 0):
        assert ys[i].tolist() == [wants[i]] * 3
    assert torch.cat(ys).tolist() == [w for w in wants for _ in range(3)]
    got: list[list[float]] = []
    late = fcoll.all_gather_into_tensor(torch.tensor([float(rank)]))
    thread = threading.Thread(target=lambda: got.append(late.tolist()))
    thread.start()
    thread.join()
    assert got == [[0, 1]]


def test_several_in_flight_are_used_in_any_order_and_thread(ranks2):
    ranks2.run(used_in_any_order)


# -- as an input of torch.compile --------------------------------------------------------------


def as_graph_input(rank: int, backend: str, torchs_context: bool) -> None:
    torch._dynamo.reset()

    def f(y: Tensor) -> tuple[Tensor, Tensor]:
        return y * 2, y.t() + 1

    def waits(y: Tensor) -> Tensor:
        return fcoll.wait_tensor(y) * 2

    compiled, compiled_waits = (
        torch.compile(g, backend=backend, fullgraph=True) for g in (f, waits)
    )
    context = funcol.allow_inflight_collective_as_graph_input_ctx(torchs_context)
    with context:
        for _ in range(2):
            x = torch.arange(4.0).reshape(2, 2) + rank
            want = 2 * torch.arange(4.0).reshape(2, 2) + 1
            double, transposed = compiled(fcoll.all_reduce(x))
            assert torch.equal(double + 0, want * 2)
            assert torch.equal(transposed + 0, want.t() + 1)
            assert torch.equal(compiled_waits(fcoll.all_reduce(x)) + 0, want * 2)
            y = fcoll.all_reduce(x)
            assert torch.equal(compiled(y.t())[0] + 0, want.t() * 2)  # a view in flight
            assert torch.equal(compiled(y)[0] + 0, want * 2)  # completed
    leaf = x.requires_grad_()
    compiled(fcoll.all_reduce(leaf))[0].sum().backward()
    assert leaf.grad.tolist() == [[4, 4], [4, 4]]


# Dynamo looks at .grad of any input, plain ones too.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("torchs_context", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_as_the_input_of_a_compiled_function(ranks2, backend, torchs_context):
    ranks2.run(as_graph_input, backend, torchs_context)


# -- never waited for ---


def leaves_three_unwaited(rank: int) -> int:
    x = torch.ones(2)
    kept = fcoll.all_reduce(x)
    for _ in range(2):
        fcoll.all_gather_into_tensor(x)  # dropped
    fcoll.broadcast(x, 0).sum()
    dist.barrier()  # so that none is aborted by a peer's exit
    return len(kept)


def waits_for_all(rank: int) -> None:
    x = torch.ones(2, requires_grad=True)
    y = fcoll.all_reduce(x)[1:]
    y.sum().backward()
    for z in fcoll.all_reduce_coalesced([x, x]):
        z.tolist()
    fcoll.barrier()


def test_the_unwaited_are_reported_at_exit_with_op_line_and_count():
    seen = launch(leaves_three_unwaited, 2)
    assert seen.exitcodes == [0, 0]
    first = leaves_three_unwaited.__code__.co_firstlineno
    for stderr in seen.stderr:
        report = stderr[stderr.index("fcoll:") :].splitlines()[:3]
        assert report[0].startswith("fcoll: 3 collectives were issued and never waited for")
        assert sorted(report[1:]) == [
            f"  all_gather_into_tensor at tests/eager/test_async_tensor.py:{first + 4} (x2)",
            f"  all_reduce at tests/eager/test_async_tensor.py:{first + 2}",
        ]


def test_nothing_is_reported_when_all_were_waited_for():
    seen = launch(waits_for_all, 2)
    assert seen.exitcodes == [0, 0]
    for stderr in seen.stderr:
        assert "fcoll" not in stderr
        assert "unwaited" not in stderr
