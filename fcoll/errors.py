"""One class a user mistake, which says ``what`` is wrong and how to ``fix`` it.

Facts are in braces. The user's line (", at model.py:31") is put behind what is wrong, or where that
has ``{at}``.
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
    """The base of all errors that fcoll raises for a call it cannot carry out.

    Where each case of a mistake is something else, both are said where it is found: ``why`` and
    ``hint``."""

    what = "{why}"
    fix = "{hint}"
    template = "{why}{at}. {hint}"  # of both; a class may have a text of another form instead
    #: The facts that an error has as attributes, also after it was pickled.
    kept: tuple[str, ...] = ("rank",)
    rank: int = -1

    def __init_subclass__(cls) -> None:
        if {"what", "fix"} & vars(cls).keys():
            where = "" if "{at}" in cls.what else "{at}"
            cls.template = f"{cls.what}{where}. {cls.fix}"

    def __init__(self, *message: str, **facts: Any) -> None:
        if not message:
            line = user_line(_torch.traced_stack())
            at = f", at {line}" if line else ""
            message = (f"{type(self).__name__}: {self.template.format(at=at, **facts)}",)
        super().__init__(*message)
        vars(self).update({name: facts[name] for name in self.kept if name in facts})

    def __reduce__(self) -> Any:
        # not the whole __dict__: Dynamo leaves frames there, which cannot be pickled
        return type(self), self.args, {name: getattr(self, name) for name in self.kept}


class UnknownReduceOp(FcollError):
    what = "{op}: no reduce op {reduce_op!r}"
    fix = "Use one of {known}, or a dist.ReduceOp."


class NotEqual(FcollError):
    template = "the step is not proved equal to one device{at}.\n{text}"


class MissingFactor(FcollError):
    what = (
        "{op}: a factor goes with the reduce op premul_sum and only with it; got {reduce_op!r} and "
        "factor={factor}"
    )
    fix = 'Write all_reduce(x, "premul_sum", group, factor=0.5).'


class UnknownGroup(FcollError):
    what = "no process group {group}"
    fix = (
        "{hint}Pass a ProcessGroup, a 1-D DeviceMesh, (mesh, dim), a group's name, a list of "
        "ranks, or None for all ranks."
    )


class NotInitialized(FcollError):
    what = "torch.distributed is not initialized"
    fix = (
        'Call torch.distributed.init_process_group("gloo") first and start with torchrun, or use '
        "fcoll.fake_world to trace without processes."
    )


class NotInGroup(FcollError):
    what = "rank {rank} is not a member of the group {ranks}"
    fix = (
        "Only its members may call a collective on a group: guard the call with `if rank in "
        "{ranks}`."
    )


class RankOutOfGroup(FcollError):
    what = "{op}: {arg}={rank} is outside the group of {n} ranks"
    fix = "Ranks are counted within the group: 0 to {last}."


class BadPermutation(FcollError):
    what = "{op}: dst={dst} does not map the {n} ranks of the group one to one"
    fix = "Give one target for each rank, each at most once; -1 where a rank sends to nobody."


class BadDim(FcollError):
    what = "{op}: dim {dim} is outside a tensor of {ndim} dimensions"


class UnevenShard(FcollError):
    what = '{op} over "{group}" needs dim {dim} ({size}) divisible by {n}'
    fix = "Pad to {padded}, or pass {remedy}."


class BadSizes(FcollError):
    what = "{op}: sizes={sizes} do not fit{at}: {why}"
    fix = "Give one size >= 0 for each of {n} ranks."


class BadSplits(FcollError):
    what = "{op}: {arg}={splits} do not fit{at}: {why}"
    fix = (
        "Give {n} sizes >= 0, output_splits and input_splits both or neither; input_splits must "
        "add up to dim 0."
    )


class WrongDtype(FcollError):
    what = "{op}: {reduce_op} has no meaning for {dtype}"


class WrongDevice(FcollError):
    what = "{op}: the tensor is on {device}, the group's backend serves {serves}"
    fix = "Move the tensor, or make the group with a backend for {device}."


class WrongType(FcollError, TypeError):
    what = "{op}: {arg} is {kind}"
    fix = "Pass {want}."


class WrongLayout(FcollError, TypeError):
    what = "{op}: {arg} is a {kind} tensor"
    fix = (
        "Collectives move the elements of strided tensors: convert it, as in x.to_dense(), or send "
        "its parts."
    )


class MismatchedLists(FcollError):
    what = "{op}: {why}"


class BadOption(FcollError):
    what = "{op}: {arg}={value!r}"
    fix = "Use one of {known}."


class BadOutput(FcollError):
    what = "{op}: out has {got}, the result needs {want}"
    fix = "Allocate it so."


class BadRow(FcollError):
    what = "the row {name!r} cannot be registered: {why}"
    fix = "Compare it with the rows of fcoll/table/reduce.py."


class NoStackedRule(FcollError):
    what = "{op} cannot run on stacked ranks{at}: {why}"


class RaggedRanks(FcollError):
    what = "{op}: {why}, so that ranks would hold tensors of different shapes"
    fix = (
        "Stacked ranks have one shape: pad the parts, or use fcoll.simulate_ranks, where each rank "
        "has its own."
    )


class BadStack(FcollError):
    """Stacks of ranks' tensors that fit neither each other nor the ranks."""


