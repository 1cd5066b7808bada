"""Did the program change globals that simulated ranks share? A wrong rank there is no fault of its.

Looked at where a step is not proved: the verdict then names the modules, for ``isolate=``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace

from fcoll.proving.verdict import Verdict
from fcoll.ranks.isolation import Globals
from fcoll.source import is_installed, is_library, is_pythons


def watch_modules() -> Callable[[Verdict], Verdict]:
    """To be called with the verdict: the same, which names modules that were changed meanwhile."""
    before = {name: Globals((name,)) for name in _of_programs()}

    def noted(verdict: Verdict) -> Verdict:
        if verdict:
            return verdict
        changed = [name for name, held in before.items() if held.is_changed()]
        if not changed:
            return verdict
        packages = {name.rpartition(".")[0] for name in changed}  # they change with what is in them
        shown = ", ".join(f'"{name}"' for name in changed if name not in packages)
        hint = f"ranks share globals that the program changed; for each its own: isolate=[{shown}]"
        if verdict.equal is None:
            return replace(verdict, why=f"{verdict.why}; {hint}")
        first, *rest = verdict.differences
        told = "\n  ".join(filter(None, [first.remedy, hint]))
        return replace(verdict, differences=(replace(first, remedy=told), *rest))

    return noted


def _of_programs() -> list[str]:
    """Modules that are neither Python's own nor installed; of fcoll's none."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    files.pop("__mp_main__", None)  # another name of __main__
    return [
        name
        for name, file in files.items()
        if file and os.path.isabs(file)  # torch.ops has a name only
        if not (is_library(file) or is_pythons(file) or is_installed(file))
    ]
