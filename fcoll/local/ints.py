"""An int that differs between ranks, where only a SymInt is taken."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fcoll.local import _torch
from fcoll.local.errors import RanksDiffer
from fcoll.source import user_line


def _on_each_rank(fn: Callable[..., int]) -> Callable[..., Any]:
    """The method that computes ``fn`` rank by rank."""
    return lambda node, *others: node._map(fn, *others)


def _one_answer(fn: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    """The method that compares by ``fn``, on which ranks must agree."""
    return lambda node, other: node._ask(fn, other)


class LocalIntNode:
    """One int a rank, as the node of a SymInt; all equal, it is a constant.

    >>> rows = torch.SymInt(LocalIntNode({0: 3, 1: 2}))
    >>> rows + 1
    LocalIntNode({0: 4, 1: 3})
    """

    def __new__(cls, local_ints: Mapping[int, int]) -> Any:
        if len(set(local_ints.values())) == 1:
            return _torch.ConstantIntNode(next(iter(local_ints.values())))
        return super().__new__(cls)

    def __init__(self, local_ints: Mapping[int, int]) -> None:
        self._local_ints = dict(local_ints)

    def _map(self, fn: Callable[..., int], *others: Any) -> Any:
        return type(self)(
            {r: fn(i, *(int_on_rank(o, r) for o in others)) for r, i in self._local_ints.items()}
        )

    def _all(self, fn: Callable[[int, int], bool], other: Any) -> set[bool]:
        return {bool(fn(i, int_on_rank(other, r))) for r, i in self._local_ints.items()}

    def _ask(self, fn: Callable[[int, int], bool], other: Any) -> Any:
        answers = self._all(fn, other)
        if len(answers) != 1:
            raise RanksDiffer(what=f"{self} compared with {other}", hint=RanksDiffer.BRANCH)
        return _torch.constant_bool(answers.pop())

    # what SymInt asks a node
    def maybe_as_int(self) -> int | None:
        return None

    def is_int(self) -> bool:
        return True

    def is_float(self) -> bool:
        return False

    is_bool = is_nested_int = is_symbolic = is_constant = is_float

    def clone(self) -> LocalIntNode:
        return self

    def _str(self) -> str:
        values = set(self._local_ints.values())
        return f"LocalIntNode({self._local_ints})" if len(values) > 1 else str(values.pop())

    __str__ = __repr__ = _graph_repr = _str

    def guard_int(self, file: str = "", line: int = 0) -> int:
        raise TypeError(
            f"an int of each rank is not one int: {self}. Use it in tensor ops and shapes, or run "
            "the code for each rank by rank_map or maybe_run_for_local_tensor."
        )

    int_ = guard_int

    def sym_float(self, other: Any = None) -> Any:
        raise TypeError(
            f"there is no float of each rank: {self}. Multiply a tensor by the int, as in "
            "torch.ones(()) * rank / 2, or run the code for each rank by rank_map."
        )

    int_truediv = sym_float

    def wrap_int(self, num: int) -> Any:
        """The other operand: of this class, which has more arithmetic than torch's constants."""
        made = object.__new__(type(self))
        made._local_ints = dict.fromkeys(self._local_ints, num)
        return made

    # arithmetic, rank by rank
    add = _on_each_rank(operator.add)
    sub = _on_each_rank(operator.sub)
    mul = _on_each_rank(operator.mul)
    floordiv = int_floordiv = _on_each_rank(operator.floordiv)
    mod = _on_each_rank(operator.mod)
    pow = pow_by_natural = _on_each_rank(operator.pow)
    neg = _on_each_rank(operator.neg)
    abs = _on_each_rank(operator.abs)
    bitwise_and = _on_each_rank(operator.and_)
    bitwise_or = _on_each_rank(operator.or_)
    bitwise_xor = _on_each_rank(operator.xor)
    lshift = _on_each_rank(operator.lshift)
    rshift = _on_each_rank(operator.rshift)
    sym_max = _on_each_rank(max)
    sym_min = _on_each_rank(min)

    def sym_sum(self, others: Sequence[Any]) -> Any:
        return self._map(lambda a, *more: sum(more), *others)

    # comparisons: == is "on all ranks", the others need one answer
    def eq(self, other: Any) -> Any:
        return _torch.constant_bool(self._all(lambda a, b: a == b, other) == {True})

    def ne(self, other: Any) -> Any:
        return _torch.constant_bool(self._all(lambda a, b: a == b, other) != {True})

    ge, le = _one_answer(operator.ge), _one_answer(operator.le)
    gt, lt = _one_answer(operator.gt), _one_answer(operator.lt)


class RankNode(LocalIntNode):
    """``dist.get_rank()`` and what is computed of it: one int a rank, of which Python sees one.

    Tensors and sizes take each rank's. A branch, a dict and a set can only take one: the first
    rank's, which torch's LocalTensorMode gives for all, and say so where the ranks differ.
    """

    @property
    def first(self) -> int:
        return self._local_ints[min(self._local_ints)]

    def _ask(self, fn: Callable[[int, int], bool], other: Any) -> Any:
        if len(self._all(fn, other)) > 1:
            _warn(f"{self} compared with {other}")
        rank = min(self._local_ints)
        return _torch.constant_bool(bool(fn(self.first, int_on_rank(other, rank))))

    eq, ne = _one_answer(operator.eq), _one_answer(operator.ne)

    def bool_(self) -> bool:
        return bool(self.ne(0))


def _warn(what: str) -> None:
    at = user_line()
    warnings.warn(
        f"the ranks differ, and the first one's answer is taken for all: {what}"
        f"{f' at {at}' if at else ''}. For a branch of each rank, put it in a function under "
        "maybe_run_for_local_tensor, or in rank_map.",
        stacklevel=2,
    )


def rank_hash(old: Callable[[Any], int], value: Any) -> int:
    """hash() of a SymInt: a rank is found under the first rank's number."""
    if not isinstance(value.node, RankNode):
        return old(value)
    _warn(f"{value} looked up in a dict or set")
    return hash(value.node.first)


def formatted(old: Any, value: Any, spec: str) -> str:
    """A SymInt in an f-string: each rank's int by the format."""
    ints = getattr(value.node, "_local_ints", None)
    if not spec or ints is None:
        return object.__format__(value, spec)
    return "{" + ", ".join(f"{r}: {i:{spec}}" for r, i in ints.items()) + "}"


def int_on_rank(i: Any, rank: int) -> int:
    """The value of an int or a node on one rank."""
    if hasattr(i, "_local_ints"):  # also torch's class: DTensor keeps ints of ranks in its caches
        return i._local_ints[rank]
    if isinstance(i, _torch.ConstantIntNode):
        return i.val
    if isinstance(i, int):
        return i
    raise TypeError(f"neither an int nor an int of each rank: {type(i)}")


def is_local_int(value: Any) -> bool:
    """Is it a SymInt with an int for each rank?"""
    if not isinstance(value, torch.SymInt):
        return False
    node = value.node
    return isinstance(node, _torch.ConstantIntNode) or hasattr(node, "_local_ints")


def local_int(
    values: Mapping[int, int], node: type[LocalIntNode] = LocalIntNode
) -> int | torch.SymInt:
    """One int a rank -> the int if all are the same, else a SymInt.

    >>> local_int({0: 2, 1: 2}), local_int({0: 2, 1: 3})
    (2, LocalIntNode({0: 2, 1: 3}))
    """
    first = next(iter(values.values()))
    if all(v == first for v in values.values()):
        return first
    return torch.SymInt(node(values))
