"""A program that puts fcoll.local in the place of torch's module and uses it as torch's tests do.

Run as a script: the module must be served before DTensor is imported. Each ``test_`` runs alone.
"""

from __future__ import annotations

import sys

import fcoll.local

sys.modules["torch.distributed._local_tensor"] = fcoll.local
sys.modules["torch.distributed._local_tensor._c10d"] = fcoll.local._c10d

import torch  # noqa: E402  after the module is served
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as funcol  # noqa: E402
from torch.distributed._local_tensor import (  # noqa: E402
    LocalIntNode,
    LocalRunnerMode,
    LocalTensor,
    LocalTensorMode,
    enabled_local_tensor_mode,
    get_generator_seed_for_device_type,
    get_local_tensor_mode_list,
    local_tensor_mode,
    maybe_disable_local_tensor_mode,
    maybe_enable_local_tracker,
    maybe_run_for_local_tensor,
    rank_map,
    reconcile_args,
    tensor_map,
)
from torch.distributed._local_tensor._c10d import local_p2p_op, wait_all  # noqa: E402
from torch.distributed.tensor import (  # noqa: E402
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    zeros,
)
from torch.testing import assert_close  # noqa: E402

W = 4


# as torch's own tests have them (torch.testing._internal needs packages of its own)
@maybe_run_for_local_tensor
def map_local_tensor_for_rank(tensor, rank, func):
    return func(tensor, rank)


@maybe_run_for_local_tensor
def map_local_for_rank(rank, func):
    return func(rank)


def reduce_local_int(val, func):
    return func(val.node._local_ints)


def raises(error, call):
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error}")


def test_construction():
    raises(ValueError, lambda: LocalTensor({}))
    mixed = {0: torch.ones(2), 1: torch.ones(2, dtype=torch.float64)}
    raises(AssertionError, lambda: LocalTensor(mixed))
    raises(AssertionError, lambda: LocalTensor({0: torch.ones(2, requires_grad=True)}))
    x = LocalTensor({0: torch.ones(2), 1: torch.zeros(2)})
    assert repr(x) == "LocalTensor(\n  0: tensor([1., 1.]),\n  1: tensor([0., 0.])\n)"
    names, spec = x.__tensor_flatten__()
    again = LocalTensor.__tensor_unflatten__({n: getattr(x, n) for n in names}, spec, None, None)
    assert torch.equal(again._local_tensors[0], torch.ones(2)) and again._ranks == x._ranks
    raises(AttributeError, lambda: x._local_tensor_7)


def test_basic_ops_and_plain_tensors():
    a = LocalTensor({r: torch.randn(2, 3) for r in range(2)})
    plain = torch.ones(3)
    for op in (torch.add, torch.mul, torch.sub):
        y = op(a, plain)
        assert isinstance(y, LocalTensor) and len(y._local_tensors) == 2
        assert_close(y._local_tensors[1], op(a._local_tensors[1], plain))
    assert isinstance(a.mean(), LocalTensor) and a.is_contiguous()
    assert not a.t().is_contiguous() and a.t().contiguous().is_contiguous()
    v = LocalTensor({0: torch.ones(3), 1: torch.zeros(3)})
    assert_close(torch.dot(v, v)._local_tensors[0], torch.tensor(3.0))
    assert_close(torch.einsum("i,i->", v, v)._local_tensors[1], torch.tensor(0.0))


