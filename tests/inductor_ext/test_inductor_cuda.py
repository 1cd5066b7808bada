"""What all-reduces of CUDA tensors are lowered to: the code that is generated, with no GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor_config
from torch._inductor import lowering
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import fcoll
import inductor_ext
from fcoll.groups import by_name
from inductor_ext import cuda, hooks
from inductor_ext.lower import lowerings, registry

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Inductor makes CUDA code with triton only"
)
Tensor = torch.Tensor
c10d = torch.ops._c10d_functional
WORLD = "0"

H100 = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)


@contextlib.contextmanager
def as_if_on_a_gpu() -> Iterator[None]:
    """All that Inductor asks of a GPU between a graph and its code."""
    facts = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, warp_size=32)
    with contextlib.ExitStack() as stack:
        for name, answer in {
            "torch._inductor.runtime.hints.DeviceProperties.create": H100,
            "torch.cuda.get_device_properties": facts,
            "torch.cuda.get_device_capability": (9, 0),
            "torch._inductor.scheduler.has_triton": True,
            "torch.utils._triton.triton_hash_with_backend": "no driver",
        }.items():
            stack.enter_context(mock.patch(name, return_value=answer))
        yield


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """8 ranks of which there is only this one, with symmetric memory if the compiler is asked."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    fcoll.symm_mem.status()
    with mock.patch.dict(cuda._enabled, {WORLD: weakref.ref(dist.group.WORLD)}):
        yield dist.group.WORLD
    dist.destroy_process_group()


