"""A process group of simulated ranks: torch.distributed's interface to a channel.

Each rank has an object of its own; what they share is the channel. C++ (functional collectives,
DDP's reducer) calls the methods that pybind lets Python override, torch.distributed calls them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll._torch import stack_here
from fcoll.errors import (
    GroupDestroyed,
    MismatchedLists,
    NotInGroup,
    NoValues,
    RankOutOfGroup,
)
from fcoll.reductions import PREMUL_SUM, premul_factor
from fcoll.simulation import _torch
from fcoll.simulation.baton import Rank, this_rank
from fcoll.simulation.calls import RankCall, dtypes, signature, sizes
from fcoll.simulation.channel import Channel, Contribution
from fcoll.simulation.mailbox import ANY, Mailbox, MessageEnd
from fcoll.simulation.work import SimulatedWork
from fcoll.table.c10d import OPS, Op, one
from fcoll.transport.carriers import Then

# what the ranks of a group to be wait for one another in
MAKE_GROUPS = ("new_group", "init_process_group", "split_group")


class NoBackend:
    """What dist.batch_isend_irecv (from torch 2.15 on) asks of any group."""

    supports_coalescing = supports_splitting = False

    def name(self) -> str:
        return "simulated"


class SimulatedGroup(dist.ProcessGroup):
    """The group of ``channel`` as the rank ``owner`` sees it."""

    simulated = True

    def __init__(
        self, owner: Rank, channel: Channel, mailbox: Mailbox, store: Any, backend: str, desc: str
    ) -> None:
        me = channel.ranks.index(owner.number)
        super().__init__(me, channel.n)
        self.owner, self.channel, self.mailbox = owner, channel, mailbox
        self.me, self.n = me, channel.n
        self.store, self.backend, self.desc = store, backend, desc
        self.destroyed = False
        self.coalesced: list[SimulatedWork] | None = None

    # -- what c10d asks a group ---

    def rank(self) -> int:
        return self.me

    def size(self) -> int:
        return self.n

    getRank, getSize = rank, size

    def name(self) -> str:
        return self.backend

    def getBackendName(self) -> str:
        return "simulated"  # C++ would look for a backend by the name of a real one

    # C++ keeps names in backends, and this group has none; it asks by its own name for them

    @property
    def group_name(self) -> str:
        return self.channel.name

    @property
    def group_desc(self) -> str:
        return self.desc

    def getGroupName(self) -> str:
        return self.channel.name

    def getGroupDesc(self) -> str:
        return self.desc

    def _set_group_name(self, name: str) -> None:
        pass

    def _set_group_desc(self, desc: str) -> None:
        self.desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> NoBackend:
        return NoBackend()

    def get_group_store(self) -> Any:
        return self.store

    def set_timeout(self, timeout: timedelta) -> None:
        self.channel.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self.destroyed = True

    abort = shutdown

    def _start_coalescing(self, device: torch.device) -> None:
        self.coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """What waits for all that was started since; those works are not the caller's."""
        works, self.coalesced = self.coalesced or [], None
        return Then(works)

    def _get_sequence_number_for_group(self) -> int:
        return self.channel.counts[self.me]

    def _set_sequence_number_for_group(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"SimulatedGroup(rank {self.me} of {list(self.channel.ranks)})"

    @functools.cached_property
    def twin(self) -> dist.ProcessGroup:
        return _torch.traced_twin(self.channel.name, self.me, self.n)

    # -- calls ---

    def start(self, op: str, facts: Sequence[str], part: Contribution) -> SimulatedWork:
        """Bring this rank's part to the group's next collective."""
        owner = self._check_owner(op)
        if op not in MAKE_GROUPS:
            _check_values(op, [*part.ins, *part.outs])
        if part.root != -1:
            self._check_peer(op, "root", part.root)
        call = RankCall(op, tuple(facts), self.channel.label, stack_here(), signature())
        work = self._issue(owner, SimulatedWork(owner, call, part.outs))
        self.channel.join(self.me, work, part)
        if work.failure is not None:
            work.wait()  # raises, though nobody may wait for it
        return work

    def message(self, sends: bool, buf: Tensor, peer: int, tag: int) -> SimulatedWork:
        """Post one end of a message; ``peer`` is a rank of the group, or ANY."""
        op = "send" if sends else "recv"
        owner = self._check_owner(op)
        _check_values(op, [buf])
        if peer != ANY:
            self._check_peer(op, "dst" if sends else "src", peer)
        who = "any rank" if peer == ANY else self.channel.rank_name(peer)
        facts = (*sizes([buf]), *((f"tag {tag}",) if tag else ()))
        where = f"{'to' if sends else 'from'} {who}"
        call = RankCall(op, facts, self.channel.label, stack_here(), None, where)
        work = self._issue(owner, SimulatedWork(owner, call, [buf]))
        self.mailbox.post(MessageEnd(sends, self.me, peer, tag, buf, work))
        return work

    def _issue(self, owner: Rank, work: SimulatedWork) -> SimulatedWork:
        owner.session.issue(work)
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def _check_owner(self, op: str) -> Rank:
        me = this_rank()
        if me is not self.owner:
            who = "a thread that is no rank" if me is None else f"rank {me.number}"
            raise NotInGroup(rank=f"{who}, with rank {self.owner.number}'s object,", ranks=self)
        if self.destroyed:
            raise GroupDestroyed(op=op, group=self.channel.label)
        return me

    def _check_peer(self, op: str, arg: str, rank: int) -> None:
        if not 0 <= rank < self.n:
            raise RankOutOfGroup(op=op, arg=arg, rank=rank, n=self.n, last=self.n - 1)

    # -- collectives: those whose pieces go around are read by the table (below) ---

    def collective(self, op: Op, args: Sequence[Any]) -> SimulatedWork:
        """Start the collective that a method of ``op`` is called for."""
        named, given_op = op.of_method(args)
        message = op.message(**named, process_group=(self.channel.name, self.n))
        given, taken = op.pieces(message, self.n)
        ins, outs = list(map(_torch.completed, given)), list(map(_torch.completed, taken))
        root, reduce_op = named.get("root_rank", -1), named.get("reduce_op", "")
        if message.missing and root == self.me:
            raise MismatchedLists(op=op.called, why=f"{message.missing} is empty", hint="Give it.")
        facts = sizes(message.sent) if op.alike else dtypes(message.sent)
        if root != -1:
            facts = f"{'from' if message.root is None else 'to'} rank {root}", *facts
        if reduce_op:
            facts = reduce_op, *facts
        if reduce_op == PREMUL_SUM:
            factor = premul_factor(op.called, given_op, None)
            assert factor is not None  # or it would have raised
            scaled = self.owner.session.arithmetic.scaled
            ins, reduce_op = [scaled(op.called, x.detach(), factor) for x in ins], "sum"
        return self.start(op.called, facts, Contribution(ins, outs, reduce_op, root))

    def barrier(self, opts: Any = None) -> SimulatedWork:
        work = self.start("barrier", (), Contribution())
        if opts is not None and opts.timeout > timedelta(0):
            work.timeout = opts.timeout
        return work

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        patience = timeout if timeout != _torch.DEFAULT_TIMEOUT else None
        self.start("monitored_barrier", (), Contribution()).wait(patience)

    # -- messages ---

    def send(self, tensors: Any, dst: int, tag: int = 0) -> SimulatedWork:
        return self.message(True, one("send", _plain(tensors)), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> SimulatedWork:
        return self.message(False, one("recv", _plain(tensors)), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:
        return self.message(False, one("recv", _plain(tensors)), ANY, tag)


def _check_values(op: str, tensors: Sequence[Tensor]) -> None:
    """Ranks exchange values: a call of fake or meta tensors would be made in earnest and give
    nothing."""
    if _torch.is_faking() or any([x.is_meta for x in tensors]):
        hint = "Simulated ranks exchange real tensors. fcoll.trace shows what a step would issue."
        raise NoValues(what=f"{op} of fake or meta tensors", hint=hint)


# -- the methods that call ops of c10d, by the names of all versions of torch ---


def _method(op: Op) -> Callable[..., Any]:
    """That of a collective whose pieces go around."""

    def call(self: SimulatedGroup, *args: Any, **kwargs: Any) -> SimulatedWork:
        return self.collective(op, (*args, *kwargs.values()))

    return call


def _or_traced(name: str, other: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """In a trace nothing is exchanged, and what is called passes as an op of c10d."""

    @functools.wraps(method)
    def call(self: SimulatedGroup, *args: Any, **kwargs: Any) -> Any:
        if _torch.is_faking() and _torch.is_traced():
            self._check_owner(name)
            called = name if hasattr(self.twin, name) else other
            return getattr(self.twin, called)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return call


for _op in OPS.values():
    _called = _method(_op) if _op.route else vars(SimulatedGroup)[_op.methods[0]]
    for _name in _op.methods:
        setattr(SimulatedGroup, _name, _or_traced(_name, _op.methods[0], _called))


def _plain(value: Any) -> Any:
    """Tensors as c10d gets them, also those of lists."""
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return _torch.completed(value)
