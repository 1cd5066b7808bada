"""A prediction beside a real run: profiles of 2 gloo ranks, NCCL kernels as published, Nsight."""

from __future__ import annotations

import gzip
import json
import sqlite3
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import timelines
import torch
from timelines import many
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

import fcoll
from fcoll.cli import main
from fcoll.errors import BadProfile
from fcoll.report import html
from fcoll.report.against import against, page_data, render
from fcoll.report.observed import kind_of, read
from fcoll.scheduling.timeline import timeline
from fcoll.tracing.peers import Board

STEPS = 3

# -- real runs ---


def ddp(mesh):
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return step, (torch.randn(8, 64),)


def calls(mesh):
    w = torch.randn(64, 64, requires_grad=True)

    def step(x):
        y = fcoll.all_reduce(x @ w, "sum")
        z = fcoll.all_gather_into_tensor(y * 2)
        loss = fcoll.reduce_scatter_tensor(z @ w, "sum").sum()
        loss.backward()
        return loss

    return step, (torch.randn(8, 64),)


def profiled(rank, build, path, marked=False):
    """Three steps of a program, as a user profiles them; marked by p.step()."""
    step, args = build(None)
    for _ in range(2):  # DDP orders its buckets anew after the first
        step(*args)
    steps = schedule(wait=1, warmup=1, active=STEPS) if marked else None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=steps) as p:
        for _ in range(STEPS + 2 * marked):
            step(*args)
            if marked:
                p.step()
            if rank == 0 and p.step_num == STEPS + 2:
                p.export_chrome_trace(path)
    if rank == 0 and not marked:
        p.export_chrome_trace(path)


def predicted(build):
    with Board(build, {"dp": 2}, "joint").traced(0) as trace:
        _ = trace.steps
        return timeline(trace, "cpu-gloo", waits="first use")


@pytest.mark.parametrize(
    ("build", "marked"),
    [(ddp, False), (calls, False), (ddp, True)],
    ids=["ddp", "fcoll", "ddp, marked steps"],
)
def test_a_profile_of_two_gloo_ranks(ranks2, tmp_path, build, marked):
    path = str(tmp_path / "trace.json.gz")
    ranks2.run(profiled, build, path, marked)
    line = predicted(build)
    found = against(line, path)
    assert found.same and len(found.steps) == STEPS and found.run.rank == 0
    assert len(found.run.marks) == (STEPS if marked else 0)
    assert sorted(found.calls) == [c.id for c in line.collectives]
    for i, seen in found.calls.items():
        assert seen.us > 0 and -1e-6 <= seen.exposed_us <= seen.us
        assert seen.bytes == line.issued[i].bytes
    ops = [kind_of(line.issued[i].op) for i in sorted(found.found[0])]
    assert ops == [found.found[0][i].kind for i in sorted(found.found[0])]
    assert f"({STEPS} steps, medians of each call)" in render(found)


def test_a_run_of_another_program_is_told(ranks2, tmp_path):
    path = str(tmp_path / "trace.json")
    ranks2.run(profiled, ddp, path)
    found = against(predicted(calls), path)
    assert not found.same
    said = render(found)
    assert "predicted, not in the run:" in said and "reduce_scatter_tensor of 4 KiB over dp" in said


# -- GPUs: the names and arguments that torch.profiler writes ---


def nccl(name, ts, dur, stream=20, **told):
    args = {"stream": stream, "device": 0, **told}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts} | {
        "dur": dur,
        "args": args,
    }


def told(collective, elements, ranks, dtype="Float", **more):
    return {
        "Collective name": collective,
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "Group size": len(ranks),
        "dtype": dtype,
        "Process Group Ranks": str(list(ranks)),
        "Process Group Description": "mesh_tp",
        **more,
    }


def gpu_trace(tmp_path, events, name="gpu.json"):
    path = tmp_path / name
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0}}))
    return path


MM = "sm90_xmma_gemm_bf16bf16_bf16f32"


