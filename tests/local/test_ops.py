"""Ops on LocalTensors are the ops on every rank's tensor: on stacks, apart, and uneven."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fcoll.local import LocalTensor, LocalTensorMode

W = 5


def parts(*shape: int, seed: int = 0, dtype=torch.float32) -> dict[int, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {r: torch.rand(*shape, generator=g).add(0.1 * r).to(dtype) for r in range(W)}


def on_stack(tensors: dict[int, Tensor]) -> LocalTensor:
    """Stored as one tensor: the result of an op."""
    made = LocalTensor(tensors).clone()
    assert made._stack is not None
    return made


def assert_ranks(found, wanted: dict[int, Tensor], **tolerance) -> None:
    assert isinstance(found, LocalTensor), type(found)
    assert sorted(found._ranks) == sorted(wanted)
    for r, t in wanted.items():
        torch.testing.assert_close(found._local_tensors[r], t, **tolerance)
        assert found._local_tensors[r].is_contiguous() == t.is_contiguous()


def each(fn, *xs):
    """The oracle: ``fn`` on each rank's plain tensors."""
    return {r: fn(*(x[r] if isinstance(x, dict) else x for x in xs)) for r in range(W)}


UNARY = {
    "neg": lambda x: -x,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "sum": lambda x: x.sum(),
    "sum_dim": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "t": lambda x: x.t(),
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[1:, ::2],
    "index": lambda x: x[torch.tensor([2, 0])],
    "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1),
    "permuted_exp": lambda x: x.t().exp(),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: x.topk(2, -1)[1],
    "norm": lambda x: x.norm(),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "cat": lambda x: torch.cat([x, x + 1], 1),
    "stack": lambda x: torch.stack([x, x]),
    "split": lambda x: x.split(2, -1)[1],
    "chunk": lambda x: x.chunk(3, 0)[2],
    "tril": torch.tril,
    "to": lambda x: x.to(torch.float64),
    "half": lambda x: x.bfloat16() * 2,
    "compare": lambda x: x > 0.5,
    "where": lambda x: torch.where(x > 0.5, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -1.0),
    "pow": lambda x: x**2.5,
    "clamp": lambda x: x.clamp(0.2, 0.6),
    "var": lambda x: x.var(),
    "argmax": lambda x: x.argmax(-1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "pad": lambda x: F.pad(x, (1, 2)),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "repeat": lambda x: x.repeat(2, 1),
    "diag": lambda x: x.diagonal(),
    "zeros_like": torch.zeros_like,
    "new_ones": lambda x: x.new_ones(3),
    "complex": lambda x: torch.complex(x, x).conj() * 1j,
    "linalg": lambda x: torch.linalg.vector_norm(x, dim=0),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "conv": lambda x: F.conv1d(x.unsqueeze(0), x.new_ones(2, x.shape[0], 2)),
    "fft": lambda x: torch.fft.fft(x).abs(),
    "unique": lambda x: x.unique(),
    "as_strided": lambda x: x[1:].as_strided((2, 2), (2, 1), 1),
}


def stored_names(names, *one_shape):
    """(how the ranks' tensors are stored, name); those named last need one shape."""
    pairs = itertools.product(["stack", "apart", "uneven"], names)
    return [
        (stored, name) for stored, name in pairs if (stored, name in one_shape) != ("uneven", True)
    ]


@pytest.mark.parametrize(("stored", "name"), stored_names(UNARY, "as_strided", "view", "einsum"))
def test_an_op_is_the_op_on_every_rank(name, stored):
    fn, xs = UNARY[name], parts(3, 7)
    if stored == "uneven":
        xs = {r: torch.rand(3 + r % 2, 7) for r in range(W)}
        if name in ("index", "conv", "chunk"):
            xs = {r: torch.rand(3, 7 + r % 2) for r in range(W)}
    x = on_stack(xs) if stored == "stack" else LocalTensor(xs)
    assert_ranks(fn(x), each(fn, xs))


BINARY = {
    "add": torch.add,
    "broadcast": lambda x, y: x * y[0],
    "scalar": lambda x, y: x - y.sum(),
    "promoted": lambda x, y: x.bfloat16() + y.sum(),  # 0-dim: the result stays bfloat16
    "matmul": lambda x, y: x @ y.t(),
    "addmm": lambda x, y: torch.addmm(y[:, :3], x, y.t()),
    "atan2": torch.atan2,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "maximum": torch.maximum,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "gather": lambda x, y: x.gather(1, y.argsort(1)),
    "index_put": lambda x, y: x.clone().index_put((torch.tensor([0, 2]),), y[:2]),
    "scatter_add": lambda x, y: x.scatter_add(1, y.argsort(1), y),
    "embedding": lambda x, y: F.embedding((y * 2).long(), x),
    "cross_entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    "equal": lambda x, y: (x == y).all(),
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("stored", ["stack", "apart", "plain"])
def test_binary(name, stored):
    fn, xs, ys = BINARY[name], parts(3, 7), parts(3, 7, seed=1)
    make = on_stack if stored == "stack" else LocalTensor
    if stored == "plain":  # the second is the same tensor on all ranks
        assert_ranks(fn(make(xs), ys[1]), each(fn, xs, ys[1]))
        assert_ranks(fn(ys[1], make(xs)), each(fn, ys[1], xs)) if name == "add" else None
    else:
        assert_ranks(fn(make(xs), make(ys)), each(fn, xs, ys))


IN_PLACE = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(x.sum()),
    "sigmoid_": lambda x: x.sigmoid_(),
    "view": lambda x: x.view(-1)[2:5].zero_(),
    "row": lambda x: x[1].copy_(x[0]),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0, 2]), x[:2].clone()),
    "index_put_": lambda x: x.__setitem__((slice(None), torch.tensor([1, 3])), -1.0),
    "masked_fill_": lambda x: x.masked_fill_(x > 0.6, 9.0),
    "t": lambda x: x.t().add_(1),
    "expand": lambda x: x.add_(x[0].clone()),
    "fill_": lambda x: x.fill_(2.5),
    "clamp_": lambda x: x[:, 1:].clamp_(max=0.4),
    "scatter_": lambda x: x.scatter_(1, x.argsort(1), 0.5),
    "out": lambda x: torch.add(x, 1, out=x),
}


