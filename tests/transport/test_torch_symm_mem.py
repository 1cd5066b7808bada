"""torch's own SymmetricMemory API on CPU tensors, as its users call it."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import struct
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from ranks import launch
from torch._C._distributed_c10d import _SymmetricMemory

from fcoll.errors import BadSymmetricCall, GroupForked
from fcoll.transport.native import build

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
NATIVE = {"FCOLL_NATIVE": "1"}
WORLD = "0"  # the default group's name
CPU = torch.device("cpu")


def empty(*size, dtype=torch.float32):
    assert build.load() == ""
    return symm_mem.empty(*size, dtype=dtype, device="cpu")


def met(*size, dtype=torch.float32, group=WORLD):
    """A new symmetric tensor and its handle."""
    x = empty(*size, dtype=dtype)
    return x, symm_mem.rendezvous(x, group)


def raises(call, *parts):
    """Its message has all the parts; how long it took."""
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), caught.value
    return time.monotonic() - start


# -- memory --


def facts(rank):
    x, hdl = met(3, 5)
    assert symm_mem.get_backend("cpu") == "fcoll"
    assert symm_mem.is_symm_mem_tensor(x) and symm_mem.is_symm_mem_tensor(x[1])
    assert not symm_mem.is_symm_mem_tensor(torch.ones(2))
    assert (hdl.rank, hdl.world_size) == (rank, dist.get_world_size())
    assert (hdl.buffer_size, hdl.offset, hdl.device) == (60, 0, CPU)
    assert hdl.buffer_ptrs[rank] == x.data_ptr()
    assert len(set(hdl.buffer_ptrs)) == len(set(hdl.signal_pad_ptrs)) == hdl.world_size
    assert hdl.multicast_ptr == 0
    assert x.shape == (3, 5) and x.is_contiguous() and x.data_ptr() % 64 == 0
    again = symm_mem.rendezvous(x, dist.group.WORLD)  # the same mapping: no second exchange
    assert again.buffer_ptrs == hdl.buffer_ptrs
    hdl.barrier()


def test_what_a_handle_says(shared2):
    shared2.run(facts)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def peers_buffers(rank, dtype):
    n = dist.get_world_size()
    x, hdl = met(4, 6, dtype=dtype)
    x.copy_(torch.arange(24).view(4, 6) % 2 + rank)
    hdl.barrier()
    for r in range(n):
        expected = (torch.arange(24).view(4, 6) % 2 + r).to(dtype)
        assert torch.equal(hdl.get_buffer(r, (4, 6), dtype), expected)
        assert torch.equal(hdl.get_buffer(r, (2, 3), dtype, 6), expected.flatten()[6:12].view(2, 3))
        assert torch.equal(hdl.get_remote_tensor(r, (4, 6), dtype), expected)
        assert torch.equal(
            hdl.get_buffer(r, (x.nbytes,), torch.uint8), expected.view(-1).view(torch.uint8)
        )
    hdl.barrier()
    hdl.get_buffer((rank + 1) % n, (6,), dtype, 18).fill_(rank % 2)  # a write to the neighbour
    hdl.barrier()
    assert torch.equal(x[3], torch.full((6,), (rank - 1) % n % 2).to(dtype))
    raises(lambda: hdl.get_buffer(0, (25,), dtype), "exceeds the allocated size")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_of_all_peers(shared2, dtype):
    shared2.run(peers_buffers, dtype)


def test_buffers_of_four_ranks(shared4):
    shared4.run(peers_buffers, torch.float32)


def remote_tensors(rank):
    x, hdl = met(8, 4)
    x.copy_(torch.arange(32).view(8, 4) + 100 * rank)
    hdl.barrier()
    tensors = torch.ops.symm_mem.get_remote_tensors(x, WORLD)
    views = torch.ops.symm_mem.get_remote_tensors(x[2:4], WORLD)
    hdl.barrier()
    del x, hdl
    gc.collect()  # these tensors keep the memory
    for r, (t, v) in enumerate(zip(tensors, views, strict=True)):
        assert torch.equal(t, torch.arange(32.0).view(8, 4) + 100 * r)
        assert torch.equal(v, t[2:4])


def test_get_remote_tensors(shared4):
    shared4.run(remote_tensors)


def sizes(rank):
    x, hdl = met(0, 7)
    assert hdl.buffer_size == 0 and hdl.get_buffer(1 - rank, (0,), torch.int8).numel() == 0
    assert symm_mem.is_symm_mem_tensor(x)
    hdl.barrier()
    past_4gib = (4 << 30) + 12345  # pages are given at the first touch: few are touched
    big, hdl = met((5 << 30) + 1, dtype=torch.uint8)
    big[past_4gib : past_4gib + 3] = rank + 1
    hdl.barrier()
    assert hdl.get_buffer(1 - rank, (3,), torch.uint8, past_4gib).tolist() == [2 - rank] * 3
    assert hdl.get_buffer(1 - rank, (3,), torch.uint8, past_4gib - (4 << 30)).tolist() == [0] * 3
    hdl.barrier()
    window = big[past_4gib - 1 : past_4gib + 2]
    summed = torch.ops.symm_mem.one_shot_all_reduce(window, "sum", WORLD)
    assert summed.tolist() == [0, 3, 3]
    raises(lambda: empty(1 << 60), "cannot", str(4 << 60))


def test_empty_and_beyond_4_gib(shared2):
    shared2.run(sizes)


def persistent(rank):
    def alloc(*size):
        stride = torch._prims_common.make_contiguous_strides_for(size)
        return _SymmetricMemory.empty_strided_p2p(size, stride, torch.float32, CPU, WORLD, 4711)

    assert build.load() == ""
    x = alloc(64, 2)
    address = x.data_ptr()
    ptrs = _SymmetricMemory.rendezvous(x).buffer_ptrs  # the group given at the allocation
    x.fill_(rank)
    raises(lambda: alloc(64, 2), "still active")
    del x
    y = alloc(64, 2)
    hdl = _SymmetricMemory.rendezvous(y)
    assert y.data_ptr() == address and hdl.buffer_ptrs == ptrs
    hdl.barrier()
    assert hdl.get_buffer(1 - rank, (1,), torch.float32).item() == 1 - rank
    hdl.barrier()
    del y
    raises(lambda: alloc(64, 3), "different from the size of a previous allocation")


def test_persistent_alloc_id_gets_the_same_memory(shared2):
    shared2.run(persistent)


def held() -> tuple[int, int]:
    """This process's open files and mappings of symmetric memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("/memfd:fcoll")
    return len(os.listdir("/proc/self/fd")), maps


