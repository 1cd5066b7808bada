"""The folders of compiled libraries: that of the wheel, and the cache of what was compiled here.

The library that came with the wheel runs on any x86-64 CPU, with one torch: what it was made for is
written beside it. Elsewhere the library is compiled as if there were none, and kept in the cache:
what an entry is keyed by, failures, and old entries.

An entry is all files that begin with its name, ``fcoll-<key>``: the library, the extension modules
of each Python, the lock, and after a failure the log and a note of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fcoll.transport.native.compiler import (
    FLAGS,
    OPTIMIZE,
    OPTIMIZE_WITH_TORCH,
    BuildFailed,
    find_compiler,
)

FOLDER = Path(__file__).parent / "prebuilt"
LIBRARY = "fcoll.so"
KEPT = 8  # entries that stay however old they are: a few versions of torch and of fcoll
OLD_S = 24 * 3600.0


# -- of the wheel ---


def made_for(torch_version: str) -> str:
    return f"torch {torch_version} on {platform.machine()}"


@functools.cache
def prebuilt_library(torch_version: str) -> Path | None:
    """Its path; None where there is none, or not one for this torch."""
    try:
        note = (FOLDER / "made_for.txt").read_text()
    except OSError:
        return None
    return FOLDER / LIBRARY if note == made_for(torch_version) else None


# -- of the cache ---


def cache_dir() -> Path:
    """Where compiled libraries are kept: FCOLL_CACHE_DIR, or the user's cache folder."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "fcoll")
    return Path(os.environ.get("FCOLL_CACHE_DIR", default)).expanduser()


def key_of(sources: Sequence[Path], torch_version: str) -> str:
    """Differs where another library is needed; not with the CPU, whose instructions are looked up
    when the library is loaded (kernels.cpp), so that machines of several kinds share one. It needs
    no compiler: a library that is there is loaded on machines that have none."""
    digest = hashlib.sha256()
    flags = " ".join([*FLAGS, OPTIMIZE, OPTIMIZE_WITH_TORCH])
    for part in (torch_version, platform.machine(), flags):
        digest.update(part.encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def untrusted(library: Path) -> str:
    """Why a library is not loaded from where it is, or would be: somebody else may have put it
    there. Empty if only this user or root can."""
    for path in (library.parent, library):
        try:
            about = path.stat()
        except FileNotFoundError:
            continue
        if about.st_uid not in (0, os.geteuid()):
            return f"{path} belongs to another user: set FCOLL_CACHE_DIR to a folder of your own"
        if about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX:
            return f"anyone can write to {path}: set FCOLL_CACHE_DIR to a folder of your own"
    return ""


# -- failures ---


@dataclass(frozen=True)
class FailedBuild:
    """Why an attempt failed, when, and what it was made with."""

    reason: str
    when: float
    made_with: str


def note_failure(at: Path, error: BuildFailed) -> None:
    """Write down beside ``at``, which could not be made, that it could not."""
    failure = FailedBuild(str(error), time.time(), _compiler_identity())
    partial = _note_of(at).with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(failure)))
    os.replace(partial, _note_of(at))


def failure_of(at: Path, since: float) -> str:
    """The reason why ``at`` could not be made, if that was tried with the same compiler after
    ``since``; else empty: it is worth another attempt."""
    try:
        failure = FailedBuild(**json.loads(_note_of(at).read_text()))
    except (OSError, ValueError, TypeError):
        return ""
    same = failure.made_with == _compiler_identity() and since <= failure.when <= time.time()
    return failure.reason if same else ""


def forget_failure(at: Path) -> None:
    _note_of(at).unlink(missing_ok=True)


def _note_of(at: Path) -> Path:
    return at.with_name(f"{at.name}.failed")


def _compiler_identity() -> str:
    """The compiler's path and time: another one may do better."""
    try:
        found = find_compiler()
    except BuildFailed:
        return "none"
    return f"{found} {os.stat(found).st_mtime_ns}"


# -- old entries ---


def used(library: Path) -> None:
    """Note that a library was needed: the newest are kept."""
    try:
        os.utime(library)
    except OSError:  # a cache that only its owner writes
        return


def prune(folder: Path) -> list[str]:
    """Remove entries that are neither among the newest nor of the last day; their names."""
    newest: dict[str, float] = {}
    for path in folder.glob("fcoll-*"):
        name = path.name.partition(".")[0]
        newest[name] = max(newest.get(name, 0.0), _time_of(path))
    by_age = sorted(newest, key=lambda name: newest[name], reverse=True)
    old = [name for name in by_age[KEPT:] if newest[name] < time.time() - OLD_S]
    for name in old:
        for path in folder.glob(f"{name}.*"):
            path.unlink(missing_ok=True)
    for left in folder.glob("building-*"):  # by a process that was killed
        if _time_of(left) < time.time() - OLD_S:
            shutil.rmtree(left, ignore_errors=True)
    return old


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # someone else prunes, too
        return 0.0
