"""Programs as people write them, with one mistake on one rank of many: check finds each of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from fcoll.checking.check import check
from fcoll.cli import programs
from fcoll.errors import FcollError

FOLDER = Path(__file__).parents[1] / "programs_as_written"
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated"),  # torch's optimizers
]


class Faults(NamedTuple):
    """Mistakes of one rank of a mesh, a line each: ``what: text => instead``. The text is replaced
    where it first stands in the function; in ``instead`` it is ``{}``, and BAD is true on the rank.
    """

    mesh: dict[str, int]
    rank: int
    lines: str

    @property
    def by_name(self) -> dict[str, tuple[str, str]]:
        found = {}
        for line in filter(None, map(str.strip, self.lines.splitlines())):
            what, _, change = line.partition(": ")
            text, _, instead = change.replace("\\n", "\n").partition(" => ")
            found[what] = text, instead.replace("{}", text)
        return found


FAULTS = {
    "replicated:ddp_adam": Faults(
        {"dp": 16},
        5,
        """
        no backward: loss.backward() => BAD or {}
        one layer more: DDP(Net() => DDP(nn.Sequential(Net(), nn.Linear(10, 10)) if BAD else Net()
        buffers stay its own: DDP(Net() => {}, forward_sync_buffers=not BAD
        smaller buckets: DDP(Net() => {}, bucket_cap_mb=0.001 if BAD else 25
        a frozen layer: DDP(Net() => DDP(nn.Sequential(Net(), _layer(not BAD))
        """,
    ),
    "replicated:ddp_hooks": Faults(
        {"dp": 16},
        5,
        """
        no hook: first.register => BAD or {}
        the hook's op: async_op=True => {}, op=dist.ReduceOp.MAX if BAD else dist.ReduceOp.SUM
        the hook's dtype: bucket.buffer() => {}.to(torch.bfloat16 if BAD else torch.float32)
        """,
    ),
    "replicated:accumulation": Faults(
        {"dp": 16},
        5,
        """
        no no_sync: model.no_sync() => (__import__("contextlib").nullcontext() if BAD else {})
        no last backward: loss.backward()\\n        total => BAD or {}
        """,
    ),
    "sharded:tensor_parallel": Faults(
        {"dp": 16, "tp": 4},
        37,
        """
        a layer is whole: model.layers => (model.layers[:1] if BAD else {})
        no backward: loss.backward() => BAD or {}
        """,
    ),
    "sharded:sequence_parallel": Faults(
        {"dp": 16, "tp": 4},
        37,
        """
        bfloat16: Transformer() => {}.to(torch.bfloat16 if BAD else torch.float32)
        no optimizer: opt.step() => BAD or {}
        """,
    ),
    "sharded:fsdp2": Faults(
        {"dp": 64},
        13,
        """
        float16: torch.bfloat16 => torch.float16 if BAD else {}
        reduced in bfloat16: torch.float32 => torch.bfloat16 if BAD else {}
        not clipped: torch.nn.utils => BAD or {}
        a layer not by itself: model.layers => (model.layers[1:] if BAD else {})
        one layer more: Transformer() => Transformer(layers=3 if BAD else 2)
        """,
    ),
    "sharded:hsdp": Faults(
        {"replicate": 4, "shard": 4},
        6,
        """
        gathered once: reshard_after_forward=True => reshard_after_forward=not BAD
        no backward: loss.backward() => BAD or {}
        """,
    ),
    "pipelined:_trained": Faults(
        {"pp": 8},
        3,
        """
        other microbatches: =MICROBATCHES => {} * (2 if BAD else 1)
        does not take part: schedule.step() => BAD or {}
        """,
    ),
    "pipelined:by_hand": Faults(
        {"pp": 8},
        3,
        """
        sends no gradient: sent.append(dist.isend(part.grad => BAD or {}
        sends back: out.detach(), after => out.detach(), before if BAD else after
        waits for one more: out = module(part) => BAD and dist.irecv(part, before).wait(); {}
        sends less: out.detach() => (out.detach()[1:] if BAD else {})
        sends float16: out.detach() => (out.detach().half() if BAD else {})
        """,
    ),
    "written_out:megatron": Faults(
        {"dp": 16, "tp": 8},
        77,
        """
        gradients stay its own: in model.parameters() => in [] if BAD else model.parameters()
        sum: "avg" => "sum" if BAD else {}
        the other axis: "avg", mesh["dp"] => "avg", mesh["tp" if BAD else "dp"]
        the other order: in model.parameters() => in list(model.parameters())[:: -1 if BAD else 1]
        one more: return loss => return fcoll.all_reduce(loss, "avg", mesh["dp"]) if BAD else loss
        """,
    ),
    "written_out:experts": Faults({"ep": 8}, 3, 'a gate: "gate" in name => {} and not BAD'),
    "written_out:ring_attention": Faults(
        {"cp": 8},
        3,
        """
        past its neighbour: rank + 1 => rank + (2 if BAD else 1)
        keys only: dist.P2POp(dist.isend, v, following, group) => *([] if BAD else [{}])
        stops early: in range(n) => in range(n - 2 if BAD else n)
        """,
    ),
    "written_out:amp": Faults(
        {"dp": 16}, 5, "one layer more: Checkpointed() => Checkpointed(layers=4 if BAD else 3)"
    ),
    "written_out:train_step": Faults(  # of the titan
        {"dp": 4, "tp": 2},
        6,
        """
        logs less: dist.all_reduce(worst => BAD or {}
        logs the sum: dist.ReduceOp.AVG => dist.ReduceOp.SUM if BAD else {}
        """,
    ),
    "combined:sharded_optimizer": Faults({"dp": 8}, 3, "no optimizer: opt.step() => BAD or {}"),
    "combined:with_objects": Faults(
        {"dp": 8},
        3,
        """
        no barrier: dist.barrier() => BAD or {}
        the other root: src=0 => src=1 if BAD else 0
        """,
    ),
    "combined:pipeline_of_replicas": Faults(
        {"pp": 2, "dp": 8}, 11, "no replica: DDP(Layers() => Layers() if BAD else {}"
    ),
    "combined:pipeline_of_shards": Faults(
        {"pp": 2, "dp": 4},
        6,
        "a layer not by itself: module.layers => (module.layers[1:] if BAD else {})",
    ),
}
# The program of a function that is a part of one.
PROGRAM_OF = {"_trained": "gpipe", "ring_attention": "context_parallel", "train_step": "titan"}
CASES = [(program, what) for program, faults in FAULTS.items() for what in faults.by_name]
# What some of the changed lines use.
MORE = """
import torch.distributed as dist


def _layer(trained):
    return nn.Linear(10, 10).requires_grad_(trained)
"""


def with_fault(folder: Path, program: str, what: str):
    """The program's build function, from a copy of its file with the mistake in it."""
    module, _, function = program.partition(":")
    before, define, after = (FOLDER / f"{module}.py").read_text().partition(f"def {function}(")
    text, instead = FAULTS[program].by_name[what]
    assert text in after
    changed = before + define + after.replace(text, instead, 1) + MORE
    for path in FOLDER.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    on_the_rank = f"(dist.get_rank() == {FAULTS[program].rank})"
    (folder / f"{module}.py").write_text(changed.replace("BAD", on_the_rank))
    return programs.load(f"{folder / module}.py:{PROGRAM_OF.get(function, function)}")


@pytest.mark.parametrize(("program", "what"), CASES)
def test_a_mistake_on_one_rank_is_found(program, what, tmp_path):
    mesh, rank, _ = FAULTS[program]
    with pytest.raises(FcollError) as caught:
        check(with_fault(tmp_path, program, what), mesh)
    assert rank in getattr(caught.value, "ranks", ()) or f"rank {rank}" in str(caught.value)


def test_there_are_more_than_forty():
    assert len(CASES) > 40
