"""The fast path of eager (native/python.cpp): which calls take it, and that values are the same."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fcoll
from fcoll import _torch
from fcoll.transport.native import build

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.usefixtures("compiled", "headers"),
]
NATIVE = {"FCOLL_NATIVE": "1"}


@pytest.fixture(scope="module")
def headers(compiled):
    if build._extension_path(build.library_path()) is None:
        pytest.skip("needs Python's headers")


def served(x, op="sum", group=None) -> bool:
    """Does an all_reduce of x take the fast path? If so it has been made, and is right."""
    y = build.fast.all_reduce(x, op, group, "sum")
    if y is NotImplemented:
        return False
    assert torch.equal(fcoll.wait_tensor(y).detach(), x.detach() * dist.get_world_size())
    return True


# -- every collective, on the fast path and without it --


def calls(rank, n):
    x = torch.arange(24.0).reshape(4, 6) + rank
    lists = [x, (x + 1).double(), x[0, 0], x.int(), x[:, ::2]]
    yield "all_reduce", (x, "max", None, "sum")
    yield "all_reduce", (x.t(), "sum", None, "sum")
    yield "all_gather_into_tensor", (x, None, 0)
    yield "all_gather_into_tensor", (x, None, -1)
    yield "all_gather_into_tensor", (x.t(), None, 1)
    yield "all_gather_into_tensor", (x[0, 0], None, 0)
    yield "reduce_scatter_tensor", (x, "sum", None, 0)
    yield "reduce_scatter_tensor", (x, "avg", None, 1)
    yield "reduce_scatter_tensor", (x.t(), "sum", None, -1)
    yield "all_to_all_single", (x, None, None, None)
    yield "all_to_all_single", (x, None, *(([1, 3], (1, 3)) if rank == 0 else ([3, 1], (3, 1))))
    yield "all_to_all_single", (x[:, :3], None, [2, 2], [2, 2])
    yield "broadcast", (x, n - 1, None)
    yield "broadcast", (x.t(), 0, None)
    yield "barrier", (None,)
    yield "all_reduce_coalesced", (lists, "sum", None, "sum")
    yield "all_gather_into_tensor_coalesced", (tuple(lists), None, 0)
    yield "reduce_scatter_tensor_coalesced", ([x, x.int(), x[:, ::2], x[:, :0]], "sum", None, 0)


def public(name, args):
    """The public function with the arguments of the extension's."""
    names = fcoll.COLLECTIVES[name].native.fast
    return getattr(fcoll, name)(**dict(zip(names, args, strict=True)))


def both_ways(rank):
    fcoll.all_reduce(torch.ones(1)).tolist()
    extension, made = build.fast, set()
    for name, args in calls(rank, 2):
        fast = getattr(extension, name)(*args)
        assert fast is not NotImplemented, (name, args)
        build.fast = None
        slow = public(name, args)
        build.fast = extension
        if name == "barrier":
            assert fast is slow is None
            fast = slow = []
        for a, b in zip(*(y if isinstance(y, list) else [y] for y in (fast, slow)), strict=True):
            a, b = fcoll.wait_tensor(a), fcoll.wait_tensor(b)
            assert type(a) is torch.Tensor and a.is_contiguous()
            assert a.dtype == b.dtype and torch.equal(a, b), (name, args, a, b)
        made.add(name)
    of_graphs = {"claim", "meet", "announce", "collect", "meet_and_reduce"}
    of_reducers = {"Arrivals", "Recorded", "SharedBuckets", "sum_in_place"}
    of_backend = {"Backend", "make_backend", "split_backends_by"}
    # what compiled graphs, reducers and torch's groups call has no long way
    others = {"wait_tensor", "issued_in_thread", "set_callbacks"}
    others |= of_graphs | of_reducers | of_backend
    assert made == {name for name in dir(extension) if name[0] != "_"} - others


def test_both_ways_give_the_same(shared2):
    shared2.run(both_ways)


def one_rank_has_no_fast_path(rank):
    """What a rank sends does not depend on its way."""
    fcoll.all_reduce(torch.ones(1)).tolist()
    if rank == 1:
        build.fast, kept = None, build.fast
    for name, args in calls(rank, 2):
        y = public(name, args)
        for part in y if isinstance(y, list) else [y] if name != "barrier" else []:
            fcoll.wait_tensor(part)
    if rank == 1:
        build.fast = kept
    return fcoll.all_reduce(torch.ones(1)).item()


def test_ranks_may_differ_in_their_way(shared2):
    assert shared2.run(one_rank_has_no_fast_path) == [2.0, 2.0]


# -- who must be asked first --


