"""When flight records are written, and what is in them."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import launch
from torch.distributed.flight_recorder import fr_trace

import fcoll
from fcoll.errors import BadOption, CollectiveMismatch, FcollError, PeerDied

ENV = {"FCOLL_NATIVE": "1"}


def run(fn: Any, *args: Any) -> Any:
    made = launch(fn, 2, *args, init=False, env=ENV, timeout=60)
    assert made.exitcodes == [0, 0], made.stderr
    return made.results


def join(**env: str) -> None:
    os.environ.update(env)  # here: a nursery forks no ranks whose environment differs in these
    dist.init_process_group("fcoll", timeout=timedelta(seconds=30))


def read(folder: Path, rank: int) -> dict[str, Any]:
    return pickle.loads((folder / f"rank_{rank}").read_bytes())


# -- what is recorded ---


def makes_calls(rank: int, folder: Path, **env: str) -> None:
    join(**env)
    x = torch.ones(2, 3)
    dist.all_reduce(x)
    fcoll.wait_tensor(fcoll.all_gather_into_tensor(x, None))
    dist.reduce_scatter_single(torch.ones(3), x)
    dist.all_to_all_single(torch.ones(4), torch.ones(4))
    dist.barrier()
    fcoll.dump_flight_records(f"{folder}/rank_")
    dist.destroy_process_group()


def test_the_calls_of_a_group_are_recorded(tmp_path, compiled):
    run(makes_calls, tmp_path)
    entries = read(tmp_path, 1)["entries"]
    assert [entry["profiling_name"] for entry in entries] == [
        "gloo:all_reduce",
        "gloo:_all_gather_base",
        "gloo:_reduce_scatter_base",
        "gloo:all_to_all",
        "gloo:barrier",
    ]
    sizes = [(entry["input_sizes"], entry["output_sizes"]) for entry in entries]
    assert sizes == [
        ([[6]], [[6]]),  # c10d's ranks compare the number of elements
        ([[2, 3]], [[12]]),
        ([[6]], [[3]]),
        ([[4]], [[4]]),
        ([], []),
    ]
    assert [entry["record_id"] for entry in entries] == [0, 1, 2, 3, 4]
    assert {entry["state"] for entry in entries} == {"completed"}
    assert fcoll.why(tmp_path).ok


def records_of(rank: int, folder: Path, size: str) -> None:
    makes_calls(rank, folder, TORCH_FR_BUFFER_SIZE=size)


def test_the_buffers_size_is_torchs_variable(tmp_path, compiled):
    for size, count in (("2", 2), ("0", 0)):
        folder = tmp_path / size
        run(records_of, folder, size)
        entries = read(folder, 0)["entries"]
        assert len(entries) == count
        assert all(Path(__file__).name in entry["fcoll"]["line"] for entry in entries)


def lost_step(rank: int, folder: Path) -> None:
    join(TORCH_FR_BUFFER_SIZE="100")
    x = torch.ones(3)
    for _ in range(3):
        if rank == 0:
            dist.all_reduce(x)
        dist.all_reduce(x)
        if rank == 1:
            dist.all_reduce(x)
    fcoll.dump_flight_records(f"{folder}/rank_")


def test_ranks_that_lost_step_are_told_by_their_lines(tmp_path, compiled):
    """Their calls are equal. Both are asked for all lines."""
    run(lost_step, tmp_path)
    first, second = (read(tmp_path, rank)["entries"] for rank in (0, 1))
    assert [entry["fcoll"]["digest"] for entry in first] == [
        entry["fcoll"]["digest"] for entry in second
    ]
    assert first[0]["fcoll"]["line"] != second[0]["fcoll"]["line"]


# -- when they are written ---


def by_signal(rank: int, folder: Path) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
    join(FCOLL_DUMP_SIGNAL="usr2")
    os.kill(os.getpid(), signal.SIGUSR2)
    dist.barrier()


def test_a_signal_writes_a_dump(tmp_path, compiled):
    run(by_signal, tmp_path)
    for rank in (0, 1):
        dump = read(tmp_path, rank)["fcoll"]
        assert dump["rank"] == rank and dump["reasons"] == ["SIGUSR2"]
        assert dump["line"].startswith(os.path.relpath(__file__))


def test_a_handler_of_the_program_is_not_replaced():
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with pytest.raises(BadOption, match="signum"):
            fcoll.dump_on_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def fails_to_join(rank: int, folder: Path) -> None:
    if rank == 0:
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
        with pytest.raises(FcollError):
            dist.init_process_group("fcoll", timeout=timedelta(seconds=1))


def test_a_rank_that_does_not_join(tmp_path, compiled):
    """There is no group yet, and no call."""
    run(fails_to_join, tmp_path)
    found = fcoll.why(tmp_path)
    assert not found.ok and "rank 1" in found.errors[0]
    assert str(found).startswith("rank 0 raised ")


def dies(rank: int, folder: Path) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
    join()
    if rank == 1:
        os._exit(0)
    with pytest.raises(PeerDied):
        dist.all_reduce(torch.ones(3))


def test_a_peer_that_died(tmp_path, compiled):
    run(dies, tmp_path)
    text = str(fcoll.why(tmp_path))
    assert "rank 0 waits for rank 1 in all_reduce(float32 [3], sum), call 1" in text
    assert "no dump of rank 1" in text
    try:
        fr_trace.main([str(tmp_path), "--allow-incomplete-ranks"])
    finally:
        gc.enable()  # it switches that off


def mismatch(rank: int) -> None:
    join()
    with pytest.raises(CollectiveMismatch):
        dist.all_reduce(torch.ones(3 + rank))


def test_nothing_is_written_where_nobody_asked_for_it(tmp_path, compiled):
    home = {"HOME": str(tmp_path)}
    made = launch(mismatch, 2, init=False, env={**ENV, **home, "FCOLL_CACHE_DIR": cache()})
    assert made.exitcodes == [0, 0], made.stderr
    assert not list(tmp_path.rglob("*rank_*"))


def cache() -> str:
    from fcoll.transport.native.cache import cache_dir

    return str(cache_dir())


def test_gloos_calls_come_from_torchs_records(tmp_path):
    """On process groups; torch's own dump of them names no group that torchfrtrace knows."""
    program = f"""
import torch, torch.distributed as dist, fcoll
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
fcoll.dump_flight_records("{tmp_path}/rank_")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    (entry,) = read(tmp_path, 0)["entries"]
    assert entry["profiling_name"] == "gloo:all_reduce" and entry["state"] == "completed"
    assert read(tmp_path, 0)["pg_config"]["0"]["ranks"] == "[0]"
