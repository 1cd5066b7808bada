"""One class a user mistake; the message is the class's template.

Every template says what is wrong, where (``{at}`` becomes ", at model.py:31") and how to fix it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NoReturn

from fcoll import _torch
from fcoll.lobby import Died, Elsewhere, NotMet
from fcoll.source import line_of, user_line


# AssertionError and ValueError at once: torch's functional collectives raise the first and
# torch.distributed the second for the same mistakes, so code that catches either goes on working.
# Dynamo passes an AssertionError through unchanged, so a compiled program sees the same class.
class FcollError(AssertionError, ValueError):
    """The base of all errors that fcoll raises for a call it cannot carry out."""

    template = "{what}{at}"
    rank: int = -1

    def __init__(self, *message: str, **facts: Any) -> None:
        if facts:
            line = user_line(_torch.traced_stack())
            at = f", at {line}" if line else ""
            message = (f"{type(self).__name__}: {self.template.format(at=at, **facts)}",)
        super().__init__(*message)

    def __reduce__(self) -> Any:
        # not the whole __dict__: Dynamo leaves frames there, which cannot be pickled
        return type(self), self.args, {"rank": self.rank}


class UnknownReduceOp(FcollError):
    template = "{op}: no reduce op {reduce_op!r}{at}. Use one of {known}, or a dist.ReduceOp."


class NotEqual(FcollError):
    template = "the step is not proved equal to one device{at}.\n{text}"


class MissingFactor(FcollError):
    template = (
        "{op}: a factor goes with the reduce op premul_sum and only with it; got {reduce_op!r} "
        'and factor={factor}{at}. Write all_reduce(x, "premul_sum", group, factor=0.5).'
    )


class UnknownGroup(FcollError):
    template = (
        "no process group {group}{at}. {hint}Pass a ProcessGroup, a 1-D DeviceMesh, "
        "(mesh, dim), a group's name, a list of ranks, or None for all ranks."
    )


class NotInitialized(FcollError):
    template = (
        "torch.distributed is not initialized{at}. Call "
        'torch.distributed.init_process_group("gloo") first and start with torchrun, '
        "or use fcoll.fake_world to trace without processes."
    )


class NotInGroup(FcollError):
    template = (
        "rank {rank} is not a member of the group {ranks}{at}. Only its members may call a "
        "collective on a group: guard the call with `if rank in {ranks}`."
    )


class RankOutOfGroup(FcollError):
    template = (
        "{op}: {arg}={rank} is outside the group of {n} ranks{at}. Ranks are counted within the "
        "group: 0 to {last}."
    )


class BadPermutation(FcollError):
    template = (
        "{op}: dst={dst} does not map the {n} ranks of the group one to one{at}. Give one "
        "target for each rank, each at most once; -1 where a rank sends to nobody."
    )


class BadDim(FcollError):
    template = "{op}: dim {dim} is outside a tensor of {ndim} dimensions{at}. {hint}"


class UnevenShard(FcollError):
    template = (
        '{op} over "{group}" needs dim {dim} ({size}) divisible by {n}{at}. '
        "Pad to {padded}, or pass {remedy}."
    )


class BadSizes(FcollError):
    template = (
        "{op}: sizes={sizes} do not fit{at}: {why}. Give one size >= 0 for each of {n} ranks."
    )


class BadSplits(FcollError):
    template = (
        "{op}: {arg}={splits} do not fit{at}: {why}. Give {n} sizes >= 0, output_splits and "
        "input_splits both or neither; input_splits must add up to dim 0."
    )


class WrongDtype(FcollError):
    template = "{op}: {reduce_op} has no meaning for {dtype}{at}. {hint}"


class WrongDevice(FcollError):
    template = (
        "{op}: the tensor is on {device}, the group's backend serves {serves}{at}. Move the "
        "tensor, or make the group with a backend for {device}."
    )


class WrongType(FcollError, TypeError):
    template = "{op}: {arg} is {kind}{at}. Pass {want}."


class WrongLayout(FcollError, TypeError):
    template = (
        "{op}: {arg} is a {kind} tensor{at}. Collectives move the elements of strided tensors: "
        "convert it, as in x.to_dense(), or send its parts."
    )


class MismatchedLists(FcollError):
    template = "{op}: {why}{at}. {hint}"


class BadOption(FcollError):
    template = "{op}: {arg}={value!r}{at}. Use one of {known}."


class BadOutput(FcollError):
    template = "{op}: out has {got}, the result needs {want}{at}. Allocate it so."


class BadRow(FcollError):
    template = "the row {name!r} cannot be registered: {why}{at}."


class NoStackedRule(FcollError):
    template = "{op} cannot run on stacked ranks{at}: {why}. {hint}"


class RaggedRanks(FcollError):
    template = (
        "{op}: {why}, so that ranks would hold tensors of different shapes{at}. Stacked ranks have "
        "one shape: pad the parts, or use fcoll.simulate_ranks, where each rank has its own."
    )


class BadStack(FcollError):
    template = "{why}{at}. {hint}"


class NotInBatch(FcollError, RuntimeError):
    template = (
        "the ranks cannot run as one batch, at {line}: {why}. {hint}, or use fcoll.simulate_ranks, "
        "where each rank runs by itself."
    )


class UnknownAxis(FcollError):
    template = (
        "no mesh with one axis {axis!r}{at}: {why}. Pass the mesh, as in axis_index(axis, mesh)."
    )


class NoGradient(FcollError):
    template = "{op} has no gradient{at}: {why}. {hint}"


# A RuntimeError too: torch raises one where ranks make different calls.
class CollectiveMismatch(FcollError, RuntimeError):
    template = (
        "{message}{at}. All ranks of a group must make the same calls in the same order: look for "
        "a branch that only some of them take."
    )


class PlanMismatch(CollectiveMismatch):
    """Ranks of a group are about to issue different collectives; ``step`` is the first position
    at which they do, ``ranks`` those that differ from the group's first."""

    template = (
        "the ranks of the group {group!r} are about to issue different collectives{at}: number "
        "{step} is\n{lines}\n{hint}"
    )
    step: int = -1
    ranks: tuple[int, ...] = ()

    def __reduce__(self) -> Any:
        kind, args, kept = super().__reduce__()
        return kind, args, {**kept, "step": self.step, "ranks": self.ranks}


