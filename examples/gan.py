"""Two models with a GradReducer each: a generator learns a ring of points from a critic, on as many processes as torchrun starts.

torchrun --nproc-per-node 2 examples/gan.py
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import softplus

import gsync

NOISE = 4


def ring(count: int, generator: torch.Generator) -> Tensor:
    """Returns points [count, 2] near the circle of radius 2."""
    angles = 2 * math.pi * torch.rand(count, generator=generator)
    return 2 * torch.stack([angles.cos(), angles.sin()], 1) + 0.1 * torch.randn(count, 2, generator=generator)


def mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description="A GAN with two GradReducers")
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1000 + rank)

    # 1. Each model has a reducer of its own, and with it an engine and communicators of its own.
    maker, critic = mlp(NOISE, 2), mlp(2, 1)
    maker_sync, critic_sync = gsync.GradReducer(maker), gsync.GradReducer(critic)
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.99))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
    maker_sync.attach(maker_optimizer)
    critic_sync.attach(critic_optimizer)

    for step in range(args.steps):
        # 2. The critic: two forward passes, one backward pass.
        fake = maker(torch.randn(64, NOISE, generator=generator))
        critic_optimizer.zero_grad()
        critic_loss = softplus(-critic(ring(64, generator))).mean() + softplus(critic(fake.detach())).mean()
        critic_loss.backward()
        critic_optimizer.step()

        # 3. The generator: its backward pass goes through the critic, whose gradients nobody wants averaged.
        maker_optimizer.zero_grad()
        with critic_sync.no_sync():
            maker_loss = softplus(-critic(fake)).mean()
            maker_loss.backward()
        maker_optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step}: critic {critic_loss.item():.3f}, generator {maker_loss.item():.3f}", flush=True)

    # 4. The weights are the same on every rank.
    weights = torch.cat([param.detach().flatten() for model in (maker, critic) for param in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, weights)
    radius = maker(torch.randn(1000, NOISE, generator=generator)).norm(dim=1)
    if rank == 0:
        same = all(torch.equal(theirs, weights) for theirs in everyone)
        print(f"same weights on every rank: {same}")
        print(f"radius of what was made: mean {radius.mean().item():.2f}, wanted 2.00")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
