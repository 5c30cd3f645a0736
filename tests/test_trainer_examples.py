"""Examples of trainers and of torch's own tools run under torchrun on two processes, learn, and go on from what they saved."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(folder, name, *arguments):
    """What the example prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / name)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")
    done = subprocess.run([*command, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def accuracy(printed):
    return float(re.search(r"accuracy (\d\.\d+)", printed).group(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "steps", "saved", "more"),
    [
        ("lightning", 184, "runs/last.ckpt", ["--epochs", "9"]),
        ("accelerate", 184, "runs/accelerate", ["--epochs", "1"]),
        ("transformers", 180, "runs/transformers/checkpoint-180", ["--steps", "203"]),
    ],
)
def test_trainers(library, steps, saved, more, tmp_path):
    """Each is run, and again from its checkpoint for 23 steps more."""
    pytest.importorskip("sklearn")
    pytest.importorskip(library)
    printed = run(tmp_path, f"with_{library}.py")
    assert f"gsync: {steps} steps" in printed and re.search(r"3.[78]\d to 1", printed), printed
    assert accuracy(printed) > 0.8, printed
    printed = run(tmp_path, f"with_{library}.py", "--resume", saved, *more)
    assert "gsync: 23 steps" in printed, printed
    assert accuracy(printed) > 0.8, printed
