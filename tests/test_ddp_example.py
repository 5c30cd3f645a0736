"""examples/ddp.py runs under torchrun and learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "ddp.py"


def test_example_learns_under_torchrun():
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(
        [*command, "--exchange", "scatter_gather"], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(re.search(r"accuracy (\d\.\d+)", done.stdout).group(1)) > 0.85, done.stdout
    assert "200 steps" in done.stdout
