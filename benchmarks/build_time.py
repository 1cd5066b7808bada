"""The C++ part from nothing, against one source that includes the headers of torch which it needs.

That source includes torch's process group and library headers and is compiled with the same flags,
alone: what any C++ extension of torch with collectives takes at least. Both take turns in one run;
the C++ part is made in an empty folder, as at the first collective on a machine.

python benchmarks/build_time.py [--turns 1]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fcoll.transport.native import build
from fcoll.transport.native.compiler import Compiler

PEER = """#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>
"""


def peer(folder: Path) -> None:
    source = folder / "source.cpp"
    source.write_text(PEER)
    (made := folder / "made").mkdir()
    with Compiler(made) as compiler:
        compiler.objects([(source,)], folder / "log")


def whole(folder: Path) -> None:
    os.environ["FCOLL_CACHE_DIR"] = str(folder)
    build.build()


def seconds(make: Callable[[Path], None]) -> float:
    silent = contextlib.redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, silent:
        start = time.perf_counter()
        make(Path(folder))
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=1)
    args = parser.parse_args()
    took: dict[str, list[float]] = {"one source": [], "C++ part": []}
    for _ in range(args.turns):
        took["one source"].append(seconds(peer))
        took["C++ part"].append(seconds(whole))
    one, ours = (statistics.median(turns) for turns in took.values())
    cores = len(os.sched_getaffinity(0))
    print(
        f"one source with torch's headers {one:.1f} s, the C++ part {ours:.1f} s on {cores} cores"
    )
    print(f"ratio {ours / one:.2f}; median of {args.turns}")


if __name__ == "__main__":
    main()
