"""What a training step spends on communication, and how that grows with the world. No processes.

python examples/05_report.py [report.html]

The same from a shell: fcoll report --demo tiny --mesh dp=4,tp=2 --html report.html
                       fcoll scale --demo tiny --axis dp=1..64 --mesh tp=2
"""

import sys
from functools import partial
from pathlib import Path

import sympy

import fcoll
from fcoll.cli.demos import TINY, llama
from fcoll.costs.machine import Machine
from fcoll.costs.model import collective_us
from fcoll.report import html, scaling, text
from fcoll.report.scale import scale
from fcoll.scheduling.timeline import timeline

build = partial(llama, config=TINY)  # build(mesh) -> (step, its arguments)


def main() -> None:
    with fcoll.fake_world(dp=4, tp=2) as mesh:
        step, args = build(mesh)
        trace = fcoll.trace(step, *args)

    # Eager waits where a result is first used; a graph that is run as it stands, where it says.
    as_it_stands = timeline(trace, "h100")
    eager = timeline(trace, "h100", waits="first use")
    print(text.render(as_it_stands, eager, top=5))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(html.render(as_it_stands, eager, title="tiny Llama"))

    print("\nThe step as data parallelism grows:")
    points = scale(build, "dp", (1, 8, 64), mesh={"tp": 2}, waits="first use")
    print(scaling.render(points, "dp"))

    n, b = sympy.symbols("n b", positive=True)
    machine = Machine.preset("h100")
    print("\nAn all-gather of b bytes within a node of H100, in us:")
    print(sympy.sstr(collective_us("all_gather_into_tensor", 8, b, machine)))
    print("and of 1 GiB on n ranks, from 2 to 4096:")
    gather = sympy.lambdify(n, collective_us("all_gather_into_tensor", n, 2**30, machine))
    print(", ".join(f"{float(gather(2.0**k)):.0f}" for k in range(1, 13)))


if __name__ == "__main__":
    main()
