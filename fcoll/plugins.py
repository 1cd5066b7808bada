"""Plugins: what fcoll looks up by name when it is needed, instead of importing it.

fcoll imports nothing that is built on it, and a stage nothing of a later one. What the compiler
half adds to fcoll's own work, where it is installed, and later stages to earlier ones, is here.
"""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
from typing import Any

PLUGINS = {
    # Parts of torch's compiler have been imported: have them know fcoll's ops.
    "partitioner": "inductor_ext.stock.teach:teach_partitioner",
    "compiler": "inductor_ext.stock.teach:teach_inductor",
    # `fcoll calibrate` runs: measure also what the compiler decides by.
    "calibrate": "inductor_ext.one_shot_calibration:calibrate_one_shot",
    # torch's DistributedDataParallel is traced: put a reducer there that can be.
    "reducers": "fcoll.training.traceable_ddp:REDUCERS",
}


def call(name: str) -> None:
    """Call the plugin of this name, if it is installed."""
    if (act := plugin(name)) is not None:
        act()


@functools.cache
def plugin(name: str) -> Any:
    """The object behind a plugin's name, None if its package is not installed."""
    package = PLUGINS[name].partition(".")[0]
    return pkgutil.resolve_name(PLUGINS[name]) if importlib.util.find_spec(package) else None
