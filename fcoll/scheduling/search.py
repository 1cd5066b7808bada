"""``search``: placeholder until written."""

from fcoll.scheduling.overlap import Overlap


def search(problem, cap, bound_us):
    return Overlap(problem, bound_us).best(cap)
