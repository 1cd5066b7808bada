"""The compiler half of fcoll: what TorchInductor makes of functional collectives.

``torch.compile(model, backend="fcoll")``, or ``inductor_ext.install()`` and the default backend:
the kernel before a collective writes into memory that the other ranks of the host can read, and
the kernel after it reads all of theirs.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import torch

from inductor_ext.config import config

__all__ = [
    "backend",
    "config",
    "cuda",
    "install",
    "lowers",
    "plans",
    "report",
    "requires_symmetric_memory",
    "table",
    "uninstall",
]

# Name -> where it is: a module, or a name in one after a colon.
_LAZY = {
    "cuda": "inductor_ext.lower.cuda",
    "lowers": "inductor_ext.lower.registry:lowers",
    "plans": "inductor_ext.passes.schedule:plans",
    "requires_symmetric_memory": "inductor_ext.lower.registry:requires_symmetric_memory",
    "report": "inductor_ext.lowered:report",
    "table": "inductor_ext.lowered:table",
}


def __getattr__(name: str) -> Any:
    """Names that need Inductor, which takes a second to import, when they are first used."""
    if name not in _LAZY:
        raise AttributeError(f"module inductor_ext has no attribute {name}")
    globals()[name] = value = pkgutil.resolve_name(_LAZY[name])
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def backend(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Any],
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable:
    """The ``torch.compile`` backend named "fcoll"; mode and options are Inductor's."""
    from inductor_ext._torch import compile_with_inductor, inductor_config, mode_options
    from inductor_ext.comparison import with_own_errors
    from inductor_ext.hooks import connect, patches

    chosen = {**(mode_options(mode) if mode else {}), **(options or {})}
    connect(graph)
    run = compile_with_inductor(graph, inputs, patches(chosen))
    return with_own_errors(run) if chosen.get("cpp_wrapper", inductor_config.cpp_wrapper) else run


def install() -> None:
    """Make the default backend of ``torch.compile`` do what "fcoll" does, until ``uninstall``."""
    from inductor_ext import hooks

    hooks.install()


def uninstall() -> None:
    """Undo ``install``: what is compiled from now on is stock Inductor's again."""
    from inductor_ext import hooks

    hooks.uninstall()
