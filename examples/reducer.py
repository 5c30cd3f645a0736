"""Trains a small classifier on handwritten digits with GradReducer, without DDP, and with gradient accumulation.

    torchrun --nproc-per-node 2 examples/reducer.py
    torchrun --nproc-per-node 2 examples/reducer.py --accumulate 4 --codec int8

The data comes with scikit-learn (pip install scikit-learn); nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

import gsync


def main() -> None:
    parser = argparse.ArgumentParser(description="GradReducer on scikit-learn's handwritten digits")
    parser.add_argument("--codec", default="bf16", help="fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8 or int4")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes in a step; only the last is synchronised")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    # 1. One process group, one model on each rank.
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    torch.manual_seed(rank)  # the reducer sets all models to that of rank 0
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    # 2. In the place of DistributedDataParallel. The optimizer tells errors, so that nothing else need be called.
    reducer = gsync.GradReducer(model, codec=args.codec)
    reducer.attach(optimizer)

    # 3. Every rank trains on its own part of the data.
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(digits.target, device=device)
    held_out = images[-360:], labels[-360:]
    images, labels = images[:-360][rank::world_size], labels[:-360][rank::world_size]
    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        optimizer.zero_grad()
        for part in range(args.accumulate):
            is_last = part + 1 == args.accumulate
            chosen = torch.randint(len(images), (64 // args.accumulate,), generator=generator)
            with contextlib.nullcontext() if is_last else reducer.no_sync():
                loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen]) / args.accumulate
                loss.backward()
        norm = gsync.clip_grad_norm_(reducer, 1.0)
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item() * args.accumulate:.3f}, gradient norm {norm.item():.3f}", flush=True)

    # 4. What it cost, and what was learned.
    accuracy = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    if rank == 0:
        print(reducer.stats())
        print(f"accuracy {accuracy:.3f} on {len(held_out[1])} images that were not trained on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
