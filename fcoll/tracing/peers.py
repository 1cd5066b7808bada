"""What a rank is told by others before its step can be traced: the shapes that the stages of a
pipeline send each other when they first run.

A rank that asks for what nobody has said yet is put off: the one that says it is run until it does,
then the first begins again. So only ``build(mesh)``, which makes the program of any rank, will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fcoll.errors import Deadlock, UnmatchedTransfer, ran
from fcoll.tracing import singletons
from fcoll.tracing.alike import Alike
from fcoll.tracing.asking import asking
from fcoll.tracing.fake_world import fake_world, new_groups_noted
from fcoll.tracing.told import Asked, Key, Said, Talk, talking
from fcoll.tracing.trace import Mode, Trace, trace
from fcoll.tracing.values import agreeing

Build = Callable[[Any], Any]


@dataclass
class Board:
    """What ranks have said, for all traces of one program."""

    build: Build
    axes: Mapping[str, int]
    mode: Mode = "joint"
    sizes: Mapping[str, int] = field(default_factory=dict)  # by symbol or line
    said: dict[Key, Any] = field(default_factory=dict)
    agreed: Mapping[str, bool] = field(default_factory=dict)  # decisions by values all ranks share

    @contextmanager
    def traced(self, rank: int, alike: Alike | None = None) -> Iterator[Trace]:
        """The trace of a rank; inside, its world is there. ``alike`` is told what it asks."""
        with ExitStack() as world:
            while True:
                try:
                    made = self._run(rank, None, world, alike)
                    break
                except Asked as asked:
                    world.close()
                    self._find_out([asked])
            yield made

    def _run(
        self, rank: int, wanted: Key | None, world: ExitStack, alike: Alike | None = None
    ) -> Trace:
        world.enter_context(singletons.as_before())
        with talking(Talk(self.said, wanted)), agreeing(self.agreed):
            mesh = world.enter_context(fake_world(**self.axes, rank=rank))  # type: ignore[arg-type]
            with asking(alike) if alike is not None else nullcontext():
                with new_groups_noted() as before:
                    fn, args = ran("build", self.build(mesh))
                made = trace(fn, *args, mode=self.mode)
            made.new_groups = (*before, *made.new_groups)
            made.take(self.sizes)
            if alike is not None:
                alike.issued(made.collectives)
            return made

    def _find_out(self, todo: list[Asked]) -> None:
        """Run the ranks that say what was asked for, those first that they ask themselves."""
        while todo:
            asked = todo[-1]
            try:
                with ExitStack() as world:
                    self._run(asked.source, asked.key, world)
            except Said:
                todo.pop()
            except Asked as other:
                if any(other.key == before.key for before in todo):
                    _raise_circle(todo)
                todo.append(other)
            else:
                _raise_unsaid(asked)


def _raise_circle(todo: list[Asked]) -> None:
    waits = [f"  rank {x.rank} waits for {x.what} from rank {x.source}" for x in todo]
    lines = ["ranks wait for what the others have to say first:", *waits]
    error = Deadlock(message="\n".join(lines))
    error.ranks = tuple(x.rank for x in todo)
    raise error


def _raise_unsaid(asked: Asked) -> None:
    error = UnmatchedTransfer(
        message=f"between ranks {asked.source} and {asked.rank}: rank {asked.rank} waits for "
        f"{asked.what}, which rank {asked.source} does not send. All ranks of a pipeline must make "
        "the same stages, in the same order."
    )
    error.ranks = (asked.source, asked.rank)
    raise error