def test_nccl_kernels_are_matched_by_kind_size_and_group(tmp_path):
    """overlapped: r on tp, s and t on dp; here of other sizes and groups, in another order."""
    line = timelines.overlapped()
    groups = {"tp": (0, 1, 2, 3), "dp": (0, 4, 8, 12)}
    sizes = {0: 4 << 20, 1: 1 << 20, 2: 2 << 20}
    line = replace(
        line,
        collectives=tuple(
            replace(c, ranks=groups[c.axis], bytes=sizes[c.id]) for c in line.collectives
        ),
    )
    ring = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        nccl(MM, 100, 30, stream=7),
        nccl(ring, 120, 4, 24, **told("allreduce", 1 << 18, groups["dp"])),
        nccl(ring, 124, 20, 24, **told("allreduce", 1 << 19, groups["dp"])),
        nccl(ring, 125, 30, 20, **told("allreduce", 1 << 20, groups["tp"])),
    ]
    found = against(line, gpu_trace(tmp_path, events))
    assert {i: m.us for i, m in found.calls.items()} == {0: 30, 1: 4, 2: 20}
    assert {i: m.exposed_us for i, m in found.calls.items()} == {0: 25, 1: 0, 2: 14}
    assert found.same and found.run.tool == "PyTorch profiler, GPU"
    assert {r.axis: (r.us, r.measured_us) for r in found.rows} == {"dp": (20, 24), "tp": (15, 30)}


def test_steps_are_those_that_the_profiler_marked(tmp_path):
    line = many(2)
    events = []
    for k in range(4):  # the last is cut off
        mark = {"ph": "X", "cat": "gpu_user_annotation", "name": f"ProfilerStep#{k}", "pid": 0}
        events.append({**mark, "tid": 7, "ts": 1000.0 * k, "dur": 900.0})
        for i in range(2 if k < 3 else 1):
            kernel = nccl("ncclKernel_AllReduce_RING_LL_Sum_float", 1000 * k + 100 * i, 10 + k)
            events.append(kernel)
    found = against(line, gpu_trace(tmp_path, events))
    assert len(found.steps) == 3 and [m.us for m in found.calls.values()] == [11, 11]
    assert any("step: predicted" in n and "measured 900 us" in n for n in found.notes)
    assert any("the file tells no sizes" in n for n in found.notes)


def test_what_one_of_them_lacks_is_told(tmp_path):
    line = many(3)  # three all-reduces of 4 MiB
    events = [
        nccl("ncclDevKernel_AllReduce_x", 0, 5, **told("allreduce", 1 << 20, range(4))),
        nccl("ncclDevKernel_AllReduce_x", 10, 5, **told("allreduce", 1 << 10, range(4))),
        nccl("ncclDevKernel_AllReduce_x", 20, 5, **told("allreduce", 1 << 20, range(4))),
        nccl("ncclDevKernel_AllReduce_x", 30, 5, **told("allreduce", 1 << 20, range(4))),
        nccl("ncclDevKernel_Broadcast_RING_LL", 40, 5, **told("broadcast", 256, range(4))),
    ]
    found = against(line, gpu_trace(tmp_path, events))
    assert sorted(found.calls) == [0, 1, 2] and len(found.extra) == 2
    note = next(n for n in found.notes if n.startswith("in the run, not predicted"))
    assert "all_reduce of 4 KiB over mesh_tp" in note and "broadcast of 1 KiB" in note
    fewer = against(line, gpu_trace(tmp_path, events[:1]))
    assert len(fewer.missing) == 2
    assert any("2 x all_reduce of 4 MiB" in n or "all_reduce of 4 MiB" in n for n in fewer.notes)
    half = nccl("ncclDevKernel_AllReduce_x", 0, 5, **told("allreduce", 1 << 20, range(4), "Half"))
    other = against(many(1), gpu_trace(tmp_path, [half]))
    assert any(n.startswith("other sizes: all_reduce of 4 MiB") for n in other.notes)


def test_calls_on_cpus(tmp_path):
    """An op that calls itself is one call; a backend that tells nothing leaves the calls' times."""
    facts = {"Input Dims": [[[1024, 1024]]], "Input type": ["TensorList"]}
    outer = {"ph": "X", "cat": "cpu_op", "name": "c10d::allreduce_", "pid": 1, "tid": 1}
    outer |= {"ts": 100.0, "dur": 50.0, "args": facts}
    inner = {**outer, "ts": 110.0, "dur": 30.0}
    gloo = {**outer, "cat": "user_annotation", "name": "gloo:all_reduce", "tid": 2, "ts": 120.0}
    gloo |= {"dur": 60.0, "args": {"Input type": ["float"]}}
    mm = {**outer, "name": "aten::mm", "ts": 150.0, "dur": 10.0, "args": {}}
    found = against(many(1), gpu_trace(tmp_path, [outer, inner, gloo, mm]))
    assert found.same and found.run.tool == "PyTorch profiler, CPU"
    assert vars(found.calls[0]) == {"us": 60, "exposed_us": 50, "bytes": 4 << 20}
    silent = against(many(1), gpu_trace(tmp_path, [outer, inner, mm]))
    assert vars(silent.calls[0]) == {"us": 50, "exposed_us": 50, "bytes": None}