def freed(rank):
    n = dist.get_world_size()
    met(1)  # what a first rendezvous opens for good: a pidfd for each peer
    before = held()
    tensors = [met(1000) for _ in range(10)]
    files, maps = held()
    assert (files, maps) == (before[0] + 10, before[1] + 10 * 2 * n)  # data and pads of n ranks
    handles = [hdl for _, hdl in tensors]
    del tensors
    assert held() == (files, maps)  # a handle keeps the memory
    handles[0].get_buffer(rank, (1000,), torch.float32).fill_(1)
    handles[0].barrier()
    del handles
    assert held() == before
    empty(10_000)
    assert held() == before


def test_memory_is_freed_with_the_tensor_and_the_handle(shared2):
    shared2.run(freed)


# -- signals --


def barriers(rank):
    n = dist.get_world_size()
    x, hdl = met(1, dtype=torch.int64)
    for i in range(200):
        x.fill_(i)
        hdl.barrier(channel=i % 7)
        assert [hdl.get_buffer(r, (1,), torch.int64).item() for r in range(n)] == [i] * n
        hdl.barrier(channel=7)
    assert not hdl.get_signal_pad(rank).any()  # all consumed


def test_barriers_on_several_channels(shared2, shared4):
    shared2.run(barriers)
    shared4.run(barriers)


def ring(rank):
    n = dist.get_world_size()
    x, hdl = met(1)
    ahead, behind = (rank + 1) % n, (rank - 1) % n
    for i in range(20):
        if rank > 0:
            hdl.wait_signal(behind, channel=i % 3)
        hdl.get_buffer(ahead, (1,), torch.float32).copy_(x + 1 if rank else torch.full((1,), i))
        hdl.put_signal(ahead, channel=i % 3)
        if rank == 0:
            hdl.wait_signal(behind, channel=i % 3)
            assert x.item() == i + n - 1


def test_signals_around_a_ring(shared4):
    shared4.run(ring)


