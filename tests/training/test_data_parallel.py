"""fcoll.DataParallel beyond what torch's module does: hooks, dtypes, buffers, errors, compiled."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, quantization_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_localSGD
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
from torch.nn.parallel import DistributedDataParallel

import fcoll
from fcoll.errors import BadCommHook, ParametersDiffer


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def batch(rank: int, step: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 4, generator=made)


def gradients(module: nn.Module, rank: int, steps: int = 1, call=None) -> list[torch.Tensor]:
    for step in range(steps):
        module.zero_grad()
        (module if call is None else call)(batch(rank, step)).square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def close(found, wanted, tol=1e-5) -> bool:
    return all(torch.allclose(a, b, tol, tol) for a, b in zip(found, wanted, strict=True))


def compiled(module: nn.Module, backend: str = "aot_eager"):
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, backend=backend)


def parts(rank: int) -> None:
    """All in one call: a pool's ranks are busy for as long as their slowest part."""
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    wanted = gradients(DistributedDataParallel(model()), rank, 2)

    # state dicts, in both directions
    ours, theirs = fcoll.DataParallel(model()), DistributedDataParallel(model())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert isinstance(ours, DistributedDataParallel)

    # a functional hook, in eager and compiled
    def halved(flat):
        return fcoll.all_reduce(flat, "avg") / 2

    half = fcoll.DataParallel(model(), comm_hook=halved)
    assert close(gradients(half, rank, 2), [g / 2 for g in wanted])
    half = fcoll.DataParallel(model(), comm_hook=halved)
    assert close(gradients(half, rank, 2, compiled(half)), [g / 2 for g in wanted])

    # mixed precision: parameters and gradients keep their dtype
    for way in ("eager", "compiled"):
        narrow = fcoll.DataParallel(model(), mixed_precision=torch.bfloat16)
        call = compiled(narrow) if way == "compiled" else narrow
        assert call(batch(rank)).dtype is torch.bfloat16
        found = gradients(narrow, rank, 2, call)
        assert {g.dtype for g in found} == {torch.float32} and close(found, wanted, 0.5)
    precision = fcoll.MixedPrecision(reduce_dtype=torch.float16)
    reduced = gradients(fcoll.DataParallel(model(), mixed_precision=precision), rank, 2)
    assert close(reduced, wanted, 0.02) and not close(reduced, wanted, 1e-7)

    # rank 0's buffers in every forward pass, or only its own
    for call_of in (lambda m: m, compiled):
        synced = fcoll.DataParallel(model())
        gradients(synced, rank, 2, call_of(synced))
        call_of(synced)(batch(rank))
        mean = synced.module[1].running_mean.clone()
        before = fcoll.all_gather_into_tensor(mean[None])
        alone = fcoll.DataParallel(model(), broadcast_buffers=False)
        gradients(alone, rank, 2, call_of(alone))
        after = fcoll.all_gather_into_tensor(alone.module[1].running_mean[None])
        assert before.shape == after.shape and not torch.equal(after[0], after[1])
        synced.module[1].running_mean.fill_(rank)
        gradients(synced, rank, 1, call_of(synced))
        momentum = 0.9 * torch.zeros(4) + 0.1 * synced.module[0](batch(rank)).mean(0)
        assert torch.allclose(synced.module[1].running_mean, momentum, 1e-4, 1e-4)

    # a hook with futures is not compiled
    hooked = fcoll.DataParallel(model())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    assert close(gradients(hooked, rank, 2), wanted)
    with pytest.raises(BadCommHook, match="comm_hook="):
        compiled(hooked)(batch(rank))


def test_parts(shared2):
    shared2.run(parts, timeout=150)


def torchs_hooks(rank: int) -> dict[str, bool]:
    """Each of torch's comm hooks gives on our reducer what it gives on torch's."""
    world = dist.group.WORLD
    hooks = {
        "allreduce": (lambda: None, default_hooks.allreduce_hook),
        "fp16": (lambda: None, default_hooks.fp16_compress_hook),
        "wrapper": (lambda: None, default_hooks.fp16_compress_wrapper(post_local)),
        "PowerSGD": (lambda: powerSGD.PowerSGDState(world, 1, 2), powerSGD.powerSGD_hook),
        "post-localSGD": (
            lambda: post_localSGD.PostLocalSGDState(world, world, 2),
            post_localSGD.post_localSGD_hook,
        ),
        "quantized": (lambda: world, quantization_hooks.quantization_pertensor_hook),
        "ALLREDUCE": (None, dist.BuiltinCommHookType.ALLREDUCE),
        "FP16_COMPRESS": (None, dist.BuiltinCommHookType.FP16_COMPRESS),
    }
    return {name: same(rank, state, hook) for name, (state, hook) in hooks.items()}


def post_local(state, bucket):
    return default_hooks.allreduce_hook(state, bucket)


def same(rank: int, state, hook) -> bool:
    both = []
    for wrap in (DistributedDataParallel, fcoll.DataParallel):
        module = wrap(model())
        if state is None:
            module._register_builtin_comm_hook(hook)
        else:
            module.register_comm_hook(state(), hook)
        torch.manual_seed(0)
        try:
            both.append(gradients(module, rank, 4))
        except RuntimeError as error:  # quantized: torch's hook is for NCCL alone
            both.append(str(error).splitlines()[0])
    if isinstance(both[0], str):
        return both[0] in both[1]
    return close(*both, 1e-5)


def test_torchs_hooks(shared2):
    for found in shared2.run(torchs_hooks, timeout=120):
        assert all(found.values()), found


def differing(rank: int) -> str:
    layers = [nn.Linear(4, 4), nn.Linear(4, 5)]
    with pytest.raises(ParametersDiffer) as raised:
        fcoll.DataParallel(nn.Sequential(*(layers[::-1] if rank else layers)))
    return str(raised.value)


def test_parameters_in_another_order_are_an_error_on_all_ranks(ranks2):
    for rank, text in enumerate(ranks2.run(differing)):
        assert f"[{rank}]: params[0] (0.weight)" in text and f"process {1 - rank}" in text


def accelerated(rank: int) -> None:
    theirs = dist.Reducer
    outer = fcoll.accelerate_ddp()
    with pytest.raises(ZeroDivisionError), fcoll.accelerate_ddp():
        ours = DistributedDataParallel(model())
        _ = 1 // 0
    assert dist.Reducer is fcoll.Reducer
    outer.undo()
    assert dist.Reducer is theirs
    outer.undo()  # once is enough
    torchs = DistributedDataParallel(model())
    assert isinstance(ours.reducer, fcoll.Reducer) and not isinstance(torchs.reducer, fcoll.Reducer)
    assert close(gradients(ours, rank, 3), gradients(torchs, rank, 3))


def test_torchs_module_is_accelerated_until_it_is_undone(shared2):
    shared2.run(accelerated)
