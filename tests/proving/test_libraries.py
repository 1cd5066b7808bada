"""What libraries do in a step that is proved: by small programs, and by the libraries themselves,
where they are installed."""

from __future__ import annotations

import importlib
import importlib.util
import struct
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fcoll

CLIENTS = Path(__file__).parents[2] / "examples" / "clients"


def summed(mesh, model, forward, *, optimizer=None):
    """A step of data parallel training."""

    def step(x):
        loss = forward(model, x).square().mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    torch.manual_seed(1)
    return step, (torch.randn(4, 4).chunk(mesh.size())[mesh.get_rank()],)


class Wrapping(torch.optim.Optimizer):
    """As accelerate's: it has no hooks of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()


def wrapped_optimizer(mesh):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = Wrapping(torch.optim.AdamW(model.parameters(), lr=0.1))
    return summed(mesh, model, lambda m, x: m(x), optimizer=optimizer)


def sizes_on_meta(mesh):
    """transformers asks an empty tensor for its strides."""
    torch.manual_seed(0)
    return summed(
        mesh,
        nn.Linear(4, 2),
        lambda m, x: m(x).as_strided((x.shape[0], 2), torch.empty(9, 2, device="meta").stride()),
    )


def weights_of_a_file(mesh):
    """safetensors takes bytes for floats."""
    numbers = bytearray(struct.pack("8f", *range(8)))
    weight = torch.frombuffer(numbers, dtype=torch.uint8).view(torch.float32).view(2, 4)
    assert weight.dtype == torch.float64 and weight[1, 3] == 7
    assert weight.view(torch.int64).dtype == torch.int64
    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(weight)
    return summed(mesh, model, lambda m, x: m(x))


def buffer_on_the_gpu(mesh):
    """Megatron's layers make theirs on torch.cuda.current_device()."""
    torch.manual_seed(0)

    def forward(model, x):
        rows = torch.empty(x.shape, dtype=x.dtype, device=torch.cuda.current_device())
        return model(rows.copy_(x))

    return summed(mesh, nn.Linear(4, 2), forward)


def names_of_its_own(mesh):
    """Megatron's DistributedDataParallel has a list where modules have the method."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2).eval())
    model.buffers = []
    return summed(mesh, model, lambda m, x: m(x))


PROGRAMS = (
    wrapped_optimizer,
    sizes_on_meta,
    weights_of_a_file,
    buffer_on_the_gpu,
    names_of_its_own,
)


@pytest.mark.parametrize("build", PROGRAMS, ids=lambda build: build.__name__)
def test_as_libraries_do_it(build):
    if build is buffer_on_the_gpu and torch.cuda.is_available():
        pytest.skip("there the GPU's number is the answer")
    verdict = fcoll.prove(build, {"dp": 2})
    assert verdict.equal, str(verdict)
    if build is wrapped_optimizer:  # its gradients are cleared: taken before the step
        assert verdict.compared["gradients"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the GPU's number is the answer")
def test_a_group_of_another_backend_is_traced():
    """Megatron makes a gloo group beside each of the world's backend."""

    def build(mesh):
        group = dist.new_group([0, 1], backend="gloo")

        def step(x):
            y = x.to(torch.cuda.current_device())  # the CPU, where there is no GPU
            dist.all_reduce(y, group=group)
            return y

        return step, (torch.ones(2),)

    assert fcoll.check(build, {"dp": 2}, values=True).calls == 2


# -- the libraries ---

MESH = {"dp": 2, "tp": 2}


@cache
def client(name: str, package: str):
    """A module of examples/clients; the test is skipped where its library is not installed."""
    try:
        found = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{package} is not installed")
    spec = importlib.util.spec_from_file_location(name, CLIENTS / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["plain", "tensor_parallel", "finalized"])
def test_megatron_is_proved(name):
    verdict = fcoll.prove(getattr(client("megatron_prove", "megatron.core"), name), MESH)
    assert verdict.equal, str(verdict)
    from megatron.core import parallel_state

    assert not parallel_state.model_parallel_is_initialized()


@pytest.mark.filterwarnings("ignore")
def test_megatron_smooths_labels_over_the_local_vocabulary():
    """NVIDIA/Megatron-LM#737"""
    verdict = fcoll.prove(client("megatron_prove", "megatron.core").smoothed, MESH)
    assert verdict.equal is False
    names = [d.name for d in verdict.differences]
    assert names[:2] == ["result of mul", "loss"]  # 1 - label_smoothing * vocab_size / ...
    assert verdict.differences[0].line.endswith("cross_entropy.py:182")
    assert len([n for n in names if n.startswith("gradient")]) == 3


@pytest.mark.filterwarnings("ignore")
def test_megatron_norms_without_their_all_reduce():
    verdict = fcoll.prove(client("megatron_prove", "megatron.core").not_finalized, MESH)
    assert verdict.equal is False
    names = {d.name for d in verdict.differences}
    assert names == {"gradient of norm.weight", "gradient of down.bias"}
    assert 'an all-reduce over "tp" is missing' in str(verdict)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["plain", "finalized"])
def test_megatron_is_checked(name):
    build = getattr(client("megatron_prove", "megatron.core"), name)
    assert fcoll.check(build, MESH, values=True).ok


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("synced", [True, False])
def test_accelerate(synced):
    accelerate = pytest.importorskip("accelerate")

    def build(mesh):
        accelerator = accelerate.Accelerator(cpu=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert accelerator.num_processes == mesh.size()
        assert accelerator.process_index == mesh.get_rank()

        def step(x):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return accelerator.gather(loss).mean()

        def unsynced(x):
            with accelerator.no_sync(model):
                return step(x)

        torch.manual_seed(1)
        x = torch.randn(8, 4).chunk(mesh.size())[mesh.get_rank()]
        return step if synced else unsynced, (x,)

    verdict = fcoll.prove(build, {"dp": 2})
    assert verdict.equal is synced, str(verdict)
    assert accelerate.state.PartialState._shared_state == {}


@pytest.mark.filterwarnings("ignore")
def test_transformers_tensor_parallel(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from transformers.distributed import DistributedConfig

    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads of a rank know no groups
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def build(mesh):
        tp = mesh.size()
        plan = {"distributed_config": DistributedConfig(tp_size=tp, tp_plan="auto")}
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(tmp_path, dtype=torch.float64, **(plan if tp > 1 else {}))

        def step(tokens):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            return loss

        return step, (torch.arange(8).view(2, 4) * 5 % 16,)

    verdict = fcoll.prove(build, {"tp": 2})
    assert verdict.equal and verdict.compared["gradients"] == 12, str(verdict)
