"""Trains a classifier of handwritten digits with Accelerate, gradients synchronised by gsync, accumulated over two batches.

    torchrun --nproc-per-node 2 examples/with_accelerate.py
    torchrun --nproc-per-node 2 examples/with_accelerate.py --resume runs/accelerate

Needs Accelerate and scikit-learn (pip install accelerate scikit-learn); nothing is downloaded.
"""

from __future__ import annotations

import argparse

import digits
import torch
import torch.nn.functional as functional
from accelerate import Accelerator
from torch.utils.data import DataLoader

import gsync
from gsync.integrations.accelerate import register


def main() -> None:
    parser = argparse.ArgumentParser(description="Accelerate on scikit-learn's handwritten digits, synchronised by gsync")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--folder", default="runs/accelerate", help="for the state at the end")
    parser.add_argument("--resume", help="the folder of a state to go on from")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    train, held_out = digits.load()
    model = digits.classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(train, batch_size=16, shuffle=True))

    # The one line that hands the gradients to gsync; from here on save_state and load_state have its state, too.
    sync = register(accelerator, model, codec="int8", error_feedback=True)
    if args.resume:
        accelerator.load_state(args.resume)

    for epoch in range(args.epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:  # by the norm that comes with synchronisation
                    gsync.clip_grad_norm_(sync, 1.0, scaler=accelerator.scaler)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")

    accelerator.save_state(args.folder)  # on every rank
    accelerator.print(sync.stats())
    accelerator.print(f"accuracy {digits.accuracy(model, held_out):.3f} on {len(held_out[1])} images that were not trained on")
    sync.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
