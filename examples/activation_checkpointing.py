"""Trains a deep model whose blocks are computed again in the backward pass instead of being kept, by GradReducer or under DDP.

    torchrun --nproc-per-node 2 examples/activation_checkpointing.py
    torchrun --nproc-per-node 2 examples/activation_checkpointing.py --reentrant --door ddp

The data comes with scikit-learn (pip install scikit-learn); nothing is downloaded.
"""

from __future__ import annotations

import argparse

import digits
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

import gsync


class Deep(nn.Module):
    """Residual blocks, each checkpointed."""

    def __init__(self, use_reentrant: bool, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.last = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(images)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


def main() -> None:
    parser = argparse.ArgumentParser(description="Activation checkpointing on scikit-learn's handwritten digits")
    parser.add_argument("--reentrant", action="store_true", help="the older kind, which runs backward within backward")
    parser.add_argument("--door", choices=["reducer", "ddp"], default="reducer")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    train, held_out = digits.load()
    sampler = DistributedSampler(train)
    model: nn.Module = Deep(args.reentrant).to(device)
    if args.door == "ddp":
        model = DistributedDataParallel(model, device_ids=[device] if use_cuda else None)
        sync = gsync.register(model, codec="int8", error_feedback=True)
    else:
        sync = gsync.GradReducer(model, codec="int8", error_feedback=True)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(train, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

    if rank == 0:
        print(sync.stats())
        print(f"accuracy {digits.accuracy(model, held_out):.3f} on {len(held_out[1])} images that were not trained on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
