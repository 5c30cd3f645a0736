"""Trains a classifier of handwritten digits by Lightning's Trainer, gradients synchronised by gsync.

    torchrun --nproc-per-node 2 examples/with_lightning.py
    torchrun --nproc-per-node 2 examples/with_lightning.py --resume runs/last.ckpt --epochs 10

Needs Lightning and scikit-learn (pip install lightning scikit-learn); nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os

import digits
import lightning.pytorch as pl
import torch
import torch.nn.functional as functional
from torch.utils.data import DataLoader

from gsync.integrations.lightning import GsyncCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = digits.classifier()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lightning on scikit-learn's handwritten digits, synchronised by gsync")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", default="runs", help="for checkpoints")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    args = parser.parse_args()

    # The one object that hands the gradients to gsync. Its state is in every checkpoint, residuals included.
    gsync_callback = GsyncCallback(codec="int8", error_feedback=True)
    trainer = pl.Trainer(
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=args.epochs,
        callbacks=[gsync_callback, pl.callbacks.ModelCheckpoint(args.folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    train, held_out = digits.load()
    model = Classifier()
    trainer.fit(model, DataLoader(train, batch_size=32, shuffle=True), ckpt_path=args.resume)  # a part of the data for each rank

    stats = gsync_callback.sync.stats()
    if trainer.is_global_zero:
        print(stats)
        print(f"accuracy {digits.accuracy(model.net, held_out):.3f} on {len(held_out[1])} images that were not trained on")


if __name__ == "__main__":
    main()
