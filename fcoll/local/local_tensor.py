"""LocalTensor: the tensors of all ranks in one, as one stack wherever their shapes are the same."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fcoll.local import _torch, rank_stacks
from fcoll.local.errors import MismatchedShards, NotLocal, RanksDiffer, ShardNeedsGrad
from fcoll.local.ints import LocalIntNode, local_int

_ATTRIBUTE = "_local_tensor_"
_REFERENCES = 3  # of a stack that one LocalTensor has: its own, a variable, getrefcount's


class LocalTensor(Tensor):
    """A tensor of simulated ranks: a plain op on it is the op on every rank's tensor.

    It is made of a tensor a rank, whose memory it shares. Results of ops are stored as one tensor
    with the ranks as its leading dim, so that an op on 64 ranks is one call of torch; ranks whose
    shapes differ have a tensor each, and then ``shape`` has an int for each rank.

    >>> x = LocalTensor({0: torch.ones(2), 1: torch.zeros(2)})
    >>> (x + 1)._local_tensors[1]
    tensor([1., 1.])
    """

    _ranks: frozenset[int]
    _order: tuple[int, ...]  # the ranks, ascending: the order of a stack's rows
    #: [W, ...]. Rows that are the same on all ranks may be one row, expanded: see ``_own_stack``.
    _stack: Tensor | None
    _parts: (
        dict[int, Tensor] | None
    )  # without a stack: the tensors; with one: its rows, if asked for
    _owned: bool  # has nobody else the tensors in _parts?
    _uneven: tuple[list[Any], list[Any]] | None  # shape and strides where they differ

    __torch_function__ = _torch.disabled_torch_function

    @staticmethod
    @_torch.disable_dynamo
    def __new__(
        cls, local_tensors: Mapping[int, Tensor], requires_grad: bool = False
    ) -> LocalTensor:
        if needing := [r for r, t in local_tensors.items() if t.requires_grad]:
            raise ShardNeedsGrad(ranks=needing)
        if not local_tensors:
            raise ValueError("LocalTensor cannot be empty!")
        plain = {r: _plain(t, r) for r, t in local_tensors.items()}
        return apart(plain, requires_grad=requires_grad, cls=cls)

    @_torch.disable_dynamo
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    # ---- storage

    @property
    def _local_tensors(self) -> rank_stacks.Rows:
        """Rank -> its tensor; writes into them are writes into this tensor."""
        made = rank_stacks.Rows(self._tensors())
        made.owner = weakref.ref(self)  # it ends with the dict: torch swaps no tensor that has one
        return made

    @_local_tensors.setter
    def _local_tensors(self, tensors: Mapping[int, Tensor]) -> None:
        self._keep_apart(dict(tensors))

    def _tensors(self) -> dict[int, Tensor]:
        """Rank -> its tensor, to read from and to write into."""
        if self._parts is None:
            own = rank_stacks.own_rows(self._own_stack())
            self._parts = dict(zip(self._order, own, strict=True))
        self._owned = False
        return self._parts

    def _keep_apart(self, parts: dict[int, Tensor]) -> None:
        """From now on the tensors in ``parts`` are the ranks' own, not rows of a stack."""
        self._stack, self._parts, self._owned = None, parts, False
        self._ranks, self._order = frozenset(parts), tuple(sorted(parts))
        even = rank_stacks.is_even(list(parts.values()))
        if self._uneven is None and not even:
            self._take_meta(apart(parts))
        elif self._uneven is not None:
            self._uneven = None if even else _uneven_meta(parts)

    def _take_meta(self, other: LocalTensor) -> None:
        """Take over shape, strides and storage of another (resize_, transpose_, ...)."""
        with _torch.without_dispatch():
            Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        for name in ("_ranks", "_order", "_stack", "_parts", "_owned", "_uneven"):
            setattr(self, name, getattr(other, name))

    def _own_stack(self) -> Tensor:
        """The stack, to write to or to make views of: with memory of its own for each rank.

        A stack of one expanded row has neither views nor rows that were handed out.
        """
        assert self._stack is not None
        if rank_stacks.rows_overlap(self._stack):
            with _torch.outside_of_modes(self._stack):
                self._stack = rank_stacks.replicated(self._stack[0], self._stack.shape[0])
        return self._stack

    def _replace_stack(self, stack: Tensor) -> bool:
        """Take new memory with new values in the place of the old; False if others see the old."""
        old = self._stack
        assert old is not None
        if sys.getrefcount(old) > _REFERENCES:  # another LocalTensor has the same stack
            return False
        if self._parts is not None or stack.shape != old.shape or stack.dtype != old.dtype:
            return False
        if stack.stride()[1:] != old.stride()[1:] or not type(old) is type(stack) is Tensor:
            return False
        if not rank_stacks.rows_overlap(old) and _torch.is_shared(old):
            return False
        self._stack = stack
        return True

    def _as_stack(self, *, limit: int | None = None) -> Tensor | None:
        """The ranks' tensors as a stack to read from, maybe one row, expanded; None if their
        shapes differ.

        If they are not stored as one, it is a copy, and None above ``limit`` bytes a rank.
        """
        if self._stack is not None:
            return self._stack
        assert self._parts is not None
        tensors = [self._parts[r] for r in self._order]
        if self._uneven is not None or not rank_stacks.is_even(tensors):
            return None
        if _torch.in_a_trace(tensors[0]):  # a compiler wants each rank's own tensor back
            return None
        if not self._owned and limit is not None and _bytes(tensors[0]) > limit:
            return None
        stack = rank_stacks.stack_of(tensors)
        if self._owned:
            self._stack, self._parts = stack, None
        return stack

    @property
    def _size(self) -> list[Any]:
        return list(self.shape)

    def _sync_meta(self) -> None:
        self._keep_apart(self._tensors())

    # ---- what users call

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        """The ranks' tensors become those of ``new``, which shares its memory from now on."""
        if not isinstance(new, LocalTensor):  # torch says what is wrong
            Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        else:
            self._take_meta(new.detach())

    def storage_offset(self) -> Any:
        """Where a rank's tensor begins in the rank's memory: an int of each if they differ."""
        if self._stack is not None:
            return self._stack.storage_offset()
        assert self._parts is not None
        return local_int({r: t.storage_offset() for r, t in self._parts.items()})

    def __deepcopy__(self, memo: dict[int, Any] | None) -> LocalTensor:
        if self._stack is not None:
            made = stacked(copy.deepcopy(self._stack, memo), self._order)
        else:
            assert self._parts is not None
            made = apart({r: copy.deepcopy(t, memo) for r, t in self._parts.items()}, owned=True)
        return made.requires_grad_(self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = ",\n".join(f"  {r}: {t}" for r, t in self._tensors().items())
        return f"LocalTensor(\n{parts}\n)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_ATTRIBUTE):
            rank = int(name.removeprefix(_ATTRIBUTE))
            if rank not in self._ranks:
                raise AttributeError(f"Local tensor has no knowledge of rank {rank}")
            return self._tensors()[rank]
        return object.__getattribute__(self, name)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return [f"{_ATTRIBUTE}{r}" for r in self._order], ()

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Mapping[str, Any], flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> LocalTensor:
        assert flatten_spec is not None, "the spec of __tensor_flatten__ is missing"
        return LocalTensor(
            {int(name.removeprefix(_ATTRIBUTE)): t for name, t in inner_tensors.items()}
        )

    @classmethod
    @_torch.disable_dynamo
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from fcoll.local import op_dispatch  # it needs this class

        return op_dispatch.dispatch(func, args, kwargs or {}, None)

    def wait(self) -> LocalTensor:
        """Itself: results of functional collectives, which programs wait for, are complete."""
        return self

    trigger_wait = wait

    def numpy(self, *, force: bool = False) -> Any:
        return self.reconcile().numpy(force=force)

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
        if self.is_contiguous(memory_format=memory_format):
            return self
        return Contiguous.apply(self, memory_format)

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        if self._stack is not None:
            return self._stack[0].is_contiguous(memory_format=memory_format)
        assert self._parts is not None
        return all(t.is_contiguous(memory_format=memory_format) for t in self._parts.values())

    def tolist(self) -> list[Any]:
        """The values as a list if all ranks have the same; ints may be an int of each rank."""
        equal = self._equal_local_tensors()
        if isinstance(equal, Tensor):
            return equal.tolist()
        exact = not self.dtype.is_floating_point and not self.dtype.is_complex
        if isinstance(equal, torch.Size) and exact:
            parts = self._tensors()
            return _zip_lists({r: parts[r].tolist() for r in self._order})
        raise RuntimeError("Cannot convert local tensor to list")

    def reconcile(self) -> Tensor:
        """A copy of the tensor that all ranks have; an error if they differ."""
        equal = self._equal_local_tensors()
        if not isinstance(equal, Tensor):
            hint = "Take one rank's, by tensor_map, or gather them first."
            raise RanksDiffer(what="shards must be the same to reconcile", hint=hint)
        return equal.clone().detach().requires_grad_(self.requires_grad)

    def _equal_local_tensors(self) -> Tensor | torch.Size | None:
        """The tensor that all ranks have, or else the shape that all have, or else None."""
        if self._stack is not None:
            first = self._stack[0]
            return first if rank_stacks.all_rows_equal(self._stack) else first.shape
        assert self._parts is not None
        first, *others = (self._parts[r] for r in self._order)
        if all(t.equal(first) for t in others):
            return first
        return first.shape if all(t.shape == first.shape for t in others) else None


class Contiguous(torch.autograd.Function):
    """``contiguous`` on every rank, with the gradient passed through."""

    @staticmethod
    def forward(ctx: Any, x: LocalTensor, memory_format: torch.memory_format) -> Any:
        parts = x._tensors()
        return apart({r: t.contiguous(memory_format=memory_format) for r, t in parts.items()})

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def local(x: Any, what: str = "Input") -> LocalTensor:
    if not isinstance(x, LocalTensor):
        raise NotLocal(what=what, got=type(x).__name__)
    return x


def stacked(stack: Tensor, order: tuple[int, ...], cls: type = LocalTensor) -> LocalTensor:
    """The LocalTensor whose ranks' tensors are the rows of a stack."""
    offset = stack.storage_offset()
    made = _torch.wrapper(cls, stack.shape[1:], stack.stride()[1:], stack, storage_offset=offset)
    made._stack, made._parts, made._owned, made._uneven = stack, None, True, None
    made._ranks, made._order = frozenset(order), order
    return made


def apart(
    tensors: Mapping[int, Tensor],
    *,
    owned: bool = False,
    requires_grad: bool = False,
    cls: type = LocalTensor,
) -> LocalTensor:
    """The LocalTensor of a tensor a rank. ``owned``: nobody else writes to their memory."""
    values = list(tensors.values())
    first = values[0]
    _check_alike(values)
    uneven = None if rank_stacks.is_even(values) else _uneven_meta(tensors)
    if uneven is None:
        # of the first rank, where they differ: Python asks storage_offset() above
        memory = first.untyped_storage().nbytes()
        where = {"storage_offset": first.storage_offset(), "storage_size": memory}
        options = {"requires_grad": requires_grad, **where}
        made = _torch.wrapper(cls, first.shape, first.stride(), first, **options)
    else:
        # its sizes are asked in Python: they are ints of each rank, and in-place ops change them
        policy = {"dispatch_sizes_strides_policy": "sizes", "requires_grad": requires_grad}
        made = _torch.wrapper(cls, *uneven, first, **policy)
    made._stack, made._owned, made._uneven = None, owned, uneven
    made._parts = dict(tensors)
    made._ranks, made._order = frozenset(tensors), tuple(sorted(tensors))
    return made


def _check_alike(tensors: Sequence[Tensor]) -> None:
    first = tensors[0]
    for name in ("dtype", "layout"):
        if any(getattr(t, name) != getattr(first, name) for t in tensors):
            found = sorted({str(getattr(t, name)) for t in tensors})
            raise MismatchedShards(what=name, found=found)
    keys = [(t.is_conj(), t.is_neg()) for t in tensors]
    if any(k != keys[0] for k in keys):
        raise MismatchedShards(what="lazy conjugation and negation", found=sorted(set(keys)))
    if any(t.dim() != first.dim() for t in tensors):
        dims = [t.dim() for t in tensors]
        raise MismatchedShards(what="number of dims", found=dims)


def _uneven_meta(tensors: Mapping[int, Tensor]) -> tuple[list[Any], list[Any]]:
    first = next(iter(tensors.values()))
    strided = first.layout is torch.strided
    shape, strides = (
        [local_int({r: get(t)[d] for r, t in tensors.items()}) for d in range(first.dim())]
        for get in (lambda t: t.shape, lambda t: t.stride() if strided else (0,) * t.dim())
    )
    return shape, strides


def _plain(t: Tensor, rank: int) -> Tensor:
    """A rank's tensor: complete, and of one made in a mode (a LocalTensor itself) its own part."""
    t = t.wait() if isinstance(t, _torch.AsyncCollectiveTensor) else t
    return t._tensors()[rank] if isinstance(t, LocalTensor) else t


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _zip_lists(lists: Mapping[int, Any]) -> Any:
    """Lists of one shape, one a rank -> the list of that shape with an int of each rank."""
    first = next(iter(lists.values()))
    if isinstance(first, list):
        return [_zip_lists({r: v[i] for r, v in lists.items()}) for i in range(len(first))]
    return torch.SymInt(LocalIntNode(lists))
