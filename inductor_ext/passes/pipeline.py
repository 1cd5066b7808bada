"""``Passes``: the passes in their order, as one pass of Inductor's, and its key in caches.

A pass takes the graph, changes it, and returns what it did, a line for each collective it touched.
After each of them ``verify`` looks whether the graph still is one.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.fx import Graph, Node

import fcoll
from fcoll import symm_mem
from fcoll.graph.nodes import collectives
from fcoll.graph.soundness import verify
from fcoll.transport import shared_memory
from fcoll.transport.native import build
from inductor_ext._torch import CustomGraphPass, is_group_name, symmetric_groups
from inductor_ext.choice import choice_of, number
from inductor_ext.config import config
from inductor_ext.passes.choose import choose
from inductor_ext.passes.normalize import normalize
from inductor_ext.passes.schedule import schedule
from inductor_ext.passes.simplify import simplify

log = logging.getLogger("inductor_ext")

Pass = Callable[[Graph], list[str]]
PASSES: tuple[Pass, ...] = (normalize, simplify, schedule, choose)

#: The packages whose sources decide what is generated.
PACKAGES = (Path(fcoll.__file__).parent, Path(__file__).parent.parent)
SOURCES = ("*.py", "*.cpp", "*.h")


def run(p: Pass, graph: Graph) -> list[str]:
    """Run one pass and verify the graph; the lines that the pass returned."""
    lines = p(graph)
    verify(graph, is_complete)
    return lines


def is_complete(node: Node) -> bool:
    """Was a form chosen for the collective whose result needs no wait?"""
    choice = choice_of(node)
    return choice is not None and choice.is_complete


class Passes(CustomGraphPass):
    """All passes, as one of Inductor's own; its uuid is part of the key of Inductor's caches."""

    def __call__(self, graph: Graph) -> None:
        if not any(True for _ in collectives(graph)):
            return
        number(graph)
        for p in PASSES:
            for line in run(p, graph):
                log.info("%s: %s", p.__name__, line)

    def uuid(self) -> str | None:
        """The same for graphs that are lowered the same; None, and nothing is cached, if the
        scheduler is a function that depends on more than its code."""
        settings = config.key()
        if settings is None:
            return None
        native = symm_mem.load(), build.has_fast_path()
        # Destroyed groups stay known until they are garbage collected, whenever that is.
        groups = [g for g in shared_memory.known_groups() if is_group_name(g[0])]
        # Ranks share a cache, but not always their shapes: of `sizes=` each has its own result.
        rank = dist.get_rank() if dist.is_initialized() else 0
        facts = own_source_hash(), settings, native, groups, symmetric_groups(), rank
        return hashlib.sha256(repr(facts).encode()).hexdigest()


@functools.cache
def own_source_hash() -> str:
    """The hash of the code that runs in this process, so once is enough."""
    return source_hash(*PACKAGES)


def source_hash(*folders: Path) -> str:
    """A hash of the names and contents of all source files below some folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for file in source_files(folder):
            text = file.read_bytes()
            digest.update(f"{file.relative_to(folder)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def source_files(folder: Path) -> list[Path]:
    return sorted(file for kind in SOURCES for file in folder.rglob(kind))
