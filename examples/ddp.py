"""Trains a small classifier on handwritten digits with DDP and gsync, on as many processes as torchrun starts.

    torchrun --nproc-per-node 2 examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py --codec fp16 --exchange scatter_gather --steps 500

The data comes with scikit-learn (pip install scikit-learn); nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gsync


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP on scikit-learn's handwritten digits, gradients synchronised by gsync")
    parser.add_argument("--codec", default="bf16", help="fp32, fp16 or bf16")
    parser.add_argument("--exchange", default="auto", help="auto, all_reduce or scatter_gather")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to this 2-norm")
    args = parser.parse_args()

    # 1. One process group, one model on each rank: all as without gsync.
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if use_cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if use_cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    # 2. The one line that hands the gradients to gsync.
    sync = gsync.register(model, codec=args.codec, exchange=args.exchange)

    # 3. Every rank trains on its own part of the data.
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
    labels = torch.tensor(digits.target, device=device)
    held_out = images[-360:], labels[-360:]
    images, labels = images[:-360][rank::world_size], labels[:-360][rank::world_size]
    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        chosen = torch.randint(len(images), (64,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        loss.backward()
        norm = gsync.clip_grad_norm_(sync, args.max_norm)  # the norm comes with synchronisation; no second read of the gradients
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}", flush=True)

    # 4. What it cost, and what was learned.
    accuracy = (model(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
    if rank == 0:
        print(sync.stats())
        print(f"accuracy {accuracy:.3f} on {len(held_out[1])} images that were not trained on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
