"""The dispatch modes: in one a program is built, in the other its step runs in an algebra."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fcoll.graph._torch import op_is_random
from fcoll.proving import _torch
from fcoll.proving.algebra import Algebra, NotExact, Unlucky
from fcoll.proving.complex_rules import COMPLEX_RULES, packed, parts, resolved
from fcoll.proving.indexed_rules import RULES  # all of them
from fcoll.proving.lists import ELEMENTWISE, joined, parted
from fcoll.proving.movement import MOVES, NAMESPACES, OF_NUMBERS, SILENT, UNINITIALIZED
from fcoll.proving.norm_rules import WRITES
from fcoll.proving.optimizer_rules import FUSED
from fcoll.source import user_line

_FLOATS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PLAIN = frozenset(_FLOATS)
_ITEM = torch.ops.aten._local_scalar_dense.default
_META = torch.device("meta")  # sizes without elements


AS_A_NUMBER = "a value of the step is used as a number of Python's"


class Refused(Exception):
    """What cannot be told of this program, and why."""


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _floats_in(args: Any) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            if x.is_floating_point() or x.is_complex():
                yield x
        elif isinstance(x, (list, tuple)):
            yield from _floats_in(x)


def _is_marked(floats: list[Tensor]) -> bool:
    """By torch, as the conjugate or the negative of what it holds: views of complex numbers."""
    return any([x.is_neg() or (x.is_complex() and x.is_conj()) for x in floats])


def _is_nan(x: Any) -> bool:
    return isinstance(x, float) and x != x


def _plain(x: Tensor) -> Tensor:
    return _torch.plain(x) if getattr(x, "has_escaped", False) else x


def _is_single(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 0


def lifted_constant(algebra: Algebra, x: Tensor) -> Tensor:
    """An optimizer may ask again for the number that a tensor is, its learning rate."""
    lifted = algebra.lift(x)
    if _is_single(x):
        algebra.note(float(lifted), float(x.detach()))
    return lifted


def _is_complex(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_complex()


def _each(args: Any) -> Iterator[Any]:
    for x in args:
        if isinstance(x, (list, tuple)):
            yield from _each(x)
        else:
            yield x


def _wide(dtype: Any) -> Any:
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    return torch.complex128 if dtype.is_complex else torch.float64


def _is_wide(x: Tensor) -> bool:
    return x.dtype == _wide(x.dtype)


class Wide(_torch.TorchDispatchMode):  # type: ignore[misc]
    """All floats that are made are float64: what a step in an algebra needs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in _FLOATS for t in types):  # a DTensor's local parts come later
            return func(*args, **(kwargs or {})) if _torch.FakeTensor in types else NotImplemented
        name = _torch.name_of(func)[1]
        if name == "view" and isinstance(args[1], torch.dtype):  # bytes of a file, as floats
            out = func(*args)
            return out.to(torch.float64) if out.is_floating_point() else out
        kwargs = {k: _wide(v) for k, v in (kwargs or {}).items()}
        args = tuple(map(_wide, args))
        out = func(*args, **kwargs)
        if name == "lift_fresh" and out.is_floating_point():
            out = out.to(torch.float64)
        # zeros are residues: what lies between a bucket's gradients takes part in its reduction
        return out.zero_() if name in UNINITIALIZED else out


