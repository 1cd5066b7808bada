"""fcoll.compat has the names of torch's functional collectives, and gives what they give.

Torch's own functions are the oracle, on the same real ranks; where torch is wrong, the last part
says what is right.
"""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from functorch.compile import make_boxed_func
from ranks import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import fcoll
from fcoll import compat
from fcoll._torch import FUNCTIONAL_COLLECTIVES as THEIRS
from fcoll._torch import work_registry_size

Tensor = torch.Tensor
Module = types.ModuleType

SPACES = ("fcoll", "_c10d_functional")
OURS = [name for name in compat.__all__ if getattr(compat, name) is not THEIRS[name]]
DEPRECATED = [n for n in OURS if "tensor" in n and n[:3] in ("all", "red") and "inplace" not in n]


# -- names ---


def public_names() -> list[str]:
    return [name for name in vars(funcol) if not name.startswith("_")]


@pytest.mark.parametrize("name", public_names())
def test_has_every_public_name_with_its_signature(name):
    theirs = getattr(funcol, name)
    ours = getattr(compat, name)
    assert name in compat.__all__
    if inspect.isfunction(theirs):
        assert inspect.signature(ours) == inspect.signature(theirs)


@pytest.mark.parametrize("name", [n for n in OURS if inspect.isfunction(getattr(compat, n))])
def test_the_signature_is_that_of_the_code(name):
    """The types are copied from torch; the names and defaults must be those that are called."""
    code = inspect.unwrap(getattr(compat, name))
    args = inspect.getfullargspec(code)
    theirs = inspect.getfullargspec(getattr(THEIRS[name], "_init_fn", THEIRS[name]))
    assert (args.args, args.defaults, args.varargs) == (
        theirs.args,
        theirs.defaults,
        theirs.varargs,
    )


def test_private_helpers_that_torch_uses_are_ours():
    helpers = "_resolve_group _resolve_group_name _expand_group _group_or_group_name "
    helpers += "_maybe_wrap_tensor _wrap_tensor_autograd _are_we_tracing"
    assert set(helpers.split()) < set(OURS)
    assert compat.AsyncCollectiveTensor is fcoll.AsyncCollectiveTensor
    assert issubclass(compat.AsyncCollectiveTensor, funcol.AsyncCollectiveTensor)


def test_tables_are_torchs_with_our_functions():
    assert compat.REDUCE_OP_TO_STR == funcol.REDUCE_OP_TO_STR
    assert compat.RANK_TYPES == funcol.RANK_TYPES
    ours, theirs = compat.traceable_collective_remaps, funcol.traceable_collective_remaps
    assert {k: v.__name__ for k, v in ours.items()} == {k: v.__name__ for k, v in theirs.items()}
    assert all(fn is getattr(compat, fn.__name__) for fn in ours.values())


def test_what_a_newer_torch_adds_is_its_own():
    program = """
import torch, torch.distributed._functional_collectives as funcol
def _remapped_scatter(*args): ...
funcol.traceable_collective_remaps[torch.distributed.scatter] = _remapped_scatter
import fcoll
ours = fcoll.compat.traceable_collective_remaps
assert ours[torch.distributed.scatter] is _remapped_scatter
assert ours[torch.distributed.all_gather] is fcoll.compat._remapped_all_gather
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'all_redcue'"):
        _ = compat.all_redcue


# -- values and result types: torch's functions are the oracle ---


def part(rank: int, *shape: int) -> Tensor:
    """The rank's input: small integers, so that sums are exact."""
    values = torch.arange(math.prod(shape)) * 7 + rank * 5
    return (values % 16 - 8).float().reshape(shape)


def splits(rank: int, n: int) -> tuple[list[int], list[int]]:
    """(output, input) of an uneven all_to_all: rank r sends r + t rows to rank t."""
    return [r + rank for r in range(n)], [rank + t for t in range(n)]


def uneven(f: Callable, rank: int, n: int, g: Any) -> Tensor:
    receive, send = splits(rank, n)
    return f(part(rank, sum(send), 2), receive, send, g)


