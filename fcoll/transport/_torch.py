"""The private torch APIs that the backend "fcoll" needs. Tested with torch 2.13.0; 2.15.0 has these
names, too, and calls that are not for gloo alone."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

from fcoll._torch import cpu_backend, default_group

_OF_GLOO = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")


def serve_calls_for_gloo() -> None:
    """torch has these for groups of its own backends alone, asked by name and by type: have them
    for groups of the backend, too."""
    _serve_timeouts()
    _serve_sequence_numbers()
    _serve_log_of_ddp()


def _serve_timeouts() -> None:
    monitored_barrier, set_pg_timeout = c10d.monitored_barrier, c10d._set_pg_timeout

    @functools.wraps(monitored_barrier)
    def barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        found = _cpu_backend(group)
        if found is None or dist.get_backend(group) == "gloo":
            return monitored_barrier(group, timeout, wait_all_ranks)
        group = group or default_group()
        return group.monitored_barrier(timeout or found.options._timeout, wait_all_ranks)

    @functools.wraps(set_pg_timeout)
    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        found = _cpu_backend(group)
        ours = found is not None and not isinstance(found, dist.ProcessGroupGloo)
        if ours:
            found._set_default_timeout(timeout)
        if not ours or len((group or default_group())._device_types) > 1:
            set_pg_timeout(timeout, group)

    for owner in (dist, c10d):
        owner.monitored_barrier = barrier
    c10d._set_pg_timeout = set_timeout


def _serve_sequence_numbers() -> None:
    names = "_get_sequence_number_for_group", "_set_sequence_number_for_group"
    for name in [name for name in names if hasattr(dist.ProcessGroup, name)]:  # 2.15: the first
        theirs = getattr(dist.ProcessGroup, name)

        @functools.wraps(theirs)
        def call(group: Any, name: str = name, theirs: Callable[[Any], Any] = theirs) -> Any:
            found = _named_custom(group)
            return theirs(group) if found is None else getattr(found, name)()

        setattr(dist.ProcessGroup, name, call)


def _serve_log_of_ddp() -> None:
    log_of = DistributedDataParallel._get_ddp_logging_data

    @functools.wraps(log_of)
    def log(model: Any) -> dict[str, Any]:
        made, group = log_of(model), model.process_group
        return made if _named_custom(group) is None else made | _log_of(group)

    DistributedDataParallel._get_ddp_logging_data = log


def _log_of(group: Any) -> dict[str, Any]:
    """What torch logs of a gloo group: one carries what is not served by shared memory."""
    variables = {name.lower(): os.environ.get(name, "N/A") for name in _OF_GLOO}
    threads = dist.ProcessGroupGloo._Options()._threads  # the default, as of ours
    return {"backend_name": dist.get_backend(group), "gloo_num_threads": threads, **variables}


def _named_custom(group: Any) -> Any:
    """The backend of a group that torch takes for one of a backend it does not know; else None."""
    return _cpu_backend(group) if group.name() in ("custom", "undefined") else None


def _cpu_backend(group: Any) -> Any:
    """The one of a group that has calls of gloo's: gloo itself or "fcoll"."""
    group = group or default_group()
    found = None if c10d._rank_not_in_group(group) else cpu_backend(group)
    return found if hasattr(found, "_set_default_timeout") else None
