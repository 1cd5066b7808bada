"""Values that a step reads: placeholders to print; to decide by them where it is all the same."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fcoll
from fcoll.errors import DataDependent, UnevenShard
from fcoll.tracing.values import MOST_BRANCHES, Unknown

LOG = logging.getLogger("train")


def traced(read: Callable[..., Any], mode: str = "joint") -> fcoll.Trace:
    """A step that reads its loss, of which a collective comes before and one after."""
    with fcoll.fake_world(dp=2) as mesh:
        weight = torch.ones(4, requires_grad=True)

        def step(x):
            loss = fcoll.all_reduce((x * weight).sum(), "sum", mesh)
            read(loss, x, lambda: fcoll.all_reduce(x, "max", mesh))
            return loss

        return fcoll.trace(step, torch.ones(4), mode=mode)


def line_of(text: str, fn: Any) -> str:
    lines, first = inspect.getsourcelines(fn)
    return f"test_value_reads.py:{first + next(i for i, s in enumerate(lines) if text in s)}"


# -- reads that are no decisions ---

READS: dict[str, Callable[..., Any]] = {
    "item": lambda loss, x, _: loss.item(),
    "item .3f": lambda loss, x, _: f"{loss.item():.3f} {loss.item():>10} {loss.item():e}",
    "tensor .3f": lambda loss, x, _: f"{loss:.3f} {loss}",
    "int :d": lambda loss, x, _: f"{x.argmax().item():d} {x.argmax().item():>10} {x.argmax():5d}",
    "percent": lambda loss, x, _: "%.3f %d" % (loss.item(), x.argmax().item()),  # noqa: UP031
    "accuracy": lambda loss, x, _: f"{(x > 0).sum().item() / len(x):.1%}",
    "print": lambda loss, x, _: print(loss, loss.detach(), x, loss.item(), x.tolist()),
    "logger": lambda loss, x, _: LOG.warning("%s %.2f %d", loss, loss.item(), x.argmax().item()),
    "float": lambda loss, x, _: f"{float(loss):.3f} {float(x.argmax())}",
    "int": lambda loss, x, _: f"{int(loss):d} {int(x.argmax())}",
    "round": lambda loss, x, _: (round(loss.item(), 2), round((x > 0).sum().item() / 3, 2)),
    "arithmetic": lambda loss, x, _: -((loss.item() * 2 + 1) ** 0.5 / 3 - 1) % 2 // 1,
    "zero": lambda loss, x, _: 1 / (loss.item() - 1.0),
    "perplexity": lambda loss, x, _: f"{math.exp(loss.item()):.2f} {math.log(loss.item())}",
    "average": lambda loss, x, _: sum([loss.item(), loss.item()]) / 2,
    "mean": lambda loss, x, _: statistics.fmean([loss.item()]),
    "json": lambda loss, x, _: json.dumps({"loss": loss.item(), "best": x.argmax().item()}),
    "numpy": lambda loss, x, _: (loss.detach().numpy(), np.mean([loss.item()]), np.float32(loss)),
    "copy": lambda loss, x, _: copy.deepcopy({"loss": loss.item()}),
    "isfinite": lambda loss, x, _: torch.isfinite(loss),
    "clip": lambda loss, x, _: print(f"{torch.nn.utils.clip_grad_norm_([x], 1.0):.2f}"),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", READS)
def test_reads_do_not_break_a_trace(name):
    found = traced(READS[name])
    assert [c.phase for c in found.collectives] == ["fwd", "bwd"]
    assert found.notes == ()


@pytest.mark.parametrize("name", ["item .3f", "tensor .3f", "print"])
def test_reads_of_a_compiled_step(name):
    assert [c.phase for c in traced(READS[name], "compiled").collectives] == ["fwd", "bwd"]


def test_what_is_read_goes_on_after_the_trace():
    losses = []
    traced(lambda loss, x, _: losses.append(loss.item()))
    assert f"{losses[0]:.2f}" == "1.00" and isinstance(losses[0] + 1, Unknown)
    with pytest.raises(DataDependent, match="read while a step was traced"):
        bool(losses[0] > 3)


def test_all_is_as_before():
    before = [torch.Tensor.item, torch.SymInt.__int__, math.isnan, json.JSONEncoder.default]
    traced(lambda loss, x, _: loss.item())
    with pytest.raises(KeyError):
        traced(lambda loss, x, _: {}[loss.item()])
    after = [torch.Tensor.item, torch.SymInt.__int__, math.isnan, json.JSONEncoder.default]
    assert after == before and "item" not in vars(torch.Tensor)
    assert f"{torch.tensor(2.5).item():.1f}" == "2.5" and not torch.tensor(0.0)


def test_constants_of_the_program_keep_their_values():
    splits = torch.tensor([1, 3])

    def step(x):
        if torch.tensor(3) > 2 and splits.tolist() == [1, 3]:
            return fcoll.all_reduce(x)
        return x

    with fcoll.fake_world(dp=2):
        found = fcoll.trace(step, torch.ones(4))
    assert len(found.collectives) == 1 and found.notes == ()


def test_a_list_of_what_the_step_wrote_is_not_the_old_one():
    seen = torch.zeros(2, dtype=torch.long)

    def step(x):
        seen.add_(1)
        return x.expand(seen.tolist()[0], 4) * 2

    found = fcoll.trace(step, torch.ones(4)).graph_module.graph
    assert any("u0" in str(getattr(n.meta.get("val"), "shape", "")) for n in found.nodes)
    assert seen.tolist() == [0, 0]


def test_sizes_that_are_read_stay_symbols():
    with fcoll.fake_world(ep=2) as mesh:

        def step(x, counts):
            splits = counts.tolist()
            rows = fcoll.all_to_all_single(x, mesh, splits, splits)
            return rows, x.new_empty(counts.sum().item(), 2)

        (found,) = fcoll.trace(step, torch.ones(4, 2), torch.full((2,), 2)).collectives
        (again,) = fcoll.trace(
            step, torch.ones(4, 2), torch.ones(2, device="meta").long()
        ).collectives
    assert found.args["output_split_sizes"] == [2, 2]  # the program's own, as it is
    assert [str(n) for n in again.args["output_split_sizes"]] == ["u0", "u1"]


# -- decisions that make no difference ---


def skip_nan(loss, x, more):
    if torch.isnan(loss):
        raise RuntimeError("nan")


def check_finite(loss, x, more):
    assert torch.isfinite(loss)


def stop_unless_finite(loss, x, more):
    if not math.isfinite(loss.item()):
        raise SystemExit(1)


def numpy_isnan(loss, x, more):
    if np.isnan(loss.item()):
        raise RuntimeError("nan")


def warn_if_large(loss, x, more):
    if loss.item() > 10:
        print("large")


def warn_if_many(loss, x, more):
    if x.argmax().item() > 2:
        print("many")


def best_so_far(loss, x, more):
    best = min(math.inf, loss.item())
    print(f"{best:.2f}")


def nested(loss, x, more):
    if loss > 10:
        if x.sum().item() < 3:
            print("odd")
    elif x.any():
        print("usual")


def agree_to_stop(loss, x, more):
    """A condition as a tensor, as ranks exchange it."""
    stop = torch.tensor(float(loss.item() > 3)) + torch.tensor([loss.item() > 3])
    if stop.item():
        print("stop")


def plain_number(loss, x, more):
    if float(loss.detach()) > 10:
        print("large")


@pytest.mark.parametrize(
    ("read", "note"),
    [
        (skip_nan, "taken to be False; if not: RuntimeError"),
        (check_finite, "taken to be True; if not: AssertionError"),
        (stop_unless_finite, "taken to be True; if not: SystemExit"),
        (numpy_isnan, "taken to be False; if not: RuntimeError"),
        (warn_if_large, "taken to be False; if not: the collectives are the same"),
        (warn_if_many, "taken to be False; if not: the collectives are the same"),
        (best_so_far, "the collectives are the same"),
        (nested, "the collectives are the same"),
        (agree_to_stop, "the collectives are the same"),
        (plain_number, ""),
    ],
)
def test_a_branch_may_be_taken_that_sends_the_same(read, note):
    found = traced(read)
    assert [c.phase for c in found.collectives] == ["fwd", "bwd"]
    assert note in "".join(found.notes)
    assert all("test_value_reads.py:" in text for text in found.notes)
    assert all(text in str(found) for text in found.notes)
    assert fcoll.Trace.from_json(found.to_json()).notes == found.notes


# -- those that do ---


def branch_on_item(loss, x, more):
    if loss.item() > 10:  # here
        more()


def branch_on_tensor(loss, x, more):
    if torch.isnan(loss):  # here
        more()


def branch_on_count(loss, x, more):
    if x.argmax().item() != 3:  # here
        more()


def branch_on_average(loss, x, more):
    average = (loss.item() + 1) / 2
    if average < 0.1 or loss.item() == 0:  # here
        more()


def branch_on_isfinite(loss, x, more):
    if not math.isfinite(loss.item()):  # here
        return
    more()


def branch_on_float(loss, x, more):
    value = float(loss.detach())  # here
    if value < -5:
        more()


def branch_on_an_array(loss, x, more):
    values = np.array([loss.item(), 2.0])  # here
    if values.mean() > 10:
        more()


def branch_on_nan(loss, x, more):
    value = float(loss.detach())  # here
    if value != value:
        more()


def loop(loss, x, more):
    while loss.item() > 0.1:  # here
        loss = loss / 2


def loop_of_calls(loss, x, more):
    for _ in range(x.argmax().item()):  # here
        more()


def second_branch(loss, x, more):
    if loss.item() > 10:
        print("large")
    if x.sum() > 3:  # here
        more()


@pytest.mark.parametrize(
    "read",
    [
        branch_on_item,
        branch_on_tensor,
        branch_on_count,
        branch_on_average,
        branch_on_isfinite,
        branch_on_float,
        branch_on_an_array,
        branch_on_nan,
        loop,
        loop_of_calls,
        second_branch,
    ],
)
def test_a_branch_that_sends_something_else_names_its_line(read):
    with pytest.raises(DataDependent, match=r"fcoll\.assume") as raised:
        traced(read)
    assert line_of("# here", read) in str(raised.value)
    if read not in (loop,):
        assert "all_reduce(max) of float32 (4,)" in str(raised.value)


def test_a_plain_int_as_a_size_says_what_to_use():
    def step(x, count):
        return fcoll.all_reduce(x.expand(int(count), 4))

    with fcoll.fake_world(dp=2), pytest.raises(DataDependent, match="keep it a symbol") as raised:
        fcoll.trace(step, torch.ones(1, 4), torch.empty((), device="meta").long())
    assert line_of("int(count)", step) in str(raised.value)


def test_a_plain_int_that_does_not_fit_says_what_to_use():
    def step(x, counts):
        splits = [int(n) for n in counts]
        return fcoll.all_to_all_single(x, None, splits, splits)

    with fcoll.fake_world(dp=2), pytest.raises(DataDependent, match="keep it a symbol") as raised:
        fcoll.trace(step, torch.ones(6, 4), torch.empty(2, device="meta").long())
    assert "BadSplits" in str(raised.value)


def test_errors_of_the_program_are_its_own():
    def read(loss, x, more):
        if loss.item() > 3:
            print("large")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        traced(read)


def test_a_way_that_cannot_be_traced_is_no_end():
    """A call that is wrong is not a way for a run to stop."""

    def read(loss, x, more):
        if loss.item() > 3:
            fcoll.reduce_scatter_tensor(x[:3])

    with pytest.raises(UnevenShard):
        traced(read)


def test_more_branches_than_are_tried():
    def read(loss, x, more):
        for value in (loss.item() + i for i in range(MOST_BRANCHES + 1)):
            if value > 10:
                print("large")

    with pytest.raises(DataDependent, match="tries both ways of up to 4 decisions"):
        traced(read)


# -- assume ---


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("mode", ["joint", "compiled"])
def test_assume_says_which_way(answer, mode):
    def read(loss, x, more):
        if fcoll.assume(loss.item() > 10, answer):
            more()

    found = traced(read, mode)
    assert [c.args["reduce_op"] for c in found.collectives].count("max") == answer
    assert found.notes == ()


def test_assume_outside_a_trace_is_the_condition():
    assert fcoll.assume(torch.tensor(3.0) > 1, False) is True
    assert fcoll.assume(torch.tensor(3.0).item() > 10, True) is False


def test_assume_takes_what_decides_by_itself():
    """`not` and `and` decide before assume is asked: both ways lead to the same."""

    def read(loss, x, more):
        if fcoll.assume(not torch.isfinite(loss) and loss.item() > 3, False):
            more()

    assert len(traced(read).collectives) == 2
