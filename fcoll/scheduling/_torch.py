"""torch's own scheduler of FX graphs, for comparison. Tested with torch 2.13.0, 2.14.1 and
2.15.0, which all have these names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import fx

from fcoll.imports import say_what_is_missing
from fcoll.ranks.patches import patched


def overlap_scheduler_order(
    graph_module: fx.GraphModule,
    us: Callable[[str], float],
    max_memory_increase_gb: float | None = 1.0,
    max_memory_increase_ratio: float | None = 0.05,
) -> list[str]:
    """The names of the nodes as ``schedule_overlap_bucketing`` orders them, without its buckets.

    The graph is copied: torch's scheduler moves its nodes. It asks for ms. Prices are given, so
    that there is nothing to align between ranks: that step, which communicates, is left out.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.fx_passes import overlap_scheduling

    class Scheduler(overlap_scheduling.OverlapScheduler):
        def _align_compute_nodes_runtime_estimations_across_all_distributed_ranks(self) -> None:
            pass

    copied = fx.Graph()
    names: dict[fx.Node, str] = {}
    made: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        made[node] = copied.node_copy(node, made.__getitem__)
        names[made[node]] = node.name
    module = fx.GraphModule(torch.nn.Module(), copied)
    # it asks for a price of its own besides ours, which takes a GPU
    no_roofline = {"estimate_roofline_runtime_ms": lambda node: 0.0}
    with patched("fcoll.schedule", overlap_scheduling, no_roofline):
        scheduler = Scheduler(
            module,
            max_in_flight_gb=5,
            max_compute_pre_fetch=200,
            collective_bucketing=False,
            insert_overlap_deps=False,
            compute_overlap_multipler=1.0,
            max_coll_distance=200,
            custom_runtime_estimation=lambda node, size: us(names[node]) / 1000,
            compute_estimator="analytical",
            max_memory_increase_gb=max_memory_increase_gb,
            max_memory_increase_ratio=max_memory_increase_ratio,
        )
    fix = {"aten_distributed_optimizations.overlap_scheduling_autofix_cycles": True}
    with _deep_recursion(), inductor_config.patch(fix):  # else it raises for order edges of its own
        scheduler.run()
    return [names[node] for node in module.graph.nodes]


def bucket_dtypes() -> list[torch.dtype]:
    """The dtypes that an index given to ``bucketing::_pre_bucket_all_gather`` may mean."""
    from torch._inductor.fx_passes import bucketing

    return list(bucketing._ALL_DTYPES)


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Its handling of waits calls itself for each collective in flight, and sometimes forever:
    a reduce-scatter behind which an all-reduce of another group follows, as HSDP has them."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 5_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


say_what_is_missing(__name__)
