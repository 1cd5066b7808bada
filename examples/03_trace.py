"""Which collectives does a tensor-parallel Llama issue in a training step? No processes, no data.

The model is as large as Llama 3 8B, cut down to two layers, on 8 x 8 ranks that do not exist. The
table says what is sent, over which axis, how much, and which line asked for it.

python examples/03_trace.py
"""

from dataclasses import replace

import fcoll
from fcoll.cli import demos


def main() -> None:
    config = replace(demos.LLAMA3_8B, layers=2)
    with fcoll.fake_world(dp=8, tp=8) as mesh:
        step, args = demos.llama(mesh, config)
        plain = fcoll.trace(step, *args)
        step, args = demos.llama(mesh, config, split=demos.sequence_parallel)
        split = fcoll.trace(step, *args)
    print(plain)

    # Sequence parallelism is other collectives, and fewer bytes: the gradients that wq, wk and wv
    # give are added up before they are sent.
    print("\nwith sequence parallelism:")
    print(plain.diff(split))
    for name, trace in (("without", plain), ("with", split)):
        sent = sum(c.wire_bytes for c in trace.collectives if c.axis == "tp")
        print(f"bytes that each rank sends over tp, {name}: {sent / 2**20:,.0f} MiB")

    # Each entry is data as well.
    largest = max(plain.collectives, key=lambda c: c.bytes)
    print(f"\nlargest: {largest.op} of {largest.bytes:,} bytes at {largest.source}")


if __name__ == "__main__":
    main()
