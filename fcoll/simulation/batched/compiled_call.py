"""A simulation that torch.compile traces: vmap and collectives become plain ops of its graph.

Dynamo traces fn as it runs on a rank. Its graph is then traced again below vmap, by the rest of the
compiler, where collectives find their stage by the names of its groups. Nothing of the simulation
is left in what runs.
"""

from __future__ import annotations

import weakref
from typing import Any

from fcoll import groups
from fcoll._torch import at_trace_time
from fcoll.simulation.batched import _torch, kernels
from fcoll.simulation.batched.stage import Stage, stages


def call(simulated: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What Dynamo traces in the place of the stage, which it could not enter."""
    # a text of its own, and no number: numbers that differ between calls become symbols
    name = "" + simulated.name
    out = simulated.mapped(args, kwargs, _enter(name))
    _leave(name)
    return out


class _Resolver:
    """Groups are the stage's, in the trace in which it was entered and in no other: a trace that
    ends with an error does not leave it."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.trace = stage, weakref.ref(_torch.tracing_context())

    def __call__(self, group: Any) -> str | None:
        trace = self.trace()
        if trace is None or trace is not _torch.tracing_context():
            groups.resolvers.remove(self)
            return None
        return self.stage.group_name(group)


@at_trace_time
def _enter(name: str) -> int:
    """The number of ranks of the stage; from here on, groups are its own."""
    kernels.teach()
    stage = stages[name]
    _ = stage.mesh  # made here: what fn asks of it, Dynamo finds
    groups.resolvers.append(_Resolver(stage))
    return stage.size


@at_trace_time
def _leave(name: str) -> None:
    groups.resolvers.pop()
