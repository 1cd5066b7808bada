"""Ranks meet at the first collective: who is missing is named, all hear of failures."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import launch

import fcoll
from fcoll import _torch
from fcoll import lobby as lobby_module
from fcoll.groups import Group
from fcoll.lobby import Absent, Died, Lobby, NotMet, alive, process_of
from fcoll.transport import shared_memory
from fcoll.transport.handshake import prefix_of

SOON = 30.0  # of a wait that ends long before

# -- the lobby itself; ranks are threads ---


@pytest.fixture(params=["hash", "tcp", "file"])
def store(request, tmp_path):
    if request.param == "hash":
        return dist.HashStore()
    if request.param == "tcp":
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return dist.FileStore(str(tmp_path / "store"), 3)


def all_of(n: int, rank):
    with ThreadPoolExecutor(n) as ranks:
        return list(ranks.map(rank, range(n)))


def test_every_text_reaches_every_rank_in_every_round(store):
    def rank(r: int) -> list[list[str]]:
        lobby = Lobby(store, r, 3, SOON)
        return [lobby.exchange(f"{r} in round {i}") for i in range(3)]

    for rounds in all_of(3, rank):
        assert rounds == [[f"{r} in round {i}" for r in range(3)] for i in range(3)]


def test_an_earlier_meeting_of_that_name_is_not_taken_for_this_one(store):
    all_of(2, lambda r: Lobby(store, r, 2, SOON).exchange(f"old {r}"))
    with pytest.raises(Absent, match=r"^rank 0 waited 0.3 s for rank 1 to join"):
        Lobby(store, 0, 2, 0.3).exchange("new 0")  # though the old card of rank 1 is there
    assert (
        all_of(2, lambda r: Lobby(store, r, 2, SOON).exchange(f"new {r}"))
        == [["new 0", "new 1"]] * 2
    )


def test_whoever_is_missing_is_named_and_hears_of_it(store):
    def rank(r: int) -> NotMet | None:
        lobby = Lobby(store, r, 4, 0.5)
        try:
            lobby.exchange("")
        except NotMet as error:
            lobby.give_up(error)
            return error
        return None

    for error in all_of(2, rank):
        assert isinstance(error, Absent) and error.ranks == (2, 3)
    late = Lobby(store, 3, 4, SOON)
    start = time.monotonic()
    with pytest.raises(Absent, match="s for rank 2, rank 3 to join"):
        late.exchange("")
    assert time.monotonic() - start < SOON / 2
    late.forget()
    all_of(4, lambda r: Lobby(store, r, 4, SOON).exchange(""))


def test_a_long_wait_is_told_of_once(store, monkeypatch, caplog):
    monkeypatch.setattr(lobby_module, "NOTICE_S", 0.1)
    with pytest.raises(Absent):
        Lobby(store, 0, 3, 0.5, purpose="compare a graph").exchange("")
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("rank 0 waited 0.") and "(timeout 0.5 s)" in told
    assert "s for rank 1, rank 2 to compare a graph" in told


def test_siblings_that_share_a_store_do_not_meet(store):
    """split_group gives the groups that it makes one name, and so one store."""
    g = Group("1", (0, 1), 0, None, "", ("cpu",))
    other = Group("1", (2, 3), 0, None, "", ("cpu",))
    prefixes = {prefix_of(g), prefix_of(other)}
    assert len(prefixes) == 2
    places = [(prefix, r) for prefix in prefixes for r in range(2)]

    def rank(i: int) -> list[str]:
        prefix, r = places[i]
        return Lobby(store, r, 2, SOON, prefix).exchange(f"{prefix} {r}")

    assert all_of(4, rank) == [[f"{p} 0", f"{p} 1"] for p, _ in places]


@pytest.fixture
def ended():
    """A process that was there and is gone."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = process_of(child.pid)
    assert alive(process)
    child.communicate(b"\n")
    return process


def test_a_process_that_ended_is_not_waited_for(store, ended):
    start = time.monotonic()
    with pytest.raises(Died, match="rank 1 died; rank 0 waited for it") as caught:
        Lobby(store, 0, 2, SOON, processes={1: ended}).exchange("")
    assert caught.value.ranks == (1,) and time.monotonic() - start < SOON / 2


def test_processes_of_other_hosts_and_containers_are_taken_for_alive(ended):
    pid, start = ended
    assert not alive(ended)
    assert alive((pid, "other-boot-id " + start.partition(" ")[2]))
    assert alive((pid, ""))


def test_a_store_that_fails_is_an_error():
    class Broken:
        def set(self, key, value):
            raise dist.DistNetworkError("connection reset")

    lobby = Lobby(Broken(), 0, 2, SOON)
    with pytest.raises(Died, match="does not answer: connection reset"):
        lobby.exchange("")
    lobby.give_up(Absent("", []))  # best effort


