"""Offsets, strides and storage of a LocalTensor are those of one rank's own tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._local_tensor as torchs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fcoll import local
from fcoll.local import LocalTensor

W = 3
SHAPE = (2, 3, 4)

# A step takes a tensor and a number and gives a view of it, or writes through it.
VIEWS = {
    "narrow": lambda t, k: t.narrow(k % t.dim(), _at(t, k), t.shape[k % t.dim()] - _at(t, k)),
    "slice": lambda t, k: t[_at(t, 0) if k % 2 else 0 :: 1 + k % 2],
    "select": lambda t, k: t.select(k % t.dim(), t.shape[k % t.dim()] - 1),
    "split": lambda t, k: t.split(1, k % t.dim())[-1],
    "unbind": lambda t, k: t.unbind(k % t.dim())[-1],
    "transpose": lambda t, k: t.transpose(k % t.dim(), 0),
    "unsqueeze": lambda t, k: t.unsqueeze(k % (t.dim() + 1)),
    "expand": lambda t, k: t.expand(2, *t.shape),
    "diagonal": lambda t, k: t.diagonal() if t.dim() > 1 else t,
    "detach": lambda t, k: t.detach(),
    "data": lambda t, k: t.data,
    "alias": lambda t, k: t.view_as(t),
    "contiguous": lambda t, k: t.contiguous(),
    "channels last": lambda t, k: (
        t.expand(1, *SHAPE).contiguous(memory_format=torch.channels_last) if t.shape == SHAPE else t
    ),
    "strided": lambda t, k: (
        t.as_strided((2,), (1,), t.storage_offset() - k % 2)
        if t.storage_offset() and t.storage_offset() + 2 <= _length(t)
        else t
    ),
    "strided from here": lambda t, k: t.as_strided((1,), (1,)),
    "strided from 0": lambda t, k: t.as_strided((2, 2), (1, 2), 0),
    "in place": lambda t, k: t.as_strided_((2,), (3,), 1),
    "smaller": lambda t, k: t.resize_(1),
    "as another": lambda t, k: t.set_(t.detach()),
    "int32": lambda t, k: t.view(torch.int32) if t.element_size() == 4 else t,
    "copied": lambda t, k: torch.as_strided_copy(t, (2, 2), (1, 2), 0),
    "scattered": lambda t, k: (
        torch.as_strided_scatter(t, t.new_ones(1), (1,), (1,)) if t.is_contiguous() else t
    ),
    "filled": lambda t, k: t.fill_(k),
    "added": lambda t, k: t.add_(k) if t.is_contiguous() else t,
    "new": lambda t, k: t * 2,
    "new data": lambda t, k: _with_data(t, t.data * 2),
}


def _at(t: Tensor, k: int) -> int:
    return min(1, t.shape[k % t.dim()] - 1)


def _length(t: Tensor) -> int:
    return t.untyped_storage().nbytes() // t.element_size()


def _with_data(t: Tensor, new: Tensor) -> Tensor:
    t.data = new
    return t


def metadata(t: Any) -> dict[str, Any]:
    return {
        "shape": tuple(t.shape),
        "stride": t.stride(),
        "storage_offset": t.storage_offset(),
        "contiguous": t.is_contiguous(),
        "channels_last": t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last),
        "dtype": t.dtype,
        "requires_grad": t.requires_grad,
        "numel": t.numel(),
    }


def start(rank: int) -> Tensor:
    return torch.arange(24.0).reshape(SHAPE) + 100 * rank


def stored(how: str) -> LocalTensor:
    if how == "offset":  # in the middle of memory of their own
        return LocalTensor({r: _embedded(start(r)) for r in range(W)})
    made = LocalTensor({r: start(r) for r in range(W)})
    return made + 0 if how == "stack" else made


def _embedded(t: Tensor) -> Tensor:
    memory = torch.full((40,), -1.0)
    return memory[5:29].view(SHAPE).copy_(t)


STEPS = st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 3)), max_size=6)


@settings(max_examples=60, deadline=None)
@given(how=st.sampled_from(["stack", "apart", "offset"]), steps=STEPS)
@example(how="stack", steps=[("slice", 1), ("in place", 0)])
@example(how="stack", steps=[("narrow", 1), ("copied", 0), ("new data", 0)])
@example(how="offset", steps=[("narrow", 1), ("strided", 1), ("filled", 2)])
def test_a_chain_of_views_is_that_of_one_rank(how, steps):
    bases = {r: _embedded(start(r)) if how == "offset" else start(r) for r in range(W)}
    x = root = stored(how)
    plain = dict(bases)
    for name, k in steps:
        if plain[0].dim() == 0:
            break
        new, problem = {}, None
        try:
            new = {r: VIEWS[name](t, k) for r, t in plain.items()}
        except RuntimeError as error:
            problem = error
        if problem is not None:
            with pytest.raises(RuntimeError):
                VIEWS[name](x, k)
            break
        x, plain = VIEWS[name](x, k), new
        assert metadata(x) == metadata(plain[0]), name
        for r, t in plain.items():
            torch.testing.assert_close(x._local_tensors[r], t, rtol=0, atol=0)
            assert x._local_tensors[r].storage_offset() == t.storage_offset(), name
    for r, t in bases.items():  # writes through views
        torch.testing.assert_close(root._local_tensors[r], t, rtol=0, atol=0)


OFFSETS = {
    "a chunk of one tensor": lambda face: face.LocalTensor(
        dict(enumerate(torch.arange(12.0).chunk(W)))
    ),
    "a view of unequal": lambda face: face.LocalTensor(
        {r: torch.arange(5.0 + r) for r in range(W)}
    )[1:],
    "a row of its own": lambda face: (
        face.LocalTensor({r: torch.arange(6.0) + 10 * r for r in range(W)}).add(0)
    ).narrow(0, torch.SymInt(face.LocalIntNode({r: r for r in range(W)})), 3),
}


@pytest.mark.parametrize("make", OFFSETS.values(), ids=OFFSETS)
def test_offsets_that_differ_are_as_torchs(make):
    def seen(face):
        x = make(face)
        offset = x.storage_offset()
        node = offset.node._local_ints if isinstance(offset, torch.SymInt) else offset
        views = (x.as_strided((2,), (1,), offset), x.as_strided((2,), (1,)))
        fixed = x.as_strided((2,), (1,), 1)
        tensors = [{r: t.tolist() for r, t in v._local_tensors.items()} for v in (*views, fixed)]
        return node, tensors

    assert seen(local) == seen(torchs)


def test_a_view_past_the_end_of_a_ranks_memory_is_an_error():
    x = stored("stack")
    for view in (lambda: x.as_strided((4,), (1,), 22), lambda: x[1, 2].as_strided((8,), (1,))):
        with pytest.raises(RuntimeError, match="out of bounds"):
            view()


def test_a_storage_of_no_rank_is_an_error():
    x = stored("stack")
    with pytest.raises(RuntimeError, match="LocalTensor"):
        x.set_((x * 2).untyped_storage(), 1, (2,), (1,))


def test_a_rank_that_grows_keeps_its_values():
    x = stored("stack")
    v = x[1, 2]
    v.resize_(40)
    assert v.storage_offset() == 20 and v.shape == (40,)
    for r in range(W):
        assert v._local_tensors[r][:4].tolist() == (start(r)[1, 2]).tolist()


def test_a_functions_memory_on_a_rank_is_the_ranks():
    """What runs for each rank counts offsets from the beginning of its own memory."""
    x = stored("stack")[1:]
    with local.LocalTensorMode(W):
        head = local.tensor_map(x, lambda r, t: t.as_strided((2,), (1,), 0).clone())
    assert [head._local_tensors[r].tolist() for r in range(W)] == [
        [100.0 * r, 100.0 * r + 1] for r in range(W)
    ]
    assert x._local_tensors[1].untyped_storage().nbytes() == 24 * 4


@pytest.mark.parametrize("bit", ["conj", "neg"])
def test_rows_of_lazy_bits(bit):
    z = torch.complex(torch.arange(4.0), torch.ones(4))
    x = LocalTensor({r: z * (r + 1) for r in range(W)}) + 0
    lazy = x.conj() if bit == "conj" else x.conj().imag
    for r in range(W):
        own = (z * (r + 1)).conj()
        own = own if bit == "conj" else own.imag
        assert lazy._local_tensors[r].is_conj() == own.is_conj()
        assert lazy._local_tensors[r].is_neg() == own.is_neg()
        torch.testing.assert_close(lazy._local_tensors[r], own)
        assert lazy.storage_offset() == own.storage_offset()


def test_new_data_of_a_parameter():
    p = torch.nn.Parameter(stored("stack"))
    p.data = p.data + 1
    for r in range(W):
        torch.testing.assert_close(p._local_tensors[r], start(r) + 1)
    assert p.requires_grad and isinstance(p, torch.nn.Parameter)
    (p * 2).sum().backward()
    assert p.grad._local_tensors[0].unique().tolist() == [2.0]
