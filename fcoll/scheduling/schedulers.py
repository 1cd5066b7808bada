"""The schedulers that come with fcoll."""

from __future__ import annotations

from collections.abc import Iterable

from fcoll.errors import BadPlan, NoGraph
from fcoll.scheduling import _torch, classic
from fcoll.scheduling.overlap import Overlap
from fcoll.scheduling.scheduler_registry import Job, scheduler
from fcoll.scheduling.search import search


@scheduler("original")
def original(job: Job) -> Iterable[str]:
    """The order that came in."""
    return [step.name for step in job]


@scheduler("safe")
def safe(job: Job) -> Iterable[str]:
    """Starts early, waits late: collectives keep their order, peak memory does not grow, no price
    is asked for."""
    return job.names(classic.safe(job.problem))


@scheduler("sink_waits", keeps_cap=False)
def sink_waits(job: Job) -> Iterable[str]:
    """Inductor's rule: of what is ready, waits go last."""
    return job.names(classic.by_communication(job.problem, sink_waits=True))


@scheduler("raise_comms", keeps_cap=False)
def raise_comms(job: Job) -> Iterable[str]:
    """Inductor's rule: what the next collective needs goes first."""
    return job.names(classic.by_communication(job.problem, raise_comms=True))


@scheduler("reorder_compute", keeps_cap=False)
def reorder_compute(job: Job) -> Iterable[str]:
    """Inductor's rule: behind each collective comes compute that does not need it."""
    return job.names(classic.by_communication(job.problem, True, True, True))


@scheduler("torch", keeps_cap=False)
def torch_overlap(job: Job) -> Iterable[str]:
    """torch's own scheduler of FX graphs, without its buckets. It knows ``_c10d_functional`` ops,
    and may hold 5 % or 1 GB more than the order that came in. It orders nodes, not kernels: a
    kernel whose first result it uses before the last one stands where that use does."""
    if job.graph_module is None:
        raise NoGraph(what="steps alone, for torch's scheduler,")
    try:
        order = _torch.overlap_scheduler_order(job.graph_module, lambda name: job.us.get(name, 0.0))
    except RuntimeError as error:  # it calls itself without end on some graphs of two groups
        why = f"torch's scheduler fails: {type(error).__name__}: {str(error)[:100]}"
        raise BadPlan(scheduler="torch", why=why) from None
    known = set(job.us)
    units = job.units(name for name in order if name in known)
    return job.names(classic.with_needs(job.problem, units))


@scheduler("overlap", buckets=True)
def overlap(job: Job) -> Iterable[str]:
    """The best of forward and backward list schedules, the rules above and the job's
    seeds: overlap.py."""
    found = Overlap(job.problem, job.lower_bound_us, job.seeds).best(job.cap_bytes)
    return job.names(found.order) if found else ()


@scheduler("search", buckets=True)
def search_(job: Job) -> Iterable[str]:
    """``overlap``, then bounded local search; exact for small graphs: search.py."""
    found = search(job.problem, job.cap_bytes, job.lower_bound_us, job.seeds)
    return job.names(found.order) if found else ()
