"""Saves and resumes by torch.distributed.checkpoint, in a world of any size.

    torchrun --nproc-per-node 2 examples/distributed_checkpoint.py --folder runs/dcp
    torchrun --nproc-per-node 1 examples/distributed_checkpoint.py --folder runs/dcp      goes on from there, on one process

The data comes with scikit-learn (pip install scikit-learn); nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import digits
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import gsync


class Job:
    """All that a checkpoint has, as torch.distributed.checkpoint wants it. Every rank calls `state_dict`."""

    def __init__(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, sync: gsync.SyncState) -> None:
        self.model, self.optimizer, self.sync = model, optimizer, sync
        self.epoch = 0

    def state_dict(self) -> dict[str, Any]:
        # Consolidated, so that it is the same on all ranks: of an entry that all ranks have, only one rank's is saved.
        return {
            "epoch": self.epoch,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gsync": self.sync.state_dict(consolidate=True),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sync.load_state_dict(state["gsync"])


def main() -> None:
    parser = argparse.ArgumentParser(description="torch.distributed.checkpoint on scikit-learn's handwritten digits")
    parser.add_argument("--folder", default="runs/dcp")
    parser.add_argument("--epochs", type=int, default=6, help="how many more to train")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    train, held_out = digits.load()
    sampler = DistributedSampler(train)
    model = DistributedDataParallel(digits.classifier().to(device), device_ids=[device] if use_cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = Job(model, optimizer, gsync.register(model, codec="int8", error_feedback=True))
    if os.path.exists(os.path.join(args.folder, ".metadata")):
        dcp.load({"job": job}, checkpoint_id=args.folder)

    for _ in range(args.epochs):
        sampler.set_epoch(job.epoch)
        for images, labels in DataLoader(train, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        job.epoch += 1
        if rank == 0:
            print(f"epoch {job.epoch}: loss {loss.item():.3f}", flush=True)

    dcp.save({"job": job}, checkpoint_id=args.folder)
    if rank == 0:
        print(job.sync.stats())
        print(f"accuracy {digits.accuracy(model, held_out):.3f} on {len(held_out[1])} images that were not trained on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