class NotInBatch(FcollError, RuntimeError):
    template = (
        "the ranks cannot run as one batch, at {line}: {why}. {hint}, or use fcoll.simulate_ranks, "
        "where each rank runs by itself."
    )


class UnknownAxis(FcollError):
    what = "no mesh with one axis {axis!r}{at}: {why}"
    fix = "Pass the mesh, as in axis_index(axis, mesh)."


class NoGradient(FcollError):
    what = "{op} has no gradient{at}: {why}"


# A RuntimeError too: torch raises one where ranks make different calls.
class Reported(FcollError, RuntimeError):
    """A mistake that ranks found while they ran, with their message."""

    what = "{message}"


class CollectiveMismatch(Reported):
    fix = (
        "All ranks of a group must make the same calls in the same order: look for a branch that "
        "only some of them take."
    )


class PlanMismatch(CollectiveMismatch):
    """Ranks of a group are about to issue different collectives; ``step`` is the first position
    at which they do, ``ranks`` those that differ from the group's first."""

    template = (
        "the ranks of the group {group!r} are about to issue different collectives{at}: number "
        "{number} is\n{lines}\n{hint}"
    )
    kept = ("rank", "step", "ranks")
    step: int = -1
    ranks: tuple[int, ...] = ()


class OtherGraph(PlanMismatch):
    """A rank has a new graph to compare, and ``rank`` runs one on which all agreed before."""

    what = "{message}"
    fix = (
        "Ranks that run different graphs wait for each other for ever: look for a branch, a shape "
        "or a setting that only some of them have."
    )


class NeverWaited(FcollError):
    what = "nothing waits for {what}"
    fix = "Use its result, or call fcoll.wait_tensor on it."


class BadMesh(FcollError):
    what = "no mesh with {what}"


class UnusedAxis(FcollError):
    what = (
        "scale: with {axis}={size} nothing runs along the axis {axis!r}, and the program does not "
        "ask for it"
    )
    fix = "Name an axis that it uses: mesh[{axis!r}]."


class GroupDestroyed(FcollError):
    what = "{op} on the group {group!r}, which was destroyed before or never made"
    fix = "Destroy a group after its last collective."


class UnknownCollective(FcollError):
    what = "{op} cannot be traced{at}: it is not known which messages it sends"
    fix = "Use a functional collective, as in fcoll.all_reduce."


class UntraceableDDP(FcollError):
    what = (
        "torch's DistributedDataParallel is not traced as torch.compile would run it{at}: torch "
        "cuts the graph at its buckets"
    )
    fix = "Trace it in another mode, or wrap the module in fcoll.DataParallel."


class CheckMismatch(CollectiveMismatch):
    """What fcoll.check proves before a run. It has the two ranks, their calls (None where there is
    none) and the last collective that they have in common."""

    template = "{message}"
    kept = ("rank", "ranks", "calls", "last_common")
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
    kept = ("rank", "line", "shared")
    line: str = ""
    shared: str | None = None  # a digest of the condition, where all ranks share the value


class ShapeRuleLacksDtype(FcollError, RuntimeError):
    what = "torch's shape rule of {op} takes {takes} and refuses {dtype}{at}: {said}"
    fix = (
        "A trace, as torch.compile, asks this rule in place of the op, which itself may run in "
        "{dtype}. Trace the model in {takes} (model.to(torch.{takes})), or compute it without this "
        "op."
    )


