"""Reorder compute and communication of a step, and write a scheduler of one's own. No processes.

python examples/08_schedule.py
"""

from functools import partial

import fcoll
from fcoll.cli.demos import TINY, llama


@fcoll.scheduler("eager starts")
def eager_starts(steps):
    """Of all steps that are ready, starts go first, waits last: steps in, names out."""
    rank = {"start": 0, "compute": 1, "wait": 2}
    done, order, left = set(), [], list(steps)
    names = {step.name for step in steps}
    while left:
        ready = [s for s in left if done.issuperset(names.intersection(s.inputs))]
        chosen = min(ready, key=lambda s: rank[s.kind])
        left.remove(chosen)
        done.add(chosen.name)
        order.append(chosen.name)
    return order


def main() -> None:
    build = partial(llama, config=TINY)  # build(mesh) -> (step, its arguments)
    with fcoll.fake_world(dp=8, tp=4) as mesh:
        step, args = build(mesh)
        trace = fcoll.trace(step, *args)

    for scheduler in ("original", "safe", "eager starts", "overlap"):
        plan = fcoll.schedule(trace, machine="h100", memory_cap=None, scheduler=scheduler)
        print(plan, end="\n\n")

    first = next(step.name for step in plan.steps if step.kind == "start")
    print(plan.explain(first))
    planned = plan.apply()  # a GraphModule with the same values
    print(f"{len(planned.graph.nodes)} nodes, digest {plan.digest[:8]}")


if __name__ == "__main__":
    main()
