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

from fcoll.errors import (
    BadOutput,
    GroupDestroyed,
    MismatchedLists,
    NotInGroup,
    NoValues,
    RankOutOfGroup,
)
from fcoll.reductions import PREMUL_SUM, parse, premul_factor
from fcoll.simulation import _torch
from fcoll.simulation.baton import Rank, this_rank
from fcoll.simulation.calls import Call, dtypes, signature, sizes
from fcoll.simulation.channel import Channel, Part
from fcoll.simulation.mailbox import ANY, Mailbox, Message
from fcoll.simulation.work import SimulatedWork
from fcoll.source import user_sites
from fcoll.table.c10d import OPS
from fcoll.transport.carriers import Then

# what the ranks of a group to be wait for one another in
MAKE_GROUPS = ("new_group", "init_process_group", "split_group")
TO_ONE = ("reduce", "gather")  # ops whose root receives


class NoBackend:
    """What dist.batch_isend_irecv (from torch 2.15 on) asks of any group."""

    supports_coalescing = supports_splitting = False

    def name(self) -> str:
        return "simulated"


def _in_place(op: str, options: Callable[[], Any]) -> Any:
    """The method of a collective that writes to the tensors that it sends."""

    def method(self: SimulatedGroup, tensors: Any, opts: Any = None) -> SimulatedWork:
        return self._collective(op, tensors, tensors, sizes(tensors), opts or options())

    return method


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

    def start(self, op: str, facts: Sequence[str], part: Part) -> SimulatedWork:
        """Bring this rank's part to the group's next collective."""
        owner = self._check_owner(op)
        if op not in MAKE_GROUPS:
            _check_values(op, [*part.ins, *part.outs])
        if part.root != -1:
            self._check_peer(op, "root", part.root)
        call = Call(op, tuple(facts), self.channel.label, user_sites(), signature())
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
        call = Call(op, facts, self.channel.label, user_sites(), None, where)
        work = self._issue(owner, SimulatedWork(owner, call, [buf]))
        self.mailbox.post(Message(sends, self.me, peer, tag, buf, work))
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

    # -- collectives: a method has the first of an op's names in the table (c10d.py) ---

    def _collective(
        self, op: str, ins: Any, outs: Any, facts: Sequence[str], opts: Any = None
    ) -> SimulatedWork:
        """Start a collective with c10d's options, which may have a root and a reduce op."""
        ins, reduce_op, root = _plain(ins), "", getattr(opts, "rootRank", -1)
        if root != -1:
            facts = f"{'to' if op in TO_ONE else 'from'} rank {root}", *facts
        if hasattr(opts, "reduceOp"):
            reduce_op = parse(op, opts.reduceOp)
            facts = reduce_op, *facts
        if reduce_op == PREMUL_SUM:
            factor = premul_factor(op, opts.reduceOp, None)
            assert factor is not None  # or it would have raised
            scaled = self.owner.session.arithmetic.scaled
            ins, reduce_op = [scaled(op, x.detach(), factor) for x in ins], "sum"
        return self.start(op, facts, Part(ins, _plain(outs), reduce_op, root))

    allreduce = _in_place("all_reduce", dist.AllreduceOptions)
    allreduce_coalesced = _in_place("all_reduce_coalesced", dist.AllreduceCoalescedOptions)
    reduce = _in_place("reduce", dist.ReduceOptions)
    broadcast = _in_place("broadcast", dist.BroadcastOptions)

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = None) -> SimulatedWork:
        ins = [x for xs in ins for x in xs]
        _count("reduce_scatter", ins, len(outs) * self.n)
        opts = opts or dist.ReduceScatterOptions()
        return self._collective("reduce_scatter", ins, outs, dtypes(ins), opts)

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter([out], [self._chunks("reduce_scatter", x, out)], opts)

    def reduce_scatter_tensor_coalesced(
        self, outs: Any, ins: Any, opts: Any = None
    ) -> SimulatedWork:
        op, opts = "reduce_scatter_coalesced", opts or dist.ReduceScatterOptions()
        parts = [c for o, x in zip(outs, ins, strict=True) for c in self._chunks(op, x, o)]
        return self._collective(op, parts, outs, sizes(ins), opts)

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> SimulatedWork:
        outs = [x for xs in outs for x in xs]
        _count("all_gather", outs, len(ins) * self.n)
        return self._collective("all_gather", ins, outs, dtypes(ins))

    def _allgather_base(self, out: Tensor, x: Tensor, opts: Any = None) -> SimulatedWork:
        return self.allgather([self._chunks("all_gather", out, x)], [x])

    def allgather_into_tensor_coalesced(
        self, outs: Any, ins: Any, opts: Any = None
    ) -> SimulatedWork:
        op = "all_gather_coalesced"
        parts = [c for o, x in zip(outs, ins, strict=True) for c in self._chunks(op, o, x)]
        return self._collective(op, ins, parts, sizes(ins))

    def allgather_coalesced(self, outs: Any, ins: Any, opts: Any = None) -> SimulatedWork:
        """``outs[r]`` are where rank r's tensors go."""
        where = [outs[r][i] for i in range(len(ins)) for r in range(self.n)]
        return self._collective("all_gather_coalesced", ins, where, sizes(ins))

    def alltoall(self, outs: Any, ins: Any, opts: Any = None) -> SimulatedWork:
        for xs in (outs, ins):
            _count("all_to_all", xs, self.n)
        return self._collective("all_to_all", ins, outs, dtypes(ins))

    def alltoall_base(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Any = None,
        in_splits: Any = None,
        opts: Any = None,
    ) -> SimulatedWork:
        ins, outs = self._split(x, in_splits, "input"), self._split(out, out_splits, "output")
        return self.alltoall(outs, ins)

    def gather(self, outs: Any, ins: Any, opts: Any = None) -> SimulatedWork:
        opts = opts or dist.GatherOptions()
        where = outs[0] if outs else []
        if self.me == opts.rootRank:
            _count("gather", where, self.n)
        return self._collective("gather", ins, where, dtypes(ins), opts)

    def gather_single(self, out: Any, x: Any, opts: Any = None) -> SimulatedWork:
        """dist.gather_single, from torch 2.14 on; elsewhere than on the root, out is empty."""
        parts = list(out.chunk(self.n)) if out.numel() else []
        return self.gather([parts], [x], opts)

    def scatter(self, outs: Any, ins: Any, opts: Any = None) -> SimulatedWork:
        opts = opts or dist.ScatterOptions()
        parts = ins[0] if ins else []
        if self.me == opts.rootRank:
            _count("scatter", parts, self.n)
        return self._collective("scatter", parts, outs, dtypes(outs), opts)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        work = self.start("barrier", (), Part())
        if opts is not None and opts.timeout > timedelta(0):
            work.timeout = opts.timeout
        return work

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        patience = timeout if timeout != _torch.DEFAULT_TIMEOUT else None
        self.start("monitored_barrier", (), Part()).wait(patience)

    # -- messages ---

    def send(self, tensors: Any, dst: int, tag: int = 0) -> SimulatedWork:
        return self.message(True, _one("send", tensors), dst, tag)

    def recv(self, tensors: Any, src: int, tag: int = 0) -> SimulatedWork:
        return self.message(False, _one("recv", tensors), src, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:
        return self.message(False, _one("recv", tensors), ANY, tag)

    # -- parts of one tensor ---

    def _chunks(self, op: str, whole: Tensor, part: Tensor) -> list[Tensor]:
        """The n equal parts of a tensor, as views."""
        whole = _torch.plain(whole)
        if whole.numel() != part.numel() * self.n or whole.dtype != part.dtype:
            want = f"{self.n} x {part.numel()} elements of {part.dtype}"
            raise BadOutput(op=op, got=f"{whole.numel()} of {whole.dtype}", want=want)
        return list(whole.detach().view(-1).chunk(self.n)) if part.numel() else [part] * self.n

    def _split(self, x: Tensor, splits: Any, which: str) -> list[Tensor]:
        x = _torch.plain(x).detach()
        rows = x.shape[0] if x.dim() else 0
        if not splits:
            if rows % self.n:
                why = f"dim 0 of the {which} ({rows}) is not divisible by {self.n}"
                raise MismatchedLists(op="all_to_all_single", why=why, hint="Give split sizes.")
            splits = [rows // self.n] * self.n
        if len(splits) != self.n or sum(splits) != rows:
            why = (
                f"the {which} splits {list(splits)} do not add up to {rows} rows for {self.n} ranks"
            )
            raise MismatchedLists(op="all_to_all_single", why=why, hint="Give one for each rank.")
        return list(x.split(list(splits)))


def _check_values(op: str, tensors: Sequence[Tensor]) -> None:
    """Ranks exchange values: a call of fake or meta tensors would be made in earnest and give
    nothing."""
    if _torch.is_faking() or any(x.is_meta for x in tensors):
        hint = "Simulated ranks exchange real tensors. fcoll.trace shows what a step would issue."
        raise NoValues(what=f"{op} of fake or meta tensors", hint=hint)


# -- a trace: nothing is exchanged, and what is called passes as an op of c10d ---


def _or_traced(name: str, other: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: SimulatedGroup, *args: Any, **kwargs: Any) -> Any:
        if _torch.is_faking() and _torch.is_traced():
            self._check_owner(name)
            called = name if hasattr(self.twin, name) else other
            return getattr(self.twin, called)(*args, **kwargs)
        return method(self, *args, **kwargs)

    return call


for _op in OPS.values():
    _method = vars(SimulatedGroup)[_op.methods[0]]
    for _name in _op.methods:  # newer versions of torch have other names
        setattr(SimulatedGroup, _name, _or_traced(_name, _op.methods[0], _method))


def _plain(tensors: Any) -> list[Tensor]:
    return [_torch.plain(x) for x in tensors]


def _count(op: str, tensors: Sequence[Tensor], want: int) -> None:
    if len(tensors) != want:
        why = f"there are {len(tensors)} tensors where {want} are needed"
        raise MismatchedLists(op=op, why=why, hint="Give one for each rank of the group.")


def _one(op: str, tensors: Any) -> Tensor:
    _count(op, tensors, 1)
    return _torch.plain(tensors[0])
