"""Values that a rank needs from others before its step can be traced: the shapes that the stages of
a pipeline send each other when they first run.

A rank that requests what nobody has published yet is put off: the one that publishes it is run
until it does, then the first begins again. So only ``build(mesh)``, which makes the program of any
rank, will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fcoll.errors import Deadlock, UnmatchedTransfer, ran
from fcoll.ranks.isolation import KNOWN, Globals, shared_dicts_put_back
from fcoll.tracing.equivalent_ranks import Alike
from fcoll.tracing.fake_world import (
    Key,
    PeerValues,
    Published,
    Requested,
    exchanging,
    fake_world,
    new_groups_noted,
)
from fcoll.tracing.rank_queries import answering_for
from fcoll.tracing.trace import Mode, Trace, trace
from fcoll.tracing.values import agreeing

Build = Callable[[Any], Any]


@dataclass
class Board:
    """What ranks have published, for all traces of one program."""

    build: Build
    axes: Mapping[str, int]
    mode: Mode = "joint"
    sizes: Mapping[str, int] = field(default_factory=dict)  # by symbol or line
    published: dict[Key, Any] = field(default_factory=dict)
    agreed: Mapping[str, bool] = field(default_factory=dict)  # decisions by values all ranks share
    isolate: tuple[str, ...] = KNOWN  # modules whose globals each rank has for itself

    @contextmanager
    def traced(self, rank: int, alike: Alike | None = None) -> Iterator[Trace]:
        """The trace of a rank; inside, its world is there. ``alike`` records what it asks."""
        with ExitStack() as world:
            while True:
                try:
                    result = self._run(rank, None, world, alike)
                    break
                except Requested as request:
                    world.close()
                    self._find_out([request])
            yield result

    def _run(
        self, rank: int, target: Key | None, world: ExitStack, alike: Alike | None = None
    ) -> Trace:
        world.enter_context(shared_dicts_put_back())
        world.enter_context(Globals(self.isolate).put_back())
        with exchanging(PeerValues(self.published, target)), agreeing(self.agreed):
            mesh = world.enter_context(fake_world(**self.axes, rank=rank))  # type: ignore[arg-type]
            with answering_for(alike) if alike is not None else nullcontext():
                with new_groups_noted() as before:
                    fn, args = ran("build", self.build(mesh))
                result = trace(fn, *args, mode=self.mode)
            result.new_groups = (*before, *result.new_groups)
            result.take(self.sizes)
            if alike is not None:
                alike.issued(result.collectives)
            return result

    def _find_out(self, todo: list[Requested]) -> None:
        """Run the ranks that publish what is requested, first those that they need themselves."""
        while todo:
            request = todo[-1]
            try:
                with ExitStack() as world:
                    self._run(request.source, request.key, world)
            except Published:
                todo.pop()
            except Requested as other:
                if any(other.key == before.key for before in todo):
                    _raise_circle(todo)
                todo.append(other)
            else:
                _raise_unpublished(request)


def _raise_circle(todo: list[Requested]) -> None:
    waits = [f"  rank {x.rank} waits for {x.what} from rank {x.source}" for x in todo]
    lines = ["ranks wait for what the others have to say first:", *waits]
    raise Deadlock(message="\n".join(lines), ranks=tuple(x.rank for x in todo))


def _raise_unpublished(request: Requested) -> None:
    raise UnmatchedTransfer(
        message=f"between ranks {request.source} and {request.rank}: rank {request.rank} waits for "
        f"{request.what}, which rank {request.source} does not send. All ranks of a pipeline must "
        "make the same stages, in the same order.",
        ranks=(request.source, request.rank),
    )
