"""What can be proved of the calls that ranks make, from their traces: that the members of a group
make the same ones, that sends meet receives, and that nobody waits in a circle."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from fcoll.checking.provenance import Origins, call_keys
from fcoll.checking.size_comparison import Sizes, apart, differ
from fcoll.errors import CheckMismatch, Deadlock, UnmatchedTransfer
from fcoll.graph.issued import SPLITS, GroupKey, Issued, describe, messages_of
from fcoll.graph.symbolic_sizes import has_symbols
from fcoll.tracing.fake_world import NewGroup


@dataclass(frozen=True)
class PairedMessage:
    """One message of a point-to-point call."""

    call: Issued
    sends: bool
    me: int
    peer: int
    tag: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def lane(self) -> tuple[Any, ...]:
        """Messages on a lane arrive in the order they are sent in."""
        ends = (self.me, self.peer) if self.sends else (self.peer, self.me)
        return self.call.group_key, *ends, self.tag


@dataclass(frozen=True)
class RankCalls:
    """The calls of one rank, and the order in which it starts and waits for them."""

    rank: int
    calls: tuple[Issued, ...]
    events: tuple[tuple[str, int], ...]  # ("start" | "wait", the call's id)
    findings: tuple[Any, ...]
    origins: Origins = field(default_factory=Origins)  # of sizes that only a run knows
    notes: tuple[str, ...] = ()  # of its trace
    own_backward: bool = False  # does the step run a backward pass itself?
    new_groups: tuple[NewGroup, ...] = ()  # that building it and the step make

    def transfers(self) -> Iterator[PairedMessage]:
        return itertools.chain.from_iterable(transfers_of(c, self.rank) for c in self.calls)

    def peers(self) -> list[int]:
        return sorted({t.peer for t in self.transfers()})


# -- what is known of sizes ---


class KnownSizes:
    """The sizes of all programs. Where only a run knows one, ``notes`` say what was not compared,
    or from what it follows; each line of the program is named once."""

    def __init__(self, programs: dict[int, RankCalls]) -> None:
        self.programs = programs
        self._notes: dict[Any, str] = {}

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes(self.programs)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._notes.values()))

    def common(self, x: Any, rank: int) -> Any:
        """Sizes in nested lists as tuples, in terms that all ranks share."""
        if isinstance(x, (list, tuple)):
            return tuple(self.common(part, rank) for part in x)
        if has_symbols(x):
            return self.sizes.common(x, rank)
        return x if type(x) is int else repr(x)

    def not_compared(self, call: Issued, what: str) -> None:
        text = f"not compared: {what} of {call.op} at {call.source}, which only a run knows"
        self._notes.setdefault((call.op, call.source, "unknown"), text)

    def follows(self, call: Issued, *ends: tuple[Any, int]) -> None:
        """What one rank sends is what another expects, by what was exchanged before: ``ends`` are
        the two sizes and their ranks."""
        place = call.op, call.source, "known"
        if place not in self._notes:
            lines = sorted({line for size, rank in ends for line in self._lines_of(size, rank)})
            counts = f"the counts exchanged at {', '.join(lines)}"
            self._notes[place] = f"proved: the rows of {call.op} at {call.source} match by {counts}"

    def _lines_of(self, size: Any, rank: int) -> Iterator[str]:
        """The lines of the calls by which a size came from other ranks."""
        program = self.programs[rank]
        terms = [program.origins.symbols.get(str(s)) for s in size.free_symbols]
        keys = {key for term in terms for key in _calls_in(term)}
        starts = {start for start, key in call_keys(program.calls).items() if key in keys}
        return (call.source for call in program.calls if call.start in starts)


def _calls_in(term: Any) -> Iterator[Any]:
    """The calls by which a value came from other ranks."""
    if isinstance(term, tuple):
        if term[:1] in (("sent",), ("same",)):
            yield term[1:3]
        for part in term:
            yield from _calls_in(part)


# -- proof 1: the members of a group make the same calls ---


def same_calls(programs: dict[int, RankCalls], known: KnownSizes) -> int:
    """Compare all traced members of every group; the number of groups."""
    by_group: dict[GroupKey, dict[int, list[Issued]]] = defaultdict(dict)
    for rank, program in programs.items():
        for call in program.calls:
            if not call.row.is_p2p:
                by_group[call.group_key].setdefault(rank, []).append(call)
    for key, lists in by_group.items():
        members = {r: lists.get(r, []) for r in key[0] if r in programs}
        _compare(members, known)
    return len(by_group)


def _compare(members: dict[int, list[Issued]], known: KnownSizes) -> None:
    """Raise for the first call in which the members of a group differ."""
    longest = max(map(len, members.values()))
    for i in range(longest):
        calls = {rank: calls[i] if i < len(calls) else None for rank, calls in members.items()}
        for rank, other, why in _disagreements(calls, known):
            # where they went apart, which may be before the calls stop matching
            first = next(j for j in range(i + 1) if j == i or _apart(members, rank, other, j))
            _raise_mismatch(members, rank, other, first, i, why)


def _apart(members: dict[int, list[Issued]], rank: int, other: int, i: int) -> bool:
    return members[rank][i].source != members[other][i].source


def _disagreements(
    calls: dict[int, Issued | None], known: KnownSizes
) -> Iterator[tuple[int, int, str]]:
    """(a rank of the majority, one that differs from it, in what)."""
    signatures = {rank: signature(call, rank, known) for rank, call in calls.items()}
    usual = Counter(signatures.values()).most_common(1)[0][0]
    ranks = {kind: rank for rank, kind in reversed(signatures.items())}  # the first with each
    kinds = [usual, *(kind for kind in dict.fromkeys(signatures.values()) if kind != usual)]
    for x, y in itertools.combinations(kinds, 2):
        a, b = ranks[x], ranks[y]
        if apart(x, y):
            yield a, b, _difference(x, y)
        elif (call := calls[a]) is not None:
            known.not_compared(call, f"the sizes on ranks {a} and {b}")
    present = {r: c for r, c in calls.items() if c is not None}
    yield from _own_parts(present, known)


def signature(call: Issued | None, rank: int, known: KnownSizes) -> Any:
    """What must be the same on all ranks."""
    if call is None:
        return None
    args, shapes = call.agreed()
    common = sorted((name, known.common(x, rank)) for name, x in args.items())
    return call.row.message, known.common(shapes, rank), call.dtypes, tuple(common)


def _difference(x: Any, y: Any) -> str:
    """In what two signatures differ."""
    if x is None or y is None:
        return "one makes the call, the other does not"
    for name, i in (("the collective", 0), ("the shape", 1), ("the dtype", 2)):
        if apart(x[i], y[i]):
            return f"{name} differs"
    ours, theirs = dict(x[3]), dict(y[3])
    names = [k for k in {**ours, **theirs} if apart(ours.get(k), theirs.get(k))]
    return f"{', '.join(names)} differ{'s' if len(names) == 1 else ''}"


def _own_parts(calls: dict[int, Issued], known: KnownSizes) -> Iterator[tuple[int, int, str]]:
    """What rank a sends to b is what b expects from a."""
    same: set[frozenset[int]] = set()  # pairs whose counts only a run knows: those that match,
    other: dict[tuple[int, int], str] = {}  # and those of which it cannot be told
    for (a, x), (b, y) in itertools.permutations(calls.items(), 2):
        if all(isinstance(c.args.get(k), (list, tuple)) for c in (x, y) for k in SPLITS):
            sent = x.args[SPLITS[0]][x.ranks.index(b)]
            expected = y.args[SPLITS[1]][y.ranks.index(a)]
            differs = differ(known.sizes.common(sent, a), known.sizes.common(expected, b))
            if differs:
                why = f"rank {a} sends {sent} rows to rank {b}, which expects {expected}"
                yield a, b, why
            elif differs is None:
                known.not_compared(y, f"how many rows ranks send ({sent}) and expect ({expected})")
                other[a, b] = f"rank {a} sends {sent} rows to rank {b}, which expects {expected}"
            elif has_symbols(expected):
                known.follows(y, (sent, a), (expected, b))
                same.add(frozenset((a, b)))
    yield from _odd_one_out(same, other)


def _odd_one_out(
    same: set[frozenset[int]], other: Mapping[tuple[int, int], str]
) -> Iterator[tuple[int, int, str]]:
    """Counts that match between all ranks but one are other counts there."""
    if not other or not same:
        return
    for rank in sorted(frozenset.intersection(*map(frozenset, other))):
        among_others = {pair for pair in same if rank not in pair}
        pairs = {frozenset(pair) for pair in other}
        if among_others and len(pairs) > 1 and not pairs & among_others:
            (a, b), why = next(iter(other.items()))
            yield a, b, f"{why}: other counts than those that match between the other ranks"
            return


def _raise_mismatch(
    members: dict[int, list[Issued]], rank: int, other: int, first: int, i: int, why: str
) -> None:
    at = {r: members[r][first] if first < len(members[r]) else None for r in (rank, other)}
    some = next(c for c in (*at.values(), *members[rank], *members[other]) if c is not None)
    common = members[rank][first - 1] if first else None
    lines = [f'on the group "{some.axis or some.group}" of ranks {_some(some.ranks)}: {why}']
    lines += [f"  rank {r}: {describe(c) if c else 'makes no more calls'}" for r, c in at.items()]
    if first < i:
        late = {r: members[r][i] if i < len(members[r]) else None for r in (rank, other)}
        lines += ["  from there on they are not at the same line, and then:"]
        lines += [f"  rank {r}: {describe(c) if c else 'makes no more'}" for r, c in late.items()]
    lines += [f"  last in common: {describe(common) if common else 'none'}"]
    text, calls = "\n".join([*lines, CheckMismatch.fix]), tuple(at.values())
    raise CheckMismatch(message=text, ranks=(rank, other), calls=calls, last_common=common)


def _some(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"


# -- proof 2: sends meet receives ---


def transfers_of(call: Issued, me: int) -> Iterator[PairedMessage]:
    """The messages of a point-to-point call; none of another."""
    of_each = zip(messages_of(call), call.shapes, call.dtypes, strict=True)
    for (sends, peer, tag), shape, dtype in of_each if call.row.is_p2p else ():
        yield PairedMessage(call, sends, me, call.ranks[peer], tag, shape, dtype)


def transfers_meet(programs: dict[int, RankCalls], known: KnownSizes) -> None:
    lanes: dict[Any, tuple[list[PairedMessage], list[PairedMessage]]] = defaultdict(
        lambda: ([], [])
    )
    for program in programs.values():
        for transfer in program.transfers():
            lanes[transfer.lane][0 if transfer.sends else 1].append(transfer)
    problems: list[tuple[Any, Any, Any, str]] = []
    for sends, receives in lanes.values():
        common = None
        for send, receive in itertools.zip_longest(sends, receives):
            if why := _misfit(send, receive, known):
                problems.append((send, receive, common, why))
                break
            common = send
    if problems:
        # the one that its rank reaches first: the others often follow from it
        problem = min(problems, key=lambda p: min(t.call.id for t in p[:2] if t is not None))
        _raise_transfer(*problem)


def _misfit(send: PairedMessage | None, receive: PairedMessage | None, known: KnownSizes) -> str:
    if send is None:
        return "a receive that nobody sends to"
    if receive is None:
        return "a send that nobody receives"
    shapes = (known.common(t.shape, t.me) for t in (send, receive))
    differs = apart(*shapes)
    if differs:
        return "the shape differs"
    if differs is None:
        known.not_compared(receive.call, f"the sizes on ranks {send.me} and {receive.me}")
    return "" if send.dtype == receive.dtype else "the dtype differs"


def _raise_transfer(
    send: PairedMessage | None,
    receive: PairedMessage | None,
    common: PairedMessage | None,
    why: str,
) -> None:
    ends = [t for t in (send, receive) if t is not None]
    lines = [f"between ranks {ends[0].me} and {ends[0].peer}: {why}"]
    lines += [f"  rank {t.me}: {describe(t.call)}" for t in ends]
    if len(ends) == 1:
        missing = "irecv" if ends[0].sends else "isend"
        lines.append(f"  rank {ends[0].peer}: has no {missing} with tag {ends[0].tag} for it")
    lines.append(f"  last in common: {describe(common.call) if common else 'none'}")
    hint = "Every send needs a receive with the same tag, shape and dtype, in the same order."
    raise UnmatchedTransfer(
        message="\n".join([*lines, hint]),
        ranks=(ends[0].me, ends[0].peer),
        calls=tuple(t.call for t in ends),
        last_common=common.call if common else None,
    )


# -- proof 3: nobody waits in a circle ---


@dataclass(frozen=True)
class _Turn:
    """An event of a rank: the signals that it gives by coming to it, and the signals that other
    ranks must have given, how often, before it goes on: (ranks, signal, count)."""

    call: Issued
    signals: list[Any]
    waits: list[tuple[tuple[int, ...], Any, int]]


def _turns(program: RankCalls) -> Iterator[_Turn]:
    """A collective holds a rank until all members are there, a message only where it is waited for,
    until the other side has started."""
    counts: Counter[Any] = Counter()
    messages: dict[int, list[Any]] = defaultdict(list)  # of a call: what its wait waits for
    for kind, id in program.events:
        call = program.calls[id]
        if kind == "wait":
            yield _Turn(call, [], messages[id])
        elif call.row.is_p2p:
            transfers = list(transfers_of(call, program.rank))
            for t in transfers:
                counts[t.sends, t.lane] += 1
                messages[id].append(((t.peer,), (not t.sends, t.lane), counts[t.sends, t.lane]))
            yield _Turn(call, [(t.sends, t.lane) for t in transfers], [])
        else:
            key = call.group_key
            counts[key] += 1
            yield _Turn(call, [key], [(key[0], key, counts[key])])


class _Run:
    """The programs run against each other."""

    def __init__(self, programs: dict[int, RankCalls]) -> None:
        self.turns = {rank: list(_turns(program)) for rank, program in programs.items()}
        self.at = dict.fromkeys(programs, 0)  # rank -> its turn
        self.sent: Counter[tuple[int, Any]] = Counter()
        for rank in programs:
            self._come(rank)

    def turn(self, rank: int) -> _Turn | None:
        """The event that the rank has come to; None at its end."""
        turns, i = self.turns[rank], self.at[rank]
        return turns[i] if i < len(turns) else None

    def _come(self, rank: int) -> None:
        if (turn := self.turn(rank)) is not None:
            self.sent.update((rank, key) for key in turn.signals)

    def advance(self, rank: int) -> bool:
        """Go on as far as possible; did it move at all?"""
        before = self.at[rank]
        while self.turn(rank) is not None and not self.blockers(rank):
            self.at[rank] += 1
            self._come(rank)
        return self.at[rank] > before

    def blockers(self, rank: int) -> list[int]:
        """The ranks that it waits for right now."""
        turn = self.turn(rank)
        waits = turn.waits if turn is not None else []
        return [
            r for ranks, key, n in waits for r in ranks if r in self.turns and self.sent[r, key] < n
        ]


def no_deadlock(programs: dict[int, RankCalls]) -> None:
    run = _Run(programs)
    while any([run.advance(rank) for rank in programs]):
        pass
    stuck = [rank for rank in programs if run.turn(rank) is not None]
    if stuck:
        _raise_deadlock(run, stuck[0])


def _raise_deadlock(run: _Run, rank: int) -> NoReturn:
    chain = [rank]
    while (following := run.blockers(chain[-1])[0]) not in chain:
        chain.append(following)
    circle = chain[chain.index(following) :]
    calls = [turn.call for turn in map(run.turn, circle) if turn is not None]
    lines = [f"ranks {', '.join(map(str, circle))} would wait for one another for ever:"]
    for r, call, after in zip(circle, calls, [*circle[1:], circle[0]], strict=True):
        lines.append(f'  rank {r} is in {describe(call)} on "{call.label}" and waits for {after}')
    text = "\n".join([*lines, _way_out(calls)])
    raise Deadlock(message=text, ranks=tuple(circle), calls=tuple(calls))


def _way_out(calls: list[Issued]) -> str:
    if not any(call.row.is_p2p for call in calls):
        return "Let all ranks make their calls on different groups in the same order."
    if all("dst" in call.args for call in calls):
        return (
            "All of them send first and wait until it is received, which only small messages need "
            "not do. Let one receive first, wait later (isend), or use batch_p2p."
        )
    return "Send first, or use batch_p2p, which does both at once."
