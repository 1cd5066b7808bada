"""Fixtures: pools of real ranks, a world of one, and no process group left behind."""

from __future__ import annotations

import functools
import gc
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from fcoll.transport.native import build

# gloo looks up the host's name otherwise, which need not resolve.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# No deadline for a single example: a shared machine is slow now and then.
hypothesis.settings.register_profile("fcoll", deadline=None)
hypothesis.settings.load_profile("fcoll")


# Most tests are of what runs on process groups; those of shared memory take the other pools.
os.environ["FCOLL_NATIVE"] = "0"
ON_SHARED_MEMORY = {"FCOLL_NATIVE": "1"}


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def compiled() -> None:
    """The C++ part, compiled before a rank's time is counted."""
    build.build()


@pytest.fixture(scope="session")
def shared2(compiled: None) -> Iterator[RankPool]:
    with RankPool(2, ON_SHARED_MEMORY) as pool:
        yield pool


@pytest.fixture(scope="session")
def shared4(compiled: None) -> Iterator[RankPool]:
    with RankPool(4, ON_SHARED_MEMORY) as pool:
        yield pool


@pytest.fixture(scope="session", params=["ranks2", "ranks4"])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """A test that takes this runs twice: on 2 ranks and on 4."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def solo() -> Iterator[dist.ProcessGroup]:
    """The default process group of a world of one, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a default process group: destroy it, or use `solo`")


def pytest_configure(config: pytest.Config) -> None:
    """What Inductor compiles is shared by the tests and ranks of a session, and by no other,
    unless TORCHINDUCTOR_CACHE_DIR is set."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # in workers of xdist it is
        folder = tempfile.mkdtemp(prefix="fcoll-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # In the ranks themselves: a pool of compilers for each of them takes longer to start.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Every process that compiles would look what the compiler can do: 2 s, 14 s with a new cache.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


# Files that take longest come first, so that workers end together: xdist hands out whole files.
LONGEST = [
    "test_inductor_ext",
    "test_docs",
    "test_compile",
    "test_native_core",
    "test_symm_mem",
    "test_inductor_errors",
    "test_lanes",
    "test_triton_kernels",
    "test_stacked",
    "test_schedule",
    "test_values",
    "test_watch",
    "test_gradients",
    "test_register",
    "test_handshake",
    "test_stays_usable",
]


POOLS = {"ranks", "ranks2", "ranks4", "shared2", "shared4", "compiled"}
STARTS_SOMETHING = re.compile(r"\b(launch|subprocess|RankPool|torch\.compile|inductor_ext)\b")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        if is_fast(item):
            item.add_marker("fast")


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay: do not look through them for garbage again and again


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else a library of Triton's says that they leak


def is_fast(item: pytest.Item) -> bool:
    """Does it start no ranks, compiler or other process, nor does its file?"""
    pools = [pool for pool in POOLS if f"[{pool}" in item.name]  # of fixtures that choose one
    pools += POOLS.intersection(getattr(item, "fixturenames", ()))
    return not (pools or item.get_closest_marker("slow") or starts_something(item.path))


@functools.cache
def starts_something(path: Path) -> bool:
    return bool(STARTS_SOMETHING.search(path.read_text()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
