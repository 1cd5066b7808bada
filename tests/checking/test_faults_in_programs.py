"""Programs as people write them, each with one mistake on one rank of many: check finds them all."""

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


class Fault(NamedTuple):
    """A text of a function of a program is replaced; WRONG is true on the rank."""

    text: str
    instead: str


#: {program: (mesh, the rank that is wrong, {what is wrong: fault})}
FAULTS: dict[str, tuple[dict[str, int], int, dict[str, Fault]]] = {
    "replicated:ddp_adam": (
        {"dp": 16},
        5,
        {
            "no backward": Fault("loss.backward()", "WRONG or loss.backward()"),
            "one layer more": Fault("DDP(Net()", "DDP(nn.Sequential(Net(), nn.Linear(10, 10)) if WRONG else Net()"),
            "buffers stay its own": Fault('get_group("dp")', 'get_group("dp"), forward_sync_buffers=not WRONG'),
            "smaller buckets": Fault('get_group("dp")', 'get_group("dp"), bucket_cap_mb=0.001 if WRONG else 25'),
            "a frozen layer": Fault("DDP(Net()", "DDP(Net().requires_grad_() if not WRONG else _frozen()"),
        },
    ),
    "replicated:ddp_hooks": (
        {"dp": 16},
        5,
        {
            "no hook": Fault("first.register", "WRONG or first.register"),
            "the hook's op": Fault("async_op=True", "async_op=True, op=dist.ReduceOp.MAX if WRONG else dist.ReduceOp.SUM"),
            "the hook's dtype": Fault("bucket.buffer() /", "bucket.buffer().to(torch.bfloat16 if WRONG else torch.float32) /"),
        },
    ),
    "replicated:accumulation": (
        {"dp": 16},
        5,
        {
            "no no_sync": Fault("model.no_sync()", '(__import__("contextlib").nullcontext() if WRONG else model.no_sync())'),
            "no last backward": Fault("        loss.backward()\n        total", "        WRONG or loss.backward()\n        total"),
        },
    ),
    "sharded:tensor_parallel": (
        {"dp": 16, "tp": 4},
        37,
        {
            "a layer is whole": Fault("model.layers:", "(model.layers[:1] if WRONG else model.layers):"),
            "no backward": Fault("loss.backward()", "WRONG or loss.backward()"),
        },
    ),
    "sharded:sequence_parallel": (
        {"dp": 16, "tp": 4},
        37,
        {
            "bfloat16": Fault("Transformer()", "Transformer().to(torch.bfloat16 if WRONG else torch.float32)"),
            "no optimizer": Fault("opt.step()", "WRONG or opt.step()"),
        },
    ),
    "sharded:fsdp2": (
        {"dp": 64},
        13,
        {
            "float16": Fault("param_dtype=torch.bfloat16", "param_dtype=torch.float16 if WRONG else torch.bfloat16"),
            "reduced in bfloat16": Fault("reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16 if WRONG else torch.float32"),
            "not clipped": Fault("torch.nn.utils", "WRONG or torch.nn.utils"),
            "a layer not by itself": Fault("in model.layers", "in (model.layers[1:] if WRONG else model.layers)"),
            "one layer more": Fault("Transformer()", "Transformer(layers=3 if WRONG else 2)"),
        },
    ),
    "sharded:hsdp": (
        {"replicate": 4, "shard": 4},
        6,
        {
            "gathered once": Fault("reshard_after_forward=True", "reshard_after_forward=not WRONG"),
            "no backward": Fault("loss.backward()", "WRONG or loss.backward()"),
        },
    ),
    "pipelined:_trained": (
        {"pp": 8},
        3,
        {
            "other microbatches": Fault("=MICROBATCHES", "=MICROBATCHES * (2 if WRONG else 1)"),
            "does not take part": Fault("schedule.step()\n", "WRONG or schedule.step()\n"),
        },
    ),
    "pipelined:by_hand": (
        {"pp": 8},
        3,
        {
            "sends no gradient": Fault("sent.append(dist.isend(part.grad", "WRONG or sent.append(dist.isend(part.grad"),
            "sends back": Fault("out.detach(), after", "out.detach(), before if WRONG else after"),
            "waits for one more": Fault("part.requires_grad_()", "part.requires_grad_()\n                WRONG and dist.irecv(torch.empty_like(part), before, group=group).wait()"),
            "sends less": Fault("out.detach()", "(out.detach()[1:] if WRONG else out.detach())"),
            "sends float16": Fault("out.detach()", "(out.detach().half() if WRONG else out.detach())"),
        },
    ),
    "written_out:megatron": (
        {"dp": 16, "tp": 8},
        77,
        {
            "gradients stay its own": Fault("in model.parameters():", "in ([] if WRONG else model.parameters()):"),
            "sum": Fault('"avg"', '"sum" if WRONG else "avg"'),
            "the other axis": Fault('"avg", mesh["dp"]', '"avg", mesh["tp" if WRONG else "dp"]'),
            "the other order": Fault("in model.parameters():", "in sorted(model.parameters(), key=lambda p: p.numel() * (-1 if WRONG else 1)):"),
            "one more": Fault("return loss", 'return fcoll.all_reduce(loss.detach(), "avg", mesh["dp"]) if WRONG else loss'),
        },
    ),
    "written_out:experts": (
        {"ep": 8},
        3,
        {"a gate stays its own": Fault('"gate" in name', '"gate" in name and not WRONG')},
    ),
    "written_out:ring_attention": (
        {"cp": 8},
        3,
        {
            "past its neighbour": Fault("rank + 1", "rank + (2 if WRONG else 1)"),
            "keys only": Fault("dist.P2POp(dist.isend, v, following, group),", "*([] if WRONG else [dist.P2POp(dist.isend, v, following, group)]),"),
            "stops early": Fault("in range(n)", "in range(n - 2 if WRONG else n)"),
        },
    ),
    "written_out:amp": (
        {"dp": 16},
        5,
        {"no backward": Fault("scaler.scale(loss).backward()", "scaled = scaler.scale(loss)\n        WRONG or scaled.backward()")},
    ),
    "written_out:train_step": (  # of the titan
        {"dp": 4, "tp": 4},
        6,
        {
            "logs less": Fault("dist.all_reduce(worst", "WRONG or dist.all_reduce(worst"),
            "logs the sum": Fault("op=dist.ReduceOp.AVG", "op=dist.ReduceOp.SUM if WRONG else dist.ReduceOp.AVG"),
        },
    ),
    "combined:sharded_optimizer": (
        {"dp": 8},
        3,
        {"no optimizer": Fault("opt.step()", "WRONG or opt.step()")},
    ),
    "combined:with_objects": (
        {"dp": 8},
        3,
        {
            "no barrier": Fault("dist.barrier()", "WRONG or dist.barrier()"),
            "the other root": Fault("src=0", "src=1 if WRONG else 0"),
        },
    ),
    "combined:pipeline_of_replicas": (
        {"pp": 2, "dp": 8},
        11,
        {"no replica": Fault("DDP(Layers(), process_group=mesh.get_group(\"dp\"))", "Layers() if WRONG else DDP(Layers(), process_group=mesh.get_group(\"dp\"))")},
    ),
    "combined:pipeline_of_shards": (
        {"pp": 2, "dp": 4},
        6,
        {"a layer not by itself": Fault("in module.layers", "in (module.layers[1:] if WRONG else module.layers)")},
    ),
}  # fmt: skip
# The function that a mistake is in, where it is not the program itself.
BUILDS = {"_trained": "gpipe", "ring_attention": "context_parallel", "train_step": "titan"}
FROZEN = """

def _frozen():
    net = Net()
    net.head.requires_grad_(False)
    return net
"""
CASES = [(program, what) for program, (_, _, faults) in FAULTS.items() for what in faults]


