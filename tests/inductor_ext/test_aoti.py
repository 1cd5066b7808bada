"""A program that AOTInductor has compiled, in the ranks that load it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fcoll
import inductor_ext

Tensor = torch.Tensor


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.eye(8) * 3)

    def forward(self, x: Tensor) -> Tensor:
        return fcoll.all_reduce(x @ self.w) + 1


def packaged(rank: int, folder: str) -> list[Tensor]:
    block, x = Block().eval(), torch.full((4, 8), rank + 1.0)
    fcoll.all_reduce(x)
    if rank == 1:
        fcoll.barrier()  # one after the other: AOTInductor writes equal graphs to the same files
    inductor_ext.install()
    try:
        path = torch._inductor.aoti_compile_and_package(
            torch.export.export(block, (x,)), package_path=str(Path(folder) / f"{rank}.pt2")
        )
    finally:
        inductor_ext.uninstall()
    if rank == 0:
        fcoll.barrier()
    run = torch._inductor.aoti_load_package(path)
    return [run(x), run(x * 2)]


# torch.export asks for a class that torch itself has deprecated.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated:FutureWarning")
def test_a_package_of_aotinductor(shared2, tmp_path):
    for first, second in shared2.run(packaged, str(tmp_path), timeout=170):
        assert torch.equal(first, torch.full((4, 8), 10.0))
        assert torch.equal(second, torch.full((4, 8), 19.0))