class OtherGraph(PlanMismatch):
    """A rank has a new graph to compare, and ``rank`` runs one on which all agreed before."""

    template = (
        "{message}{at}. Ranks that run different graphs wait for each other for ever: look for a "
        "branch, a shape or a setting that only some of them have."
    )


class NeverWaited(FcollError):
    template = "nothing waits for {what}{at}. Use its result, or call fcoll.wait_tensor on it."


class BadMesh(FcollError):
    template = "no mesh with {what}{at}. {hint}"


class UnusedAxis(FcollError):
    template = (
        "scale: with {axis}={size} nothing runs along the axis {axis!r}, and the program does not "
        "ask for it{at}. Name an axis that it uses: mesh[{axis!r}]."
    )


class GroupDestroyed(FcollError):
    template = (
        "{op} on the group {group!r}, which was destroyed before or never made{at}. Destroy a "
        "group after its last collective."
    )


class UnknownCollective(FcollError):
    template = (
        "{op} cannot be traced{at}: it is not known which messages it sends. Use a functional "
        "collective, as in fcoll.all_reduce."
    )


class UntraceableDDP(FcollError):
    template = (
        "torch's DistributedDataParallel is not traced as torch.compile would run it{at}: torch "
        "cuts the graph at its buckets. Trace it in another mode, or wrap the module in "
        "fcoll.DataParallel."
    )


class CheckMismatch(CollectiveMismatch):
    """What fcoll.check proves before a run. It has the two ranks, their calls (None where there is
    none) and the last collective that they have in common."""

    template = "{message}"
    ranks: tuple[int, ...] = ()
    calls: tuple[Any, ...] = ()
    last_common: Any = None


class GroupMismatch(CheckMismatch):
    """Ranks that make groups, which would mix up their members or wait for one for ever."""

    hint = (
        "All ranks must make all groups in the same order, those that they are not in too; or only "
        "its members make a group, with use_local_synchronization=True, and theirs in one order."
    )


class UnmatchedTransfer(CheckMismatch):
    """A send without its receive, or the other way round, or one that does not fit."""


class Deadlock(CheckMismatch):
    """Ranks that wait for one another in a circle: ``ranks`` in its order."""


class DataDependent(FcollError):
    template = (
        "the program decides by the value of a tensor, at {line}.{why} A trace has no values, and "
        "ranks that see different ones may issue different collectives. Decide by what all ranks "
        "know, keep the decision inside tensors (torch.where), or say which way a trace goes: "
        "`if fcoll.assume(condition, False):`."
    )
    line: str = ""
    shared: str | None = None  # a digest of the condition, where all ranks share the value

    def __reduce__(self) -> Any:
        return type(self), self.args, {k: getattr(self, k) for k in ("rank", "line", "shared")}


