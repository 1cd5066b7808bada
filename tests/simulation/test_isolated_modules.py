"""Globals of named modules are each rank's own: ``simulate_ranks(..., isolate=)``."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import OrderedDict, deque
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

import fcoll
from fcoll.ranks import isolation
from fcoll.ranks.isolation import Globals
from fcoll.simulation.rank_settings import isolated

LIBRARY = """
from collections import OrderedDict, deque
from types import SimpleNamespace

RANK = None
GROUPS = {"kept": [1]}
ORDER = OrderedDict(a=1, b=2)
SEEN, KINDS, RECENT = [], set(), deque()
SPACE = SimpleNamespace(rank=None)


class State:
    shared = {}
    rank = None
    limit = 3

    def __init__(self):
        self.__dict__ = self.shared


class Tracker:
    def __init__(self):
        self.states = {}


TRACKER = Tracker()
PAIR = (Tracker(), 1)


def setup(rank):
    global RANK
    assert RANK is None and State.rank is None and "rank" not in State.shared, "set up already"
    RANK = State.rank = SPACE.rank = rank
    State().rank_of_shared = State.shared["rank"] = rank
    GROUPS[rank] = rank
    GROUPS["kept"].append(rank)
    ORDER[rank] = rank
    ORDER.move_to_end("a")
    SEEN.append(rank)
    KINDS.add(rank)
    RECENT.append(rank)
    TRACKER.states["mine"] = PAIR[0].states["mine"] = rank


def all_said():
    return [
        RANK, State.rank, State.shared["rank"], State().rank_of_shared, SPACE.rank,
        *SEEN, *KINDS, *RECENT, GROUPS["kept"][-1], list(ORDER)[-2], TRACKER.states["mine"],
        PAIR[0].states["mine"],
    ]


def state():
    objects = [vars(x) for x in (TRACKER, SPACE, PAIR[0])]
    of_class = State.shared, State.rank, State.limit
    return repr((RANK, GROUPS, ORDER, SEEN, KINDS, RECENT, objects, of_class, sorted(globals())))
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package that keeps its rank in globals, and whoever has imported some of them by name."""
    folder = tmp_path / "kept_rank"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "state.py").write_text(LIBRARY)
    (folder / "user.py").write_text("from kept_rank.state import GROUPS, SEEN, State, setup\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "kept_rank.state"
    for name in [name for name in sys.modules if name.partition(".")[0] == "kept_rank"]:
        del sys.modules[name]


def program(rank: int) -> list[int]:
    from kept_rank import state, user

    dist.barrier()
    user.setup(rank)
    for _ in range(2):
        dist.barrier()
    assert [rank] == user.SEEN and user.GROUPS[rank] == rank and user.State.rank == rank
    state.State.added = rank
    state.made_here = {"rank": rank}
    dist.barrier()
    assert state.State.added == rank and state.made_here == {"rank": rank}
    return state.all_said()


WANTED = [[rank] * 12 for rank in range(3)]


def test_without_it_ranks_share_globals(library):
    with pytest.raises(AssertionError, match="set up already"):
        fcoll.simulate_ranks(program, 3)


@pytest.mark.parametrize("isolate", [["kept_rank.state"], ["kept_rank"], "kept_rank.state"])
def test_each_rank_has_its_own(library, isolate):
    module = importlib.import_module(library)
    before = module.state()
    for _ in range(2):  # a second run finds what the first found
        assert fcoll.simulate_ranks(program, 3, isolate=isolate) == WANTED
        assert module.state() == before
        assert not hasattr(module.State, "added") and not hasattr(module, "made_here")


def test_a_rank_begins_with_what_the_caller_has(library):
    module, user = map(importlib.import_module, (library, "kept_rank.user"))
    module.setup(7)

    def change(rank):
        assert module.RANK == 7 and module.GROUPS == {"kept": [1, 7], 7: 7}
        module.RANK, module.State.limit = rank, rank
        module.GROUPS["mine"] = rank
        module.GROUPS = {}  # another one; whoever has the old one finds the rank's own there
        del module.SEEN
        dist.barrier()
        return module.RANK, module.State.limit, user.GROUPS["mine"], hasattr(module, "SEEN")

    before = module.state()
    assert fcoll.simulate_ranks(change, 2, isolate=[library]) == [
        (0, 0, 0, False),
        (1, 1, 1, False),
    ]
    assert module.state() == before


def test_a_library_that_the_ranks_import_themselves(library):
    assert library not in sys.modules
    assert fcoll.simulate_ranks(program, 3, isolate=[library]) == WANTED
    assert sys.modules[library].RANK is None
    assert fcoll.simulate_ranks(program, 3, isolate=[library]) == WANTED
    assert not any(isinstance(finder, isolation._ImportWatcher) for finder in sys.meta_path)


def test_modules_that_are_imported_stay(library):
    importlib.import_module("kept_rank")

    def use(rank):
        if rank == 0:
            import kept_rank.state  # noqa: F401
        dist.barrier()
        return sys.modules["kept_rank"].state.RANK

    assert fcoll.simulate_ranks(use, 2, isolate=["kept_rank"]) == [None, None]


def test_after_an_error_all_is_back(library):
    module = importlib.import_module(library)
    before = module.state()

    def fails(rank):
        module.setup(rank)
        dist.barrier()
        if rank == 1:
            raise KeyError("no")
        dist.barrier()

    with pytest.raises(KeyError):
        fcoll.simulate_ranks(fails, 3, isolate=[library])
    assert module.state() == before
    assert fcoll.simulate_ranks(program, 3, isolate=[library]) == WANTED


def test_a_simulation_inside_of_a_rank(library):
    module = importlib.import_module(library)

    def outer(rank):
        module.setup(10 + rank)
        dist.barrier()

        def inner(small):
            assert 10 + rank == module.RANK
            module.RANK = small
            dist.barrier()
            return module.RANK

        said = fcoll.simulate_ranks(inner, 2, isolate=[library])
        dist.barrier()
        return said, module.all_said()

    found = fcoll.simulate_ranks(outer, 2, isolate=[library])
    assert found == [([0, 1], [10] * 12), ([0, 1], [11] * 12)]
    assert module.RANK is None


def test_known_libraries_are_isolated_by_default(library, monkeypatch):
    monkeypatch.setattr("fcoll.simulation.rank_settings.KNOWN", (library,))
    assert fcoll.simulate_ranks(program, 3) == WANTED
    assert fcoll.explore(program, 3).runs == 1
    with pytest.raises(AssertionError, match="set up already"):
        fcoll.simulate_ranks(program, 3, isolate=())


def test_names_that_are_no_modules():
    for wrong in ("no_such_library.state", "torch.no_such_module", 3):
        with pytest.raises(fcoll.errors.BadOption, match="isolate"):
            fcoll.simulate_ranks(lambda rank: rank, 1, isolate=[wrong])
    assert isolated(["torch.nn"]) == (*isolation.KNOWN, "torch.nn")


def test_nothing_is_walked_where_nothing_is_isolated(monkeypatch):
    walks = []
    monkeypatch.setattr(Globals, "_walk", lambda *args: walks.append(args) or [])
    fcoll.simulate_ranks(lambda rank: dist.barrier(), 4, isolate=())
    fcoll.simulate_ranks(lambda rank: dist.barrier(), 4)
    assert len(walks) == 2  # by the caller, for what is imported; not by ranks


def build(mesh):
    """Sets the library up, as Megatron's users do; a rank finds its shard by it."""
    from kept_rank import state

    state.setup(mesh.get_rank())  # though prove builds more than once on a rank
    n = mesh.size()
    weight = torch.nn.Parameter(torch.randn(8, 4).chunk(n)[mesh.get_rank()].clone())

    def step(x):
        y = (x @ weight.t()).square().sum() * (1 + 0 * state.RANK)
        assert state.RANK == mesh.get_rank() == state.State.rank
        loss = fcoll.all_reduce(y, "sum", mesh["tp"], grad="identity")
        loss.backward()
        return loss

    return step, (torch.randn(2, 4),)


