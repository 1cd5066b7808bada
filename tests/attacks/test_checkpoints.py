"""A save that fails leaves the checkpoint that was in the folder."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem

import fcoll
from fcoll import sharded

RANKS = 2
SIZE = (4, 6)


def state(value: float) -> dict[str, torch.Tensor]:
    rows = sharded.full(sharded.chunk(0, RANKS), SIZE, value)
    columns = sharded.full(sharded.chunk(1, RANKS), SIZE, value)
    return {"rows": rows, "columns": columns, "plain": torch.full((3,), value)}


def save(folder, value, fault=None, **options):
    """What each rank raised."""

    def step(rank):
        writer, planner = sharded.checkpoint_writer(folder, **options), dcp.DefaultSavePlanner()
        if fault is not None:
            fault(rank, writer, planner)
        try:
            dcp.save(state(value), storage_writer=writer, planner=planner)
        except CheckpointException as error:
            return error
        return None

    return fcoll.simulate_ranks(step, RANKS)


def loaded(folder) -> set[float]:
    """All values that any rank reads."""

    def step(rank):
        found = state(-1.0)
        dcp.load(found, checkpoint_id=str(folder))
        whole = [found["rows"].all_gather(), found["columns"].all_gather(), found["plain"]]
        return {v for t in whole for v in t.unique().tolist()}

    return set().union(*fcoll.simulate_ranks(step, RANKS))


def raises(*args, **kwargs):
    raise OSError(errno.EIO, "the disk is gone")


def one_rank(rank, writer, planner):
    """Rank 1 writes nothing; rank 0 has written all."""
    if rank == 1:
        writer.write_data = raises


def one_tensor(rank, writer, planner):
    """Rank 1 fails at its second tensor."""
    if rank == 1:
        resolve, count = planner.resolve_data, iter(range(9))
        planner.resolve_data = lambda item: raises() if next(count) else resolve(item)


class _Full(FileSystem):
    """A disk on which each file gets 700 bytes and no more."""

    @contextmanager
    def create_stream(self, path, mode):
        with super().create_stream(path, mode) as stream:
            yield _Limited(stream)


class _Limited:
    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, data):
        room = 700 - self.stream.tell()
        self.stream.write(data[:room])
        if len(data) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)


def full_disk(rank, writer, planner):
    writer.fs = _Full()


def no_metadata(rank, writer, planner):
    """All data are written, and their names are not."""
    writer.storage_meta = raises


FAULTS = [one_rank, one_tensor, full_disk, no_metadata]


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_save_that_fails_leaves_the_old_checkpoint(fault, tmp_path):
    assert save(tmp_path, 1.0) == [None] * RANKS
    assert loaded(tmp_path) == {1.0}
    assert any(save(tmp_path, 2.0, fault))
    assert loaded(tmp_path) == {1.0}
    assert save(tmp_path, 3.0) == [None] * RANKS  # and the next one succeeds
    assert loaded(tmp_path) == {3.0}
    assert len(list(tmp_path.iterdir())) == RANKS + 1, "files of earlier saves are left"


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_there_is_no_moment_without_metadata(tmp_path, monkeypatch):
    save(tmp_path, 1.0)
    monkeypatch.setattr(FileSystem, "rename", raises)
    assert any(save(tmp_path, 2.0))
    monkeypatch.undo()
    assert loaded(tmp_path) == {1.0}


def test_its_options_are_torchs(tmp_path):
    save(tmp_path, 1.0, single_file_per_rank=False)
    assert "already exists" in str(save(tmp_path, 2.0, overwrite=False)[0])
    assert loaded(tmp_path) == {1.0}
