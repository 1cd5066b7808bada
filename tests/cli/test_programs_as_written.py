"""Programs as people write them: every collective at its count, group, phase, line; no alarms."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

import fcoll
from fcoll.checking.check import check
from fcoll.cli import main, programs
from fcoll.cli.commands import FINE
from fcoll.errors import NeedsPeers
from fcoll.tracing.fake_world import PeerValues, exchanging
from fcoll.tracing.peers import Board

FOLDER = Path(__file__).parents[1] / "programs_as_written"
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated"),  # torch's optimizers
]

# By hand, of one rank: {program: (mesh, rank, "collective axis phase": count)}.
GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
SEQUENCE = {
    f"{SCATTER} tp fwd": 5,  # the embedding, and 2 of each of 2 layers
    f"{GATHER} tp fwd": 6,  # before them, the output layer's input and its result
    f"{SCATTER} tp bwd": 5,
    f"{GATHER} tp bwd": 5,
}
FSDP = {  # 2 layers and the rest; the rest stays gathered
    f"{GATHER}_out dp fwd": 3,
    f"{GATHER}_out dp bwd": 2,
    f"{SCATTER}_out dp bwd": 3,
    "all_reduce dp bwd": 1,  # the gradients' norm
}
PIPELINE = {"irecv pp fwd": 4, "isend pp fwd": 4, "irecv pp bwd": 4, "isend pp bwd": 4}
PROGRAMS = {
    # wo and w2 of 2 layers; the inputs of wq, wk, wv, w1, w3
    "sharded:tensor_parallel": ("tp=4", 0, {"all_reduce tp fwd": 4, "all_reduce tp bwd": 10}),
    # Adam makes 3 all-reduces of each of 5 norms' gradients
    "sharded:sequence_parallel": ("tp=4", 0, SEQUENCE | {"all_reduce tp opt": 15}),
    "sharded:fsdp2": ("dp=4", 0, FSDP),
    "sharded:hsdp": (
        "replicate=2,shard=2",
        0,
        {
            f"{GATHER}_out shard fwd": 3,
            f"{GATHER}_out shard bwd": 2,
            f"{SCATTER}_out shard bwd": 3,
            "all_reduce_ replicate bwd": 3,
        },
    ),
    # the buffers of a batch norm, of two dtypes, and one bucket
    "replicated:ddp_adam": ("dp=4", 0, {"broadcast_ dp fwd": 2, "all_reduce_ dp bwd": 1}),
    "replicated:ddp_hooks": ("dp=4", 0, {"broadcast_ dp fwd": 2, "all_reduce_ dp bwd": 2}),
    "replicated:accumulation": ("dp=4", 0, {"broadcast_ dp fwd": 2, "all_reduce_ dp bwd": 1}),
    "pipelined:gpipe": ("pp=4", 1, PIPELINE),
    "pipelined:one_f_one_b": ("pp=4", 2, PIPELINE),
    "pipelined:interleaved": ("pp=4", 1, {k: 2 * n for k, n in PIPELINE.items()}),
    "pipelined:by_hand": ("pp=4", 1, PIPELINE),
    # 4 parameters of each of 2 layers
    "written_out:megatron": (
        "dp=2,tp=2",
        3,
        {"all_reduce tp fwd": 2, "all_reduce tp bwd": 2, "all_reduce dp bwd": 8},
    ),
    # counts, rows there and back; the first rows need no gradient
    "written_out:experts": (
        "ep=4",
        0,
        {"all_to_all_single ep fwd": 6, "all_to_all_single ep bwd": 3, "all_reduce_ ep bwd": 2},
    ),
    "written_out:context_parallel": ("cp=4", 2, {"isend cp fwd": 6, "irecv cp fwd": 6}),
    "written_out:amp": ("dp=4", 0, {"all_reduce_ dp bwd": 1}),
    # the last stage of 2: the gradients once, after the last of 4 microbatches
    "combined:pipeline_of_replicas": (
        "pp=2,dp=2",
        2,
        {"irecv pp fwd": 4, "isend pp bwd": 4, "all_reduce_ dp bwd": 1},
    ),
    # 2 layers: gathered for the first forward pass, which leaves none; each backward pass gathers
    # them anew and leaves them for the next forward pass
    "combined:pipeline_of_shards": (
        "pp=2,dp=2",
        2,
        {
            "irecv pp fwd": 4,
            "isend pp bwd": 4,
            f"{GATHER}_out dp fwd": 2,
            f"{GATHER}_out dp bwd": 8,
            f"{SCATTER}_out dp bwd": 2,
        },
    ),
    # each of 4 parameters from the rank that has stepped it
    "combined:sharded_optimizer": ("dp=4", 1, {"all_reduce_ dp bwd": 1, "broadcast_ dp opt": 4}),
    # sizes and bytes of the objects
    "combined:with_objects": (
        "dp=4",
        3,
        {
            "broadcast_ dp fwd": 2,
            "all_reduce_ dp bwd": 1,
            f"{GATHER} dp fwd": 2,
            "barrier dp fwd": 1,
        },
    ),
    # as both above, the norms' gradients and the norm along tp, two numbers to log
    "written_out:titan": (
        "dp=2,tp=2",
        0,
        FSDP | SEQUENCE | {"all_reduce tp bwd": 6, "all_reduce_ dp fwd": 2},
    ),
}


def loaded(name: str):
    module, _, function = name.partition(":")
    return programs.load(f"{FOLDER / module}.py:{function}")


def axes_of(text: str) -> dict[str, int]:
    return {axis: int(n) for axis, n in (part.split("=") for part in text.split(","))}


@pytest.mark.parametrize("name", PROGRAMS)
def test_traced_and_checked(name):
    mesh, rank, expected = PROGRAMS[name]
    build, axes = loaded(name), axes_of(mesh)
    with Board(build, axes).traced(rank) as trace:
        calls = trace.collectives
    assert Counter(f"{c.op} {c.axis} {c.phase}" for c in calls) == expected
    assert all(FOLDER.name in c.source for c in calls)
    checked = check(build, axes)
    assert checked.ok, str(checked)
    assert not any("not compared" in note for note in checked.notes)


def test_what_is_gathered_for_a_layer_is_at_its_line_in_all_phases():
    build = loaded("sharded:fsdp2")
    with Board(build, {"dp": 4}).traced(0) as trace:
        calls = [c for c in trace.collectives if c.op.endswith("_out")]
    places = {(c.module, c.source) for c in calls}
    assert {module for module, _ in places} == {"", "layers.0", "layers.1"}
    assert len(places) == 3 and len({line for _, line in places}) == 2  # a loop, and the call


@pytest.mark.parametrize("name", ["pipelined:one_f_one_b", "written_out:titan"])
def test_on_the_command_line(name, capsys):
    module, _, function = name.partition(":")
    program = [f"{FOLDER / module}.py:{function}", "--mesh", PROGRAMS[name][0], "-q"]
    assert main(["report", *program]) == FINE
    assert FOLDER.name in capsys.readouterr().out
    assert main(["check", *program]) == FINE


def test_a_stage_alone_says_what_it_needs():
    build = loaded("pipelined:gpipe")
    with fcoll.fake_world(pp=4, rank=1) as mesh:
        fn, args = build(mesh)
        with pytest.raises(NeedsPeers, match=r"between stages 0 and 1 .* rank 0, at .*pipelined"):
            fcoll.trace(fn, *args)


@pytest.mark.skipif(
    not hasattr(torch.distributed.config, "pipeline_per_edge_p2p"), reason="from torch 2.15 on"
)
def test_a_pipeline_with_a_communicator_an_edge():
    with torch.distributed.config.patch(pipeline_per_edge_p2p=True):
        fcoll.check(loaded("pipelined:one_f_one_b"), mesh={"pp": 2})


# Of a stage: torch 2.13 and 2.14 have the first, 2.15 the second.
CACHES = ("fwd_cache", "_forward_chunk_states", "bwd_cache", "output_chunks")


def test_a_pipeline_is_afterwards_as_it_was():
    build = loaded("pipelined:one_f_one_b")
    with fcoll.fake_world(pp=4, rank=0) as mesh:
        fn, args = build(mesh)
        inside = dict(zip(fn.__code__.co_freevars, fn.__closure__, strict=True))
        stage = inside["schedule"].cell_contents._stage
        before = set(vars(stage))
        traces = []
        for _ in range(2):
            with exchanging(PeerValues(_said_by_others(build))):
                traces.append(fcoll.trace(fn, *args))
            assert set(vars(stage)) == before
            assert not any(vars(stage).get(name) for name in CACHES)
            assert all(type(p) is torch.nn.Parameter for p in stage.submod.parameters())
    assert traces[0].diff(traces[1]).same and len(traces[0].collectives) == 8


def _said_by_others(build):
    board = Board(build, {"pp": 4})
    with board.traced(0):
        return board.published
