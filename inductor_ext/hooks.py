"""The passes and lowerings, in and out of Inductor."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fcoll import symm_mem
from fcoll.collectives import row_of
from fcoll.groups import by_name
from inductor_ext import registry
from inductor_ext._torch import (
    before_every_compile,
    inductor_config,
    is_group_name,
    real_object,
    unset_fake_temporarily,
)
from inductor_ext.config import config
from inductor_ext.passes import Passes

_passes = Passes()
_HOOK = "post_grad_custom_post_pass"


def install() -> None:
    """Make the default backend of ``torch.compile`` do what "fcoll" does. Twice is once."""
    prepare()
    before_every_compile(connect)
    before = _as_list(getattr(inductor_config, _HOOK))
    if _passes not in before:
        setattr(inductor_config, _HOOK, [*before, _passes])


def uninstall() -> None:
    """Undo ``install``: what is compiled from now on is stock Inductor's again."""
    left = [p for p in _as_list(getattr(inductor_config, _HOOK)) if p is not _passes]
    setattr(inductor_config, _HOOK, left or None)
    before_every_compile(None)
    registry.unregister()


def patches(options: dict[str, Any]) -> dict[str, Any]:
    """The settings of a compile with the passes in it, on top of a user's."""
    prepare()
    before = _as_list(options.get(_HOOK, getattr(inductor_config, _HOOK)))
    return {**options, _HOOK: [*(p for p in before if p is not _passes), _passes]}


def connect(graph: Any) -> None:
    """Find out which groups of a graph have shared memory, before any cache is asked.

    All ranks of a group must do that at the same point of their program. Later some of them may
    compile the graph, and some load it.
    """
    if not isinstance(graph, torch.fx.GraphModule):
        return
    with unset_fake_temporarily():
        for name in dict.fromkeys(_group_names(graph)):
            symm_mem.status_of(by_name(name))


def _group_names(graph: torch.fx.GraphModule) -> Iterator[str]:
    """The groups of a graph's collectives, and those of the meshes of its distributed tensors."""
    for module in graph.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            if node.op == "call_function" and row_of(node.target) is not None:
                yield from _strings_that_name_groups((*node.args, *node.kwargs.values()))
            value = node.meta.get("example_value")
            if isinstance(value, DTensor):
                yield from (g.group_name for g in real_object(value.device_mesh).get_all_groups())


def _strings_that_name_groups(args: Iterable[Any]) -> Iterator[str]:
    yield from (a for a in args if isinstance(a, str) and is_group_name(a))


def prepare() -> None:
    registry.register()
    logger = logging.getLogger("inductor_ext")
    if config.log and not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("inductor_ext: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


def _as_list(passes: Any) -> list[Any]:
    if passes is None:
        return []
    return list(passes) if isinstance(passes, (list, tuple)) else [passes]
