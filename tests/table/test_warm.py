"""Large results of stacked ranks are written to memory that is mapped already."""

from __future__ import annotations

import threading

import pytest
import torch

import fcoll
from fcoll.table import warm

SHAPE = (32, 256, 1025)  # 32 MiB and a little: not a multiple of a huge page


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    warm._kept.clear()


def test_a_freed_block_is_used_again_and_a_live_one_is_not() -> None:
    a, b = warm.empty(SHAPE, torch.float32), warm.empty(SHAPE, torch.float32)
    assert a.data_ptr() != b.data_ptr()
    view, first = a[3], a.data_ptr()
    del a
    assert warm.kept_bytes() == 0  # the view lives
    del view
    c = warm.empty(SHAPE, torch.float32)
    assert c.data_ptr() == first
    assert c.shape == SHAPE
    assert c.untyped_storage().nbytes() == c.nbytes


def test_contiguous_is_a_copy_of_the_elements() -> None:
    x = torch.arange(32 * 256 * 1025, dtype=torch.float32).view(256, 32, 1025).transpose(0, 1)
    y = warm.contiguous(x)
    assert y.is_contiguous()
    assert torch.equal(x, y)
    kept = y.data_ptr()
    del y
    assert warm.contiguous(x).data_ptr() == kept
    assert warm.contiguous(x[:2]).shape == (2, 256, 1025)  # small: torch's own memory
    assert warm.kept_bytes() == -(-x.nbytes // (2 << 20)) * (2 << 20)


def test_autograd_sees_the_copy() -> None:
    x = torch.ones(SHAPE, requires_grad=True)
    warm.contiguous(x.transpose(0, 1)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(SHAPE))


def test_too_many_and_too_old_are_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_MOST", 40 << 20)
    a, b = (warm.empty((32 << 20,), torch.uint8) for _ in range(2))
    last = b.data_ptr()
    del a, b
    assert warm.kept_bytes() == 32 << 20
    assert warm.empty((32 << 20,), torch.uint8).data_ptr() == last
    monkeypatch.setattr(warm, "_KEPT_FOR_S", -1.0)
    warm._drop()
    assert warm.kept_bytes() == 0


def test_the_cache_can_be_emptied() -> None:
    del_me = warm.empty(SHAPE, torch.float32)
    del del_me
    assert warm.kept_bytes()
    fcoll.symm_mem.empty_cache()
    assert warm.kept_bytes() == 0


def test_threads_get_blocks_of_their_own() -> None:
    found: list[bool] = []

    def work(value: int) -> None:
        for _ in range(20):
            x = warm.empty((32 << 20,), torch.uint8)
            x[::4096] = value
            found.append(bool((x[::4096] == value).all()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(found)
    assert len(found) == 40