class ShapeRuleLacksDtype(FcollError, RuntimeError):
    template = (
        "torch's shape rule of {op} takes {takes} and refuses {dtype}{at}: {said}. A trace, as "
        "torch.compile, asks this rule in place of the op, which itself may run in {dtype}. Trace "
        "the model in {takes} (model.to(torch.{takes})), or compute it without this op."
    )


class NeedsPeers(FcollError):
    template = (
        "{what} comes from rank {rank}, at {line}, which a trace of this rank alone does not know. "
        "Give PipelineStage input_args= and output_args=, or let fcoll.check, fcoll.timeline or "
        "`fcoll report` trace build(mesh): they run the ranks before it as well."
    )


class PeerDied(FcollError, RuntimeError):
    template = "{message}{at}. The group is closed: restart the job."


class CollectiveTimeout(FcollError, RuntimeError):
    template = (
        "{message}{at}. Is that rank stuck, or did it skip the call? Raise the timeout given to "
        "init_process_group if it is only slow."
    )


class GroupClosed(FcollError, RuntimeError):
    template = "{message}{at}. Make a new process group, or restart the job."


class GroupForked(FcollError, RuntimeError):
    template = "{message}{at}. Call init_process_group in the new process."


class BadSymmetricCall(FcollError, RuntimeError):
    template = (
        "{message}{at}. Its tensors are contiguous, of one dtype, and for most ops made by "
        "torch.distributed._symmetric_memory.empty, on all ranks of the group."
    )


class NeverRan(FcollError):
    """A generator or coroutine function in place of a program: a call of it runs none of it."""

    template = (
        "{op}: the function gave {kind}{at}, and none of it has run. Give a plain function: {hint}."
    )


_UNRUN = {
    GeneratorType: ("a generator", "lambda *args: list(fn(*args))"),
    CoroutineType: ("a coroutine", "lambda *args: asyncio.run(fn(*args))"),
    AsyncGeneratorType: ("an async generator", "one that goes through it, by asyncio.run"),
}


def ran(op: str, result: Any) -> Any:
    """What a program gave ``op``, unless that is the program itself, not yet run."""
    found = _UNRUN.get(type(result))
    if found is None:
        return result
    if isinstance(result, CoroutineType):
        result.close()  # else Python warns that it was never awaited
    raise NeverRan(op=op, kind=found[0], hint=found[1])


class RankFailed(FcollError, RuntimeError):
    """A simulated rank raised. It is of the class of what was raised too, which is its cause."""

    template = "{message}"

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailed:
        """The error of a rank; caught by whoever would catch the original."""
        what = str(error)
        kind = type(error).__name__
        shown = what if what.startswith(f"{kind}:") else f"{kind}: {what}" if what else kind
        line = "" if isinstance(error, FcollError) else line_of(error)
        made = _class_of_both(type(error))(f"rank {rank}: {shown}{line and f', at {line}'}")
        made.rank = rank
        return made

    def __str__(self) -> str:
        return self.args[0]  # a KeyError would show its repr

    def __reduce__(self) -> Any:
        return RankFailed, self.args, {"rank": self.rank}


def _class_of_both(kind: type[BaseException]) -> type[RankFailed]:
    if issubclass(RankFailed, kind) or not issubclass(kind, Exception):
        return RankFailed
    try:
        return type(RankFailed.__name__, (RankFailed, kind), {"__module__": __name__})
    except TypeError:  # the two cannot be one, as with OSError
        return RankFailed


class NotOnSimulatedRanks(FcollError, RuntimeError):
    template = "{what} does not work on simulated ranks{at}. {hint}"


class NoValues(FcollError, RuntimeError):
    template = "{what} has no values{at}. {hint}"


class RanksTimeout(FcollError, RuntimeError):
    template = (
        "the simulated ranks did not end in {seconds} s{at}: {ranks} was running{there}. Pass a "
        "larger timeout=, or look for a loop or a lock that the rank is in; its thread may go on."
    )


class UnknownMachine(FcollError):
    template = (
        "no machine {machine!r}{at}. Use one of {known}, a .toml file of your own (copy one of "
        "fcoll/costs/machines), or a fcoll.costs.machine.Machine."
    )


class NotCalibrated(FcollError):
    template = (
        "this machine has not been measured: there is no local.toml in {folder}{at}. "
        "Run `fcoll calibrate` (about a minute), or name another machine."
    )


class BadMachineFile(FcollError):
    template = (
        "{path} does not describe a machine: {why}{at}. Compare it with fcoll/costs/machines."
    )


class BadTarget(FcollError):
    template = (
        "cannot run {target}: {why}{at}. Name a function build(mesh) -> (fn, args) as "
        "pkg.mod:build or file.py:build, or use --demo."
    )


