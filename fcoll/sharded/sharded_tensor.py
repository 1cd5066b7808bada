"""A tensor in shards: what every rank knows of all of them, and the data of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcoll.groups import Group, GroupLike, resolve
from fcoll.report.layouts import LayoutBlock, TensorLayout, layout_svg, layout_text
from fcoll.sharded import _torch, local_shards, redistribution
from fcoll.sharded._torch import Shard, ShardedTensorMetadata, ShardingSpec, TensorProperties
from fcoll.sharded.errors import SeveralShards
from fcoll.sharded.io import checkpoint, pickling
from fcoll.sharded.ops import conversion
from fcoll.sharded.ops.rules import dispatch, unsupported
from fcoll.sharded.specs import (
    as_process_group,
    check_layout,
    describe,
    inferred_spec,
    layout_of,
    owners,
    rank_in,
    shards_here,
)
from fcoll.tracing.values import note_layout


class ShardedTensorBase(Tensor):
    """Metadata of all shards and the data of some; no group, so no communication."""

    _is_sharded_tensor = True
    _sharding_spec: ShardingSpec
    _metadata: ShardedTensorMetadata
    _local_shards: list[Shard]
    _process_group: Any
    _init_rrefs: bool
    # An empty tensor that hangs on the autograd graph which made the shards: a rank that holds
    # none takes part in the backward pass through it.
    _anchor: Tensor | None
    # Have the ranks compared what they know of it?
    _agreed: bool = False

    def __new__(
        cls,
        sharding_spec: ShardingSpec,
        *size: Any,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
        process_group: GroupLike = None,
        init_rrefs: bool = False,
    ) -> Any:
        local_shards.check_properties(layout, memory_format)
        properties = TensorProperties(
            dtype or torch.get_default_dtype(), layout, requires_grad, memory_format, pin_memory
        )
        whole = local_shards.flat_size(size)
        shards = layout_of(sharding_spec, whole, properties)
        return cls._assemble(sharding_spec, ShardedTensorMetadata(shards, whole, properties), [])

    def layout_card(self) -> dict[str, str]:
        """The layout for a report: a line of text and a picture."""
        return {"text": self._summary(), "svg": layout_svg(self._layout())}

    def _layout(self) -> TensorLayout:
        blocks = [
            LayoutBlock(s.shard_offsets, s.shard_sizes, str(s.placement), rank_in(s.placement))
            for s in self._metadata.shards_metadata
        ]
        return TensorLayout(self._metadata.size, self._metadata.tensor_properties.dtype, blocks)

    def _summary(self) -> str:
        """``ShardedTensor(size=(8, 4), dtype=float32, chunks along dim 0, ranks 0-3)``."""
        metadata, layout = self._metadata, self._layout()
        dtype = str(layout.dtype).removeprefix("torch.")
        how = describe(self._sharding_spec, len(layout.blocks))
        grad = ", requires_grad=True" * metadata.tensor_properties.requires_grad
        parts = f"size={tuple(metadata.size)}, dtype={dtype}, {how}, {layout.ranks()}{grad}"
        return f"ShardedTensor({parts})"

    @classmethod
    def _assemble(
        cls,
        spec: ShardingSpec,
        metadata: ShardedTensorMetadata,
        shards: list[Shard],
        group: Any = None,
        *,
        init_rrefs: bool = False,
        anchor: Tensor | None = None,
        agreed: bool = False,
    ) -> Any:
        """One of metadata and shards that have been checked; ``agreed``: by all ranks."""
        properties = metadata.tensor_properties
        st = _torch.wrapper(
            cls,
            metadata.size,
            dtype=properties.dtype,
            layout=properties.layout,
            pin_memory=properties.pin_memory,
            requires_grad=properties.requires_grad,
        )
        st._sharding_spec = spec
        st._metadata = replace(metadata, tensor_properties=replace(properties))
        st._local_shards = shards
        st._process_group = group
        st._init_rrefs = init_rrefs
        st._anchor = anchor
        st._agreed = agreed
        note_layout(st.layout_card)
        return st

    def metadata(self) -> ShardedTensorMetadata:
        """The size, the properties and all shards: offsets, sizes and who holds them."""
        return self._metadata

    def local_shards(self) -> list[Shard]:
        """The shards that this rank holds; an empty list where it holds none."""
        return self._local_shards

    @classmethod
    def _init_from_local_shards_and_global_metadata(
        cls,
        local_shards: list[Shard],
        sharded_tensor_metadata: ShardedTensorMetadata,
        sharding_spec: ShardingSpec | None = None,
    ) -> ShardedTensorBase:
        shards, size = sharded_tensor_metadata.shards_metadata, sharded_tensor_metadata.size
        check_layout(shards, size)
        spec = sharding_spec or inferred_spec(shards, size)
        return ShardedTensor._assemble(spec, sharded_tensor_metadata, local_shards)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """An op that C++ calls on the tensor itself: it has no memory for that."""
        raise unsupported(func, args, kwargs or {})


class ShardedTensor(ShardedTensorBase):
    """A tensor whose shards lie on the ranks of a group.

    Every rank makes it, with the same spec and size, and holds the shards that are placed on it;
    ``metadata()`` tells where all are. Made so, its shards are not initialized: use ``zeros``,
    ``rand``, ``init_from_local_shards`` and their like.

    >>> st = fcoll.sharded.arange(fcoll.sharded.chunk(0, n), 2 * n, 3)
    >>> st.local_tensor().shape, st.shape == (2 * n, 3)
    (torch.Size([2, 3]), True)
    >>> torch.equal(st.all_gather(), torch.arange(6 * n).reshape(-1, 3))
    True

    Torch functions on it run by the rules of ``fcoll.sharded.sharded_op``.
    """

    def __init__(
        self,
        *spec_and_size: Any,
        process_group: GroupLike = None,
        init_rrefs: bool = False,
        **properties: Any,
    ) -> None:
        redistribution.check_rpc(init_rrefs)
        self._process_group = as_process_group(process_group)
        self._init_rrefs = init_rrefs
        new = self._metadata.tensor_properties  # by __new__, of all other arguments
        options = {"dtype": new.dtype, "requires_grad": new.requires_grad}
        for shard, (_, device) in shards_here(self._process_group, self._metadata.shards_metadata):
            tensor = torch.empty(
                shard.shard_sizes, device=device, pin_memory=new.pin_memory, **options
            )
            self._local_shards.append(Shard(tensor, shard))

    # -- where it is ---

    @property
    def group(self) -> Group:
        """The group whose ranks hold it. NotInGroup on a rank that is none of them."""
        return resolve(self._process_group)

    def sharding_spec(self) -> ShardingSpec:
        """How it is cut."""
        return self._sharding_spec

    def owners(self) -> list[int]:
        """The global rank of each shard, in the order of ``metadata().shards_metadata``."""
        return [rank for rank, _ in owners(self._process_group, self._metadata.shards_metadata)]

    def local_tensor(self) -> Tensor:
        """The data of this rank's one shard."""
        if len(self._local_shards) != 1:
            raise SeveralShards(count=len(self._local_shards), rank=dist.get_rank())
        return self._local_shards[0].tensor

    def is_pinned(self, *args: Any, **kwargs: Any) -> bool:
        """Do the shards lie in pinned memory?"""
        return self._metadata.tensor_properties.pin_memory

    # -- whole, elsewhere, cut another way ---

    gather = redistribution.gather  # type: ignore[assignment]
    all_gather = redistribution.all_gather
    remote_shards = redistribution.remote_shards
    reshard = redistribution.reshard_

    # -- another device, another dtype ---

    cpu = conversion.cpu  # type: ignore[assignment]
    cuda = conversion.cuda  # type: ignore[assignment]
    to = conversion.to  # type: ignore[assignment]

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return self._summary()

    def __str__(self) -> str:
        """The layout as text: which rank holds which block."""
        return layout_text(self._layout())

    __format__ = object.__format__

    def svg(self) -> str:
        """The layout as a picture."""
        return layout_svg(self._layout())

    # -- making one, by torch's names ---

    _init_from_local_shards = classmethod(local_shards.init_from_local_shards)
    _init_from_local_shards_and_global_metadata = classmethod(  # type: ignore[assignment]
        local_shards.init_from_local_shards_and_global_metadata
    )
    _init_from_local_tensor = classmethod(local_shards.init_from_local_tensor)

    # -- kept, copied and loaded ---

    ProcessGroupState = pickling.ProcessGroupState  # torch's place for it, in its pickles too

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickling.rebuilt, (type(self), self.__getstate__())

    __getstate__ = pickling.state_of  # type: ignore[assignment]
    __setstate__ = pickling.restore
    __deepcopy__ = pickling.deepcopied  # type: ignore[assignment]

    def __copy__(self) -> Any:
        return self._with(list(self._local_shards), anchor=self._anchor)

    # torch.distributed.checkpoint asks these of whatever it saves and loads

    __create_write_items__ = checkpoint.write_items
    __create_chunk_list__ = checkpoint.chunks
    __get_tensor_shard__ = checkpoint.shard_at

    def _with(
        self,
        shards: list[Shard],
        *,
        spec: ShardingSpec | None = None,
        metadata: ShardedTensorMetadata | None = None,
        **parts: Any,
    ) -> Any:
        """A tensor of these shards on the same group; spec and metadata are this one's if not
        given, ``parts`` are those of ``_assemble``. Nothing is checked."""
        if metadata is None:
            parts["agreed"] = self._agreed
        spec, metadata = spec or self._sharding_spec, metadata or self._metadata
        parts |= {"group": self._process_group, "init_rrefs": self._init_rrefs}
        return type(self)._assemble(spec, metadata, shards, **parts)
