"""Which rank this process is, as told by its launcher: torchrun (or anything that sets the same variables) or Slurm's srun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

_SLURM_PORT = 29400  # plus the job's number modulo 1000, so that two jobs on one node do not meet


@dataclass(frozen=True)
class Place:
    """A rank among all.

    Attributes:
        rank, world_size: in the whole job.
        local_rank, local_world_size: on this host.
        launcher: "torchrun" or "srun".
        master_address, master_port: where rank 0 can be met.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str
    master_address: str
    master_port: int


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place, or None where it was started alone.

    Raises:
        ValueError: the launcher's variables are there, but one is missing or is no number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
            raise ValueError("RANK and WORLD_SIZE are set, but MASTER_ADDR or MASTER_PORT is not: start the ranks with torchrun")
        rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        if _number(environ, "MASTER_PORT") == 0:
            raise ValueError("MASTER_PORT=0: with torchrun take --standalone, or name a free port with --master-port")
        return Place(
            rank,
            world_size,
            _number(environ, "LOCAL_RANK", 0),
            _number(environ, "LOCAL_WORLD_SIZE", 1),
            "torchrun",
            environ["MASTER_ADDR"],
            _number(environ, "MASTER_PORT"),
        )
    # srun sets SLURM_STEP_ID for the ranks it starts; sbatch's own shell has SLURM_PROCID as well, but runs alone
    if "SLURM_PROCID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1:
        port = _number(environ, "MASTER_PORT", _SLURM_PORT + _number(environ, "SLURM_JOB_ID", 0) % 1000)
        return Place(
            _number(environ, "SLURM_PROCID"),
            _number(environ, "SLURM_STEP_NUM_TASKS"),
            _number(environ, "SLURM_LOCALID", 0),
            _tasks_here(environ),
            "srun",
            _master(environ),
            port,
        )
    return None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ValueError(f"{name}={text!r}: expected a number") from None


def _master(environ: Mapping[str, str]) -> str:
    """The first node of the step: rank 0 runs there."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"]
    nodes = (
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or "127.0.0.1"
    )
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?([^,\[]*)", nodes)  # gpu[07-09,12] and gpu07,gpu08 both begin with gpu07
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes!r}: set MASTER_ADDR to the host of rank 0")
    prefix, number, _ = match.groups()
    return prefix + (number or "")


def _tasks_here(environ: Mapping[str, str]) -> int:
    """SLURM_STEP_TASKS_PER_NODE is "4(x2),3": two nodes with four ranks, then one with three."""
    counts: list[int] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match.group(1))] * int(match.group(2) or 1)
    node = _number(environ, "SLURM_NODEID", 0)
    return counts[node] if node < len(counts) else 1
