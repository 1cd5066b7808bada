"""Modules whose parameters differ between simulated ranks: stacked into one module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fcoll.errors import BadStack, fail

_MARK = "_fcoll_stacked"


def stack_modules(modules: Sequence[nn.Module]) -> nn.Module:
    """One module that holds the parameters and buffers of every rank's, stacked by rank.

    Its parameters are leaves of shape [W, ...]: give them to an optimizer, call ``backward`` on the
    simulated losses. Passed to a simulated function it is the rank's own module. A module that is
    not stacked is the same on all ranks.

    >>> ranks = [torch.nn.Linear(2, 3) for _ in range(4)]
    >>> model = fcoll.stack_modules(ranks)
    >>> model.weight.shape
    torch.Size([4, 3, 2])
    >>> x = torch.randn(4, 5, 2)
    >>> y = fcoll.simulate(lambda model, x: model(x), world_size=4)(model, x)
    >>> torch.allclose(y[3], ranks[3](x[3]), atol=1e-6)
    True
    """
    modules = list(modules)
    if not modules:
        fail(BadStack, why="there are no modules to stack", hint="Give one for each rank.")
    made = copy.deepcopy(modules[0])
    states = [tensors_of(m) for m in modules]
    for r, state in enumerate(states):
        for name, x in states[0].items():
            other = state.get(name)
            if len(state) != len(states[0]) or other is None or other.shape != x.shape:
                why = f"the module of rank {r} has not the parameters of rank 0: {name} differs"
                hint = "Stacked ranks have one shape: pad, or use fcoll.simulate_ranks."
                fail(BadStack, why=why, hint=hint)
    stacks: dict[int, Tensor] = {}
    for name, x in tensors_of(made).items():
        stack = torch.stack([state[name].detach() for state in states])
        is_parameter = isinstance(x, nn.Parameter)
        stacks[id(x)] = nn.Parameter(stack, x.requires_grad) if is_parameter else stack
    _replace(made, stacks)
    setattr(made, _MARK, len(modules))
    made.register_forward_pre_hook(_only_inside)
    return made


def is_stacked(module: nn.Module) -> bool:
    return hasattr(module, _MARK)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def swap(module: nn.Module, own: Sequence[Tensor]) -> Callable[[], None]:
    """Put a rank's own tensors into a stacked module; returns what puts the stacks back."""
    before = list(tensors_of(module).values())
    _replace(module, {id(x): y for x, y in zip(before, own, strict=True)})
    setattr(module, _MARK, 0)

    def put_back() -> None:
        setattr(module, _MARK, len(before[0]) if before else 1)
        now = tensors_of(module)
        _replace(module, {id(y): x for x, y in zip(before, own, strict=True)})
        new = [n for n, x in now.items() if all(x is not y for y in own)]
        if new:
            why = f"the program gives its module another tensor for {new[0]}"
            fail(BadStack, why=why, hint="Write into the one that is there, as in buffer.copy_(x).")

    return put_back


def _replace(module: nn.Module, new: dict[int, Tensor]) -> None:
    for m in module.modules():
        for table in (m._parameters, m._buffers):
            for name, x in table.items():
                if x is not None and id(x) in new:
                    table[name] = new[id(x)]  # type: ignore[assignment]


def _only_inside(module: nn.Module, args: Any) -> None:
    if getattr(module, _MARK):
        why = f"a stacked {type(module).__name__} is called, which holds all ranks' parameters"
        hint = "Pass it to the simulated function as an argument and call it there."
        fail(BadStack, why=why, hint=hint)