def test_calls_on_shared_memory(tmp_path):
    facts = {"Input Dims": [[1024, 1024], [], []], "Input type": ["float", "", ""]}
    outer = {"ph": "X", "cat": "cpu_op", "name": "fcoll::all_reduce", "pid": 1, "tid": 1}
    outer |= {"ts": 100.0, "dur": 50.0, "args": facts}
    inner = {**outer, "ts": 110.0, "dur": 30.0}
    waits = {**outer, "name": "fcoll::wait_tensor", "ts": 200.0}
    found = against(many(1), gpu_trace(tmp_path, [outer, inner, waits]))
    assert vars(found.calls[0]) == {"us": 50, "exposed_us": 50, "bytes": 4 << 20}
    assert found.same and any("without their waits" in note for note in found.notes)
    gather = {**outer, "name": "fcoll::all_gather_into_tensor"}
    assert read(gpu_trace(tmp_path, [gather])).collectives[0].bytes is None


# -- the command ---


def test_the_command(tmp_path, capsys):
    kernels = [nccl("ncclDevKernel_AllReduce_x", 100 + 40 * i, 30) for i in range(3)]
    path, page = str(gpu_trace(tmp_path, kernels)), str(tmp_path / "page.html")
    asked = ["report", "--demo", "tiny", "--mesh", "tp=2", "--against", path, "--html", page, "-q"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert (
        "against gpu.json · PyTorch profiler, GPU:" in said and "predicted, not in the run" in said
    )
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"]["same"] is False
    assert main([*asked[:5], "--against", str(tmp_path / "none.json")]) == 2
    assert "BadProfile" in capsys.readouterr().err


# -- Nsight Systems ---


def test_nsight_sqlite(tmp_path):
    path = tmp_path / "run.sqlite"
    base = sqlite3.connect(path)
    base.execute("create table StringIds(id integer, value text)")
    columns = (
        "start integer, end integer, shortName integer, demangledName integer, streamId integer"
    )
    base.execute(f"create table CUPTI_ACTIVITY_KIND_KERNEL({columns})")
    base.execute("create table NVTX_EVENTS(start integer, end integer, text text, textId integer)")
    names = {1: MM, 2: "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"}
    base.executemany("insert into StringIds values(?, ?)", names.items())
    kernel = "insert into CUPTI_ACTIVITY_KIND_KERNEL values(?, ?, ?, ?, 7)"
    for k in range(2):
        zero = 1_000_000 * k
        base.execute("insert into NVTX_EVENTS values(?, ?, ?, null)",
                     (zero, zero + 900_000, f"ProfilerStep#{k}"))  # fmt: skip
        base.execute(kernel, (zero + 1000, zero + 21_000, 1, 1))
        for i in range(2):
            base.execute(kernel, (zero + 11_000 + 20_000 * i, zero + 31_000 + 20_000 * i, 2, 2))
    base.commit()
    base.close()
    found = against(many(2), path)
    assert found.run.tool == "Nsight Systems" and len(found.steps) == 2
    assert [m.us for m in found.calls.values()] == [20, 20]
    assert [m.exposed_us for m in found.calls.values()] == [10, 20]


# -- files that are none, and the page ---


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"no json", b"[1]", b'{"traceEvents": []}', b"SQLite format 3\0 but not really",
     gzip.compress(b"x", mtime=0), b"\x1f\x8b cut off",
     b'{"traceEvents": [{"ph": "X", "ts": 1, "name": "a"}]}'],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(BadProfile, match="export_chrome_trace"):
        read(path)
    with pytest.raises(BadProfile):
        read(tmp_path / "none")


def test_the_page_shows_the_run(tmp_path):
    line = timelines.overlapped()
    kernels = [nccl("ncclDevKernel_AllReduce_x", 100 + 40 * i, 30) for i in range(3)]
    found = against(line, gpu_trace(tmp_path, kernels))
    data = page_data(line, found)
    assert data["calls"] == {0: [30, 30], 1: [30, 30], 2: [30, 30]}
    assert data["lanes"][0]["spans"][0] == [10, 40, 0]  # begins where it was predicted
    page = html.render(line, run=found)
    shown = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])
    assert shown["run"]["rows"][0]["ratio"] == pytest.approx(3.0)
    assert json.loads(json.dumps(found.as_dict()))["same"] is True
    assert str(found) == render(found)
    notebook = ElementTree.fromstring(f"<p>{found._repr_html_()}</p>")
    assert len(notebook.findall("table/tr")) == 1 + len(found.rows)