def test_mode_and_factories():
    assert local_tensor_mode() is None and enabled_local_tensor_mode() is None
    with LocalTensorMode(W) as mode:
        assert local_tensor_mode() is mode and get_local_tensor_mode_list() == [mode]
        for make in (torch.zeros, torch.ones, torch.empty, torch.randn, torch.rand):
            assert isinstance(make(2, 2), LocalTensor), make
        assert isinstance(torch.full((2,), 3.0), LocalTensor)
        assert isinstance(torch.arange(3), LocalTensor)
        with maybe_disable_local_tensor_mode():
            assert enabled_local_tensor_mode() is None and local_tensor_mode() is mode
            plain = torch.ones(2)
            assert not isinstance(plain, LocalTensor)
        assert enabled_local_tensor_mode() is mode
        assert not isinstance(plain + 1, LocalTensor)
        with LocalTensorMode(frozenset({0, 1})):
            assert torch.zeros(1)._ranks == {0, 1}
        assert torch.zeros(1)._ranks == set(range(W))
    assert local_tensor_mode() is None
    raises(AssertionError, lambda: LocalTensorMode([0, 1]))


def test_maps():
    with LocalTensorMode(W) as mode:
        x = mode.rank_map(lambda r: torch.full((2,), float(r)))
        y = rank_map(lambda r: torch.full((2,), float(r)))
        assert_close(x._local_tensors[3], y._local_tensors[3])
        z = tensor_map(x, lambda r, t: t * r)
        assert_close(z._local_tensors[3], torch.full((2,), 9.0))
        some = mode.tensor_map(x, lambda r, t: t if r < 2 else None)
        assert some._ranks == {0, 1}
        assert_close((some + 1)._local_tensors[1], torch.full((2,), 2.0))
    assert torch.equal(rank_map(lambda r: torch.tensor(r)), torch.tensor(0))
    assert torch.equal(tensor_map(torch.ones(1), lambda r, t: t + r), torch.ones(1))


