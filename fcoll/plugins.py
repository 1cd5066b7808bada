"""Functions of other packages that fcoll calls where they are installed.

fcoll imports nothing that is built on it. What the compiler half adds to fcoll's own work is named
here and looked up when it is needed.
"""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any

PLUGINS = {
    # An op of fcoll is being traced: have stock Inductor and AOTAutograd's partitioner know it.
    "traced": "inductor_ext.stock.teach:teach",
    # `fcoll calibrate` runs: measure also what the compiler decides by.
    "calibrate": "inductor_ext.calibrate:calibrate_one_shot",
}


@functools.cache
def plugin(name: str) -> Callable[..., Any] | None:
    """The function that is called on an occasion, None if its package is not installed."""
    package = PLUGINS[name].partition(".")[0]
    return pkgutil.resolve_name(PLUGINS[name]) if importlib.util.find_spec(package) else None
