"""examples/reducer.py and examples/gan.py run under torchrun and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def _run(name, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / name)]
    environment = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("arguments", [(), ("--accumulate", "1", "--codec", "int8")])
def test_plain_training_and_accumulation(arguments):
    pytest.importorskip("sklearn")
    printed = _run("reducer.py", *arguments)
    assert float(re.search(r"accuracy (\d\.\d+)", printed).group(1)) > 0.85, printed
    assert "200 steps" in printed


def test_two_models():
    printed = _run("gan.py")
    assert "same weights on every rank: True" in printed, printed
    assert 1.4 < float(re.search(r"mean (\d\.\d+)", printed).group(1)) < 2.6, printed