@pytest.mark.parametrize(("stored", "name"), stored_names(IN_PLACE, "view", "index_put_", "clamp_"))
def test_writes_show_in_the_tensor_its_views_and_the_ranks(name, stored):
    fn, xs = IN_PLACE[name], parts(3, 7)
    if stored == "uneven":
        xs = {r: torch.rand(3 + r % 2, 7) for r in range(W)}
    given = {r: t.clone() for r, t in xs.items()}
    x = on_stack(given) if stored == "stack" else LocalTensor(given)
    view, held = x[0], dict(x._local_tensors)
    fn(x)
    for t in xs.values():
        fn(t)
    assert_ranks(x, xs)
    assert_ranks(view, {r: t[0] for r, t in xs.items()})
    for r, t in held.items():
        assert torch.equal(t, x._local_tensors[r])
    if stored != "stack":  # made of tensors, it shares their memory
        assert all(torch.equal(given[r], xs[r]) for r in xs)


def test_writing_to_one_ranks_tensor_writes_to_no_other():
    with LocalTensorMode(3):
        x = torch.zeros(2)
    for y in (x, x + 1, x.expand(2, 2), x.sum()):
        y = y.clone()
        before = y._local_tensors[1].clone()
        y._local_tensors[0].fill_(9)
        assert torch.equal(y._local_tensors[1], before)


def test_an_entry_of_the_ranks_can_be_replaced():
    x = on_stack(parts(2))
    x._local_tensors[1] = torch.zeros(2)
    assert torch.equal((x + 1)._local_tensors[1], torch.ones(2))
    x._local_tensors[2] = torch.zeros(4)
    assert x.shape[0].node._local_ints == {0: 2, 1: 2, 2: 4, 3: 2, 4: 2}


@pytest.mark.parametrize("stored", ["stack", "apart"])
def test_in_place_changes_of_shape(stored):
    xs = parts(3, 4)
    x = on_stack(xs) if stored == "stack" else LocalTensor({r: t.clone() for r, t in xs.items()})
    x.transpose_(0, 1)
    assert x.shape == (4, 3) and x.stride() == (1, 4)
    assert_ranks(x + 0, each(lambda t: t.t() + 0, xs))
    x.unsqueeze_(0)
    assert x.shape == (1, 4, 3)
    y = on_stack(xs) if stored == "stack" else LocalTensor({r: t.clone() for r, t in xs.items()})
    y.resize_(5, 5)
    y.zero_()
    y[0] += 1
    assert y.shape == (5, 5)
    assert_ranks(y.sum(), each(lambda t: torch.tensor(5.0), xs))


def test_out_is_resized_for_each_rank():
    xs = parts(3)
    with LocalTensorMode(W):
        out = torch.empty(0)
        x = LocalTensor(xs)
        torch.mul(x, 2, out=out)
    assert_ranks(out, each(lambda t: t * 2, xs))