def test_ints_of_ranks():
    n = torch.SymInt(LocalIntNode({0: 1, 1: 2}))
    assert reduce_local_int(n * 2 + 1, max) == 1 and (n + n).node._local_ints == {0: 2, 1: 4}
    assert (n % 2).node._local_ints == {0: 1, 1: 0} and (-n).node._local_ints == {0: -1, 1: -2}
    assert (n // 2).node._local_ints == {0: 0, 1: 1}
    assert bool(n == 1) is False and n != 1 and n < 3 and n >= 1
    raises(AssertionError, lambda: bool(n < 2))
    assert torch.SymInt(LocalIntNode({0: 3, 1: 3})) == 3
    assert torch.sym_max(n, 2) == 2
    x = LocalTensor({0: torch.tensor([1, 2]), 1: torch.tensor([3, 2])})
    assert [str(v) for v in x.tolist()] == ["LocalIntNode({0: 1, 1: 3})", "2"]
    raises(RuntimeError, lambda: x.float().tolist())


def test_reconcile():
    same = LocalTensor({0: torch.ones(2), 1: torch.ones(2)})
    assert torch.equal(same.reconcile(), torch.ones(2)) and same.tolist() == [1.0, 1.0]
    assert same.numpy().tolist() == [1.0, 1.0]
    (a,), kw = reconcile_args((same,), {"k": [same, 3]})
    assert torch.equal(a, torch.ones(2)) and kw["k"][1] == 3 and type(kw["k"][0]) is torch.Tensor
    differ = LocalTensor({0: torch.ones(2), 1: torch.zeros(2)})
    raises(AssertionError, differ.reconcile)


def test_functions_of_a_rank():
    @maybe_run_for_local_tensor
    def mine(t, rank, factor=1):
        return t[: rank + 1] * factor, rank * 2, "same"

    with LocalTensorMode(W):
        rank = torch.SymInt(LocalIntNode({r: r for r in range(W)}))
        t, i, text = mine(torch.ones(5), rank, factor=3)
        assert t.shape[0].node._local_ints == {0: 1, 1: 2, 2: 3, 3: 4} and text == "same"
        assert i.node._local_ints == {0: 0, 1: 2, 2: 4, 3: 6}
        assert map_local_for_rank(rank, lambda r: r + 1).node._local_ints[3] == 4
        y = map_local_tensor_for_rank(torch.zeros(2), rank, lambda t, r: t + r)
        assert_close(y._local_tensors[2], torch.full((2,), 2.0))
    assert mine(torch.ones(5), 1)[1] == 2


def test_random():
    with LocalTensorMode(W):
        torch.manual_seed(7)
        a = torch.randn(3)
        a.reconcile()  # all ranks have the same seed
        assert torch.initial_seed() == 7 and get_generator_seed_for_device_type("cpu") == 7
        torch.manual_seed(torch.SymInt(LocalIntNode({r: 100 + r for r in range(W)})))
        assert torch.initial_seed().node._local_ints[2] == 102
        b, c = torch.rand(3), torch.rand(3)
        d = torch.nn.functional.dropout(torch.ones(50), 0.5)
    for r in range(W):
        torch.manual_seed(100 + r)
        assert_close(b._local_tensors[r], torch.rand(3))
        assert_close(c._local_tensors[r], torch.rand(3))
        assert_close(d._local_tensors[r], torch.nn.functional.dropout(torch.ones(50), 0.5))
    torch.manual_seed(7)
    assert_close(a.reconcile(), torch.randn(3))
    assert maybe_enable_local_tracker("cpu", True, None, None) is None


def test_collectives():
    with LocalTensorMode(W):
        x = rank_map(lambda r: torch.full((2, 2), float(r)))
        dist.all_reduce(x)
        assert_close(x.reconcile(), torch.full((2, 2), 6.0))
        y = rank_map(lambda r: torch.full((2,), float(r)))
        dist.broadcast(y, src=2)
        assert_close(y.reconcile(), torch.full((2,), 2.0))
        outs = [torch.zeros(2) for _ in range(W)]
        dist.all_gather(outs, rank_map(lambda r: torch.full((2,), float(r))))
        assert all(
            torch.equal(o.reconcile(), torch.full((2,), float(i))) for i, o in enumerate(outs)
        )
        work = dist.all_reduce(x, async_op=True)
        work.wait()


def test_dtensor():
    with LocalTensorMode(W):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert [c.node._local_ints for c in mesh.get_coordinate()] == [
            {0: 0, 1: 0, 2: 1, 3: 1}, {0: 0, 1: 1, 2: 0, 3: 1},
        ]  # fmt: skip
        assert mesh.get_local_rank("tp").node._local_ints == {0: 0, 1: 1, 2: 0, 3: 1}
        assert mesh.get_rank().node._local_ints == {r: r for r in range(W)}
        whole = torch.arange(24.0).view(6, 4)
        for placements in ([Shard(0), Shard(1)], [Shard(1), Replicate()], [Replicate(), Shard(0)]):
            d = distribute_tensor(whole, mesh, placements)
            assert_close(d.full_tensor().reconcile(), whole.reconcile())
            out = (d @ distribute_tensor(torch.ones(4, 2), mesh, [Replicate()] * 2)).full_tensor()
            assert_close(out.reconcile(), whole.reconcile() @ torch.ones(4, 2).reconcile())
        p = DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial()])
        assert_close(p.full_tensor().reconcile(), torch.full((2,), 4.0).reconcile())
        z = zeros(5, 3, device_mesh=mesh, placements=[Shard(0), Replicate()])
        assert z.to_local().shape[0].node._local_ints == {0: 3, 1: 3, 2: 2, 3: 2}
        d = distribute_tensor(torch.randn(5, 3), mesh, [Shard(0), Shard(1)]).requires_grad_()
        (d * 2).sum().backward()
        assert_close(d.grad.full_tensor().reconcile(), torch.full((5, 3), 2.0).reconcile())
        table = distribute_tensor(torch.randn(8, 4), mesh, [Replicate(), Shard(0)])
        ids = distribute_tensor(torch.tensor([1, 5, 7]), mesh, [Replicate(), Replicate()])
        got = torch.nn.functional.embedding(ids, table).full_tensor()
        want = table.full_tensor()[torch.tensor([1, 5, 7])]
        assert_close(got.reconcile(), want.reconcile())
        a, b = (distribute_tensor(torch.randn(4, 4), mesh, [Shard(0), Replicate()]) for _ in "ab")
        want = torch.cat([a.full_tensor().reconcile(), b.full_tensor().reconcile()])
        assert_close(torch.cat([a, b]).full_tensor().reconcile(), want)


