"""Trains in fp16 by autocast and GradScaler, clips by the norm that synchronisation computes, sends int8 with error feedback.

    torchrun --nproc-per-node 2 examples/amp.py

The data comes with scikit-learn (pip install scikit-learn); nothing is downloaded.
"""

from __future__ import annotations

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as functional
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20)  # so high that the first steps overflow, and are skipped

    # Residuals are in the units of the scaled loss: gsync is told the scaler, and follows its scale.
    sync = gsync.register(model, codec="int8", error_feedback=True, scaler=scaler)

    for epoch in range(8):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(train, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16):
                loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            scaler.scale(loss).backward()
            norm = gsync.clip_grad_norm_(sync, 1.0, scaler=scaler)  # of the unscaled gradients; unscale_ is not needed
            scaler.step(optimizer)  # an overflow on one rank is one on all of them: all skip
            scaler.update()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, norm {norm.item():.3f}, scale {scaler.get_scale():.0f}", flush=True)

    if rank == 0:
        print(sync.stats())
        print(f"accuracy {digits.accuracy(model, held_out):.3f} on {len(held_out[1])} images that were not trained on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