class NeedsPeers(FcollError):
    template = (
        "{what} comes from rank {rank}, at {line}, which a trace of this rank alone does not know. "
        "Give PipelineStage input_args= and output_args=, or let fcoll.check, fcoll.timeline or "
        "`fcoll report` trace build(mesh): they run the ranks before it as well."
    )


class PeerDied(Reported):
    fix = "The group is closed: restart the job."


class CollectiveTimeout(Reported):
    fix = (
        "Is that rank stuck, or did it skip the call? Raise the timeout given to "
        "init_process_group if it is only slow."
    )


class GroupClosed(Reported):
    fix = "Make a new process group, or restart the job."


class GroupForked(Reported):
    fix = "Call init_process_group in the new process."


class BadSymmetricCall(Reported):
    fix = (
        "Its tensors are contiguous, of one dtype, and for most ops made by "
        "torch.distributed._symmetric_memory.empty, on all ranks of the group."
    )


class NeverRan(FcollError):
    """A generator or coroutine function in place of a program: a call of it runs none of it."""

    what = "{op}: the function gave {kind}{at}, and none of it has run"
    fix = "Give a plain function: {hint}."


_UNRUN = {
    GeneratorType: ("a generator", "lambda *args: list(fn(*args))"),
    CoroutineType: ("a coroutine", "lambda *args: asyncio.run(fn(*args))"),
    AsyncGeneratorType: ("an async generator", "one that goes through it, by asyncio.run"),
}


def ran(op: str, result: Any) -> Any:
    """The result of a program; NeverRan if it is a generator or coroutine that has not run."""
    unrun = _UNRUN.get(type(result))
    if unrun is None:
        return result
    if isinstance(result, CoroutineType):
        result.close()  # else Python warns that it was never awaited
    raise NeverRan(op=op, kind=unrun[0], hint=unrun[1])


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
        raised = _class_of_both(type(error))(f"rank {rank}: {shown}{line and f', at {line}'}")
        raised.rank = rank
        return raised

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
    what = "{what} does not work on simulated ranks"


class NoValues(FcollError, RuntimeError):
    what = "{what} has no values"


class RanksTimeout(FcollError, RuntimeError):
    what = "the simulated ranks did not end in {seconds} s{at}: {ranks} was running{there}"
    fix = (
        "Pass a larger timeout=, or look for a loop or a lock that the rank is in; its thread may "
        "go on."
    )


class UnknownMachine(FcollError):
    what = "no machine {machine!r}"
    fix = (
        "Use one of {known}, a .toml file of your own (copy one of fcoll/costs/machines), or a "
        "fcoll.costs.machine.Machine."
    )


class NotCalibrated(FcollError):
    what = "this machine has not been measured: there is no local.toml in {folder}"
    fix = "Run `fcoll calibrate` (about a minute), or name another machine."


class BadMachineFile(FcollError):
    what = "{path} does not describe a machine: {why}"
    fix = "Compare it with fcoll/costs/machines."


class BadTarget(FcollError):
    what = "cannot run {target}: {why}"
    fix = (
        "Name a function build(mesh) -> (fn, args) as pkg.mod:build or file.py:build, or use "
        "--demo."
    )


class BadTraceFile(FcollError):
    what = "cannot read the trace {path}: {why}"
    fix = "Write one with `fcoll report train.py:build --mesh dp=4 --save trace.json`."


class BadProfile(FcollError):
    what = "cannot read the profile {path}: {why}"
    fix = "Write one with torch.profiler's export_chrome_trace, or with nsys export --type sqlite."


class BadDump(FcollError):
    what = "cannot read the flight records {path}: {why}"
    fix = (
        "Name the folder or the files that ranks wrote with TORCH_FR_DUMP_TEMP_FILE=folder/rank_ "
        "set."
    )


class NotWritable(FcollError):
    what = "cannot write {path}: {why}"
    fix = "Make the folder, or name another file."


class MissingSize(FcollError):
    what = "the cost depends on {symbols}, which have no value"
    fix = 'Pass sizes={{"{first}": 128, ...}}, or --sizes {first}=128.'


class UnknownScheduler(FcollError):
    what = "no scheduler {scheduler!r}"
    fix = (
        "Use one of {known}, a function of your own (Steps in, names out), or register one with "
        '@fcoll.scheduler("name").'
    )


class MemoryCapTooSmall(FcollError):
    what = (
        "no order was found that holds at most {cap}{at}: the least is {least}, and the graph's "
        "own order holds {original}"
    )
    fix = "Pass a larger memory_cap, or None."