class Records(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class RecordsFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Sub(torch.Tensor):
    pass


def guards(rank):
    for kind in (DeprecationWarning, FutureWarning):  # torch's own, of torch.jit: 2.13; newer
        warnings.simplefilter("ignore", kind)
    x = torch.ones(3)
    fcoll.all_reduce(x).tolist()
    leaf = torch.ones(3, requires_grad=True)
    took = {"plain": served(x), "parameter": served(torch.nn.Parameter(x.clone(), False))}
    took["grad"] = served(leaf)
    with torch.no_grad():
        took["no_grad"] = served(leaf)
    with torch.inference_mode():
        took["inference"] = served(torch.ones(3)) and served(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        took["autocast"] = served(x)
    with Records():
        took["dispatch mode"] = served(x)
    with RecordsFunctions():
        took["function mode"] = served(x)
    with torch.profiler.profile():
        took["profiler"] = served(x)
    took["vmap"] = inside(lambda f: torch.vmap(f)(torch.ones(2, 3)), x)
    took["grad transform"] = inside(lambda f: torch.func.grad(f)(x), x)
    took["make_fx"] = inside(lambda f: make_fx(f)(x), x)
    took["fake"] = inside(lambda f: make_fx(f, tracing_mode="fake")(x), x)
    took["jit.trace"] = inside(lambda f: torch.jit.trace(f, (x,), check_trace=False), x)
    took["after them"] = served(x)
    with torch.autograd.forward_ad.dual_level():
        took["tangent"] = served(torch.autograd.forward_ad.make_dual(x, x))
    took["subclass"] = served(x.as_subclass(Sub))
    took["sparse"] = served(x.to_sparse())
    took["meta"] = served(x.to("meta"))
    took["conj"] = served(torch.ones(3, dtype=torch.complex64).conj())
    took["neg"] = served(torch.ones(3, dtype=torch.complex64).conj().imag)
    took["float8"] = served(x.to(torch.float8_e4m3fn))
    took["avg of ints"] = served(x.int(), "avg")
    took["no such op"] = served(x, "SUM")
    took["not a tensor"] = build.fast.all_reduce([1.0], "sum", None, "sum") is not NotImplemented
    took["empty"] = served(x[:0])
    return took


def inside(run, x) -> bool:
    """Does a call that is made inside run(f) take it, or a wait?"""
    took = []

    def f(y):
        took.extend(build.fast.all_reduce(z, "sum", None, "sum") for z in (x, y))
        took.extend(map(build.fast.wait_tensor, (x, y)))
        return y.sum()

    run(f)
    return any(y is not NotImplemented for y in took)


SHORT = {"plain", "parameter", "no_grad", "inference", "autocast", "after them"}


def test_only_ordinary_calls_take_it(shared2):
    for took in shared2.run(guards):
        assert took == {k: k in SHORT for k in took}


def ways_to_name_a_group(rank):
    x = torch.ones(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    group = dist.new_group([0, 1])
    took = {}
    named = {
        "none": None,
        "world": dist.group.WORLD,
        "group": group,
        "name": group.group_name,
        "mesh": mesh,
        "axis": (mesh, "tp"),
        "number": (mesh, 0),
    }
    for key, g in named.items():
        fcoll.all_reduce(x, "sum", g).tolist()
        took[key] = served(x, "sum", g)
    for key, g in {"ranks": [0, 1], "bad axis": (mesh, "dp"), "bad": "no such", "int": 3}.items():
        took[key] = served(x, "sum", g)
    fresh = dist.new_group([0, 1])
    took["first use"] = served(x, "sum", fresh)
    return took


def test_groups_in_every_form(shared2):
    for took in shared2.run(ways_to_name_a_group):
        fast = {"none", "world", "group", "name", "mesh", "axis", "number"}
        assert took == {k: k in fast for k in took}


def destroyed(rank):
    x, took = torch.ones(2), {}
    group = dist.new_group([0, 1])
    name = group.group_name
    fcoll.all_reduce(x, "sum", group).tolist()
    assert served(x, "sum", group)
    dist.barrier()
    dist.destroy_process_group(group)
    took["held"] = served(x, "sum", group)
    took["by name"] = served(x, "sum", name)
    with pytest.raises(fcoll.errors.UnknownGroup, match=r"test_fast_path\.py"):
        fcoll.all_reduce(x, "sum", group)
    world = dist.group.WORLD
    fcoll.all_reduce(x).tolist()
    assert served(x)
    dist.barrier()
    dist.destroy_process_group()
    took["world"] = served(x) or served(x, "sum", world)
    with pytest.raises(fcoll.errors.NotInitialized):
        fcoll.all_reduce(x)
    return took


def test_a_destroyed_group_is_never_served():
    done = launch(destroyed, 2, env=NATIVE)
    assert not any(done.errors), done.errors
    assert done.results == [{"held": False, "by name": False, "world": False}] * 2


def groups_that_come_and_go(rank):
    """An object may lie where one of a group that is gone has been."""
    x, took = torch.ones(2), []
    for _ in range(6):
        group = dist.new_group([0, 1])
        first = served(x, "sum", group)
        fcoll.all_reduce(x, "sum", group).tolist()
        took.append((first, served(x, "sum", group)))
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
    return took


def test_groups_that_come_and_go(shared2):
    assert shared2.run(groups_that_come_and_go) == [[(False, True)] * 6] * 2


def same_name_again(rank):
    """torch gives a destroyed group's name to a new one: the old object must not reach it."""
    x, old = torch.ones(2), dist.group.WORLD
    fcoll.all_reduce(x).tolist()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    before = served(x), served(x, "sum", old)
    fcoll.all_reduce(x).tolist()
    return old.group_name == dist.group.WORLD.group_name, before, served(x), served(x, "sum", old)


def test_a_name_given_again_is_not_the_old_group():
    done = launch(same_name_again, 2, env=NATIVE)
    assert done.results == [(True, (False, False), True, False)] * 2, done.errors


def modes_see(rank, mode):
    fcoll.all_reduce(torch.ones(1)).tolist()
    with mode() as m:
        fcoll.wait_tensor(fcoll.all_reduce(torch.ones(2)))
        fcoll.wait_tensor(fcoll.all_to_all_single(torch.ones(2)))
        [fcoll.wait_tensor(y) for y in fcoll.all_reduce_coalesced([torch.ones(2)])]
    return m.seen


@pytest.mark.parametrize("mode", [Records, RecordsFunctions])
def test_modes_see_the_ops(shared2, mode):
    for seen in shared2.run(modes_see, mode):
        for name in ("all_reduce", "all_to_all_single", "all_reduce_coalesced"):
            assert any(f"fcoll.{name}" in op for op in seen), seen


def lazy_values(rank):
    """Conjugates and negatives that are not in memory yet, and the same in memory."""
    z = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    for lazy, real in (
        (z.conj(), z.conj().resolve_conj()),
        (z.conj().imag, z.conj().imag.resolve_neg()),
    ):
        assert lazy.is_conj() or lazy.is_neg()
        for call in (
            fcoll.all_reduce,
            fcoll.all_gather_into_tensor,
            fcoll.reduce_scatter_tensor,
            fcoll.all_to_all_single,
            lambda x: fcoll.broadcast(x, 1),
            lambda x: fcoll.all_reduce_coalesced([x])[0],
        ):
            assert torch.equal(fcoll.wait_tensor(call(lazy)), fcoll.wait_tensor(call(real)))


def test_conjugates_and_negatives_are_made_real_first(shared2, ranks2):
    shared2.run(lazy_values)
    ranks2.run(lazy_values)


# -- gradients --


def gradients_of(rank, call, shape):
    """The first and second gradients of a call, and a parameter's."""
    x = (torch.arange(24.0).reshape(shape) / 24 + rank).requires_grad_()
    y = fcoll.wait_tensor(call(x))
    weights = torch.arange(1.0, y.numel() + 1).reshape(y.shape)
    (first,) = torch.autograd.grad((y.pow(2) * weights).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * x).sum(), x)
    p = torch.nn.Parameter(x.detach().clone())
    call(p).sum().backward()
    return first.detach(), second, p.grad


def gradient_calls(rank):
    uneven = ([1, 3], [1, 3]) if rank == 0 else ([3, 1], [3, 1])
    yield lambda x: fcoll.all_reduce(x)
    yield lambda x: fcoll.all_reduce(x, "avg")
    yield lambda x: fcoll.all_reduce(x, "max")
    yield lambda x: fcoll.all_reduce(x, grad="identity")
    yield lambda x: fcoll.all_gather_into_tensor(x, dim=1)
    yield lambda x: fcoll.reduce_scatter_tensor(x)
    yield lambda x: fcoll.reduce_scatter_tensor(x, "max", dim=1)
    yield lambda x: fcoll.all_to_all_single(x, None, *uneven)
    yield lambda x: fcoll.broadcast(x, 1)
    yield lambda x: fcoll.all_reduce_coalesced([x])[0]


def gradients_both_ways(rank):
    fcoll.all_reduce(torch.ones(1)).tolist()
    first, _, of_a_sum = gradients_of(rank, fcoll.all_reduce, (4, 6))
    y = fcoll.all_reduce(torch.arange(24.0).reshape(4, 6) / 24 + rank)
    assert torch.equal(of_a_sum, torch.full((4, 6), 2.0))
    assert torch.allclose(first, 4 * y * torch.arange(1.0, 25).reshape(4, 6))
    for i, call in enumerate(gradient_calls(rank)):
        fast = gradients_of(rank, call, (4, 6))
        ordinary, _torch.ordinary = _torch.ordinary, lambda x: False
        slow = gradients_of(rank, call, (4, 6))
        _torch.ordinary = ordinary
        for a, b in zip(fast, slow, strict=True):
            assert torch.equal(a, b), (i, a, b)


def test_gradients_are_those_of_the_dispatcher(shared2):
    shared2.run(gradients_both_ways)


def backward_meets_another_call(rank):
    y = fcoll.wait_tensor(fcoll.all_reduce(torch.ones(4, requires_grad=True)))
    if rank == 0:
        y.sum().backward()
    return fcoll.broadcast(torch.ones(4), 0).tolist()


def test_an_error_in_a_gradient_has_class_and_line():
    error, other = launch(backward_meets_another_call, 2, env=NATIVE).errors
    assert isinstance(error, fcoll.errors.CollectiveMismatch), error
    assert isinstance(other, fcoll.errors.CollectiveMismatch), other
    line = backward_meets_another_call.__code__.co_firstlineno + 3
    assert f"test_fast_path.py:{line}" in str(error)


# -- the rest of what it promises --


def waits(rank):
    x = torch.ones(2, requires_grad=True)
    fcoll.all_reduce(torch.ones(1)).tolist()
    seen = [fcoll.wait_tensor(x) is x]
    if rank == 0:
        late = fcoll.all_reduce(torch.ones(4))
        assert isinstance(late, fcoll.AsyncCollectiveTensor)
        seen.append(build.fast.wait_tensor(late) is NotImplemented)
        dist.send(torch.ones(1), 1)
        seen.append(build.fast.wait_tensor(late.elem) is late.elem)
        seen.append(late.elem.tolist() == [2.0] * 4)
    else:
        dist.recv(torch.empty(1), 0)
        late = fcoll.all_reduce(torch.ones(4))
    seen.append(fcoll.wait_tensor(late).tolist() == [2.0] * 4)
    return all(seen)


def test_waiting_with_and_without_something_under_way(shared2):
    assert shared2.run(waits) == [True, True]


def other_threads_run(rank):
    """A call that waits for the peer lets the thread run that lets the peer go on."""
    fcoll.all_reduce(torch.ones(1)).tolist()
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    started = threading.Event()

    def let_go():
        started.wait()
        dist.send(torch.ones(1), 1)

    thread = threading.Thread(target=let_go)
    if rank == 0:
        thread.start()
        started.set()
    y = fcoll.all_to_all_single(torch.arange(2.0))  # complete on return: rank 0 waits inside
    if rank == 0:
        thread.join()
    return y.tolist()


def test_the_gil_is_released_while_waiting(shared2):
    assert shared2.run(other_threads_run) == [[0.0, 0.0], [1.0, 1.0]]


def many_threads(rank):
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    for g in groups:
        fcoll.all_reduce(torch.ones(1), "sum", g).tolist()
    wrong = []

    def work(k):
        for i in range(300):
            if not served(torch.full((i + 1,), float(k)), "sum", groups[k]):
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return wrong


def test_threads_take_it_at_once(shared2):
    assert shared2.run(many_threads) == [[], []]


def errors_are_the_same(rank):
    fcoll.all_reduce(torch.ones(1)).tolist()
    if rank == 0:
        return fcoll.all_to_all_single(torch.ones(4))
    return fcoll.broadcast(torch.ones(4), 0).tolist()


def test_errors_of_the_core_have_class_line_and_rank():
    for rank, error in enumerate(launch(errors_are_the_same, 2, env=NATIVE).errors):
        assert isinstance(error, fcoll.errors.CollectiveMismatch), error
        line = errors_are_the_same.__code__.co_firstlineno + (3 if rank == 0 else 4)
        assert f"test_fast_path.py:{line}" in str(error)
        assert error.rank == 1 - rank


def without_headers(rank):
    build._extension_path = lambda library: None
    value = fcoll.all_reduce(torch.ones(3)).tolist()
    return value, str(fcoll.symm_mem.status())[:13], type(build.fast).__name__


def test_without_headers_shared_memory_still_serves():
    done = launch(without_headers, 2, env=NATIVE)
    assert done.results == [([2.0] * 3, "shared memory", "NoneType")] * 2, done.errors
