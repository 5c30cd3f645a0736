"""Trains on many nodes, started by srun or torchrun; saves when told to leave, and goes on where it was.

    srun python examples/cluster.py --folder /shared/run            (examples/slurm/train.sbatch)
    torchrun ... examples/cluster.py --folder /shared/run           (examples/torchrun/launch.sh, examples/kubernetes/job.yaml)

SIGUSR1 (Slurm, before the time limit) or SIGTERM (a node that is drained) makes all ranks save together and leave with code 75,
"try again". The state is consolidated: the next start may have another number of ranks. The data comes with scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import digits
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.nn.parallel import DistributedDataParallel

import gsync

TRY_AGAIN = 75  # EX_TEMPFAIL
BATCH, LOOK_EVERY = 64, 10


def place() -> tuple[int, int, int]:
    """Rank, number of ranks, and rank within the node, as torchrun or Slurm say."""
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")):
        if all(name in os.environ for name in names):
            rank, world_size, local_rank = (int(os.environ[name]) for name in names)
            return rank, world_size, local_rank
    raise SystemExit("cluster.py: start it by torchrun or srun; neither RANK nor SLURM_PROCID is set")


class Job:
    """Everything that a checkpoint has."""

    def __init__(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, sync: gsync.SyncState, file: Path
    ) -> None:
        self.model, self.optimizer, self.sync, self.file = model, optimizer, sync, file
        self.step = 0

    def save(self) -> None:
        """Every rank calls it: residuals are added up over ranks. Rank 0 writes."""
        state: dict[str, Any] = {
            "step": self.step,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gsync": self.sync.state_dict(consolidate=True),
        }
        if dist.get_rank() == 0:
            new = self.file.with_suffix(".new")
            torch.save(state, new)
            new.replace(self.file)  # whole, or not at all
        dist.barrier()

    def load(self) -> None:
        """Goes on from the file, if there is one."""
        if self.file.exists():
            state = torch.load(self.file, map_location="cpu", weights_only=True)
            self.step = state["step"]
            self.model.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.sync.load_state_dict(state["gsync"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description="A job that saves when it is told to leave, and goes on when it is started again"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint, where all nodes see it")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=200)
    args = parser.parse_args()

    # 1. A signal only leaves a note: it may come to some ranks, in the middle of a step.
    told = torch.zeros(1)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: told.fill_(1.0))

    # 2. Ranks, devices, one process group.
    rank, world_size, local_rank = place()
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo", rank=rank, world_size=world_size)
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    model = DistributedDataParallel(digits.classifier().to(device), device_ids=[device] if use_cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = gsync.register(model, codec="int8", error_feedback=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    job = Job(model, optimizer, sync, args.folder / "job.pt")
    job.load()
    if rank == 0:
        print(f"{world_size} ranks, from step {job.step}", flush=True)

    # 3. Each step's batch depends on its number alone; every rank takes a part of it.
    train, held_out = digits.load()
    images, labels = train.tensors
    while job.step < args.steps:
        chosen = torch.randint(len(images), (BATCH,), generator=torch.Generator().manual_seed(job.step))[rank::world_size]
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images[chosen].to(device)), labels[chosen].to(device))
        loss.backward()
        optimizer.step()
        job.step += 1
        if rank == 0 and job.step % 50 == 0:
            print(f"step {job.step}: loss {loss.item():.4f}", flush=True)

        # 4. All ranks leave after the same step, if one of them was told to.
        if job.step % LOOK_EVERY == 0:
            anyone = told.clone()
            dist.all_reduce(anyone, dist.ReduceOp.MAX)
            if anyone.item():
                job.save()
                if rank == 0:
                    print(f"saved at step {job.step}, to be started again", flush=True)
                dist.destroy_process_group()
                return TRY_AGAIN
        if job.step % args.save_every == 0:
            job.save()

    if rank == 0:
        print(sync.stats())
        print(f"accuracy {digits.accuracy(model, held_out):.3f} on {len(held_out[1])} images that were not trained on")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
