"""A long run with faults that training gets over: memory stays flat, ranks stay equal, the loss is as without gsync.

    python tests/soak.py [--steps 20000] [--door ddp|reducer] [--json FILE]

Two ranks train a small model with error feedback. Of every hundred steps some have a fault, drawn from a seed that all ranks
share; which rank it strikes is drawn too:

    nonfinite    Inf in one rank's inputs: all ranks see it, and leave the step out
    raise        backward raises in the middle: caught, `reset()` on all ranks, the step again
    memory       an allocation in backward fails: as above
    abort        the engine of one rank fails: as above
    delay        one rank is late by up to 20 ms
    checkpoint   residuals, step and seed are saved and loaded again
    no_sync      the batch in two halves, the first under no_sync

Every 100 steps the bytes of all parameters are compared between ranks, every 1000 steps the resident memory of each rank is
noted. The same steps are then done by one process without gsync, faults left out.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import assert_same_on_all_ranks
from field_cases import Door
from ranks import watch_ranks

import gsync

FAULTS = ("nonfinite", "raise", "memory", "abort", "delay", "checkpoint", "no_sync")
SHARE = 0.03  # of the steps, for each kind of fault
ROWS, WIDTH = 16, 24
LONGEST_DELAY_S = 0.02
GROUP_TIMEOUT_S = 60.0


class Breaks(torch.autograd.Function):
    """Passes gradients on, or fails as told."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: str) -> torch.Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.fault == "raise":
            raise ZeroDivisionError("made up")
        if ctx.fault == "memory":
            torch.empty(1 << 60, dtype=torch.uint8)
        return gradient, None


class Net(nn.Module):
    """Three layers; `fault` strikes between the last two, when some gradients have been handed over and some have not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 64), nn.Linear(64, 64), nn.Linear(64, 4)])

    def forward(self, x: torch.Tensor, fault: str = "") -> torch.Tensor:
        x = self.layers[1](self.layers[0](x).tanh())
        return self.layers[2](Breaks.apply(x, fault).tanh())


def plan(steps: int) -> list[tuple[str, int, float]]:
    """Of each step: a fault or "", the rank, and a number for it from 0 to 1."""
    draw = random.Random(17)
    chances = [SHARE] * len(FAULTS)
    return [
        (draw.choices((*FAULTS, ""), (*chances, 1 - sum(chances)))[0], draw.randrange(2), draw.random()) for _ in range(steps)
    ]


def data(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what a fixed smooth function makes of them."""
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))
    weights = torch.randn(WIDTH, 4, generator=torch.Generator().manual_seed(5)) / WIDTH**0.5
    return x, (x @ weights).sin()


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor, *fault: str) -> torch.Tensor:
    return (model(x, *fault) - y).square().mean()


def loss_at_end(module: nn.Module) -> float:
    with torch.no_grad():
        return sum(loss_of(module, *data(0, -1 - i)).item() for i in range(64)) / 64


def make_optimizer(module: nn.Module, steps: int) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def backward(door: Door, rank: int, step: int, fault: str, struck: int) -> None:
    x, y = data(rank, step)
    if fault == "nonfinite" and rank == struck:
        x[3, 2] = float("inf")
    if fault == "no_sync":
        half = ROWS // 2
        with door.no_sync():
            (0.5 * loss_of(door, x[:half], y[:half])).backward()
        (0.5 * loss_of(door, x[half:], y[half:])).backward()
        return
    loss_of(door, x, y, fault if rank == struck else "").backward()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def train(rank: int, world_size: int, steps: int, kind: str) -> dict[str, Any]:
    """One rank's run; raises where something is not as promised."""
    module = Net()
    door = Door(kind, module, "auto", bucket_mb=0.01, codec="int8", exempt=(), error_feedback=True)
    optimizer, schedule = make_optimizer(module, steps)
    memory, counts, skipped = [], dict.fromkeys(FAULTS, 0), 0
    started = time.monotonic()
    for step, (fault, struck, number) in enumerate(plan(steps)):
        counts[fault] = counts.get(fault, 0) + 1
        if fault == "delay" and rank == struck:
            time.sleep(number * LONGEST_DELAY_S)
        if fault == "abort" and rank == struck and step > 0:
            door.sync._engine.abort("the soak test asked for it")
        if fault == "checkpoint" and step > 0:
            file = io.BytesIO()
            torch.save(door.sync.state_dict(), file)
            file.seek(0)
            door.sync.load_state_dict(torch.load(file))
        optimizer.zero_grad()
        if fault in ("raise", "memory", "abort") and step > 0:
            try:
                backward(door, rank, step, fault, struck)
            except (gsync.SyncError, RuntimeError, ZeroDivisionError):
                door.sync.reset()
                optimizer.zero_grad()
            else:
                raise AssertionError(f"step {step}: {fault} on rank {struck} went unnoticed on rank {rank}")
            fault = ""
        backward(door, rank, step, "" if step == 0 and fault != "nonfinite" else fault, struck)
        if bool(door.sync.found_nonfinite()):
            assert fault == "nonfinite", f"step {step}: Inf or NaN without a reason"
            skipped += 1
        else:
            assert fault != "nonfinite", f"step {step}: Inf on rank {struck} went unnoticed on rank {rank}"
            optimizer.step()
        schedule.step()
        if step % 100 == 99:
            assert_same_on_all_ranks(list(module.parameters()))
        if step % 1000 == 999 or (steps < 1000 and step % 100 == 99):
            memory.append(resident_mib())
    seconds = time.monotonic() - started
    counts.pop("", None)
    result = {"memory_mib": memory, "faults": counts, "skipped": skipped, "seconds": seconds, "loss": loss_at_end(module)}
    door.close()
    dist.barrier()
    return result


def train_alone(steps: int) -> float:
    """The loss after the same steps in one process, with the mean of both ranks' losses and without gsync."""
    module = Net()
    optimizer, schedule = make_optimizer(module, steps)
    for step, (fault, _, _) in enumerate(plan(steps)):
        if fault != "nonfinite":
            optimizer.zero_grad()
            sum(0.5 * loss_of(module, *data(rank, step)) for rank in range(2)).backward()
            optimizer.step()
        schedule.step()
    return loss_at_end(module)


def slope(values: list[float]) -> float:
    """Of a line through the values behind the first fifth, by least squares: per entry."""
    values = values[len(values) // 5 :]
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread if spread else 0.0


def soak(steps: int, kind: str) -> dict[str, Any]:
    """What a run came to. Raises AssertionError where a rank failed."""
    outcomes = watch_ranks(train, 2, 60 + steps * 0.25, args=(steps, kind), group_timeout_s=GROUP_TIMEOUT_S)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None and outcome.exit_code == 0, f"rank {rank}: {outcome.error}\n{outcome.output[-4000:]}"
    ranks = [outcome.value for outcome in outcomes]
    return {
        "steps": steps,
        "door": kind,
        "faults": ranks[0]["faults"],
        "steps_left_out": ranks[0]["skipped"],
        "seconds": max(each["seconds"] for each in ranks),
        "memory_mib": [each["memory_mib"] for each in ranks],
        "memory_kib_per_1000_steps": [1024 * slope(each["memory_mib"]) for each in ranks],
        "loss": ranks[0]["loss"],
        "loss_without_gsync": train_alone(steps),
        "torch": torch.__version__,
        "gsync": gsync.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--door", choices=("ddp", "reducer"), action="append")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for kind in given.door or ("ddp", "reducer"):
        results.append(soak(given.steps, kind))
        print(json.dumps(results[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    import soak as importable  # ranks look functions up in their module, which __main__ is not

    importable.main()