def generated(
    f: Callable,
    *shapes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    passes: bool = True,
    dynamic: bool = False,
    write_back: bool = False,
    **changes: Any,
) -> str:
    """What runs at a call of f, by the passes and lowerings of "fcoll"."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    with mode, torch.no_grad(), as_if_on_a_gpu(), inductor_ext.config.patch(**changes):
        rows, *others = shapes
        first = symbolic(mode, rows) if dynamic else rows
        args = [torch.empty(shape, device="cuda:0", dtype=dtype) for shape in (first, *others)]
        gm = make_fx(f)(*args)
        if write_back:
            copy_output_to_first_input(gm.graph)
        settings = hooks.patches({"fx_graph_cache": False}) if passes else {}
        with inductor_config.patch(settings), V.set_fake_mode(mode):
            post_grad_passes(gm, is_inference=True)
            graph = GraphLowering(gm, example_inputs=args, shape_env=mode.shape_env)
            with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
                graph.run(*args)
                text = graph.codegen()[0].value
    return text[text.rindex("def call(") :].split("\nrunner")[0]


def copy_output_to_first_input(graph: torch.fx.Graph) -> None:
    """As AOTAutograd ends a graph that changes an argument: fakes of CUDA have no copy_ here."""
    first, output = next(iter(graph.nodes)), graph.output_node()
    with graph.inserting_before(output):
        copy = graph.call_function(torch.ops.aten.copy_.default, (first, output.args[0]))
    copy.meta["val"] = first.meta["val"]
    output.args = ((copy,),)


def symbolic(mode: FakeTensorMode, shape: tuple[int, ...]) -> torch.Size:
    """The shape with a first dim that may be any."""
    rest = [DimDynamic.STATIC] * (len(shape) - 1)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, *rest])
    with unset_fake_temporarily():
        x = torch.empty(shape)
    return mode.from_tensor(x, symbolic_context=context).shape


def facts(code: str) -> list[dict[str, Any]]:
    """What the code says of its collectives."""
    return [json.loads(line) for line in re.findall(r"# fcoll: (.*)", code)]


def forms(code: str) -> list[str]:
    return [entry["form"] for entry in facts(code)]


def comm_buffers(code: str) -> list[str]:
    return re.findall(r"(\w+) = empty_strided_p2p\(", code)


def reduced(code: str, op: str = "one_shot") -> list[str]:
    """The buffers that Triton kernels reduce."""
    return re.findall(rf"fcoll_triton\.{op}_all_reduce\.default\((\w+), 'sum', '0'\)", code)


# -- programs ---


def torchs(x: Tensor, op: str = "sum") -> Tensor:
    return c10d.wait_tensor(c10d.all_reduce(x, op, WORLD))


def block(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(fcoll.all_reduce(x @ w)) + 1


def torchs_block(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(torchs(x @ w)) + 1


def computed(x: Tensor, w: Tensor) -> Tensor:
    return torchs(torch.relu(x) * 2) + 1


def viewed(x: Tensor, w: Tensor) -> Tensor:
    return torchs((x @ w).view(2, 2, 64)).view(4, 64) + 1


def used_again(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w
    return torchs(h) + torch.relu(h)


def of_an_argument(x: Tensor, w: Tensor) -> Tensor:
    return fcoll.all_reduce(x) + 1


def of_an_argument_as_it_is(x: Tensor, w: Tensor) -> Tensor:
    return torchs(x)


def two_in_a_row(x: Tensor, w: Tensor) -> Tensor:
    return torchs(torch.relu(torchs(x @ w)) @ w)


SMALL = ((4, 64), (64, 64))  # 1024 bytes


# -- what the kernels serve ---


@pytest.mark.parametrize("f", (block, torchs_block))
def test_the_product_is_written_where_the_peers_read(world, f):
    code = generated(f, *SMALL)
    assert forms(code) == ["triton one-shot"]
    (buffer,) = comm_buffers(code)
    assert f"extern_kernels.mm(x_1, w_1, out={buffer})" in code
    assert reduced(code) == [buffer]
    assert not re.search(r"_c10d_functional\.\w+\.default\(", code)
    assert code.count(".run(") == 1  # relu and + 1


@pytest.mark.parametrize("f", (block, torchs_block))
def test_from_a_size_on_it_is_two_shot(world, f):
    code = generated(f, *SMALL, cuda_one_shot_bytes={2: 1023})
    assert forms(code) == ["triton two-shot"]
    assert facts(code)[0]["why"] == "1024 bytes are more than the 1023 of one-shot"
    assert reduced(code, "two_shot") == comm_buffers(code)
    assert "wait_tensor" not in code


def test_a_kernel_writes_where_the_peers_read(world):
    code = generated(computed, *SMALL)
    (buffer,) = comm_buffers(code)
    assert re.search(rf"\.run\(x_1, {buffer}, 256", code)
    assert reduced(code) == [buffer]


def test_a_view_of_the_product(world):
    code = generated(viewed, *SMALL)
    (buffer,) = comm_buffers(code)
    assert f"extern_kernels.mm(x_1, w_1, out={buffer})" in code
    assert f"one_shot_all_reduce.default(reinterpret_tensor({buffer}, (2, 2, 64)" in code


@pytest.mark.parametrize("f", (used_again, of_an_argument, of_an_argument_as_it_is))
def test_what_others_use_is_copied(world, f):
    code = generated(f, *SMALL)
    (buffer,) = comm_buffers(code)
    assert f"out={buffer})" not in code
    assert re.search(rf"\.run\(\w+, {buffer}, 256", code)
    assert reduced(code) == [buffer]


def test_an_argument_is_written(world):
    """torch's all-reduce becomes one in place, as what is written is its argument."""
    code = generated(of_an_argument_as_it_is, *SMALL, write_back=True)
    assert facts(code)[0]["op"] == "all_reduce_"
    (result,) = re.findall(r"(\w+) = torch.ops.fcoll_triton", code)
    names = re.findall(rf"(\w+) = {result}$", code, re.M) or [result]  # from torch 2.14 on
    assert re.search(rf"\.run\({names[0]}, x_1, 256", code)


def test_comm_buffers_are_used_again(world):
    code = generated(two_in_a_row, *SMALL)
    assert forms(code) == ["triton one-shot"] * 2
    (first,) = comm_buffers(code)
    again = re.search(rf"(\w+) = {first}; del {first}", code)
    assert reduced(code) == [first, again[1]]


