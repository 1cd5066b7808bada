"""torch.distributed.pipelining in a trace: stages exchange shapes when they first run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import permutations
from typing import Any

import torch.distributed as dist

from fcoll.tracing import _torch


@contextmanager
def shapes_exchanged(
    pause: Callable[[], AbstractContextManager[Any]],
    publish: Callable[[tuple[Any, ...], Any], None],
    request: Callable[[tuple[Any, ...], int, str], Any],
) -> Iterator[None]:
    """Inside, stages that first run learn shapes by publish() and request(), under pause(): a step
    in the middle of training does not do it, so it is no part of a trace."""
    from torch.distributed.pipelining import schedules, stage

    prepare = schedules._PipelineSchedule._initialize_pp_stages

    def initialize(schedule: Any, stages: list[Any], *args: Any, **kwargs: Any) -> Any:
        replicas = [one.submod for one in stages if _torch.is_ddp(one.submod)]
        with pause(), ExitStack() as stack:
            for replica in replicas:  # or its first backward pass would reduce
                stack.enter_context(replica.no_sync())
            return prepare(schedule, stages, *args, **kwargs)

    def vote(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        for one in stages:
            if getattr(one, "p2p_per_edge", False):  # from torch 2.15 on, as on a fake group
                ranks = one.stage_index_to_group_rank.values()
                one._p2p_edge_groups = dict.fromkeys(permutations(ranks, 2), one._parent_group)
            if isinstance(one, stage.PipelineStage):
                asks = stage.InferenceMode.needs_dynamic(one._user_meta, has_backward)
                modes = stage.InferenceMode
                one._inference_mode = modes.DYNAMIC if asks else modes.STATIC

    def about(x: Any, source: int, to: int) -> tuple[Any, ...]:
        return tuple(dist.get_process_group_ranks(x.group)), source, to

    def send(self: Any, meta: Any, dst_stage: int) -> None:
        publish(about(self, self.stage_index, dst_stage), meta)

    def receive(self: Any, src_stage: int) -> Any:
        what = f"the shapes between stages {src_stage} and {self.stage_index} of a pipeline"
        peer = self._resolve_peer_global_rank(src_stage)
        return request(about(self, src_stage, self.stage_index), peer, what)

    # of these two names torch has the first until 2.14 and the second from 2.15 on
    votes = dict.fromkeys(("_warmup_p2p", "_initialize_pipeline_distributed_state"), vote)
    of_schedules = {"_initialize_pp_stages": initialize, **votes}
    with (
        _torch.replaced(schedules._PipelineSchedule, of_schedules),
        _torch.replaced(stage.PipelineStage, {"_send_meta": send, "_recv_meta": receive}),
    ):
        yield
