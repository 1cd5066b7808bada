"""A trace with results that are kept is the trace without: every node, its sizes and its memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fcoll.cli import programs
from fcoll.tracing.fakes import Results
from fcoll.tracing.peers import Board

FOLDER = Path(__file__).parents[1] / "programs_as_written"
PROGRAMS = {
    "sharded:sequence_parallel": {"tp": 2},
    "sharded:fsdp2": {"dp": 2},
    "replicated:ddp_adam": {"dp": 2},
    "written_out:experts": {"ep": 2},
    "written_out:amp": {"dp": 2},
    "pipelined:one_f_one_b": {"pp": 2},
}
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")


def nodes_of(name: str) -> list[object]:
    module, _, function = name.partition(":")
    build = programs.load(f"{FOLDER / module}.py:{function}")
    with Board(build, PROGRAMS[name]).traced(0) as trace:
        seen: dict[int, int] = {}  # storages in order of appearance
        return [_described(node, seen) for node in trace.graph_module.graph.nodes]


def _described(node, seen):
    val = node.meta.get("val")
    values = val if isinstance(val, (list, tuple)) else [val]
    return (
        node.name,
        str(node.target),
        str(node.args),
        node.meta.get("origin"),
        [_metadata(x, seen) for x in values],
    )


def _metadata(x, seen):
    if not isinstance(x, Tensor):
        return str(x)
    storage = seen.setdefault(x.untyped_storage()._cdata, len(seen))
    sizes = str(tuple(x.shape)), str(x.stride()), str(x.storage_offset())
    return *sizes, x.dtype, x.device, x.requires_grad, storage


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_without(name, monkeypatch):
    kept = nodes_of(name)
    made = []
    monkeypatch.setattr(Results, "call", lambda self, func, args, kwargs: func(*args, **kwargs))
    monkeypatch.setattr(Results, "_tensor_like", lambda *args: made.append(args))
    plain = nodes_of(name)
    assert not made
    for one, other in zip(kept, plain, strict=True):
        assert one == other


def test_what_is_kept():
    """Views are views of what goes in; numbers that are equal but of other kinds are others."""
    from fcoll.tracing import _torch

    mode = _torch.fake_mode()
    run, aten = Results(mode).call, torch.ops.aten
    with mode:
        xs = [torch.empty(4, 6), torch.empty(4, 6)]
    for x in xs:
        y = run(aten.view.default, (x, [24]), {})
        assert y.shape == (24,) and _torch.storage_id(y) == _torch.storage_id(x)
        z = run(aten.mul.Tensor, (x, x), {})
        assert z.stride() == (6, 1) and _torch.storage_id(z) != _torch.storage_id(x)
    with mode:
        whole = [run(aten.full.default, ([2], v), {}) for v in (1, 1.0, True) for _ in "ab"]
    kinds = [torch.int64, torch.float32, torch.bool]
    assert [x.dtype for x in whole] == [kind for kind in kinds for _ in "ab"]
    assert run(aten.mul.Tensor, (xs[0].t(), xs[0].t()), {}).stride() == (1, 6)
