"""Tests on simulated ranks, in milliseconds.

    @pytest.mark.ranks(4)
    def test_total():                      # the body runs on each of 4 ranks
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 4

    def test_rows(fcoll_world):
        assert fcoll_world(3).run(lambda rank: dist.get_rank()) == [0, 1, 2]

    def test_step(fcoll_prove):            # fails unless it is one device's function, exactly
        fcoll_prove(build, mesh={"dp": 2, "tp": 2})

What other fixtures give is made once and shared by the ranks; ``fcoll_rank`` is each rank's number.
Keyword arguments of both are those of ``fcoll.simulate_ranks``.

    @pytest.mark.ranks(2, processes=True)  # real processes, in seconds; also timeout= and backend=

is for code that keeps a rank once for a process, which ``isolate=["its.module"]`` does not reach.
There each rank makes the fixtures for itself.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from fcoll_pytest import processes


class World:
    """``run(fn)`` is ``fcoll.simulate_ranks(fn, size, ...)``."""

    def __init__(self, size: int, **options: Any) -> None:
        self.size, self.options = size, options

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        import fcoll  # not at pytest's start: it imports torch

        try:
            return fcoll.simulate_ranks(fn, self.size, **self.options)
        except fcoll.errors.RankFailed as error:
            if isinstance(error.__cause__, (pytest.skip.Exception, pytest.xfail.Exception)):
                raise error.__cause__ from None
            from fcoll.ranks.isolation import singletons_hint

            if hint := singletons_hint():
                error.add_note(hint)
            raise

    def explore(self, fn: Callable[[int], Any], **options: Any) -> Any:
        """``fcoll.explore(fn, size, ...)``: every order in which messages may come."""
        import fcoll

        return fcoll.explore(fn, self.size, **{**self.options, **options})


class _EachRanks:
    """Stands for the rank until the test runs on one."""

    def __repr__(self) -> str:
        return "the rank of a test with @pytest.mark.ranks(n)"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(n, processes=False, **options): run the test's body on each of n simulated ranks "
        "or real processes (fcoll)",
    )


@pytest.fixture
def fcoll_world() -> Callable[..., World]:
    """``fcoll_world(4).run(fn)`` -> the result of ``fn(rank)`` on each of 4 simulated ranks."""
    return World


@pytest.fixture
def fcoll_prove() -> Callable[..., Any]:
    """``fcoll_prove(build, mesh={"tp": 2})`` is ``fcoll.prove(...)``; the test fails with the
    verdict's text unless it is proved."""

    def prove(build: Callable[..., Any], mesh: Any, **options: Any) -> Any:
        import fcoll

        verdict = fcoll.prove(build, mesh, **options)
        if not verdict:
            pytest.fail(str(verdict), pytrace=False)
        return verdict

    return prove


@pytest.fixture
def fcoll_rank(request: pytest.FixtureRequest) -> Any:
    """The rank that the body of a test with ``@pytest.mark.ranks(n)`` runs on."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail("fcoll_rank is for tests with @pytest.mark.ranks(n)", pytrace=False)
    return _EachRanks()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    if len(marker.args) != 1:
        pytest.fail("use @pytest.mark.ranks(n), with one number of ranks", pytrace=False)
    options = dict(marker.kwargs)
    on_processes = options.pop("processes", False)
    if on_processes and not processes.is_rank():
        if more := options.keys() - {"timeout", "backend"}:
            message = f"{', '.join(sorted(more))}: of simulated ranks, not of processes=True"
            pytest.fail(message, pytrace=False)
        processes.run_on_processes(pyfuncitem, marker.args[0], **options)
        return True
    fn, names = pyfuncitem.obj, pyfuncitem._fixtureinfo.argnames
    fixtures = {name: pyfuncitem.funcargs[name] for name in names}

    def body(rank: int) -> Any:
        mine = {k: rank if isinstance(v, _EachRanks) else v for k, v in fixtures.items()}
        result = fn(**mine)
        if inspect.iscoroutine(result):  # of an async def, which would pass without having run
            return asyncio.run(result)
        return result

    if on_processes:
        processes.run_body(body)
    else:
        World(marker.args[0], **options).run(body)
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if processes.is_rank():
        processes.write_report(report)
