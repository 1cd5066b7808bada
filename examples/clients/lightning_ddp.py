"""Lightning: its DDP strategy takes the name of a backend.

torchrun --nproc-per-node 2 examples/clients/lightning_ddp.py [fcoll|gloo]
"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def main(backend: str = "fcoll") -> None:
    made = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=made)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = Regression()
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        print("losses", *model.losses)


if __name__ == "__main__":
    main(*sys.argv[1:])