class BadTraceFile(FcollError):
    template = (
        "cannot read the trace {path}: {why}{at}. Write one with "
        "`fcoll report train.py:build --mesh dp=4 --save trace.json`."
    )


class BadProfile(FcollError):
    template = (
        "cannot read the profile {path}: {why}{at}. Write one with torch.profiler's "
        "export_chrome_trace, or with nsys export --type sqlite."
    )


class BadDump(FcollError):
    template = (
        "cannot read the flight records {path}: {why}{at}. Name the folder or the files that ranks "
        "wrote with TORCH_FR_DUMP_TEMP_FILE=folder/rank_ set."
    )


class NotWritable(FcollError):
    template = "cannot write {path}: {why}{at}. Make the folder, or name another file."


class MissingSize(FcollError):
    template = (
        "the cost depends on {symbols}, which have no value{at}. "
        'Pass sizes={{"{first}": 128, ...}}, or --sizes {first}=128.'
    )


class UnknownScheduler(FcollError):
    template = (
        "no scheduler {scheduler!r}{at}. Use one of {known}, a function of your own "
        '(Steps in, names out), or register one with @fcoll.scheduler("name").'
    )


class MemoryCapTooSmall(FcollError):
    template = (
        "no order was found that holds at most {cap}{at}: the least is {least}, and the graph's "
        "own order holds {original}. Pass a larger memory_cap, or None."
    )


class BadPlan(FcollError):
    template = (
        "the plan of scheduler {scheduler!r} is wrong: {why}{at}. Give every step once, behind all "
        "that it needs, and stay under the memory cap."
    )


class NoGraph(FcollError):
    template = (
        "a plan of {what} has no graph to change{at}. Plan a Trace of this process, or a "
        "GraphModule."
    )


class BadPlanFile(FcollError):
    template = "cannot read the plan {path}: {why}{at}. Write one with plan.save({path!r})."


# -- gradient buckets: RuntimeErrors too, as those of torch's reducer ---


class BadBuckets(FcollError, RuntimeError):
    template = "no such gradient buckets{at}: {why}. {hint}"


class BadGradient(FcollError, RuntimeError):
    template = "a gradient cannot be reduced{at}: Expected {want}, got {got}. {hint}"


class ReductionUnfinished(FcollError, RuntimeError):
    """Some parameters got no gradient in the last backward pass: ``parameters`` are their names."""

    template = "{message}"
    parameters: tuple[str, ...] = ()


class ReadyTwice(FcollError, RuntimeError):
    template = "{message}"


class GraphChanged(FcollError, RuntimeError):
    template = "{message}"


class BadCommHook(FcollError, RuntimeError):
    template = "{why}{at}. {hint}"


class JoinCompiled(FcollError, RuntimeError):
    template = (
        "a compiled module has no join(){at}: ranks that have joined do not answer its "
        "all-reduces. {hint}"
    )


class ParametersDiffer(FcollError, RuntimeError):
    template = "{message}{at}. Build the same model on all ranks, with its parameters in one order."


#: Called with every error that the C++ part or the ranks' meeting raises.
on_failure: list[Callable[[FcollError], object]] = []

_NATIVE = re.compile(r"fcoll\.(\w+)\[(-?\d+)\]: ([^\n]*)")


def from_native(error: Exception) -> Exception:
    """What the C++ part threw, as the class that it names; any other error as it is.

    A mistake that names a rank has it as ``rank``, counted within the group.
    """
    found = _NATIVE.search(str(error))
    if found is None:
        return error
    made: FcollError = globals()[found[1]](message=found[3])
    made.rank = int(found[2])
    return _told(made)


def from_lobby(why: NotMet) -> FcollError:
    """That ranks did not come together, as the error of a collective that waited for them."""
    kinds: dict[type, type[FcollError]] = {Died: PeerDied, Elsewhere: OtherGraph}
    made = kinds.get(type(why), CollectiveTimeout)(message=str(why))
    made.rank = why.ranks[0] if why.ranks else -1
    return _told(made)


def _told(error: FcollError) -> FcollError:
    for listener in on_failure:
        listener(error)
    return error


@_torch.at_trace_time
def fail(cls: type[FcollError], **facts: Any) -> NoReturn:
    """Raise ``cls``. A function, so that a check traced by Dynamo raises the class itself.

    Dynamo turns a ``raise`` in traced code into its own Unsupported error; this call it makes
    while tracing. Facts must be constants: format sizes that may be symbolic with an f-string.
    """
    raise cls(**facts)