def clients(n: int) -> list[dist.TCPStore]:
    """A store that ends with rank 0, whose process holds it, as each rank has it."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [dist.TCPStore("127.0.0.1", host.port, is_master=False) for _ in range(1, n)]
    return [host, *others]


def test_the_word_of_the_rank_that_holds_the_store_is_heard():
    stores = clients(3)  # rank 2 does not come

    def rank(r: int) -> NotMet:
        store, stores[r] = stores[r], None
        lobby = Lobby(store, r, 3, 0.5 if r == 0 else SOON)
        with pytest.raises(NotMet) as caught:
            lobby.exchange("")
        lobby.give_up(caught.value)
        error = caught.value.with_traceback(None)
        del lobby, store, caught  # the process ends
        return error

    for error in all_of(2, rank):
        assert type(error) is Absent and "waited 0.5 s for rank 2" in str(error)


@pytest.mark.parametrize("rounds", [1, 2])
def test_the_rank_that_holds_the_store_may_end_when_it_has_read(rounds):
    for _ in range(4):  # the last look of the others is a matter of luck
        stores = clients(3)

        def rank(r: int, stores=stores) -> list[str]:
            store, stores[r] = stores[r], None
            lobby = Lobby(store, r, 3, SOON)
            del store
            return [lobby.exchange(f"{r}") for _ in range(rounds)][-1]

        assert all_of(3, rank) == [["0", "1", "2"]] * 3


def test_a_store_that_ends_says_whom_the_rank_waited_for():
    stores = clients(2)
    waiting = threading.Event()

    class Watched(Lobby):
        def _look(self, ranks):
            waiting.set()
            super()._look(ranks)

    def rank(r: int) -> str:
        store, stores[r] = stores[r], None
        if r == 0:
            waiting.wait(SOON)
            return ""  # it ends with an error of its own, and says nothing
        with pytest.raises(Died) as caught:
            Watched(store, r, 2, SOON).exchange("")
        return str(caught.value)

    assert "rank 1 waited for rank 0 to join the group" in all_of(2, rank)[1]


# -- real ranks ---


def caught(call, *args) -> tuple[str, str, float, int]:
    """What a call raised: its class, message, seconds, and the rank that it is about."""
    start = time.monotonic()
    try:
        call(*args)
    except Exception as error:
        seconds = time.monotonic() - start
        return type(error).__name__, str(error), seconds, getattr(error, "rank", -1)
    return "", "", time.monotonic() - start, -1


@contextmanager
def patched(owner, name: str, value):
    """The rank goes on with other tests, so what is changed in it is put back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def short_of_time():
    """The handshake's timeout, not gloo's: that has to connect its ranks on a busy machine."""
    return patched(_torch, "group_timeout_s", lambda pg: 1.5)


def say(key: str) -> None:
    dist.group.WORLD.get_group_store().set(key, "")


def hear(key: str) -> None:
    dist.group.WORLD.get_group_store().wait([key], timedelta(seconds=60))


def sum_over(group) -> None:
    fcoll.wait_tensor(fcoll.all_reduce(torch.ones(2), "sum", group))


def one_is_absent(rank: int) -> list:
    """Rank 1 comes when the other has given up; then both make a new group."""
    group = dist.new_group([0, 1])
    with short_of_time():
        if rank == 1:
            hear(f"gave up {group.group_name}")
        found = [caught(sum_over, group), caught(sum_over, group)]
        say(f"gave up {group.group_name}")
    fresh = dist.new_group([0, 1])
    return [*found, fcoll.all_reduce(torch.ones(2), "sum", fresh).tolist()]


@pytest.mark.parametrize("pool", ["ranks2", "shared2"])
def test_an_absent_rank_is_named_and_the_group_closed(pool, request):
    answers = request.getfixturevalue(pool).run(one_is_absent)
    for rank, (first, again, after) in enumerate(answers):
        name, message, seconds, about = first
        assert (name, about) == ("CollectiveTimeout", 1)
        assert "rank 0 waited 1.5 s for rank 1 to join the group" in message
        assert seconds >= 1.5 if rank == 0 else seconds < 1.5, "who is late need not wait"
        assert again[0] == "GroupClosed" and "waited 1.5 s for rank 1" in again[1]
        assert after == [2.0, 2.0]


def join_in_4_seconds(rank: int) -> list:
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    if rank == 1:
        hear("gave up")
    found = [caught(sum_over, [1, 0]), caught(sum_over, [1, 0])]
    say("gave up")
    return found


def test_a_rank_list_has_the_timeout_of_its_world():
    for rank, (first, again) in enumerate(launch(join_in_4_seconds, 2, init=False).results):
        assert first[0] == "CollectiveTimeout", first
        assert "rank 0 waited 4 s for rank 1 to join the group" in first[1]
        assert 3.9 < first[2] < 30 if rank == 0 else first[2] < 3.9
        assert again[0] == "GroupClosed" and "[1, 0]" in again[1]


def one_died(rank: int) -> tuple:
    sum_over(None)
    group = dist.new_group([0, 1])
    if rank == 1:
        os._exit(3)
    return caught(sum_over, group), caught(sum_over, [1, 0])


