"""Fixtures: pools of real ranks, a world of one, and no process group left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

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
    # Importing fcoll imports Dynamo, which sets it to torch's default where it is not set.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):
        folder = tempfile.mkdtemp(prefix="fcoll-inductor-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # In the ranks themselves: a pool of compilers for each of them takes longer to start.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