def test_placements_of_uneven_means():
    with LocalTensorMode(W):
        mesh = init_device_mesh("cpu", (W,))
        for rows, placement in ((3, Replicate()), (8, Partial("avg"))):
            whole = torch.arange(4.0 * rows).view(rows, 4)
            mean = distribute_tensor(whole, mesh, [Shard(0)]).mean()
            assert list(mean.placements) == [placement]
            assert_close(mean.full_tensor().reconcile(), whole.mean().reconcile())


def test_functional_results_are_waited_for():
    with LocalTensorMode(W):
        x = rank_map(lambda r: torch.full((W,), float(r)))
        y = funcol.all_to_all_single(x, [1] * W, [1] * W, dist.group.WORLD).wait()
        assert isinstance(y, LocalTensor)
        assert_close(y.reconcile(), torch.arange(4.0).reconcile())


def test_all_submeshes_in_a_mode():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with LocalTensorMode(W):
        found = [m.mesh.tolist() for m in mesh._get_all_submeshes("pp")]
    assert found == [[0, 1], [2, 3]]


def test_worlds_one_after_another():
    """A mesh that is still there does not say what the groups of the next world are."""
    kept = []
    for size in (2, 3, 4, 3):
        dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=size)
        x = LocalTensor({r: torch.full((2,), float(r)) for r in range(size)})
        dist.all_reduce(x)
        assert_close(x.reconcile(), torch.full((2,), float(sum(range(size)))))
        with LocalTensorMode(size):
            kept.append(init_device_mesh("cpu", (size,)))
            kept.append(distribute_tensor(torch.ones(6), kept[-1], [Shard(0)]).sum())


def test_pipeline_of_threads():
    """Each thread is a stage; messages go to the next and gradients come back."""
    got = {}

    def stage(i: int) -> None:
        mine = frozenset({2 * i, 2 * i + 1})
        with LocalTensorMode(mine):
            near = torch.SymInt(LocalIntNode({r: (r + 2) % 4 for r in mine}))
            x = rank_map(lambda r: torch.full((2,), float(r)))
            if i == 0:
                wait_all(local_p2p_op(near, x, dist.isend))
                wait_all(local_p2p_op(near, x, dist.irecv))
            else:
                buffer = torch.zeros(2)
                wait_all(local_p2p_op(near, buffer, dist.irecv))
                wait_all(local_p2p_op(near, buffer + x, dist.isend))
            got[i] = {r: t.clone() for r, t in x._local_tensors.items()}

    with LocalRunnerMode(W, 2, stage):
        pass
    assert_close(got[0], {0: torch.full((2,), 2.0), 1: torch.full((2,), 4.0)})
    raises(AssertionError, LocalRunnerMode.current)


def test_a_deadlock_of_threads_is_an_error():
    def stage(i: int) -> None:
        mine = frozenset({2 * i, 2 * i + 1})
        with LocalTensorMode(mine):
            near = torch.SymInt(LocalIntNode({r: (r + 2) % 4 for r in mine}))
            wait_all(local_p2p_op(near, torch.zeros(1), dist.irecv))

    def run():
        with LocalRunnerMode(W, 2, stage):
            pass

    raises(RuntimeError, run)

    def wrong(i: int) -> None:
        if i == 1:
            raise KeyError("mine")

    def run_wrong():
        with LocalRunnerMode(W, 2, wrong):
            pass

    raises(KeyError, run_wrong)


def main() -> None:
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            dist.init_process_group("fake", rank=0, world_size=W)
            try:
                test()
                print("ok", name)
            finally:
                dist.destroy_process_group()


if __name__ == "__main__":
    main()
