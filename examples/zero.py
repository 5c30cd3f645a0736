"""Trains with ZeroRedundancyOptimizer, which keeps the optimizer's state of each parameter on one rank only.

    torchrun --nproc-per-node 2 examples/zero.py

The data comes with scikit-learn (pip install scikit-learn); nothing is downloaded.
"""

from __future__ import annotations

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import gsync


def main() -> None:
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    train, held_out = digits.load()
    sampler = DistributedSampler(train)
    model = DistributedDataParallel(digits.classifier().to(device), device_ids=[device] if use_cuda else None)

    # gsync makes gradients equal on all ranks; the optimizer steps a part of the parameters on each, and sends them round.
    # Its overlap_with_ddp wants DDP's hook for itself, and stays off.
    sync = gsync.register(model, codec="int8", error_feedback=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=2e-3)

    for epoch in range(8):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(train, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            gsync.clip_grad_norm_(sync, 1.0)
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

    # For a checkpoint both are gathered, on every rank.
    optimizer.consolidate_state_dict(to=0)
    state = sync.state_dict(consolidate=True)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "gsync": state}, "zero.pt")
        print(sync.stats())
        print(f"accuracy {digits.accuracy(model, held_out):.3f} on {len(held_out[1])} images that were not trained on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
