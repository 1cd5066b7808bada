"""Modules with sharded parameters: one, or all of a plan; their outputs and their state dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fcoll.groups import GroupLike
from fcoll.sharded._torch import ChunkShardingSpec, Sharder, ShardingPlan, ShardingSpec
from fcoll.sharded.creators import shard_tensor
from fcoll.sharded.errors import (
    BadSharderPath,
    BadShards,
    NoSuchParameter,
    PlanConflict,
    WrongKindInPlan,
)
from fcoll.sharded.redistribution import reshard
from fcoll.sharded.sharded_tensor import ShardedTensor
from fcoll.sharded.shards import same_layout


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: GroupLike = None,
) -> None:
    """Replace a parameter by one that is sharded: that of rank ``src_rank`` of the group, cut by
    the spec. A frozen parameter stays frozen.

    >>> layer = torch.nn.Linear(4, 2 * n)
    >>> fcoll.sharded.shard_parameter(layer, "weight", fcoll.sharded.chunk(0, n))
    >>> layer.weight.local_tensor().shape, isinstance(layer.weight, torch.nn.Parameter)
    (torch.Size([2, 4]), True)
    """
    tensor = _parameter(module, param_name)
    sharded = shard_tensor(tensor.detach(), sharding_spec, src_rank, process_group)
    trained = tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    module.register_parameter(param_name, nn.Parameter(sharded, trained))


def _parameter(module: nn.Module, name: str) -> Tensor:
    """The parameter, if it can be sharded."""
    kind = type(module).__name__
    if not hasattr(module, name):
        names = ", ".join(n for n, _ in module.named_parameters(recurse=False)) or "none"
        raise NoSuchParameter(module=kind, name=name, found=f"the parameters {names}")
    tensor = getattr(module, name)
    if not isinstance(tensor, Tensor):
        why = f"Expected {kind}.{name} to be a Tensor, but found {type(tensor).__name__}"
        raise BadShards(why=why, hint="Name a parameter.")
    if isinstance(tensor, ShardedTensor):
        hint = "Use its reshard(spec) to cut it another way."
        raise BadShards(why=f"{kind}.{name} is sharded already", hint=hint)
    if not tensor.is_contiguous():
        why = f"param: {name} is not a contiguous Tensor"
        raise BadShards(why=why, hint="Replace it by nn.Parameter(x.contiguous()).")
    return tensor


def shard_module(
    module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: GroupLike = None
) -> None:
    """Shard what the plan names: parameters by a spec, modules by a Sharder of yours; reshard the
    outputs in its ``output_plan``, and return this rank's part of those in
    ``return_local_tensor``.

    The plan is checked before anything is done.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2 * n), torch.nn.Linear(2 * n, 4))
    >>> rows = fcoll.sharded.chunk(0, n)
    >>> fcoll.sharded.shard_module(model, fcoll.sharded.ShardingPlan({"0.weight": rows}))
    >>> model[0].weight.local_tensor().shape, model[1].weight.shape == (4, 2 * n)
    (torch.Size([2, 4]), True)
    """
    _check(module, plan)
    for path, how in plan.plan.items():
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        if isinstance(how, ShardingSpec):
            shard_parameter(owner, name, how, src_rank, process_group)
            continue
        replacement = how.shard(module.get_submodule(path))
        # one without a forward only holds what the old one computes with, which it has sharded
        if type(replacement).forward is not nn.Module.forward:
            setattr(owner, name, replacement)
    for path, spec in (plan.output_plan or {}).items():
        reshard_output(module.get_submodule(path), spec)
    for path in plan.return_local_tensor or []:
        collect_local_shard(module.get_submodule(path))


def _check(module: nn.Module, plan: ShardingPlan) -> None:
    sharders = [path for path, how in plan.plan.items() if isinstance(how, Sharder)]
    for path, how in plan.plan.items():
        parent, _, name = path.rpartition(".")
        if isinstance(how, Sharder):
            if path == "":
                why = "Module path must not be empty for custom sharder!"
                raise BadSharderPath(why=why, hint="Name a module inside the one given.")
            module.get_submodule(path)
        elif isinstance(how, ShardingSpec):
            if above := next((s for s in sharders if f"{parent}.".startswith(f"{s}.")), None):
                why = (
                    f"ShardingPlan is in-valid, trying to shard a parameter: {path}, but there's "
                    f"already a Sharder entry for module {above}, parameter sharding should not "
                    "conflict with the submodule tree that a Sharder is working with!"
                )
                raise PlanConflict(why=why, hint="Leave one of them out.")
            _parameter(module.get_submodule(parent), name)
        else:
            why = f"Only `ShardingSpec` and `Sharder` are supported to shard '{path}'"
            raise WrongKindInPlan(why=why, hint=f"The plan has a {type(how).__name__}.")
    for path, spec in (plan.output_plan or {}).items():
        if not isinstance(spec, ShardingSpec):
            why = f"Only `ShardingSpec` is supported as output_plan for '{path}'"
            raise WrongKindInPlan(why=why, hint=f"The plan has a {type(spec).__name__}.")
        module.get_submodule(path)
    for path in plan.return_local_tensor or []:
        module.get_submodule(path)


def reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Cut what the module returns by this spec, if it is a sharded tensor; the module itself comes
    back, with the hook that does it."""

    def change(output: ShardedTensor) -> ShardedTensor:
        same = same_layout(output.sharding_spec(), resharding_spec)
        return output if same else reshard(output, resharding_spec)

    return _change_output(module, change)


def collect_local_shard(module: nn.Module) -> nn.Module:
    """Return only this rank's part of a sharded output; of chunks of one row the row, without the
    dim. The module itself comes back, with the hook that does it.

    >>> module = torch.nn.Identity()
    >>> _ = fcoll.sharded.collect_local_shard(module)
    >>> module(fcoll.sharded.ones(fcoll.sharded.chunk(0, n), n, 3))
    tensor([1., 1., 1.])
    """

    def change(output: ShardedTensor) -> Tensor:
        spec, local = output.sharding_spec(), output.local_tensor()
        if isinstance(spec, ChunkShardingSpec) and local.size(spec.dim) == 1:
            return local.squeeze(spec.dim)
        return local

    return _change_output(module, change)


def _change_output(module: nn.Module, change: Callable[[ShardedTensor], Any]) -> nn.Module:
    """The module, with a hook for outputs that are sharded tensors."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return change(output) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def state_dict_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Put sharded tensors that are plain attributes, in the module and below, into its state dict:
    ``module.register_state_dict_post_hook(fcoll.sharded.state_dict_hook)``. Parameters are in it
    without."""
    for key, owner, name in _attributes(module, prefix):
        if isinstance(owner.__dict__[name], ShardedTensor):
            destination[key] = owner.__dict__[name]


def pre_load_state_dict_hook(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any
) -> None:
    """Take sharded tensors of a state dict as attributes of the same names, in the module and
    below: ``module.register_load_state_dict_pre_hook(fcoll.sharded.pre_load_state_dict_hook)``."""
    for key, owner, name in _attributes(module, prefix):
        if isinstance(state_dict.get(key), ShardedTensor):
            setattr(owner, name, state_dict.pop(key))  # load_state_dict gives a dict of its own


def _attributes(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module, str]]:
    """(key in a state dict, the module, the name) of all attributes."""
    return [
        (f"{prefix}{path}{'.' if path else ''}{name}", owner, name)
        for path, owner in module.named_modules()
        for name in owner.__dict__
    ]