def test_a_rank_that_died_before_is_named_at_once(compiled):
    done = launch(one_died, 2, env={"FCOLL_NATIVE": "1"}, timeout=120)
    for name, message, seconds, _ in done.results[0]:
        assert name == "PeerDied" and "died" in message and seconds < 15
    assert [answer[3] for answer in done.results[0]] == [1, 0], "ranks are those of the group"


def one_fails(rank: int, step: str) -> tuple[str, list[float]]:
    """Rank 1 cannot do one step of the handshake."""

    def no_more(*args):
        raise OSError(24, "Too many open files")

    sum_over(None)  # the library is there, and the step is of a later group
    owners = {"_place": shared_memory, "load": shared_memory.build, "join": torch.ops.fcoll_native}
    group = dist.new_group([0, 1])
    with patched(owners[step], step, no_more) if rank == 1 else nullcontext():
        total = fcoll.all_reduce(torch.ones(2), "sum", group).tolist()
    return str(fcoll.symm_mem.status(group)), total


@pytest.mark.parametrize("step", ["_place", "load", "join"])
def test_a_failure_on_one_rank_reaches_the_others(shared2, step):
    for rank, (status, total) in enumerate(shared2.run(one_fails, step)):
        where = "rank 1: " if rank == 0 else ""
        assert status == f"process group: {where}OSError: [Errno 24] Too many open files"
        assert total == [2.0, 2.0]


def without_a_store(rank: int) -> list[object]:
    """A group written in Python may have none."""
    group = dist.new_group([0, 1])
    with patched(_torch, "group_store", lambda pg: None):
        total = fcoll.all_reduce(torch.ones(2), "sum", group).tolist()
    return [str(fcoll.symm_mem.status(group)).partition(":")[0], total]


def test_a_group_without_a_store_gathers_what_ranks_say(shared2):
    assert shared2.run(without_a_store) == [["shared memory", [2.0, 2.0]]] * 2


def interrupted(rank: int) -> tuple:
    def control_c(*args):
        raise KeyboardInterrupt

    group = dist.new_group([0, 1])
    if rank == 0:
        return caught(sum_over, group)
    with patched(shared_memory, "_open", control_c), pytest.raises(KeyboardInterrupt):
        sum_over(group)
    return ()


def test_an_interrupted_rank_is_not_waited_for(shared2):
    name, message, _, about = shared2.run(interrupted)[0]
    assert (name, about) == ("CollectiveTimeout", 1)
    assert "rank 1 left the meeting by KeyboardInterrupt" in message


# -- the peers are there, and make another first call ---


def another_collective(rank: int) -> tuple:
    group = dist.new_group([0, 1])
    x = torch.ones(2)
    first = (lambda: fcoll.all_reduce(x, "sum", group)) if rank else lambda: fcoll.barrier(group)
    return caught(first)


def test_another_first_collective_is_a_mismatch(shared2):
    for name, message, *_ in shared2.run(another_collective):
        assert name == "CollectiveMismatch" and "barrier" in message and "all_reduce" in message


def another_kind(rank: int) -> tuple:
    """A message, and a collective of torch's own, where the other rank makes one of fcoll's."""
    found = []
    message = lambda group: fcoll.wait_tensor(fcoll.isend(torch.ones(2), 0, group))  # noqa: E731
    ours = lambda group: dist.all_reduce(torch.ones(2), group=group)  # noqa: E731
    for other in (message, ours):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=8))
        with short_of_time():
            found.append(caught(sum_over if rank == 0 else other, group))
    return tuple(found)


def test_another_kind_of_first_call_is_a_timeout(shared2):
    mine, theirs = shared2.run(another_kind)
    for name, message, _, about in mine:
        assert (name, about) == ("CollectiveTimeout", 1) and "for rank 1 to join" in message
    assert theirs[1][0], "torch's collective does not take the handshake for its peer"


# -- whatever way the first call takes ---


def first_by(rank: int, way: str) -> list:
    group = dist.new_group([0, 1])
    if rank == 1:
        hear(f"gave up {group.group_name}")
        return []
    x, name = torch.ones(4), group.group_name

    def functional():
        with fcoll.symm_mem.accelerate_c10d():
            y = torch.ops._c10d_functional.all_reduce(x, "sum", name)
            torch.ops._c10d_functional.wait_tensor(y)

    def compiled():
        torch.compile(lambda x: fcoll.all_reduce(x, "sum", name) + 1, backend="aot_eager")(x)

    call = {"accelerated": functional, "compiled": compiled}[way]
    try:
        with short_of_time():
            return [caught(call), caught(call)]
    finally:
        say(f"gave up {group.group_name}")


@pytest.mark.parametrize("way", ["accelerated", "compiled"])
def test_the_error_is_the_same_by_every_way(shared2, way):
    first, again = shared2.run(first_by, way)[0]
    assert first[0] == "CollectiveTimeout" and "for rank 1 to join" in first[1], first
    assert again[0] == "GroupClosed", again