# -- what is left to stock Inductor, and why ---


def left_to_stock(code: str) -> str:
    """The reason."""
    assert "empty_strided_p2p" not in code and "fcoll_triton" not in code
    assert code.count("wait_tensor.default(") == 1
    assert forms(code) == ["stock"]
    return facts(code)[0]["why"]


@pytest.mark.parametrize("f", (block, torchs_block))
@pytest.mark.parametrize(
    "changes, why",
    [
        ({"form": "kernel"}, 'inductor_ext.config.form = "kernel"'),
        (
            {"cuda_one_shot_bytes": {2: 100}, "cuda_two_shot_bytes": {2: 1023}},
            "1024 bytes are more than the 1023 of 8 ranks",
        ),
        ({"dtype": torch.int16}, "sum of torch.int16 is not one of the Triton kernels'"),
        ({"dynamic": True}, "its size is not known when the graph is compiled"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_why_not(world, f, changes, why):
    assert left_to_stock(generated(f, *SMALL, **changes)) == why


def test_other_reductions(world):
    code = generated(lambda x, w: torchs(x @ w, "band"), *SMALL, dtype=torch.int32)
    assert left_to_stock(code) == "band is not a reduction of the Triton kernels"


def test_a_group_without_symmetric_memory(world):
    cuda.disable()
    why = left_to_stock(generated(torchs_block, *SMALL))
    assert why == "its group has no symmetric memory on CUDA: see inductor_ext.cuda.enable"


def test_a_new_group_of_the_same_name_has_none(world):
    assert cuda.is_enabled(by_name(WORLD))
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    assert not cuda.is_enabled(by_name(WORLD))


def test_graphs_that_the_passes_have_not_seen(world):
    hooks.prepare()
    code = generated(torchs_block, *SMALL, passes=False)
    assert "_c10d_functional.all_reduce_.default(" in code and "fcoll" not in code


def test_stock_is_put_back(world):
    hooks.prepare()
    ours = {op: lowering.lowerings[op] for op in lowerings.TORCHS}
    registry.unregister()
    try:
        assert all(lowering.lowerings[op] is not ours[op] for op in ours)
        assert "_c10d_functional.all_reduce_.default(" in generated(
            torchs_block, *SMALL, passes=False
        )
    finally:
        registry.register()


def test_caches_tell_groups_with_symmetric_memory(world):
    before = inductor_ext.config.key()
    cuda.disable()
    assert inductor_ext.config.key() != before


# -- which groups have symmetric memory ---


def enabled_without_a_gpu(rank: int) -> tuple[str, bool]:
    return cuda.enable(), cuda.is_enabled(by_name(WORLD))


def test_without_a_gpu_nothing_is_enabled(ranks2):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert ranks2.run(enabled_without_a_gpu) == [("rank 0: there is no GPU", False)] * 2


def enabled_where_it_works_on(rank: int, ranks: set[int]) -> tuple[str, bool]:
    with (
        mock.patch.object(cuda, "_lacks", return_value=""),
        mock.patch.object(cuda, "_fails", return_value="" if rank in ranks else "no way"),
    ):
        why = cuda.enable()
    found = cuda.is_enabled(by_name(WORLD))
    cuda.disable()
    assert not cuda.is_enabled(by_name(WORLD))
    return why, found


def test_all_ranks_agree(ranks2):
    assert ranks2.run(enabled_where_it_works_on, {0, 1}) == [("", True)] * 2
    assert ranks2.run(enabled_where_it_works_on, {0}) == [("rank 1: no way", False)] * 2


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from inductor_ext.lower import cuda, registry, triton_ops
registry.register()
assert not triton_ops.has_triton()
print(cuda._lacks(None))
"""


def test_without_triton():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "triton is not installed\n", done.stderr
