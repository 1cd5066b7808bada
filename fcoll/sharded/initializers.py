"""nn.init on sharded tensors: each rank fills its own shards, by its own generator.

Those of nn.init that are not here (zeros_, xavier_uniform_, kaiming_normal_, ...) call the Tensor
methods that pointwise.py has, with the size of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fcoll.sharded import creators
from fcoll.sharded.dispatch import built_in, name_of
from fcoll.sharded.errors import BadInit


def _arguments(func: Callable, kwargs: dict[str, Any], *names: str) -> tuple[Any, ...]:
    """The tensor and what it is filled with, which torch passes by keyword."""
    for name in names:
        if kwargs.get(name) is None:
            raise BadInit(func=name_of(func), name=name)
    return kwargs["tensor"], *(kwargs[name] for name in names)


@built_in(nn.init.uniform_)
def uniform_(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, a, b = _arguments(nn.init.uniform_, kwargs, "a", "b")
    for shard in st._local_shards:
        nn.init.uniform_(shard.tensor, a, b, generator=kwargs.get("generator"))
    return st


@built_in(nn.init.normal_)
def normal_(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, mean, std = _arguments(nn.init.normal_, kwargs, "mean", "std")
    for shard in st._local_shards:
        nn.init.normal_(shard.tensor, mean, std, generator=kwargs.get("generator"))
    return st


@built_in(nn.init.constant_)
def constant_(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    st, value = _arguments(nn.init.constant_, kwargs, "val")
    for shard in st._local_shards:
        nn.init.constant_(shard.tensor, value)
    return st


@built_in(nn.init.kaiming_uniform_)
def kaiming_uniform_(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
    """The fan is that of the whole tensor (torch takes each shard's own)."""
    func = nn.init.kaiming_uniform_
    st, a, mode, nonlinearity = _arguments(func, kwargs, "a", "mode", "nonlinearity")
    rows, columns, *field = st._metadata.size
    fan = math.prod(field) * {"fan_in": columns, "fan_out": rows}[mode.lower()]
    bound = nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3 / max(fan, 1))
    for shard in st._local_shards:
        nn.init.uniform_(shard.tensor, -bound, bound, generator=kwargs.get("generator"))
    return st


def _like(func: Callable, make: Callable) -> None:
    @built_in(func)
    def creator(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Any:
        st, *rest = args
        options = {"dtype": st.dtype, "process_group": process_group} | kwargs
        return make(st.sharding_spec(), st.size(), *rest, **options)


for _name in ("empty", "zeros", "ones", "full", "rand", "randn"):
    _like(getattr(torch, f"{_name}_like"), getattr(creators, _name))


def _new(name: str) -> None:
    """st.new_empty(size) is a plain tensor of this rank's: of st's dtype, on its device."""
    method = getattr(Tensor, f"new_{name}")

    @built_in(method)
    def new(types: Any, args: tuple, kwargs: dict[str, Any], process_group: Any) -> Tensor:
        st, *rest = args
        made: Tensor = method(torch.empty(0, dtype=st.dtype, device=st.device), *rest, **kwargs)
        return made


for _name in ("empty", "zeros", "ones", "full", "tensor"):
    _new(_name)