class BadPlan(FcollError):
    what = "the plan of scheduler {scheduler!r} is wrong: {why}"
    fix = "Give every step once, behind all that it needs, and stay under the memory cap."


class GraphNotProved(FcollError):
    what = "the second graph is not proved right{at}: {text}"
    fix = "Look at the nodes that it names, in both graphs."


class NoGraph(FcollError):
    what = "a plan of {what} has no graph to change"
    fix = "Plan a Trace of this process, or a GraphModule."


class BadPlanFile(FcollError):
    what = "cannot read the plan {path}: {why}"
    fix = "Write one with plan.save({path!r})."


# -- gradient buckets: RuntimeErrors too, as those of torch's reducer ---


class BadBuckets(FcollError, RuntimeError):
    what = "no such gradient buckets{at}: {why}"


class BadGradient(FcollError, RuntimeError):
    what = "a gradient cannot be reduced{at}: Expected {want}, got {got}"


class ReductionUnfinished(FcollError, RuntimeError):
    """Some parameters got no gradient in the last backward pass: ``parameters`` are their names."""

    template = (
        "Expected to have finished reduction in the prior iteration before starting a new one. "
        "{cause}"
    )
    kept = ("rank", "parameters")
    parameters: tuple[str, ...] = ()


class ResetElsewhere(ReductionUnfinished):
    what = "reset_state() met another collective"
    fix = "Call it on all ranks, after the same one."


class ReadyTwice(FcollError, RuntimeError):
    """A parameter's gradient was computed twice in one iteration."""

    template = (
        "Expected to mark a variable ready only once. This error is caused by one of the following "
        "reasons: 1) Use of a module parameter outside the `forward` function. Please make sure "
        "model parameters are not shared across multiple concurrent forward-backward passes. or "
        "try to use _set_static_graph() as a workaround if this module graph does not change "
        "during training loop.2) Reused parameters in multiple reentrant backward passes. For "
        "example, if you use multiple `checkpoint` functions to wrap the same part of your model, "
        "it would result in the same set of parameters been used by different reentrant backward "
        "passes multiple times, and hence marking a variable ready multiple times. You can try to "
        "use _set_static_graph() as a workaround if your module graph does not change over "
        "iterations.{unused}\nParameter at index {index} with name {name} has been marked as ready "
        "twice. This means that multiple autograd engine  hooks have fired for this particular "
        "parameter during this iteration. First at {first}, then at {now}."
    )


class GraphChanged(FcollError, RuntimeError):
    """In a static graph a parameter got more gradients than in the first iteration."""

    template = (
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        "iteration, but then got used in the second iteration. this is not compatible with "
        "static_graph set to True.\nParameter {name} (index {index}) {then} in the first iteration "
        "and got one more now{at}."
    )


class StaticGraphTooLate(GraphChanged):
    what = (
        "set_static_graph() should be called before training loop starts and after "
        "DistributedDataParallel is constructed"
    )
    fix = "Pass static_graph=True to it."


class BadCommHook(FcollError, RuntimeError):
    """A communication hook that cannot be registered, or gave what is no gradient."""


class JoinCompiled(FcollError, RuntimeError):
    what = (
        "a compiled module has no join(){at}: ranks that have joined do not answer its all-reduces"
    )


class ParametersDiffer(Reported):
    fix = "Build the same model on all ranks, with its parameters in one order."


#: Called with every error that the C++ part or the ranks' meeting raises.
on_failure: list[Callable[[FcollError], object]] = []

_NATIVE = re.compile(r"fcoll\.(\w+)\[(-?\d+)\]: ([^\n]*)")


def from_native(error: Exception) -> Exception:
    """What the C++ part threw, as the class that it names; any other error as it is.

    A mistake that names a rank has it as ``rank``, counted within the group.
    """
    match = _NATIVE.search(str(error))
    if match is None:
        return error
    return _notified(globals()[match[1]](message=match[3], rank=int(match[2])))


def from_lobby(why: NotMet) -> FcollError:
    """The error of a collective that waited for ranks which did not come together."""
    kinds: dict[type, type[FcollError]] = {Died: PeerDied, Elsewhere: OtherGraph}
    rank = why.ranks[0] if why.ranks else -1
    return _notified(kinds.get(type(why), CollectiveTimeout)(message=str(why), rank=rank))


def _notified(error: FcollError) -> FcollError:
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
