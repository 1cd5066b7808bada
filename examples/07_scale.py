"""How a step's time grows with the world, as a plot. No processes.

python examples/07_scale.py [scale.svg]

The same from a shell: fcoll scale --demo tiny --axis dp=1..1024 --mesh tp=8 --svg scale.svg
"""

import sys
from functools import partial
from pathlib import Path

from fcoll.cli.demos import TINY, llama
from fcoll.report import scaling
from fcoll.report.scale import scale

build = partial(llama, config=TINY)  # build(mesh) -> (step, its arguments)


def main() -> None:
    # tp=8 fills a node of H100; every further rank of dp is across the network
    sizes = (1, 4, 16, 64, 256, 1024)
    points = scale(build, "dp", sizes, mesh={"tp": 8}, machine="h100", waits="first use")
    print(scaling.render(points, "dp"))

    plot = scaling.plot(points, "dp", "tiny Llama, tp=8, on H100")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(plot)
        print(f"\nthe plot is in {sys.argv[1]}")


if __name__ == "__main__":
    main()
