"""Trains a model that torch.compile has compiled around DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/compile.py
    torchrun --nproc-per-node 2 examples/compile.py --compiler aot_eager

The data comes with scikit-learn (pip install scikit-learn); nothing is downloaded. The default compiler, inductor, needs a C++
compiler, or Triton on a GPU.
"""

from __future__ import annotations

import argparse

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import gsync


def main() -> None:
    parser = argparse.ArgumentParser(description="torch.compile around DDP on scikit-learn's handwritten digits")
    parser.add_argument("--compiler", default="inductor", help="a backend of torch.compile")
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    train, held_out = digits.load()
    sampler = DistributedSampler(train)
    ddp = DistributedDataParallel(digits.classifier().to(device), device_ids=[device] if use_cuda else None)

    # DDP first, then the compiler, then gsync: backward stays overlapped with synchronisation, one graph for each bucket.
    model = torch.compile(ddp, backend=args.compiler)
    sync = gsync.register(model, codec="bf16")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(train, batch_size=32, sampler=sampler, drop_last=True):  # one shape, one graph
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)

    if rank == 0:
        print(sync.stats())
        print(f"accuracy {digits.accuracy(ddp.module, held_out):.3f} on {len(held_out[1])} images that were not trained on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
