"""Ranks that fail and come back, or do not: errors in time, a right step after `reset()`, jobs that restart."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from ddp_cases import Scalars, assert_same_on_all_ranks, batch, gradients
from field_cases import DOORS, Door, options_of
from ranks import run_on_ranks, watch_ranks
from reducer_cases import alone, assert_gradients, each_engine

import gsync

native = pytest.mark.parametrize("backend", [engine for engine in each_engine() if engine.values[0] == "native"])
TIMEOUT_S, MARGIN_S = 3.0, 5.0


class Fails(torch.autograd.Function):
    """Runs out of memory in its backward pass, when told so."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fails:
            raise torch.OutOfMemoryError("made up")
        return gradient, None


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x, fails=False):
        for i, layer in enumerate(self.layers):
            x = Fails.apply(layer(x), fails and i == 1)
        return x.square().sum()


def _retries(rank, world_size, backend, kind):
    """Rank 1 fails in the middle of its third backward pass; all catch, reset, and run the step again."""
    door = Door(kind, Layers(), backend, bucket_mb=1e-4, timeout_s=TIMEOUT_S, **options_of("bf16", error_feedback=True))
    caught = None
    for step in range(5):
        door.zero_grad()
        started = time.monotonic()
        try:
            door(batch(rank, step, 16), rank == 1 and step == 2).backward()
            if step == 2:
                door.sync.wait() if kind == "reducer" else door.sync.grad_norm()
        except (gsync.SyncError, torch.OutOfMemoryError) as error:
            assert step == 2
            caught = f"{type(error).__name__}: {error}"
            assert rank == 1 or time.monotonic() - started < TIMEOUT_S + MARGIN_S
            dist.barrier()
            door.sync.reset()
            door.zero_grad()
            for entry in door.sync.state_dict()["residuals"].values():
                assert entry["sender"].isfinite().all() and entry["reducer"].isfinite().all()
            door(batch(rank, step, 16)).backward()
        assert_same_on_all_ranks(gradients(door.module))
        expected = alone(door.module, world_size, lambda m, r, step=step: m(batch(r, step, 16)))
        assert_gradients(door.module, expected, 0.05)
    return caught


@native
@pytest.mark.parametrize("kind", DOORS)
def test_a_rank_out_of_memory_retries_after_reset(backend, kind):
    """Case 101. The others get an error in time; after reset() the step is right, and so are those behind it."""
    outcomes = watch_ranks(_retries, 2, 60, args=(backend, kind), group_timeout_s=30.0)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
    assert outcomes[0].value.startswith("Sync") and "of step 2" in outcomes[0].value
    assert outcomes[1].value == "OutOfMemoryError: made up"


def _killed(rank, world_size, backend, kind):
    door = Door(kind, Scalars(100_000), backend, codec="fp32")
    for step in range(100):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            door(torch.ones(100_000)).backward()
        except gsync.SyncError:
            os._exit(7 if time.monotonic() - started < MARGIN_S else 8)  # as a job that gives up, without any close()
    return None


@native
@pytest.mark.parametrize("kind", DOORS)
def test_survivors_of_a_killed_rank_leave_at_once(backend, kind):
    """Case 104. One of three is killed: an error long before any time-out, and no thread of gsync's keeps a process alive."""
    outcomes = watch_ranks(_killed, 3, 60, args=(backend, kind), group_timeout_s=120.0)
    assert [outcome.exit_code for outcome in outcomes] == [7, -signal.SIGKILL, 7], outcomes


def train_and_save(rank, world_size, folder, dies, consolidates=False):
    """Eight steps from wherever the files in `folder` are; rank 1 may leave at the begin of the sixth, once.

    Of a consolidated state each rank gets an equal part of all residuals, so a run that goes on without a break takes it, too.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 1))
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    door = Door("ddp", module, "auto", codec="int8", error_feedback=True)
    file, step, losses = Path(folder) / f"rank{rank}.pt", 0, []
    if file.exists():
        saved = torch.load(file)
        module.load_state_dict(saved["module"])
        door.sync.load_state_dict(saved["sync"])
        step, losses = saved["sync"]["step"], saved["losses"]
    while step < 8:
        if dies and rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL) if consolidates else os._exit(3)
        if consolidates and step == 5:
            door.sync.load_state_dict(torch.load(file)["sync"])
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (door(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        step += 1
        new = file.with_suffix(".new")
        torch.save({"module": module.state_dict(), "sync": door.sync.state_dict(consolidates), "losses": losses}, new)
        dist.barrier()
        new.rename(file)
        dist.barrier()  # files of one step on all ranks
    return losses


SCRIPT = """
import os, sys
from datetime import timedelta
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from test_field_faults import train_and_save
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
train_and_save(rank, 2, sys.argv[2], os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", sys.argv[3] == "consolidated")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["own", pytest.param("consolidated", marks=pytest.mark.slow)])
def test_torchrun_restarts_and_losses_are_those_of_an_unbroken_run(tmp_path, kind):
    """Case 104. Rank 1 leaves, or is killed, at step 5; torchrun starts both again; state and residuals come from the files."""
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    for folder in (broken, unbroken):
        folder.mkdir()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--monitor-interval", "0.1", str(script), str(Path(__file__).parent), str(broken), kind]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or torch's own group takes addresses of the run before
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    ended = "exitcode: 3" if kind == "own" else "exitcode: -9"
    assert done.returncode == 0 and ended in done.stderr, done.stdout + done.stderr
    expected = run_on_ranks(train_and_save, 2, args=(str(unbroken), False, kind == "consolidated"))
    for rank, losses in enumerate(expected):
        assert torch.load(broken / f"rank{rank}.pt")["losses"] == losses and len(losses) == 8


def _left_over(rank, world_size, backend, port, prefix):
    """Two runs over one store, as after a restart: the second finds all keys of the first."""
    means = []
    for run in range(2):
        store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False))
        dist.init_process_group("gloo", store=dist.PrefixStore(str(run), store), rank=rank, world_size=world_size)
        # The group's own keys are new, the store of gsync's is the old one.
        group = dist.group.WORLD
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda _, store=store: store)
            for kind in DOORS:
                if rank == 1:
                    time.sleep(0.2)  # rank 0 comes first, and finds what rank 1 left
                door = Door(kind, Scalars(3), backend, process_group=group, codec="int8", exempt=())
                door(torch.full((3,), rank + 1.0 + run)).backward()
                means.append(door.module.weight.grad.tolist())
                door.close()
        dist.destroy_process_group()
    return means


@pytest.mark.parametrize("backend", each_engine())
def test_keys_of_an_earlier_run_are_not_taken_for_those_of_this_one(backend):
    """Case 104. A store that outlives a restart: ranks agree and connect anew, whoever comes first."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for means in run_on_ranks(_left_over, 2, backend=None, args=(backend, server.port, "job")):
        expected = [[1.5] * 3, [1.5] * 3, [2.5] * 3, [2.5] * 3]
        assert all(got == pytest.approx(mean, rel=1e-6) for got, mean in zip(means, expected, strict=True)), means