# Ranks with equal values must get equal bits, whatever a kernel does at the end of its memory.
SAME = {k: f for k, f in UNARY.items() if k != "as_strided"} | {
    "silu": F.silu, "mish": F.mish, "softplus": F.softplus, "sinh": torch.sinh,
    "atanh": lambda x: torch.atanh(x / 4), "exp2": torch.exp2, "tanh": torch.tanh,
    "erf": torch.erf, "log1p": torch.log1p, "rsqrt": torch.rsqrt, "cosh": torch.cosh,
    "logaddexp": lambda x: torch.logaddexp(x, x * 2), "sigmoid_t": lambda x: x.t().sigmoid(),
    "product": lambda x: x @ torch.linspace(0, 1, x.shape[-1] * 5).view(x.shape[-1], 5),
    "sigmoid_": lambda x: x.clone().sigmoid_(), "pow_t": lambda x: x ** (x + 0.3),
    "svd": torch.linalg.svdvals, "det": lambda x: torch.linalg.det(x @ x.t()),
    "eigh": lambda x: torch.linalg.eigvalsh(x @ x.t()), "mv": lambda x: x @ x[0],
    "dot": lambda x: x[0] @ x[1], "addmv": lambda x: torch.addmv(x[:, 0], x, x[1]),
    "complex_sgn": lambda x: torch.complex(x, x + 1).sgn().abs(),
    "complex_mul": lambda x: (torch.complex(x, x + 1) * torch.complex(x + 2, x)).real.clone(),
    "complex_div": lambda x: (torch.complex(x, x + 1) / torch.complex(x + 2, x)).imag.clone(),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SAME.keys() - {"complex"}))  # equal, up to the sign of zero
@pytest.mark.parametrize("shape", [(3, 7), (13, 37), (31, 33)])
@pytest.mark.parametrize("ranks", [3, 70])
def test_equal_ranks_stay_equal(name, shape, ranks):
    t = torch.rand(*shape, generator=torch.Generator().manual_seed(2)) + 0.1
    x = LocalTensor(dict.fromkeys(range(ranks), t)).clone()
    torch.testing.assert_close(SAME[name](x).reconcile(), SAME[name](t))


@pytest.mark.parametrize("shape", [(), (1,), (-1,), (1, -1), (4, 1), (4, -1)], ids=str)
@pytest.mark.parametrize("columns", [7, W])
def test_a_bias_is_broadcast_as_on_one_rank(shape, columns):
    shape = tuple(columns if n == -1 else n for n in shape)
    xs, ws = parts(4, 3), parts(3, columns, seed=1)
    biases = each(lambda t: t[0].clone(), parts(1, *shape, seed=2))
    got = torch.addmm(on_stack(biases), on_stack(xs), on_stack(ws), beta=0.5)
    for r in range(W):
        wanted = torch.addmm(biases[r], xs[r], ws[r], beta=0.5)
        torch.testing.assert_close(got._local_tensors[r], wanted)


def test_strided_scatter_counts_from_the_ranks_own_memory():
    xs = parts(3, 3)

    def scattered(t):
        return torch.as_strided_scatter(t, torch.ones_like(t[:2, :2]), (2, 2), (1, 2), 1)

    assert_ranks(scattered(on_stack(xs)), each(scattered, xs))


def test_errors_are_those_of_one_rank():
    x = on_stack(parts(3, 4))
    with pytest.raises(RuntimeError, match=r"\(3x4 and 3x4\)"):
        x @ x
    with pytest.raises(IndexError):
        x.sum(5)
    with pytest.raises(AssertionError, match="different ranks"):
        x + LocalTensor({0: torch.ones(3, 4)})


def test_values_of_one_element():
    x = LocalTensor({r: torch.tensor(r) for r in range(3)})
    assert (x + 0).item().node._local_ints == {0: 0, 1: 1, 2: 2}
    assert (x * 0).item() == 0
    with pytest.raises(AssertionError, match="must be equal"):
        (x + 0.5).item()
    assert torch.equal(x + 1, x + 1) is True


def test_gradients_are_the_ranks_own():
    xs, ws = parts(3, 4), parts(5, 4, seed=3)

    def loss(x, w):
        return F.gelu(F.linear(x, w)).pow(2).mean()

    x = on_stack(xs).requires_grad_()
    w = LocalTensor(ws, requires_grad=True)
    loss(x, w).backward()
    for r in range(W):
        a, b = xs[r].clone().requires_grad_(), ws[r].clone().requires_grad_()
        loss(a, b).backward()
        torch.testing.assert_close(x.grad._local_tensors[r], a.grad)
        torch.testing.assert_close(w.grad._local_tensors[r], b.grad)
