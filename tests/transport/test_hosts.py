"""Groups on several islands of shared memory: values, errors, results that nobody waits for."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import cases
import pytest
import strategies
import torch
import torch.distributed as dist
from cases import ROWS, default_case
from compare import check
from hypothesis import given, settings
from ranks import Launched, RankPool, launch
from transport import two_hosts

import fcoll
import inductor_ext
from fcoll.errors import CollectiveMismatch, GroupClosed, PeerDied
from fcoll.transport.hosts import DEPTH, SMALL
from fcoll.transport.island_messages import BLOCK
from fcoll.transport.islands import MOST, islands_of
from fcoll.transport.ordered_calls import INLINE

DIVISIONS = {"even": "0,1/2,3", "interleaved": "0,2/1,3", "uneven": "0,1,2/3", "three": "0,3/1/2"}


def on_islands(division: str) -> dict[str, str]:
    return {"FCOLL_NATIVE": "1", "FCOLL_ISLANDS": division}


@pytest.fixture(scope="module", params=DIVISIONS)
def islands4(request: pytest.FixtureRequest, compiled: None) -> Iterator[RankPool]:
    with RankPool(4, on_islands(DIVISIONS[request.param])) as pool:
        yield pool


# -- which ranks are together ---


def test_ranks_of_one_place_are_an_island_in_the_order_of_first_ranks():
    assert islands_of("baab", "hiih").ranks == ((0, 3), (1, 2))
    many = islands_of(["x"] * (MOST + 3), ["h"] * (MOST + 3))
    assert [len(ranks) for ranks in many.ranks] == [MOST, 3]


def status(rank: int) -> str:
    return str(fcoll.symm_mem.status())


def test_the_status_says_which_ranks_share_memory(compiled):
    done = launch(status, 4, env=on_islands("0,2/1,3"), timeout=60)
    (text,) = set(done.results)
    assert text.startswith("2 islands of shared memory (ranks 0, 2 on ")
    assert text.endswith("messages between them")


def test_ranks_that_are_all_alone_use_the_process_group(compiled):
    done = launch(status, 2, env=on_islands("0/1"), timeout=60)
    assert set(done.results) == {"process group: its ranks are on 2 hosts"}


# -- values ---


def test_every_row_and_dtype(islands4):
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint16)
    reductions = ("sum", "avg", "max")
    wanted = []
    for op in ROWS:
        for dtype in dtypes:
            ways = reductions if op in cases.REDUCING else (None,)
            for way in ways:
                if way is None or cases.has_meaning(way, dtype):
                    args = {} if way is None else {"reduce_op": way}
                    wanted.append(default_case(op, 4, dtypes=(dtype,), args=args))
    check(islands4, wanted)


@pytest.mark.parametrize("form", [f for f in cases.FORMS if f != "one"])
def test_groups_of_some_ranks(islands4, form):
    n = cases.size_of(form, 4)
    ops = [op for op in ROWS if n > 1 or op not in cases.P2P]
    check(islands4, [default_case(op, n, group=form) for op in ops])


def test_uneven_parts(islands4):
    ops = [op for op in ROWS if strategies.takes(op, "sizes") or op == "all_to_all_single"]
    check(islands4, [case for op in ops for case in strategies.uneven(op, 4)])


@settings(max_examples=25, derandomize=True, database=None)
@given(case=strategies.st.sampled_from(ROWS).flatmap(lambda op: strategies.a_case(op, 4)))
def a_call(pool: RankPool, case: cases.Case) -> None:
    check(pool, [case])


def test_any_call(islands4):
    a_call(islands4)


SIZES = (SMALL // 4, SMALL // 4 + 1, INLINE // 4, INLINE // 4 + 1, (DEPTH + 2) * BLOCK // 4 + 5)


def sums_and_moves(rank: int, sizes: tuple[int, ...]) -> None:
    """Sums of sevenths round differently in another order: all ranks have the same bits."""
    n = dist.get_world_size()
    for size in sizes:
        parts = [(torch.arange(size) % 97 + r) / 7 for r in range(n)]
        total = fcoll.all_reduce(parts[rank])
        every = fcoll.all_gather_into_tensor(parts[rank])
        first = fcoll.broadcast(parts[rank], 1)
        torch.testing.assert_close(total + 0, torch.stack(parts).double().sum(0).float())
        assert torch.equal(every, torch.cat(parts))
        assert torch.equal(first, parts[1])
        bits = fcoll.all_gather_into_tensor(fcoll.wait_tensor(total)).view(n, -1)
        assert (bits == bits[0]).all(), size
        rows = torch.stack(parts)
        mine = fcoll.reduce_scatter_tensor(rows)
        torch.testing.assert_close(mine + 0, n * parts[rank][None], rtol=1e-5, atol=1e-5)
        swapped = fcoll.all_to_all_single(rows + 100 * rank)
        assert torch.equal(swapped, torch.stack([parts[rank] + 100 * r for r in range(n)]))


def test_sizes_around_every_limit(islands4):
    islands4.run(sums_and_moves, SIZES, timeout=120)


# -- results that nobody waits for, in another order, from two threads ---


def out_of_order(rank: int) -> list[float]:
    large = torch.full((INLINE,), float(rank))  # four times what the caller carries out itself
    results = [fcoll.all_reduce(large + i) for i in range(6)]
    if rank == 1:
        results.reverse()
    if rank == 2:
        del results[2:4]
    kept = sorted(float(x[0]) for x in results)
    return [*kept, float(fcoll.all_reduce(torch.ones(1)))]


def overtaken(rank: int) -> list[float]:
    """Small calls, each behind a large one that is under way."""
    sums = []
    for i in range(10):
        large = fcoll.all_reduce(torch.full((8 * INLINE,), 1.0 + i))
        small = fcoll.all_reduce(torch.full((4,), 2.0 + i))
        sums += [float(small[0]), float(large[0])]
    return sums


def test_a_small_call_does_not_overtake_a_large_one(islands4):
    assert islands4.run(overtaken) == [[x for i in range(10) for x in (8 + 4 * i, 4 + 4 * i)]] * 4


def test_ranks_may_wait_in_any_order_or_not_at_all(islands4):
    whole = [6.0 + 4 * i for i in range(6)]
    some = [x for i, x in enumerate(whole) if i not in (2, 3)]
    answers = [[*whole, 4.0], [*whole, 4.0], [*some, 4.0], [*whole, 4.0]]
    assert islands4.run(out_of_order) == answers


def in_two_threads(rank: int) -> list[float]:
    """Of two groups, each of which one thread uses."""
    groups = [dist.new_group(list(range(4))) for _ in range(2)]
    for group in groups:
        fcoll.barrier(group)
    sums = [0.0, 0.0]

    def use(i: int) -> None:
        for size in (3, INLINE) * 5:
            sums[i] += float(fcoll.all_reduce(torch.full((size,), i + 1.0), "sum", groups[i])[-1])

    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sums


def test_two_threads_on_two_groups(islands4):
    assert islands4.run(in_two_threads) == [[40.0, 80.0]] * 4


def gradient(rank: int) -> list[float]:
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    fcoll.all_reduce(x).square().sum().backward()
    return x.grad.tolist()


def test_gradients(islands4):
    assert islands4.run(gradient) == [[80.0, 80.0]] * 4


def compiled_form(rank: int) -> tuple[list[float], str]:
    fcoll.all_reduce(torch.ones(1)).tolist()
    compiled = torch.compile(lambda x: fcoll.all_reduce(x + 1) * 2, backend="fcoll", fullgraph=True)
    out = compiled(torch.full((2,), float(rank))).tolist()
    return out, str(inductor_ext.table())


def test_a_compiled_graph_runs_the_kernel(compiled):
    done = launch(compiled_form, 4, env=on_islands("0,1/2,3"), timeout=170)
    assert done.errors == [None] * 4, done.errors
    for out, table in done.results:
        assert out == [20.0, 20.0] and "kernel" in table and "2 islands" in table, table


# -- errors ---


def differing(rank: int) -> str:
    fcoll.all_reduce(torch.ones(4))
    try:
        fcoll.wait_tensor(fcoll.all_reduce(torch.ones(5 if rank > 1 else 4)))
    except (CollectiveMismatch, GroupClosed) as error:
        first = f"{type(error).__name__}: {error}"
    else:
        return "nothing was raised"
    try:
        fcoll.all_reduce(torch.ones(4))
    except GroupClosed as error:
        return json.dumps([first, str(error)])
    return f"{first}, then nothing"


def test_calls_that_differ_between_hosts_raise_on_all_ranks(compiled):
    done = launch(differing, 4, env=on_islands("0,1/2,3"), timeout=60)
    assert done.errors == [None] * 4, done.errors
    for answer in done.results:
        first, then = json.loads(answer)
        assert "[4]" in first and "[5]" in first and "test_hosts.py" in first, first
        assert "closed by an earlier error" in then


def dying(rank: int) -> str:
    fcoll.all_reduce(torch.ones(4))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(100):
            fcoll.all_reduce(torch.ones(100)).sum()
    except (PeerDied, GroupClosed) as error:
        return str(error)
    return "nothing was raised"


def test_a_rank_that_dies_is_an_error_on_all_others(compiled):
    done: Launched = launch(dying, 4, env=on_islands("0,1/2,3"), timeout=60)
    assert done.exitcodes[3] == -signal.SIGKILL
    for answer in done.results[:3]:
        assert answer and "rank" in answer and answer != "nothing was raised", answer


# -- on two hosts: namespaces in which ranks see no process of the other's ---


@pytest.fixture
def hosts(tmp_path, compiled) -> Iterator[two_hosts.Hosts]:
    if why := two_hosts.why_not():
        pytest.skip(why)
    with two_hosts.two_hosts(tmp_path) as made:
        yield made


def test_two_hosts(hosts):
    hosts.start((2, 2), "host_ranks", "values", timeout_s=60)
    hosts.wait(120)
    for rank in range(4):
        assert len(said := hosts.said(rank)) == 2, hosts.out(rank).read_text()
        assert said[0].startswith("2 islands of shared memory (ranks 0, 1 on ")
        assert said[1] == "right"


def until(seen: Callable[[], bool], timeout_s: float = 60) -> None:
    ends = time.monotonic() + timeout_s
    while not seen():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.05)


@pytest.mark.parametrize("what", ["kill", "cut"])
def test_a_host_that_is_lost_is_an_error_on_all_ranks_that_are_left(hosts, what):
    hosts.start((2, 2), "host_ranks", "until_an_error", timeout_s=8)
    until(lambda: all(hosts.said(rank) for rank in range(4)))
    if what == "kill":
        hosts.kill(1)
    else:
        hosts.cut()
    left = range(2 if what == "kill" else 4)
    until(lambda: all(len(hosts.said(rank)) == 2 for rank in left))
    answers = [hosts.said(rank)[1] for rank in left]
    assert all(answer.split(":")[0] in ERRORS for answer in answers), answers
    assert any(" on " in answer and "lost rank" in answer for answer in answers), answers


ERRORS = ("PeerDied", "GroupClosed", "CollectiveTimeout")
