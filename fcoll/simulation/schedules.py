"""The choices that real ranks leave to chance: which message a receive from any rank takes, whether
a handle is complete when it is asked, who comes first to a store.

A schedule is the number of the option taken at each choice. An empty one takes the first option
everywhere; ``following`` gives the next one to try, so that all are tried in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fcoll.errors import BadOption

Schedule = tuple[int, ...]


@dataclass
class Choices:
    """Takes the options of a schedule, then the first ones, and notes what there was to choose."""

    schedule: Schedule = ()
    taken: list[int] = field(default_factory=list)
    options: list[int] = field(default_factory=list)

    def choose(self, options: int) -> int:
        """The number of the option to take, of so many."""
        at = len(self.taken)
        number = self.schedule[at] if at < len(self.schedule) else 0
        if number >= options:
            known = f"schedules whose choice {at + 1} is below {options}: has the program changed?"
            raise BadOption(op="simulate_ranks", arg="schedule", value=self.schedule, known=known)
        self.taken.append(number)
        self.options.append(options)
        return number

    def following(self) -> Schedule | None:
        """The schedule after this run's, in the order of a depth-first search; None at the end."""
        for at in reversed(range(len(self.taken))):
            if self.taken[at] + 1 < self.options[at]:
                return (*self.taken[:at], self.taken[at] + 1)
        return None
