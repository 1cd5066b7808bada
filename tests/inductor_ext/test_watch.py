"""A rank with a new graph, whose peers run one that was agreed on: an error, not a wait."""

from __future__ import annotations

import base64
import datetime
import json
import logging
import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import compiled, normal

import fcoll
from fcoll.errors import GroupClosed, OtherGraph
from inductor_ext import watch
from inductor_ext.comparison import Runs
from inductor_ext.watch import call_at

COMPILE_S = 600
TIMEOUT_S = 300  # of the group: the error is there long before

Tensor = torch.Tensor


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def one_has_a_new_graph(rank: int, cpp: bool) -> tuple[str, list[str]]:
    """Both agree on a graph. Then rank 0 runs another one and rank 1 the same again."""
    made = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    group, w = made.group_name, normal(4, 4, rank=0)
    said, message = Said(), ""
    watch.log.addHandler(said)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(watch, "STUCK_S", 0.5)
        with torch._inductor.config.patch(cpp_wrapper=cpp):
            old = compiled(lambda x: fcoll.all_reduce(x @ w, "sum", group) + 1)
            new = torch.compile(
                lambda x: fcoll.all_reduce(x @ w, "max", group) + 2, backend="fcoll"
            )
            x = normal(4, 4, rank=rank)
            want = fcoll.all_reduce(x @ w, "sum", group) + 1
            torch.testing.assert_close(old(x), want)
            if rank == 0:
                with pytest.raises(OtherGraph) as caught:
                    new(x)
                assert caught.value.rank == 1
                message = str(caught.value)
            if fcoll.symm_mem.status(made).shared:  # rank 1 has waited in it all the time
                with pytest.raises(GroupClosed, match="rank 0 has a new graph"):
                    old(x)
            else:
                torch.testing.assert_close(old(x), want)
                torch.testing.assert_close(old(x), want)
    watch.log.removeHandler(said)
    return message, said.lines


@pytest.mark.parametrize(("pool", "cpp"), [("ranks2", False), ("shared2", False), ("ranks2", True)])
def test_a_rank_with_a_new_graph_is_told(request: Any, pool: str, cpp: bool):
    """On shared memory its peers raise, too; on a process group they go on when it does."""
    ranks = request.getfixturevalue(pool)
    (message, nothing), (_, logged) = ranks.run(one_has_a_new_graph, cpp, timeout=COMPILE_S)
    assert "rank 1 runs a graph that was agreed on before" in message
    assert "rank 0 has a new graph, which begins with all_reduce(max)" in message
    assert message.count("test_watch.py:") >= 2
    if not cpp:  # also where it is
        assert "and is at all_reduce of [4, 4] at" in message
    assert nothing == [] and len(logged) == 1 and logged[0].split(". ")[0] in message


# -- the same by hand, without a compiler ---

GRAPH = """
def call(x):
    fcoll_begins()
    return fcoll.wait_tensor(fcoll.all_reduce(x, op, group))
"""


def graph_by_hand(op: str, group: str) -> Any:
    """As generated code has it: a function beside its Runs."""
    issued = {group: [[op, f"all_reduce({op}) at model.py:3"]]}
    card = base64.b64encode(zlib.compress(json.dumps([issued, ""]).encode())).decode()
    names: dict[str, Any] = {"fcoll": fcoll, "op": op, "group": group, watch.RUNS: Runs(card)}
    exec(GRAPH, names)
    return names["call"]


def new_graph_by_hand(rank: int) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S)).group_name
    old, new, x, said = graph_by_hand("sum", group), graph_by_hand("max", group), torch.ones(1), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "STUCK_S", 0.5)
        assert old(x) == old(x) == dist.get_world_size()
        if rank == 0:
            with pytest.raises(OtherGraph) as caught:
                new(x)
            said = str(caught.value)
        assert old(x) == dist.get_world_size()
    return said


def test_all_other_ranks_run_an_agreed_graph(ranks4):
    said, *_ = ranks4.run(new_graph_by_hand)
    assert "runs a graph that was agreed on before, which begins with all_reduce(sum)" in said
    assert "rank 0 has a new graph, which begins with all_reduce(max) at model.py:3" in said


CODE = """
    fcoll_begins()
    # fcoll: {"op": "all_gather", "shape": [4], "source": "a.py:1"}
    # Topologically Sorted Source Nodes
    buf1 = torch.ops.fcoll.all_gather.default(arg0, 2, '0')
    # fcoll: {"op": "all_reduce", "shape": [8], "source": "a.py:2"}
    buf2 = fcoll_fast.announce(buf0, "all_reduce", "sum", "0", 0)
    extern_kernels.mm(buf5, buf6, out=buf7)
    torch.ops._c10d_functional.wait_tensor.default(buf1)
    buf3 = fcoll_fast.collect(buf2, buf0)
""".splitlines()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("buf1 = ", "all_gather of [4] at a.py:1"),
        ("wait_tensor", "all_gather of [4] at a.py:1"),
        ("announce", "all_reduce of [8] at a.py:2"),
        ("collect", "all_reduce of [8] at a.py:2"),
        ("mm(", ""),
        ("begins", ""),
    ],
)
def test_the_line_of_generated_code_says_which_collective(line: str, found: str):
    number = next(i for i, text in enumerate(CODE, 1) if line in text)
    assert call_at(CODE, number) == found
    assert call_at(CODE, 0) == call_at(CODE, 99) == ""