def with_fault(folder: Path, program: str, what: str):
    """The program's build function, from a copy of its file with the mistake in it."""
    _, rank, faults = FAULTS[program]
    module, _, function = program.partition(":")
    text = (FOLDER / f"{module}.py").read_text()
    before, define, after = text.partition(f"def {function}(")
    assert faults[what].text in after
    after = after.replace(faults[what].text, faults[what].instead, 1)
    changed = (before + define + after).replace("WRONG", f"(dist.get_rank() == {rank})")
    if "import torch.distributed as dist" not in changed:
        changed = changed.replace("import torch\n", "import torch\nimport torch.distributed as dist\n", 1)
    for path in FOLDER.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    (folder / f"{module}.py").write_text(changed + FROZEN * ("_frozen" in changed))
    return programs.load(f"{folder / module}.py:{BUILDS.get(function, function)}")


@pytest.mark.parametrize(("program", "what"), CASES)
def test_a_mistake_on_one_rank_is_found(program, what, tmp_path):
    axes, rank, _ = FAULTS[program]
    with pytest.raises(FcollError) as caught:
        check(with_fault(tmp_path, program, what), axes)
    assert rank in getattr(caught.value, "ranks", ()) or f"rank {rank}" in str(caught.value)


def test_there_are_forty():
    assert len(CASES) >= 40