def signal_pads(rank):
    _x, hdl = met(1)
    n, peer = hdl.world_size, 1 - rank
    hdl.put_signal(peer, channel=3)
    dist.barrier()
    pad = hdl.get_signal_pad(rank)
    assert pad.view(torch.int32).nonzero().item() == 3 * n + peer  # torch's layout
    hdl.wait_signal(peer, channel=3)
    assert not pad.any()
    dist.barrier()
    if rank == 0:  # a signal that a user's kernel sends
        time.sleep(0.05)
        _SymmetricMemory.stream_write_value32(hdl.get_signal_pad(1), 5 * n, 1)
    else:
        hdl.wait_signal(0, channel=5, timeout_ms=5000)
    _SymmetricMemory.memset32(hdl.get_signal_pad(rank), 8, 7, 2)
    assert pad[7:11].tolist() == [0, 7, 7, 0]
    pad.zero_()
    dist.barrier()


def test_signal_pads_are_laid_out_as_torch_does(shared2):
    shared2.run(signal_pads)


def larger_pads(rank):
    usual = symm_mem.get_signal_pad_size()
    try:
        symm_mem.set_signal_pad_size(8 * usual + rank * 64)
        x = empty(1)
        raises(lambda: symm_mem.rendezvous(x, WORLD), "rendezvous of a signal pad of")
        symm_mem.set_signal_pad_size(8 * usual)
        x, hdl = met(1)
        hdl.barrier(channel=usual - 1)  # 4 bytes x 2 ranks x usual channels
        assert hdl.get_signal_pad(1 - rank).nbytes == 8 * usual
    finally:
        symm_mem.set_signal_pad_size(usual)


def test_signal_pads_of_another_size(shared2):
    shared2.run(larger_pads)


def timeouts(rank):
    x, hdl = met(1)
    if rank == 0:
        where = "CollectiveTimeout: rank 0 waited ", " ms for rank 1 in "
        waited = raises(lambda: hdl.barrier(2, 60), *where, "barrier on channel 2")
        assert 0.05 < waited < 1
        waited = raises(lambda: hdl.wait_signal(1, 4, 60), *where, "wait_signal on channel 4")
        assert 0.05 < waited < 1
        hdl.put_signal(1, 6)
        raises(lambda: hdl.put_signal(1, 6, 60), *where, "put_signal on channel 6")  # not yet taken
    dist.barrier()
    if rank == 1:
        hdl.wait_signal(0, 6, 5000)
    # rank 1 has made none yet, but might be let through by what is left of rank 0's
    raises(lambda: hdl.barrier(2, 60), "closed by an earlier error: rank 0 waited")
    dist.barrier()
    hdl = symm_mem.rendezvous(x, WORLD)
    hdl.barrier(2)  # made anew, it works again
    for call in (lambda: hdl.barrier(-1), lambda: hdl.barrier(10**6), lambda: hdl.put_signal(2)):
        with pytest.raises(BadSymmetricCall, match="is outside the"):
            call()


def test_timeouts_name_ranks_and_channel(shared2):
    shared2.run(timeouts)


def timeout_of_the_group(rank):
    group = dist.new_group([0, 1], timeout=timedelta(milliseconds=300))
    x, hdl = met(2, group=group)
    y = empty(2)
    if rank == 0:
        assert raises(lambda: hdl.barrier(), "rank 0 waited", "barrier on channel 0") < 2
        reduce = torch.ops.symm_mem.one_shot_all_reduce
        again = "waited 300 ms for rank 1 in rendezvous"  # closed, it would have to be made anew
        assert raises(lambda: reduce(x, "sum", group.group_name), again) < 2
        raises(lambda: symm_mem.rendezvous(y, group), "waited 300 ms for rank 1 in rendezvous")
    dist.barrier()


def test_without_a_timeout_that_of_the_group_holds(shared2):
    shared2.run(timeout_of_the_group)


# -- groups --


