"""Install the passes and lowerings in Inductor, and remove them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fcoll.graph.nodes import row_of_node
from fcoll.groups import by_name
from fcoll.transport.shared_memory import status_of
from inductor_ext._torch import (
    before_every_compile,
    inductor_config,
    is_group_name,
    real_object,
    unset_fake_temporarily,
)
from inductor_ext.config import config
from inductor_ext.lower import registry
from inductor_ext.passes.pipeline import Passes

_passes = Passes()
_HOOK = "post_grad_custom_post_pass"


def install() -> None:
    """Make the default backend of ``torch.compile`` do what "fcoll" does. Twice is once."""
    prepare()
    before_every_compile(_before_compile)
    before = _as_list(getattr(inductor_config, _HOOK))
    if _passes not in before:
        setattr(inductor_config, _HOOK, [*before, _passes])


def uninstall() -> None:
    """Undo ``install``: what is compiled from now on is stock Inductor's again."""
    others = [p for p in _as_list(getattr(inductor_config, _HOOK)) if p is not _passes]
    setattr(inductor_config, _HOOK, others or None)
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
            status_of(by_name(name))


def _before_compile(graph: Any) -> None:
    prepare()  # again: users may have registered rows since the last time
    connect(graph)


def _group_names(graph: torch.fx.GraphModule) -> Iterator[str]:
    """The groups of a graph's collectives, and those of the meshes of its distributed tensors."""
    for module in graph.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            name = _group_name(node)
            if isinstance(name, str) and is_group_name(name):
                yield name
            value = node.meta.get("example_value")
            if isinstance(value, DTensor):
                yield from (g.group_name for g in real_object(value.device_mesh).get_all_groups())


def _group_name(node: torch.fx.Node) -> Any:
    """The group argument of a collective's node: in Dynamo's graphs a name, or another node."""
    row = row_of_node(node)
    if row is None:
        return None
    at = row.position.get("group_name", len(node.args))
    return node.args[at] if at < len(node.args) else node.kwargs.get("group_name")


def prepare() -> None:
    """Have all rows lowered, and the log shown if it is on. Before every compile."""
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
