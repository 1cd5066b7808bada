"""The storage writer of a checkpoint that is saved again into the same folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem
from torch.distributed.checkpoint.storage import WriteResult

from fcoll.sharded import _torch


class CheckpointWriter(FileSystemWriter):
    """torch's FileSystemWriter, but every save has files of its own until it is complete.

    torch's writes the data into the files that the folder's metadata names: a save that fails in
    the middle leaves some ranks' new data beside others' old, and what is loaded is a mixture.
    """

    def __init__(self, path: Any, **options: Any) -> None:
        super().__init__(path, **options)
        self.fs = _Replacing()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        return plan if self.use_collectives else self._named(plan, self.rank)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not self.use_collectives:
            return plans
        return [self._named(plan, rank) for rank, plan in enumerate(plans)]

    def _named(self, plan: SavePlan, rank: int | None) -> SavePlan:
        prefix = _torch.file_prefix(f"__{self.save_id}_{rank}_")
        return dataclasses.replace(plan, storage_data=prefix)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        if self.use_collectives:  # else each rank finishes by itself, and its peers may still write
            self._remove_all_but(_torch.data_files(metadata))

    def _remove_all_but(self, kept: Collection[str]) -> None:
        """Delete the data of earlier saves, complete or not, which nothing names any more."""
        for file in Path(self.path).glob(f"__*{DEFAULT_SUFFIX}"):
            if file.name not in kept:
                file.unlink(missing_ok=True)


class _Replacing(FileSystem):
    """Files that are renamed onto another replace it: there is no moment without metadata."""

    def rm_file(self, path: Any) -> None:
        """Nothing: torch removes the metadata just before it renames the new onto its place."""