def sub_groups(rank):
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [3, 0], [1, 2])]
    x, hdl = met(4, group=pairs[rank // 2])
    other = symm_mem.rendezvous(x, pairs[2 if rank in (0, 3) else 3])
    world = symm_mem.rendezvous(x, WORLD)
    x.fill_(rank)
    world.barrier()
    assert (hdl.rank, hdl.world_size, world.rank) == (rank % 2, 2, rank)
    neighbour, across = rank ^ 1, 3 - rank
    assert hdl.get_buffer(1 - hdl.rank, (1,), torch.float32).item() == neighbour
    assert other.get_buffer(1 - other.rank, (1,), torch.float32).item() == across
    assert [world.get_buffer(r, (1,), torch.float32).item() for r in range(4)] == [0, 1, 2, 3]
    world.barrier()
    hdl.put_signal(1 - hdl.rank)  # no other group may take it for its own
    raises(lambda: other.wait_signal(1 - other.rank, timeout_ms=50), "waited")
    raises(lambda: world.wait_signal(neighbour, timeout_ms=50), "waited")
    hdl.wait_signal(1 - hdl.rank, timeout_ms=5000)
    total = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", pairs[rank // 2].group_name)
    assert total.tolist() == [float(rank + neighbour)] * 4
    assert torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", WORLD).tolist() == [6.0] * 4


def test_sub_groups_and_one_tensor_in_three_groups(shared4):
    shared4.run(sub_groups)


def other_sizes(rank):
    x = empty(4 + rank)
    sizes = f"of {16 + 4 * rank} bytes on rank {rank}, {20 - 4 * rank} bytes on rank {1 - rank}"
    raises(lambda: symm_mem.rendezvous(x, WORLD), "CollectiveMismatch: ", sizes)
    x, hdl = met(4)  # the group goes on
    hdl.barrier()


def test_tensors_of_other_sizes_are_an_error_on_all_ranks(shared2):
    shared2.run(other_sizes)


def strangers(rank, forge_token):
    """Rank 1 tells of memory that is not what it says."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    pad_bytes = symm_mem.get_signal_pad_size() + 64 + 40  # see SharedBuffers' constructor
    x = empty(pad_bytes, dtype=torch.uint8)  # so that the token is all that is wrong
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"/proc/\d+/fd/\d+ is not the peer's memory"):
            symm_mem.rendezvous(x, group)
    else:
        fd = fd_of(x) if forge_token else os.open("/dev/null", os.O_RDWR)
        address = (os.getpid(), fd, 1234, pad_bytes)
        store = dist.distributed_c10d._get_process_group_store(group)
        store.set("fcoll_symm/0_1_/0/1", struct.pack("iiQQiiQQ", *address, *address))
    dist.barrier()


def fd_of(x):
    """The file of a symmetric tensor, by its place in memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= x.data_ptr() < end:
            inode = int(line.split()[4])
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the file of the listing itself
            if os.stat(f"/proc/self/fd/{fd}").st_ino == inode:
                return int(fd)
    raise AssertionError("no such file")


@pytest.mark.parametrize("forge_token", [False, True])
def test_memory_with_another_token_is_not_mapped(shared2, forge_token):
    shared2.run(strangers, forge_token)


def new_worlds(rank):
    """A world is replaced while a tensor is alive; then the process forks."""
    port = int(os.environ["MASTER_PORT"])
    x, hdl = met(2)
    for k in range(3):
        x.fill_(rank + k)
        total = torch.ops.symm_mem.one_shot_all_reduce(x, "sum", WORLD)
        assert total.tolist() == [1.0 + 2 * k] * 2
        files = held()
        dist.barrier()
        dist.destroy_process_group()
        raises(lambda: symm_mem.rendezvous(x, WORLD), "Could not resolve")
        hdl.barrier()  # the memory outlives the group
        store = dist.PrefixStore(str(k), dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    assert held()[0] <= files[0] + 10  # threads and sockets of old groups are gone
    hdl = symm_mem.rendezvous(x, WORLD)
    child = os.fork()
    if child == 0:
        y = empty(2)
        forked = 0
        for call in (
            lambda: hdl.barrier(),
            lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", WORLD),
            lambda: symm_mem.rendezvous(y, WORLD),
        ):
            try:
                call()
            except RuntimeError as error:
                forked += isinstance(error, GroupForked)
        os._exit(forked)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    hdl.barrier()


def test_new_worlds_and_forks():
    done = launch(new_worlds, 2, env=NATIVE)
    assert done.errors == [None, None], done.stderr


# -- collectives --


def one_by_one(xs, op):
    """The reduction in rank order, in the type it is to be done in."""
    wide = xs.float() if xs.dtype in (torch.bfloat16, torch.float16) else xs
    total = wide[0]
    for x in wide[1:]:
        if op == "max":
            total = torch.maximum(total, x)
        elif op == "product":
            total = total * x
        else:
            total = (total + x).to(total.dtype)
    return (total / len(xs) if op == "avg" else total).to(xs.dtype)


REDUCTIONS = [
    (torch.float32, "sum"),
    (torch.bfloat16, "sum"),
    (torch.float16, "avg"),
    (torch.float64, "product"),
    (torch.int32, "max"),
    (torch.uint8, "sum"),
    (torch.complex64, "sum"),
]


def all_reduces(rank, dtype, op, count):
    n = dist.get_world_size()
    torch.manual_seed(count)
    xs = torch.randn(n, count).mul(3).to(dtype)
    expected = one_by_one(xs, op)
    ops = torch.ops.symm_mem
    base, _ = met(count + 8, dtype=dtype)
    buf = base[8:]  # behind an offset
    local = xs[rank].clone()

    buf.copy_(local)
    results = [ops.one_shot_all_reduce(buf, op, WORLD)]
    results.append(ops.one_shot_all_reduce_out(buf, op, WORLD, torch.empty_like(local)))
    results.append(ops.multimem_one_shot_all_reduce(buf, op, WORLD))
    assert torch.equal(buf, local)
    buf.zero_()
    results.append(ops.one_shot_all_reduce_copy(buf, local, op, WORLD))
    out = torch.empty_like(local)
    assert ops.one_shot_all_reduce_copy_out(buf, local, op, WORLD, out) is out
    results.append(out)
    half = count // 2  # the buffer may be larger than what is sent
    part = ops.one_shot_all_reduce_copy(buf, local[:half].clone(), op, WORLD)
    assert torch.equal(part, expected[:half])
    buf.copy_(local)
    results.append(ops.two_shot_all_reduce_out(buf, op, WORLD, torch.empty_like(local)))
    buf.copy_(local)
    assert ops.two_shot_all_reduce_(buf, op, WORLD) is buf
    results.append(buf)
    for result in results:
        assert torch.equal(result, expected)
    return results[0].view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype, op", REDUCTIONS, ids=str)
def test_all_reduces_give_the_sum_and_the_same_bits(shared2, shared4, dtype, op):
    for pool, count in ((shared2, 1000), (shared4, 1001)):
        bits = pool.run(all_reduces, dtype, op, count)
        assert all(b == bits[0] for b in bits)


@pytest.mark.parametrize("count", [0, 1, 3, 17, 300_000])
def test_all_reduces_of_all_lengths(shared4, count):
    shared4.run(all_reduces, torch.float32, "sum", count)


def scatter_and_gather(rank):
    n = dist.get_world_size()
    ops = torch.ops.symm_mem
    torch.manual_seed(0)
    xs = torch.randn(n, 5, 6 * n)
    total = one_by_one(xs, "sum")
    buf, _ = met(5, 6 * n)
    buf.copy_(xs[rank])
    out = ops.reduce_scatter_out(buf, WORLD, True, torch.empty(5, 6))
    assert torch.equal(out, total[:, 6 * rank : 6 * rank + 6])
    out = ops.reduce_scatter_out(buf.view(-1), WORLD, False, torch.empty(30))
    assert torch.equal(out, total.view(n, 30)[rank])

    gathered, _ = met(3 * n, 2, dtype=torch.bfloat16)
    ops.multimem_all_gather_out(torch.full((3, 2), rank).bfloat16(), WORLD, gathered)
    assert torch.equal(gathered, torch.arange(n).repeat_interleave(6).view(-1, 2).bfloat16())


def test_reduce_scatter_and_all_gather(shared2, shared4):
    shared2.run(scatter_and_gather)
    shared4.run(scatter_and_gather)


def one_after_the_other(rank):
    """Inputs are overwritten at once: no rank may still be reading them."""
    n = dist.get_world_size()
    buf, _ = met(2000)
    for i in range(300):
        buf.fill_(i + rank)
        y = torch.ops.symm_mem.one_shot_all_reduce(buf, "sum", WORLD)
        assert torch.equal(y, torch.full((2000,), float(n * i + sum(range(n)))))
        buf.fill_(i)
        torch.ops.symm_mem.two_shot_all_reduce_(buf, "sum", WORLD)
        assert torch.equal(buf, torch.full((2000,), float(n * i)))


def test_collectives_one_after_the_other(shared2, shared4):
    shared2.run(one_after_the_other)
    shared4.run(one_after_the_other)


def wrong_calls(rank):
    ops = torch.ops.symm_mem
    x, hdl = met(4, 6)
    out = torch.empty(4, 6)
    with pytest.raises(BadSymmetricCall, match="not in symmetric memory"):
        ops.one_shot_all_reduce(torch.ones(3), "sum", WORLD)
    with pytest.raises(BadSymmetricCall, match="must be contiguous"):
        ops.one_shot_all_reduce(x.t(), "sum", WORLD)
    with pytest.raises(BadSymmetricCall, match="no reduce op most"):
        ops.two_shot_all_reduce_(x, "most", WORLD)
    with pytest.raises(BadSymmetricCall, match="band has no meaning for Float"):
        ops.one_shot_all_reduce(x, "band", WORLD)
    with pytest.raises(BadSymmetricCall, match="overlap"):
        ops.one_shot_all_reduce_out(x, "sum", WORLD, x)
    with pytest.raises(BadSymmetricCall, match=r"\[4, 5\].*\[4, 6\]"):
        ops.one_shot_all_reduce_out(x, "sum", WORLD, torch.empty(4, 5))
    with pytest.raises(BadSymmetricCall, match="Float on cpu and Double on cpu"):
        ops.two_shot_all_reduce_out(x, "sum", WORLD, out.double())
    with pytest.raises(BadSymmetricCall, match="25 is not divisible by 2"):
        ops.reduce_scatter_out(empty(25), WORLD, False, torch.empty(12))
    assert symm_mem.rendezvous(torch.ones(3), WORLD) is None  # and a warning, as on CUDA
    hdl.barrier()
    sent = x if rank == 0 else x[:3]
    with pytest.raises(RuntimeError) as caught:
        ops.one_shot_all_reduce(sent, "sum", WORLD)
    for r, count in enumerate((24, 18)):
        call = f"rank {r} calls one_shot_all_reduce: all_reduce({count} float32, sum)"
        assert call in str(caught.value), caught.value
    x.fill_(rank)
    assert ops.one_shot_all_reduce(x, "sum", WORLD)[0, 0] == 1  # it goes on


def test_wrong_calls_are_errors_that_say_so(shared2):
    shared2.run(wrong_calls)


def registered(rank):
    assert build.load() == ""
    keys = {}
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("symm_mem::"):
            dump = torch._C._dispatch_dump(schema.name).splitlines()[3:]  # name, schema, debug
            lines = [line for line in dump if "registered at" in line]
            keys[schema.name] = {line.split(":")[0]: "symm_backend.cpp" in line for line in lines}
    return keys


def test_kernels_are_for_cpu_alone_and_replace_nobodys(shared2):
    ops = shared2.run(registered)[0]
    for name, keys in ops.items():
        assert [k for k, ours in keys.items() if ours] in ([], ["CPU"]), (name, keys)
    for name in ("one_shot_all_reduce", "get_remote_tensors"):
        assert {"CPU": True, "Meta": False}.items() <= ops[f"symm_mem::{name}"].items()


# -- never hang --


def killed(rank, victim):
    x, hdl = met(4)
    fresh = empty(4)
    torch.ops.symm_mem.one_shot_all_reduce(x, "sum", WORLD)
    if rank == victim:
        time.sleep(0.2)  # the others are in the barrier
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    died = f"PeerDied: rank {victim} died; rank {rank} waited for it in "
    waits = [raises(hdl.barrier, died + "barrier on channel 0") - 0.2]
    later = [
        (lambda: hdl.wait_signal(victim, 1), "wait_signal on channel 1"),
        (lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", WORLD), "rendezvous"),
        (lambda: symm_mem.rendezvous(fresh, WORLD), "rendezvous"),
    ]
    waits += [raises(call, died + where) for call, where in later]
    assert time.monotonic() - start < 5
    alive = (rank + 1 if rank + 1 != victim else rank + 2) % hdl.world_size
    hdl.put_signal(alive, 2)  # those that live can still talk
    hdl.wait_signal((rank - 1 if rank - 1 != victim else rank - 2) % hdl.world_size, 2)
    return waits


def test_a_killed_peer_raises_in_all_others():
    left_over = sorted(os.listdir("/dev/shm"))
    victim = 2
    done = launch(killed, 4, victim, env=NATIVE)
    assert done.exitcodes[victim] == -signal.SIGKILL
    for rank, waits in enumerate(done.results):
        if rank != victim:
            assert waits is not None, done.stderr[rank]
            assert max(waits) < 0.5, waits
    assert sorted(os.listdir("/dev/shm")) == left_over
