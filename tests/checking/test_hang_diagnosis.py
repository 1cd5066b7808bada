"""fcoll.why on records that are written here, as torch's NCCL backend and fcoll write them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import fcoll
from fcoll.cli import main
from fcoll.errors import BadDump, BadMesh

WORLD = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}


def entry(number: int, op: str = "all_reduce", sizes: tuple[int, ...] = (4,), **more: Any) -> Any:
    """As NCCL's, made at train.py:10 + its number."""
    frames = [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/a.py", "line": 3},
        {"name": "step", "filename": "/x/train.py", "line": 10 + number},
    ]
    made = {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "is_p2p": False,
        "profiling_name": f"nccl:{op}",
        "input_sizes": [list(sizes)],
        "output_sizes": [list(sizes)],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": "completed",
        "time_created_ns": number * 10**9,
        "frames": frames,
    }
    return {**made, **more}


def write(folder: Path, *ranks: list[Any], time_ns: int | None = None) -> Path:
    for rank, entries in enumerate(ranks):
        dump: dict[str, Any] = {"version": "2.10", "pg_config": WORLD, "entries": entries}
        if time_ns is not None:
            dump["fcoll"] = {"rank": rank, "time_ns": time_ns}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    return folder


def test_a_rank_that_made_fewer_calls_is_waited_for(tmp_path):
    found = fcoll.why(write(tmp_path, [entry(1), entry(2, state="started")], [entry(1)]))
    (waiting,) = found.waiting
    assert (waiting.call.rank, waiting.missing, waiting.call.number) == (0, (1,), 2)
    assert "in all_reduce(float32 [4]), call 2 on group 0 (default_pg), at /x/train.py:12" in str(
        found
    )
    assert "rank 1 is in no collective; its last one there is all_reduce" in str(found)
    assert not found.ok and not found.differing


def test_the_first_call_that_differs(tmp_path):
    first = [entry(1), entry(2), entry(3, "all_gather")]
    second = [entry(1), entry(2, sizes=(5,)), entry(3)]
    found = fcoll.why(write(tmp_path, first, second))
    assert [(c.rank, c.number, c.text) for c in found.differing] == [
        (0, 2, "all_reduce(float32 [4])"),
        (1, 2, "all_reduce(float32 [5])"),
    ]


def test_sizes_that_are_each_ranks_own_do_not_differ(tmp_path):
    first, second = ([entry(1, "all_to_all", sizes=(n,))] for n in (4, 5))
    assert fcoll.why(write(tmp_path, first, second)).ok


def test_ranks_in_step_are_fine_and_calls_that_were_pushed_out_are_not_missed(tmp_path):
    first = [entry(i) for i in range(1, 6)]
    assert fcoll.why(write(tmp_path, first, first[3:])).ok


def test_a_call_from_another_line(tmp_path):
    other = [{"name": "step", "filename": "/x/train.py", "line": 99}]
    first = [entry(1), entry(2), entry(3, state="started")]
    found = fcoll.why(write(tmp_path, first, [entry(1), entry(2, frames=other)]))
    assert [(c.number, c.line) for c in found.other_lines] == [
        (2, "/x/train.py:12"),
        (2, "/x/train.py:99"),
    ]


def test_a_rank_without_a_dump(tmp_path):
    found = fcoll.why(write(tmp_path, [entry(1, state="started")]))
    assert found.waiting[0].missing == (1,)
    assert "no dump of rank 1" in str(found)


def test_a_rank_that_came_when_the_others_had_given_up(tmp_path):
    first, late = entry(1, state="started"), entry(1, state="started", time_created_ns=5 * 10**9)
    found = fcoll.why(write(tmp_path, [first], [late], time_ns=3 * 10**9))
    assert [(w.call.rank, w.missing) for w in found.waiting] == [(0, (1,))]
    assert "rank 1 came when rank 0 had given up, at /x/train.py:11" in str(found)


# -- messages between two ranks ---