def test_what_other_modules_hold_is_not_its_own(library):
    """A module may keep others in a container, or the dict of one; what they hold is theirs."""
    module, other = importlib.import_module(library), ModuleType("other")
    other.__spec__ = importlib.machinery.ModuleSpec("other", None)
    other.number, other.known = 0, {}
    module.MODULES, module.NAMES = [other], vars(other)
    held = Globals((library,))
    other.number, other.known["a"] = 1, 1
    assert not held.is_changed()
    held.restore()
    assert other.number == 1
    module.MODULES.append(sys)
    assert held.is_changed()


def test_check_and_prove(library):
    assert fcoll.check(build, {"tp": 2}, values=True, isolate=[library]).values == 2
    assert fcoll.prove(build, {"tp": 2}, isolate=[library]).equal
    assert sys.modules[library].RANK is None
    refused = fcoll.prove(build, {"tp": 2}, isolate=())
    assert refused.equal is None and "AssertionError" in refused.why
    assert refused.why.endswith('for each its own: isolate=["kept_rank.state"]')


def test_a_false_alarm_by_shared_globals_names_them(library):
    """The second rank overwrites the first one's number: the program is right, where it has its
    own."""
    module = importlib.import_module(library)

    def offsets(mesh):
        module.RANK = mesh.get_rank()
        weight = torch.nn.Parameter(torch.randn(8).chunk(mesh.size())[module.RANK].clone())

        def step(x):
            mine = x.chunk(mesh.size())[module.RANK]
            return fcoll.all_reduce((mine * weight).sum(), "sum", mesh["tp"], grad="identity")

        return step, (torch.randn(8),)

    wrong = fcoll.prove(offsets, {"tp": 2})
    assert wrong.equal is False and 'isolate=["kept_rank.state"]' in str(wrong)
    assert fcoll.prove(offsets, {"tp": 2}, isolate=[library]).equal
    refuted = fcoll.prove(offsets, {"tp": 2}, isolate=[library], single=twice)
    assert refuted.equal is False and "isolate" not in str(refuted)


def twice(mesh):
    weight = torch.nn.Parameter(torch.randn(8))
    return lambda x: 2 * (x * weight).sum(), (torch.randn(8),)


def test_containers_keep_their_kind():
    module = ModuleType("kinds_of_containers")
    module.order, module.recent = OrderedDict(a=1), deque([1], maxlen=2)
    sys.modules[module.__name__] = module
    try:
        held = Globals((module.__name__,))
        order, recent = module.order, module.recent
        order.clear()
        module.recent = None
        recent.append(5)
        held.restore()
        assert module.order is order and order == OrderedDict(a=1)
        assert module.recent is recent and list(recent) == [1] and recent.maxlen == 2
    finally:
        del sys.modules[module.__name__]


def test_objects_that_warn_when_they_are_looked_at(monkeypatch):
    """torch.distributed.reduce_op warns when any attribute of it is read, __class__ too."""
    module = ModuleType("their_reductions")
    vars(module)["reduce_op"] = dist.reduce_op
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Globals((module.__name__,)).is_changed()
