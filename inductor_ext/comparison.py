"""When a compiled graph first runs, the ranks of its groups compare what it issues.

The first run is the point that all ranks of a group reach: some may have compiled the graph and
others have loaded it, and a backward graph may be compiled with its forward graph on one rank and
later on another. What is issued is written into the code, so that it is there in caches, too.
Later runs are counted, so that a rank which runs an agreed graph where another has a new one can
tell that one so (watch.py).
"""

from __future__ import annotations

import base64
import functools
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from fcoll.errors import PlanMismatch
from fcoll.graph.call_agreement import Call, ComparedCalls, calls_by_group, compare, compared
from fcoll.graph.issued import Issued, collectives_of
from fcoll.graph.nodes import has_named_group, regions_of
from fcoll.groups import by_name
from fcoll.transport.handshake import digest
from inductor_ext import watch
from inductor_ext._torch import runs_region
from inductor_ext.choice import Choice, choice_of
from inductor_ext.config import config


def card_of(module: torch.fx.GraphModule) -> str:
    """What a graph issues on its groups, as text that may stand in code of any language. Groups
    that are values of the graph are not known before it runs: nothing is said of them."""
    calls, how = [], {}
    for call, node in _issued(module):
        calls.append(call)
        how[call.start] = _how(node)
    settings = str(digest(repr(config.key())))
    plain = json.dumps([calls_by_group(calls, how), settings])
    return base64.b64encode(zlib.compress(plain.encode())).decode()


def _issued(module: torch.fx.GraphModule, within: str = "") -> Iterator[tuple[Issued, Node]]:
    """(call, its node) of a graph and of the regions that it runs, each as often as it does. What
    branches and loops issue depends on values: nothing is said of it."""
    calls = {call.start: call for call in collectives_of(module)}
    for node in module.graph.nodes:
        if node.name in calls and has_named_group(node):
            yield replace(calls[node.name], start=within + node.name), node
        elif runs_region(node):
            for region in regions_of(node):
                yield from _issued(region, f"{within}{node.name}.")


def _how(node: torch.fx.Node) -> str:
    """Form and number of a collective: ranks that read in place meet no others. And which of the
    program's calls it makes, since passes leave some out, merge and move them."""
    choice = choice_of(node) or Choice()
    in_place = "read in place, " if choice.form in ("fused", "split", "opaque") else ""
    return f"{in_place}call {' and '.join(choice.calls)} of the graph"


class Runs:
    """The runs of a graph: generated code calls it when one begins."""

    def __init__(self, card: str) -> None:
        self.card = card
        self.count = 0
        self.groups: list[str] = []  # by name: a loaded graph must not keep a destroyed one alive
        self.begun: list[ComparedCalls] = []  # of its groups, once all agreed

    def __call__(self) -> None:
        if not self.count:
            self._compare()
        self.count += 1
        watch.begun[threading.get_ident()] = time.monotonic()
        for group in self.begun:
            group.begun += 1

    def _compare(self) -> None:
        by_group, settings = self.calls()
        groups = [by_name(name) for name in by_group]
        # One order for all ranks, whatever order they issue in: a circle of waits is none then.
        for group in sorted(groups, key=lambda g: (g.ranks, g.name)):
            compare(group, by_group[group.name], settings)
        self.groups = [group.name for group in groups if compared(group)]
        self.begun = [history for group in groups if (history := compared(group))]
        if self.groups:
            watch.start()

    def calls(self) -> tuple[dict[str, list[Call]], str]:
        """What it issues by group, and the settings that it was planned with."""
        by_group, settings = json.loads(zlib.decompress(base64.b64decode(self.card)))
        return by_group, settings


# -- as an op, for the C++ wrapper ---

_lib = torch.library.Library("fcoll_compiled", "DEF")
_lib.define("compare(str card) -> Tensor")
_runs_of = functools.cache(Runs)
_raised: dict[int, PlanMismatch] = {}  # by thread


def _op(card: str) -> torch.Tensor:
    runs = watch.in_cpp[threading.get_ident()] = _runs_of(card)
    try:
        runs()
    except PlanMismatch as error:
        _raised[threading.get_ident()] = error
        raise
    return torch.empty(0)


def with_own_errors(run: Callable[..., Any]) -> Callable[..., Any]:
    """Raise the error of an op itself, of which a graph in C++ makes a RuntimeError."""

    @functools.wraps(run)
    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except RuntimeError as error:
            mine = _raised.pop(threading.get_ident(), None)
            if mine is None:
                raise
            raise mine from error
        finally:
            watch.in_cpp.pop(threading.get_ident(), None)

    return call


_lib.impl("compare", _op, "CompositeExplicitAutograd")
torch.library.register_fake("fcoll_compiled::compare", lambda card: torch.empty(0), lib=_lib)
OP: Any = torch.ops.fcoll_compiled.compare.default
