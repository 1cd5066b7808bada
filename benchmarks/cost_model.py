"""Is the cost model right on this machine? Predicted against measured, 25 collectives on 2 ranks.

The machine is measured first, as `fcoll calibrate` does (--machine local takes what that wrote),
then collectives of 1 KiB to 16 MiB, of sizes that calibration did not try, are run and compared.
Both are medians of the least disturbed of passes spread over the run: the cores of a virtual
machine are near to each other now and far then, and other programs come and go.

--published compares the machines that come with fcoll with published times instead (nothing is
run), --hold-out also shows what a fit predicts of points that it has not seen.

python benchmarks/cost_model.py [--machine local] [--published [--hold-out]] [--fit h100]
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import published
import torch.distributed as dist

import fcoll
from fcoll.costs.forms import ring
from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us
from fcoll.profiling.calibration import CALLS, PASSES, Sample, calibrate, call_us, typical
from fcoll.profiling.calibration import SIZES as TRIED
from fcoll.table.collectives import COLLECTIVES

SIZES = (5 << 8, 24 << 10, 640 << 10, 12 << 20, (16 << 20) - (64 << 10))
assert not set(SIZES) & set(TRIED)
BAR = 0.30


def measure(path: str) -> None:
    samples: dict[str, list[Sample]] = {}
    for _ in range(PASSES):
        for op in CALLS:
            for size in SIZES:
                samples.setdefault(f"{op} {size}", []).append(call_us(op, size))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps({k: typical(v) for k, v in samples.items()}))


def compare(machine: Machine, measured: dict[str, float]) -> float:
    """Print the table; the median of the errors."""
    head = f"{'collective':24} {'bytes':>9} {'measured':>10} {'predicted':>10} {'error':>7}"
    print(f"{head}  by one link")
    errors, plain = [], []
    for op in CALLS:
        for size in SIZES:
            us = measured[f"{op} {size}"]
            predicted = float(collective_us(op, 2, size, machine))
            by_link = float(ring(COLLECTIVES[op], 2, size, machine.intra))
            errors.append(abs(predicted - us) / us)
            plain.append(abs(by_link - us) / us)
            times = f"{us:>8.1f}us {predicted:>8.1f}us {errors[-1]:>7.0%}"
            print(f"{op:24} {size:>9} {times} {by_link:>9.1f}us")
    error = statistics.median(errors)
    print(f"\nmedian error {error:.0%} (bar: {BAR:.0%})")
    print(f"by a ring with one latency and one bandwidth for all: {statistics.median(plain):.0%}")
    return error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", help="a measured machine instead of measuring now")
    parser.add_argument("--published", action="store_true", help="against published times")
    parser.add_argument("--hold-out", action="store_true", help="with --published: a minute")
    parser.add_argument("--fit", metavar="NAME", help="print constants fitted to published times")
    args = parser.parse_args()
    if args.fit:
        print(published.fitted(args.fit))
        return 0
    if args.published:
        return 0 if published.compare(args.hold_out) <= published.BAR else 1
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        machine = (
            Machine.of(args.machine)
            if args.machine
            else calibrate(2, Path(folder) / "local.toml", quiet=True)
        )
        fcoll.launch(measure, str(found), world_size=2)
        measured = json.loads(found.read_text())
    return 0 if compare(machine, measured) <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