class ExactMode(_torch.TorchDispatchMode):  # type: ignore[misc]
    """Ops on floats are their rules in an algebra; those that move elements run as they are, and
    what has no rule is refused."""

    def __init__(
        self, algebra: Algebra, rank: int, allow: frozenset[str] = frozenset(), label: str = ""
    ) -> None:
        super().__init__()
        self.algebra, self.rank, self.allow, self.label = algebra, rank, allow, label
        self.parameters: dict[int, str] = {}  # by the address of their elements
        self.lines: dict[str, str] = {}  # where each was first used
        self.has_escaped = False  # are there values of .item() in the step?
        self._made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _PLAIN.issuperset(types):  # a DTensor's local parts come later
            return func(*args, **(kwargs or {})) if _torch.FakeTensor in types else NotImplemented
        kwargs = kwargs or {}
        if self.has_escaped and func is not _ITEM:
            args, kwargs = self._each_float(args, kwargs, _plain)
        floats = list(_floats_in(args))
        if kwargs:
            floats.extend(_floats_in(kwargs.values()))
        if kwargs.get("device") == _META or any([x.is_meta for x in floats]):
            return func(*args, **kwargs)
        if self.parameters:
            self._note_use(floats)
        try:
            return self._run(func, args, kwargs, floats)
        except NotExact as error:
            raise Refused(_placed(func, error)) from None
        except Unlucky as error:
            if not error.placed:
                error.args, error.placed = (_placed(func, error),), True
            raise

    def _note_use(self, floats: list[Tensor]) -> None:
        for x in floats:
            name = self.parameters.pop(x.data_ptr(), None)
            if name is not None and (line := user_line()):
                self.lines[name] = line

    # -- an op ---

    def _run(self, func: Any, args: Any, kwargs: Any, floats: list[Tensor]) -> Any:
        namespace, name, _ = _torch.name_of(func)
        if self.algebra.escaped and any(map(_is_nan, _each((*args, *kwargs.values())))):
            self._check_numbers(func, args, kwargs, bool(floats))
        if namespace in SILENT:
            return func(*args, **kwargs)
        if name not in ("_conj", "_neg_view") and _is_marked(floats):
            args, kwargs = self._each_float(args, kwargs, lambda x: resolved(self.algebra, x))
        if op_is_random(func):
            return self._random(func, args, kwargs, floats)
        if namespace in NAMESPACES:
            return func(*args, **kwargs)
        if name.startswith("_foreach_"):
            return self._foreach(func, args, kwargs)
        if name in FUSED:
            with self:
                return FUSED[name](*args, **kwargs)
        written = _torch.written_args(func)
        if not all(map(_is_wide, floats)):
            args, kwargs = self._lifted(args, kwargs, written)
        base = name.removesuffix("_") if written else name
        if name in SPECIAL:
            return SPECIAL[name](self, func, args, kwargs)
        if not floats and not self._makes_floats(func, args, kwargs):
            return func(*args, **kwargs)
        if base in MOVES and base not in RULES:
            kwargs = {k: _wide(v) for k, v in kwargs.items()}
            if base in _JOINS:
                joined = [x if _is_float(x) else self.algebra.lift(x) for x in args[0]]
                args = (joined, *args[1:])
            return func(*args, **kwargs)
        if base in _NEW and not _makes_wide(kwargs):  # ones of integers, like a tensor of floats
            return func(*args, **kwargs)
        if base in UNINITIALIZED:
            return self._uninitialized(func, args, kwargs)
        if written:
            return self._written(func, base, args, kwargs, written)
        return self._value(func, base, args, kwargs)

    def _check_numbers(self, func: Any, args: Any, kwargs: Any, has_floats: bool) -> None:
        """A number may be a value of the step (tokens.py) where a rule computes with it."""
        name = _torch.name_of(func)[1].removeprefix("_foreach_").removesuffix("_")
        takes = name in OF_NUMBERS and _makes_wide(kwargs)
        if not takes or not (has_floats or self._makes_floats(func, args, kwargs)):
            raise NotExact(AS_A_NUMBER)

    def _value(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        values = (*_each(args), *_each(kwargs.values()))
        is_complex = any(isinstance(x, complex) or _is_complex(x) for x in values)
        rules = COMPLEX_RULES if is_complex or name in ("polar", "complex") else RULES
        if (rule := rules.get(name)) is not None:
            if name not in _NEW and not _makes_wide(kwargs):  # a sum of floats as integers
                args, _ = self._each_float(args, {}, lambda x: as_integers(self.algebra, x))
                return func(*args, **kwargs)
            given = {k: v for k, v in kwargs.items() if k not in _HOW}
            with torch.no_grad():
                out = self._applied(rule, name, args, given)
            # x ** 1 is a tensor of its own, which may be written
            out = out.clone() if any(out is x for x in values) else out
            self._note_constant(func, args, kwargs, out)
            return out
        if (made := _torch.decomposition(func)) is not None:
            with self:
                return made(*args, **kwargs)
        with self:
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            raise NotExact("it has no rule in exact arithmetic")
        return out

    def _applied(self, rule: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in WRITES:
            return rule(self.algebra, *args, **kwargs)
        return self.algebra.applied(rule, name, args, kwargs)

    def _note_constant(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """What single numbers make is one, too: an optimizer computes so with powers of betas."""
        if func is None or not _is_single(out):
            return
        tensors = [x for x in (*_each(args), *_each(kwargs.values())) if isinstance(x, Tensor)]
        if not all(x.dim() == 0 for x in tensors):
            return
        floats = {id(x): self.algebra.constant(float(x.detach())) for x in tensors if _is_float(x)}
        if None not in floats.values():
            with torch.no_grad():
                plain, named = self._each_float(
                    args, kwargs, lambda x: torch.tensor(floats[id(x)], dtype=torch.float64)
                )
                named = {k: _wide(v) for k, v in named.items()}
                value = float(func(*plain, **named))
                if not _is_nan(value):  # of a number that is a value of the step
                    self.algebra.note(float(out.detach()), value)

    def _written(self, func: Any, base: str, args: Any, kwargs: Any, written: Any) -> Any:
        """add_(x, y) is x.copy_(add(x, y)); so are forms with out=."""
        outs = [kwargs[n] if by_name else args[i] for i, n, by_name in written]
        given = {k: v for k, v in kwargs.items() if k not in {n for _, n, by in written if by}}
        values = self._value(_torch.functional(func), base, args, given)
        values = values if isinstance(values, (tuple, list)) else (values,)
        for out, value in zip(outs, values, strict=True):
            if out.shape != value.shape and out.numel() == 0:
                out.resize_(value.shape)
            out.copy_(self._as_written(value, out))
        return outs[0] if len(outs) == 1 else tuple(outs)

    def _as_written(self, value: Tensor, out: Tensor) -> Tensor:
        if _is_float(out) or not _is_float(value):
            return value
        return value != 0 if out.dtype == torch.bool else as_integers(self.algebra, value)

    def _foreach(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Lists: the op without the prefix, for each."""
        name = _torch.name_of(func)[1].removeprefix("_foreach_")
        base, n = name.removesuffix("_"), next(len(x) for x in args if isinstance(x, (list, tuple)))
        if base not in RULES and getattr(torch.ops.aten, name, None) is None:
            raise NotExact("it has no rule in exact arithmetic")
        steps = all(map(_is_single, args[0])) if isinstance(args[0], (list, tuple)) else True
        if (
            base in ELEMENTWISE
            and n > 1
            and not steps
            and (flat := joined(args, kwargs)) is not None
        ):
            with torch.no_grad():
                done = parted(self.algebra.applied(RULES[base], base, flat, {}), args[0])
                if not name.endswith("_"):
                    return done
                for x, value in zip(args[0], done, strict=True):
                    x.copy_(value)
                return None
        done = [self._one_of(name, i, n, args, kwargs) for i in range(n)]
        return None if name.endswith("_") else done

    def _one_of(self, name: str, i: int, n: int, args: Any, kwargs: Any) -> Any:
        own = lambda x: x[i] if isinstance(x, (list, tuple)) and len(x) == n else x  # noqa: E731
        mine, named = list(map(own, args)), {k: own(v) for k, v in kwargs.items() if k not in _HOW}
        base = name.removesuffix("_")
        if base not in RULES:  # a move
            with self:
                return getattr(torch.ops.aten, name)(*mine, **named)
        with torch.no_grad():  # a rule, and not the op, which makes tensors of numbers
            value = self.algebra.applied(RULES[base], base, mine, named)
        self._note_constant(getattr(torch.ops.aten, base, None), mine, named, value)
        return mine[0].copy_(value) if name.endswith("_") else value

    # -- floats that are no elements yet ---

    def _lifted(self, args: Any, kwargs: Any, written: Any) -> Any:
        """Tensors of other dtypes hold numbers: they were made outside of build and step."""
        for i, name, by_name in written:
            out = kwargs.get(name) if by_name else args[i]
            if _is_float(out) and not _is_wide(out):
                raise NotExact(f"it writes a tensor of {out.dtype} that was not made in build()")

        def lift(x: Tensor) -> Tensor:
            if x.is_complex():
                return packed(*map(self.algebra.lift, torch.view_as_real(x).unbind(-1)))
            return lifted_constant(self.algebra, x)

        return self._each_float(args, kwargs, lambda x: x if _is_wide(x) else lift(x))

    def _each_float(self, args: Any, kwargs: Any, change: Callable[[Tensor], Tensor]) -> Any:
        def each(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(map(each, x))
            return change(x) if _is_float(x) else x

        with torch.no_grad():
            return tuple(map(each, args)), {k: each(v) for k, v in kwargs.items()}

    def _makes_floats(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Does an op without floats make some? Asked of the op itself."""
        if _torch.written_args(func):
            return False
        if (dtype := kwargs.get("dtype")) is not None:
            return bool(dtype.is_floating_point or dtype.is_complex)
        made = func(*args, **kwargs)
        return any(map(_is_float, _each([made])))

    def _uninitialized(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Elements that nobody else has: reading them makes a difference."""
        out = func(*args, **{k: _wide(v) for k, v in kwargs.items()})
        if out.is_floating_point():
            self._made += 1
            name = f"uninitialized {self.label} {self.rank} {self._made}"
            storage = torch.empty(0, dtype=torch.float64).set_(out.untyped_storage())
            storage.copy_(self.algebra.draw(name, storage.numel()))
        return out

    def _random(self, func: Any, args: Any, kwargs: Any, floats: list[Tensor]) -> Any:
        name = _torch.name_of(func)[1]
        if name == "native_dropout" and (args[1] == 0 or args[2] is False):
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if "rng" not in self.allow:
            raise NotExact('it draws random numbers (allow={"rng"} takes them as they are)')
        out = func(*args, **kwargs)
        if not _is_float(out):
            return out
        with torch.no_grad():
            lifted = self.algebra.lift(out)
        return out.copy_(lifted) if _torch.written_args(func) else lifted


def _shown(func: Any) -> str:
    namespace, name, _ = _torch.name_of(func)
    return name if namespace == "aten" else f"{namespace}.{name}"


def _placed(func: Any, error: Exception) -> str:
    at = user_line()
    return f"{_shown(func)}: {error}" + (f", at {at}" if at else "")


# -- ops with a meaning of their own ---


def _lift_fresh(mode: ExactMode, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.tensor(...) in the step."""
    x = args[0]
    return lifted_constant(mode.algebra, x) if x.is_floating_point() else func(x)


def _to_copy(mode: ExactMode, func: Any, args: Any, kwargs: Any) -> Any:
    x, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if dtype.is_complex:
        if x.is_complex():
            return x.clone()
        return packed(*parts(mode.algebra, x))
    if x.is_complex():
        raise NotExact("the imaginary part is left out")
    if dtype.is_floating_point:
        kwargs = {**kwargs, "dtype": torch.float64}
        return func(x if x.is_floating_point() else mode.algebra.lift(x), **kwargs)
    if x.is_floating_point():
        if dtype == torch.bool:
            return x != 0
        return as_integers(mode.algebra, x).to(dtype)
    return func(*args, **kwargs)


def _copy_(mode: ExactMode, func: Any, args: Any, kwargs: Any) -> Any:
    to, x = args[:2]
    # Numbers that a library keeps (a tag behind a bucket's gradients) were not found to be lifted.
    # Residues stay themselves.
    if to.is_complex():
        return func(to, x if x.is_complex() else packed(*parts(mode.algebra, x)))
    if to.is_floating_point():
        if x.is_complex():
            raise NotExact("the imaginary part is left out")
        is_element = x.is_floating_point() and not bool(((x != x.floor()) | (x < 0)).any())
        x = x if is_element else mode.algebra.lift(x)
    if x.is_floating_point() and not to.is_floating_point():
        raise NotExact(f"floats become {to.dtype}")
    return func(to, x)


def _view_dtype(mode: ExactMode, func: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(args[1], torch.dtype) and args[1] != args[0].dtype:
        raise NotExact(f"the bits of floats are read as {args[1]}")
    return func(*args, **kwargs)


def _item(mode: ExactMode, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if x.is_complex():
        raise NotExact(AS_A_NUMBER)
    if not x.is_floating_point():
        return func(x)
    found = mode.algebra.constant(float(func(_torch.plain(x))))
    if found is None and getattr(
        x, "has_escaped", False
    ):  # asked by torch, for an op that takes a number
        return mode.algebra.token(_torch.plain(x))
    if found is None:
        raise NotExact(AS_A_NUMBER)
    return found


SPECIAL: dict[str, Callable[[ExactMode, Any, Any, Any], Any]] = {
    "lift_fresh": _lift_fresh,
    "_to_copy": _to_copy,
    "copy_": _copy_,
    "view": _view_dtype,
    "_local_scalar_dense": _item,
}
_HOW = ("dtype", "layout", "device", "pin_memory", "memory_format", "out")
_NEW = frozenset(("ones_like", "full_like", "new_ones", "new_full"))
_JOINS = frozenset(("cat", "concatenate", "stack"))  # integers, too, with floats


def _makes_wide(kwargs: Any) -> bool:
    dtype = kwargs.get("dtype")
    return dtype is None or dtype.is_floating_point or dtype.is_complex


def as_integers(algebra: Algebra, x: Tensor) -> Tensor:
    known, counts = algebra.counts(x)
    if not bool(known.all()):
        raise NotExact("floats that are no small integers become integers")
    return counts.to(torch.int64)