def into(f: Callable, out: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
    """What an in-place function returns and what it wrote."""
    return [f(out, *args, **kwargs), out]


def exchanged(f: Callable, rank: int, n: int, g: Any) -> list[Tensor]:
    """Ring: by isend_inplace or irecv_inplace; the other half is torch.distributed's."""
    right, left = (rank + 1) % n, (rank - 1) % n
    x, y = part(rank, 3), torch.zeros(3)
    if f.__name__ == "isend_inplace":
        work = dist.irecv(y, left, g)
        token = f(x, right, group=g)
        work.wait()
        return [compat.wait_tensor(token), token, y]
    work = dist.isend(x, right, g)
    out = f(y, left, group=g)
    result = [out, compat.wait_tensor(out), y]
    work.wait()
    return result


def batch(f: Callable, rank: int, n: int, g: Any) -> list[Tensor]:
    right, left = (rank + 1) % n, (rank - 1) % n
    x, y = part(rank, 3), torch.zeros(3)
    outs = f(["irecv", "isend"], [left, right], [0, 0], [y, x], g)
    return [*outs, *map(compat.wait_tensor, outs), y]


GATHERS = [
    lambda f, r, n, g: f(part(r, 2, 3), 0, g),
    lambda f, r, n, g: f(part(r, 2, 3, 2), 1, g),
    lambda f, r, n, g: f(part(r, 2, 3), gather_dim=-1, group=g),
]
#: name -> calls f(rank's inputs) on the group g of n ranks
CALLS: dict[str, list[Callable[[Callable, int, int, Any], Any]]] = {
    "wait_tensor": [lambda f, r, n, g: f(part(r, 3))],
    "broadcast": [lambda f, r, n, g: f(part(r, 2, 3), n - 1, g)],
    "all_reduce": [
        lambda f, r, n, g: f(part(r, 2, 3), "sum", g),
        lambda f, r, n, g: f(part(r, 2, 3), "AVG", g),
        lambda f, r, n, g: f(part(r, 2, 3).t(), reduceOp="max", group=g, tag=""),
    ],
    "all_gather_single": GATHERS,
    "reduce_scatter_single": [
        lambda f, r, n, g: f(part(r, 2 * n, 3), "sum", 0, g),
        lambda f, r, n, g: f(part(r, 3, 2 * n), "min", 1, g),
    ],
    "all_to_all_single": [lambda f, r, n, g: f(part(r, 2 * n, 3), None, None, g), uneven],
    "permute_tensor": [
        lambda f, r, n, g: f(part(r, 3), [(i + 1) % n for i in range(n)], g),
        lambda f, r, n, g: f(part(r, 3), [0] * n, g),
    ],
    "all_reduce_coalesced": [lambda f, r, n, g: f([part(r, 2, 3), part(r, 4)], "sum", g)],
    "all_gather_single_coalesced": [lambda f, r, n, g: f([part(r, 2, 3), part(r, 4)], g)],
    "reduce_scatter_single_coalesced": [
        lambda f, r, n, g: f([part(r, 2 * n, 3), part(r, 3, n)], "sum", [0, 1], g)
    ],
    "all_reduce_inplace": [
        lambda f, r, n, g: into(f, part(r, 2, 3), group=g),
        lambda f, r, n, g: into(f, part(r, 2, 3), "max", g),
    ],
    "all_gather_tensor_inplace": [
        lambda f, r, n, g: into(f, torch.zeros(2 * n, 3), part(r, 2, 3), g),
        lambda f, r, n, g: into(f, torch.zeros(2, 3 * n), part(r, 2, 3), g, gather_dim=1),
    ],
    "reduce_scatter_tensor_inplace": [
        lambda f, r, n, g: into(f, torch.zeros(2, 3), part(r, 2 * n, 3), group=g),
        lambda f, r, n, g: into(f, torch.zeros(3, 2), part(r, 3, 2 * n), "max", g, scatter_dim=1),
    ],
    "all_to_all_inplace": [
        lambda f, r, n, g: into(f, torch.zeros(2 * n, 3), part(r, 2 * n, 3), group=g),
    ],
    "all_gather_inplace": [
        lambda f, r, n, g: f([torch.zeros(2, 3) for _ in range(n)], part(r, 2, 3), g),
    ],
    "isend_inplace": [exchanged],
    "irecv_inplace": [exchanged],
    "batch_p2p_ops_inplace": [batch],
}
CALLS |= {
    "all_gather_single_autograd": GATHERS,
    "all_gather_tensor": GATHERS,
    "all_gather_tensor_autograd": GATHERS,
    "all_gather_into_tensor_coalesced": CALLS["all_gather_single_coalesced"],
    "reduce_scatter_single_autograd": CALLS["reduce_scatter_single"],
    "reduce_scatter_tensor": CALLS["reduce_scatter_single"],
    "reduce_scatter_tensor_autograd": CALLS["reduce_scatter_single"],
    "reduce_scatter_tensor_coalesced": CALLS["reduce_scatter_single_coalesced"],
    "all_to_all_single_autograd": CALLS["all_to_all_single"],
}
if "reduce_scatter_inplace" in OURS:  # torch has it from 2.14 on
    CALLS["reduce_scatter_inplace"] = [
        lambda f, r, n, g: into(f, torch.zeros(2, 3), [*part(r, n, 2, 3)], group=g),
        lambda f, r, n, g: into(f, torch.zeros(()), [*part(r, n)], "max", g),
    ]
if "wait_tensors" in OURS:  # from 2.15 on
    CALLS["wait_tensors"] = [lambda f, r, n, g: f([part(r, 3), part(r, 2)])]


def test_every_collective_has_a_call():
    public = [n for n in OURS if not n.startswith("_") and inspect.isfunction(getattr(compat, n))]
    assert sorted(CALLS) == public


def kind(x: Tensor) -> str:
    return "async" if isinstance(x, funcol.AsyncCollectiveTensor) else type(x).__name__


def observed(module: Module, rank: int, n: int, g: Any) -> dict[str, list]:
    """Of every call: the kinds of the results and their values."""
    seen = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for name, calls in CALLS.items():
            for i, call in enumerate(calls):
                outs = tree_leaves(call(getattr(module, name), rank, n, g))
                seen[f"{name}-{i}"] = [(kind(x), funcol.wait_tensor(x) * 1) for x in outs]
    return seen


def both(rank: int) -> tuple[dict, dict, int]:
    n, g = dist.get_world_size(), dist.group.WORLD
    theirs = observed(funcol, rank, n, g)
    left = work_registry_size()
    return theirs, observed(compat, rank, n, g), work_registry_size() - left


# Along another dim than 0 torch waits, to rearrange; ours rearrange at the wait.
WAITED_FOR = {
    f"{name}-{i}" for name, calls in CALLS.items() if calls is GATHERS for i in range(1, len(calls))
}


def test_same_values_and_result_types_as_torch(ranks: RankPool):
    for theirs, ours, unwaited in ranks.run(both):
        assert unwaited == 0
        for call, expected in theirs.items():
            kinds = ["async"] if call in WAITED_FOR else [k for k, _ in expected]
            assert [k for k, _ in ours[call]] == kinds, call
            torch.testing.assert_close([x for _, x in ours[call]], [x for _, x in expected])


def results(rank: int) -> dict[str, list[str]]:
    n, g = dist.get_world_size(), dist.group.WORLD
    return {call: [k for k, _ in outs] for call, outs in observed(compat, rank, n, g).items()}


FUNCTIONAL = [n for n in CALLS if "inplace" not in n and "wait" not in n]


def all_async(kinds: dict[str, list[str]]) -> bool:
    return all(set(k) == {"async"} for c, k in kinds.items() if c.partition("-")[0] in FUNCTIONAL)


def test_eager_results_are_always_async(ranks2: RankPool):
    assert all(map(all_async, ranks2.run(results)))


def test_eager_results_are_async_on_a_group_of_one(solo, monkeypatch):
    for name in ("isend_inplace", "irecv_inplace", "batch_p2p_ops_inplace"):
        monkeypatch.delitem(CALLS, name)  # nobody to send to
    assert all_async(results(0))
    y = compat.all_reduce(torch.ones(2, requires_grad=True), "sum", solo)
    assert isinstance(y, fcoll.AsyncCollectiveTensor) and y.completed and y.requires_grad


def gradients(module: Module, rank: int) -> list[Tensor]:
    n, g = dist.get_world_size(), dist.group.WORLD
    x = part(rank, 2 * n, n).requires_grad_()
    outs = [
        module.all_reduce(x, "sum", g),
        module.all_gather_single_autograd(x, 1, g),
        module.reduce_scatter_single_autograd(x, "sum", 0, g),
        module.all_to_all_single_autograd(x, None, None, g),
        *module.all_reduce_coalesced([x, x * 2], "sum", g),
        *module.all_gather_single_coalesced([x], g),
        *module.reduce_scatter_single_coalesced([x, x], "sum", [0, 1], g),
    ]
    weights = [part(100 + rank, *y.shape) for y in outs]
    losses = [(y * w).sum() for y, w in zip(outs, weights, strict=True)]
    return [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in losses]


def both_gradients(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    return gradients(funcol, rank), gradients(compat, rank)


def test_same_gradients_as_torch(ranks: RankPool):
    for theirs, ours in ranks.run(both_gradients):
        torch.testing.assert_close(ours, theirs)


class Capture:
    """A torch.compile backend that keeps the collectives of the graphs it sees."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def __call__(self, gm: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=self.keep, bw_compiler=self.keep)(gm, inputs)

    def keep(self, gm: Any, inputs: Any) -> Any:
        targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
        self.ops += [str(t) for t in targets if getattr(t, "namespace", "") in SPACES]
        return make_boxed_func(gm)


# The patched programs below have them, or they start nothing.
NOT_COMPILED = (
    *("wait_tensor", "wait_tensors"),
    *("isend_inplace", "irecv_inplace", "batch_p2p_ops_inplace"),
)


def compiled(rank: int) -> dict[str, tuple[list, list, list[str]]]:
    n, g = dist.get_world_size(), dist.group.WORLD
    seen = {}
    for name in CALLS:
        if name in NOT_COMPILED:
            continue
        f, call = getattr(compat, name), CALLS[name][0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            expected = [x * 1 for x in tree_leaves(call(f, rank, n, g))]
        backend = Capture()

        def step(f=f, call=call):
            return call(f, rank, n, g)

        torch._dynamo.reset()
        outs = torch.compile(step, backend=backend, fullgraph=True)()
        seen[name] = (tree_leaves(outs), expected, backend.ops)
    return seen


def test_in_a_trace_results_are_waited_for(ranks2: RankPool):
    for by_name in ranks2.run(compiled, timeout=100):
        for name, (outs, expected, ops) in by_name.items():
            assert {type(x) for x in outs} == {Tensor}, name
            torch.testing.assert_close(outs, expected)
            waits = [op for op in ops if op == "_c10d_functional.wait_tensor.default"]
            assert waits and all(op.startswith("fcoll.") for op in ops if op not in waits), ops
            assert len(waits) < len(ops), ops


# -- groups ---


def forms_of(n: int) -> Iterator[Any]:
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    yield from (dist.group.WORLD, dist.group.WORLD.group_name, mesh, (mesh, 0), list(range(n)))


def in_every_form(rank: int) -> list[tuple]:
    n = dist.get_world_size()
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for group in forms_of(n):
            for module in (funcol, compat):
                total = module.all_reduce(torch.ones(1), "sum", group).item()
                named = isinstance(group, str)
                expanded = None if named else module._expand_group(group)
                resolved = module._resolve_group(group)
                name = module._resolve_group_name(group)
                seen.append((total, expanded, name, type(resolved).__name__))
    return seen


def test_every_form_of_group_as_in_torch(ranks2: RankPool):
    for seen in ranks2.run(in_every_form):
        assert seen[::2] == seen[1::2]
        assert [total for total, *_ in seen] == [2.0] * 10


def subgroup_in_any_order(rank: int) -> list[list[float]]:
    dist.new_group([1, 3])  # made with the order 1, 3: a list of ranks is the set of them
    if rank not in (1, 3):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        x = torch.tensor([float(rank)])
        return [m.all_gather_single(x, 0, [3, 1]).tolist() for m in (funcol, compat)]


def test_ranks_in_any_order(ranks4: RankPool):
    assert ranks4.run(subgroup_in_any_order)[1:4:2] == [[[1.0, 3.0]] * 2] * 2


# -- warnings ---


def warned(call: Callable[[], Any]) -> list[tuple]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x in tree_leaves(call()):
            funcol.wait_tensor(x)
    return [(str(w.message), w.category, w.filename, w.lineno) for w in caught]


@pytest.mark.parametrize("name", DEPRECATED)
def test_deprecated_names_warn_like_torch(solo, name):
    call = CALLS[name][0]
    ours = warned(lambda: call(getattr(compat, name), 0, 1, solo))
    assert ours == warned(lambda: call(getattr(funcol, name), 0, 1, solo))
    assert ours[0][1] is FutureWarning and ours[0][2] == __file__


def test_which_names_are_deprecated():
    assert len(DEPRECATED) == 6


def test_ranks_as_group_warn_like_torch(solo):
    both = [warned(lambda m=m: m.all_reduce(torch.ones(1), "sum", [0])) for m in (compat, funcol)]
    assert both[0] == both[1] and len(both[0]) == 1


def test_a_warning_is_shown_once_a_line(solo):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            compat.all_gather_tensor(torch.ones(1), 0, solo).wait()
    assert len(caught) == 1


# -- what is right here and wrong in torch ---


def broadcast_gradient(rank: int) -> list[float]:
    x = torch.ones(2, requires_grad=True)
    (compat.broadcast(x, 1, dist.group.WORLD) * (rank + 1)).sum().backward()
    return x.grad.tolist()


def test_gradient_of_broadcast_is_a_reduce_to_src(ranks4: RankPool):
    assert ranks4.run(broadcast_gradient) == [[0, 0], [10, 10], [0, 0], [0, 0]]


def average_gradient(rank: int) -> float:
    x = torch.ones(1, requires_grad=True)
    (compat.all_reduce(x, "avg", dist.group.WORLD) * (rank + 1)).sum().backward()
    return x.grad.item()


def test_gradient_of_avg(ranks2: RankPool):
    assert ranks2.run(average_gradient) == [1.5, 1.5]


def permuted(rank: int) -> list[Tensor]:
    n = dist.get_world_size()
    ring = [(r + 1) % n for r in range(n)]
    calls = [((), ring), ((2, 3), ring), ((2, 1, 2), ring), ((2, 3), [1])]
    return [compat.permute_tensor(part(rank, *s), dst, dist.group.WORLD) * 1 for s, dst in calls]


def test_permute_tensor_of_any_shape(ranks4: RankPool):
    for rank, got in enumerate(ranks4.run(permuted)):
        left = (rank - 1) % 4
        alone = part(0, 2, 3) * (rank == 1)  # only rank 0 sends; the others' results are zeros
        expected = [part(left), part(left, 2, 3), part(left, 2, 1, 2), alone]
        torch.testing.assert_close(got, expected)


def scattered_list(rank: int) -> tuple[bool, tuple]:
    x = part(rank, 3, 4)
    inputs = [x]
    (y,) = compat.reduce_scatter_single_coalesced(inputs, "sum", [1], dist.group.WORLD)
    return inputs[0] is x, y.shape


def test_the_callers_list_is_left_alone(ranks2: RankPool):
    assert ranks2.run(scattered_list) == [(True, (3, 2))] * 2


def exchanged_in_a_subgroup(rank: int) -> list[Any]:
    """Global ranks 1 and 3 are ranks 0 and 1 of the group: torch crashes on rank 3 of 2."""
    g = dist.new_group([1, 3])
    if rank not in (1, 3):
        return []
    peer = 4 - rank
    x, y, z, w = torch.tensor([float(rank)]), torch.zeros(1), torch.zeros(1), torch.zeros(1)
    received = compat.irecv_inplace(y, peer, group=g)  # both receive first: it must not wait
    compat.isend_inplace(x, peer, group=g).wait()
    got = [received.item(), y.item(), received.wait().data_ptr() == y.data_ptr()]
    received = compat.irecv_inplace(z, None, group=g, group_src=int(rank == 1))
    compat.isend_inplace(x, None, group=g, group_dst=int(rank == 1)).wait()
    got.append(received.item())
    outs = compat.batch_p2p_ops_inplace(["isend", "irecv"], [peer, peer], [0, 0], [x, w], g)
    assert all(isinstance(out, fcoll.AsyncCollectiveTensor) for out in outs)
    fcoll.wait_tensor(outs[0])
    got += [outs[1].item(), w.item()]
    with pytest.raises(fcoll.errors.NotInGroup, match="rank 2 is not a member"):
        compat.isend_inplace(x, 2, group=g)
    with pytest.raises(ValueError, match="both 'dst' and 'group_dst'"):
        compat.isend_inplace(x, peer, group=g, group_dst=0)
    return got


def test_peers_are_global_ranks_in_a_subgroup(ranks4: RankPool):
    got = ranks4.run(exchanged_in_a_subgroup)
    assert got[1::2] == [[3, 3, True, 3, 3, 3], [1, 1, True, 1, 1, 1]]


def gathered_uneven(rank: int) -> list[Tensor]:
    outs = [torch.zeros(r + 1, 2) for r in range(dist.get_world_size())]
    return compat.all_gather_inplace(outs, part(rank, rank + 1, 2))


def test_all_gather_inplace_of_uneven_parts(ranks2: RankPool):
    assert_close = torch.testing.assert_close
    for got in ranks2.run(gathered_uneven):
        assert_close(got, [part(r, r + 1, 2) for r in range(2)])


def wrong_calls(rank: int) -> list[str]:
    g = dist.group.WORLD
    calls = [
        lambda: compat.reduce_scatter_single(torch.ones(4, 3), "sum", 1, g),
        lambda: compat.all_to_all_single(torch.ones(3), None, None, g),
        lambda: compat.all_gather_inplace([torch.ones(2)] * 2, torch.ones(3)),
        lambda: compat.all_reduce_inplace(torch.ones(3), async_op=True),
    ]
    said = []
    for call in calls:
        with pytest.raises(AssertionError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_mistakes_are_errors_at_the_call(ranks2: RankPool):
    for said in ranks2.run(wrong_calls):
        assert "needs dim 1 (3) divisible by 2" in said[0]
        assert "needs dim 0 (3) divisible by 2" in said[1]
        assert "sizes=[2, 2] do not fit" in said[2]
        assert said[3] == "Can't remap async version of inplace op to functional collective"


def accepted(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    one = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nested = compat.all_reduce(one, "sum", [[0, 1]]).item()
        with pytest.raises(ValueError, match="with the tag 'none'"):
            compat.all_reduce(one, "sum", [0, 1], "none")
    return [
        compat.all_reduce(one, dist.ReduceOp.MAX, None).item(),
        compat.all_reduce(one, "sum", (mesh, "tp")).item(),
        nested,
        compat.all_gather_single(torch.tensor(float(rank)), 0, None).tolist(),
        compat.all_reduce(torch.tensor([rank == 1]), "max", None).item(),
        compat.all_to_all_single(torch.tensor([1j, 2j]), None, None, None).tolist(),
    ]


def test_more_groups_reduce_ops_and_dtypes(ranks2: RankPool):
    got = ranks2.run(accepted)
    assert [g[:5] for g in got] == [[1, 2, 2, [0, 1], True]] * 2
    assert [g[5] for g in got] == [[1j, 1j], [2j, 2j]]


def test_vmap(solo):
    x = torch.randn(3, 2)
    torch.testing.assert_close(torch.vmap(lambda v: compat.all_reduce(v, "sum", solo))(x), x)


# -- shapes alone: tensors on the meta device, and no process group ---

ON_META: dict[str, Callable[[Module, Any], Any]] = {
    "all_reduce": lambda m, x: m.all_reduce(x, "sum", "0"),
    "all_reduce with a gradient": lambda m, x: m.all_reduce(x.requires_grad_(), "sum", "0"),
    "broadcast": lambda m, x: m.broadcast(x, 0, "0"),
    "all_reduce_coalesced": lambda m, x: m.all_reduce_coalesced([x, x[:1]], "avg", "0"),
    "all_reduce_inplace": lambda m, x: m.all_reduce_inplace(x, "sum", "0"),
    "wait_tensor": lambda m, x: m.wait_tensor(x),
    "all_gather_single": lambda m, x: m.all_gather_single(x, 0, "0"),  # it needs the group's size
    "reduce_scatter_single": lambda m, x: m.reduce_scatter_single(x, "sum", 0, "0"),
}


@pytest.mark.parametrize("name", ON_META)
def test_meta_tensors_without_a_group(name):
    def shapes(module: Module) -> Any:
        try:
            out = ON_META[name](module, torch.empty(2, 3, 4, device="meta"))
        except (RuntimeError, ValueError):
            return "refused"
        return [(type(x), x.shape, x.dtype, x.device) for x in tree_leaves(out)]

    assert shapes(compat) == shapes(types.SimpleNamespace(**THEIRS))


@pytest.mark.parametrize(
    "xs", [[], [torch.ones(2)], [torch.empty(2, device="meta"), torch.ones(1)]]
)
def test_all_else_needs_a_group(xs):
    with pytest.raises(fcoll.errors.NotInitialized):
        compat.all_reduce_coalesced(xs, "sum", "0")