def message(number: int, name: str, **more: Any) -> Any:
    """As NCCL's: ranks are those of the group."""
    named = {"is_p2p": True, "p2p_seq_id": number, "profiling_name": f"nccl:{name}"}
    return entry(number, **{**named, **more})


def test_ranks_that_wait_for_messages_of_one_another(tmp_path):
    first = [message(1, "send 0->1"), message(2, "recv 0<-1", state="started")]
    second = [message(1, "recv 1<-0"), message(2, "recv 1<-0", state="started")]
    found = fcoll.why(write(tmp_path, first, second, time_ns=5 * 10**9))
    assert str(found).splitlines() == [
        "rank 0 waits to receive float32 [4] from rank 1, message 2 on group 0 (default_pg), at "
        "/x/train.py:12, for 3.0 s",
        "rank 1 waits to receive float32 [4] from rank 0, message 2 on group 0 (default_pg), at "
        "/x/train.py:12, for 3.0 s",
        "they wait in a circle: rank 0 -> rank 1 -> rank 0",
    ]
    assert not found.ok


def test_a_message_that_nobody_sends(tmp_path):
    found = fcoll.why(write(tmp_path, [entry(1)], [message(1, "recv 1<-0", state="started")]))
    assert [(w.call.rank, w.missing) for w in found.waiting] == [(1, (0,))]
    assert str(found).endswith("rank 0 waits for no other")


def test_a_message_that_nobody_waits_for_is_no_reason(tmp_path):
    sent = message(1, "send 0->1", state="scheduled")
    found = fcoll.why(write(tmp_path, [sent, entry(1, state="started")], []))
    assert [(w.call.row, w.missing) for w in found.waiting] == [("all_reduce", (1,))]


# -- with the program ---


def build(mesh):
    def step(x, y):
        x = fcoll.all_reduce(x, "sum", mesh["dp"])
        return x.sum() + fcoll.all_gather_into_tensor(y, mesh["dp"]).sum()

    return step, (torch.ones(4), torch.ones(2))


def test_the_expected_call(tmp_path):
    """Behind what came before the first step, and in its third repetition."""
    gather = "_all_gather_base"
    before = [entry(1, "broadcast", (9,)), entry(2), entry(3, gather, (2,)), entry(4)]
    first, second = [*before, entry(5, gather, (2,))], [*before, entry(5)]
    found = fcoll.why(write(tmp_path, first, second), build, {"dp": 2})
    assert [(rank, call.op) for rank, call in found.expected] == [
        (0, "all_gather_into_tensor"),
        (1, "all_gather_into_tensor"),
    ]
    assert "expected there of rank 1: all_gather_into_tensor" in str(found)


def test_a_program_that_is_not_the_one_that_ran(tmp_path):
    first = [entry(1, "broadcast"), entry(2, state="started")]
    found = fcoll.why(write(tmp_path, first, first[:1]), build, {"dp": 2})
    assert not found.expected and "not those of the program" in str(found)
    with pytest.raises(BadMesh):
        fcoll.why(tmp_path, build)


# -- files and the command ---


def test_the_command(tmp_path, capsys):
    write(tmp_path, [entry(1), entry(2, state="started")], [entry(1)])
    assert main(["why", str(tmp_path)]) == 1
    assert "rank 0 waits for rank 1" in capsys.readouterr().out
    files = [str(p) for p in sorted(tmp_path.iterdir())]
    assert main(["why", "--json", *files]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["waiting"][0]["missing"] == [1] and not told["ok"]
    assert main(["why", files[1]]) == 0


def test_what_is_no_dump_is_named(tmp_path):
    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": []}))
    with pytest.raises(BadDump, match="rank_0: it has no 'pg_config'"):
        fcoll.why(tmp_path)
    (tmp_path / "rank_0").write_bytes(pickle.dumps(Path("/")))  # code that a pickle may run
    with pytest.raises(BadDump, match="pathlib"):
        fcoll.why(tmp_path)
    with pytest.raises(BadDump, match="there are none"):
        fcoll.why([])
