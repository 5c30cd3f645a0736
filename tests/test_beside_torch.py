"""Beside what torch offers for training: GradScaler with fused clipping, synchronised batch norm, ZeroRedundancyOptimizer, and
torch.distributed.checkpoint. Its compiler and activation checkpointing are in test_ddp_models.py and test_reducer_graphs.py."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as synced
import torch.nn as nn
from ddp_cases import assert_same_bits, assert_same_on_all_ranks, batch, gradients, mlp
from field_cases import DOORS, Door, engines, every_door, feedback_modes
from ranks import run_on_ranks
from test_cuda_engine import device_of, needs
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import gsync
from gsync.engine import why_not_nccl
from gsync.model import read_model

FEEDBACK = {"codec": "int8", "error_feedback": True}


def _loss(door, rank, step):
    return door(batch(rank, step)).square().mean()


def _clipped(rank, world_size, backend):
    for options in feedback_modes():
        for unscales in (False, True):
            ours, theirs = (iter(every_door(lambda: mlp(3), backend, **options)) for _ in range(2))
            for mine, other in zip(ours, theirs, strict=True):
                steps = []
                for door, is_fused in ((mine, True), (other, False)):
                    optimizer = torch.optim.SGD(door.module.parameters(), 0.1)
                    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
                    for step in range(4):
                        before = [parameter.detach().clone() for parameter in door.module.parameters()]
                        optimizer.zero_grad()
                        loss = _loss(door, rank, step) * (float("inf") if (rank, step) == (1, 2) else 1.0)
                        scaler.scale(loss).backward()
                        assert_same_on_all_ranks([door.sync.found_nonfinite(), door.sync.grad_norm()])
                        assert bool(door.sync.found_nonfinite()) == (step == 2)
                        if unscales or not is_fused:
                            scaler.unscale_(optimizer)
                        if is_fused:
                            norm = gsync.clip_grad_norm_(door.sync, 0.05, scaler=scaler)
                        else:
                            norm = nn.utils.clip_grad_norm_(door.module.parameters(), 0.05)
                        assert step == 2 or norm > 0.05
                        scaler.step(optimizer)
                        scaler.update()
                        after = [parameter.detach().clone() for parameter in door.module.parameters()]
                        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (step == 2)
                        assert_same_on_all_ranks(after)
                    assert scaler.get_scale() == 2.0**11
                    steps.append(after)
                for a, b in zip(*steps, strict=True):
                    assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@engines
def test_fused_clipping_under_a_loss_scale_is_torchs(backend):
    """Before unscale_ and after it; an overflow on one rank is seen by all, which skip that step together."""
    run_on_ranks(_clipped, 2, 120, args=(backend,))


class SyncedNorm(nn.Module):
    """Batch norm over all ranks for CPUs, where torch's refuses: sums of its own in forward and backward."""

    def forward(self, x):
        # Its default is the group that was the world when torch imported it.
        sums = synced.all_reduce(torch.stack([x.sum(0), x.square().sum(0)]), group=dist.group.WORLD)
        count = dist.get_world_size() * len(x)
        mean = sums[0] / count
        return (x - mean) / (sums[1] / count - mean.square() + 1e-5).sqrt()


def _normed(rank, world_size, backend):
    def make():
        torch.manual_seed(2)
        layers = [layer for width in (31, 64, 64, 64) for layer in (nn.Linear(width, 64), SyncedNorm(), nn.Tanh())]
        return nn.Sequential(*layers, nn.Linear(64, 7))

    theirs = DistributedDataParallel(make())
    for exchange in ("all_reduce", "scatter_gather"):
        for door in every_door(make, backend, codec="fp32", exchange=exchange, bucket_mb=0.01):
            for step in range(50):
                for model in (door, theirs):
                    model.zero_grad()
                    model(batch(rank, step)).square().mean().backward()
                assert_same_bits(gradients(door.module), gradients(theirs.module))
            assert door.sync.stats().buckets > 100


@engines
def test_beside_a_norm_that_is_synchronised_in_backward(backend):
    """Several buckets under way while the model itself communicates: the bits of stock DDP, and no hang."""
    run_on_ranks(_normed, 2, 120, args=(backend,))


class _Group:
    """A process group of NCCL, as far as is asked."""

    def _get_backend(self, device):
        return self

    def name(self):
        return "nccl"

    def size(self):
        return dist.get_world_size()


def _own_communicator(rank, world_size):
    plain, normed = (read_model(module, gsync.SyncConfig()) for module in (mlp(), nn.Sequential(mlp(), nn.SyncBatchNorm(7))))
    return why_not_nccl(plain, _Group()), why_not_nccl(normed, _Group())


def test_sync_batch_norm_gets_no_communicator_beside_its_own():
    """Two communicators at work on one GPU may wait for each other: the group's is used, or asking for another raises."""
    for plain, normed in run_on_ranks(_own_communicator, 2):
        assert (plain, normed) == ("", "SyncBatchNorm '1' communicates in the backward pass")


def _gpu_sync_batch_norm(rank, world_size):
    device = device_of(rank, "cuda")
    torch.manual_seed(2)
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(31, 64), nn.BatchNorm1d(64), nn.Linear(64, 7)))
    theirs, ours = (DistributedDataParallel(copy.deepcopy(module).to(device), device_ids=[device]) for _ in range(2))
    with pytest.raises(ValueError, match="SyncBatchNorm '1' communicates in the backward pass"):
        gsync.register(ours, transport="nccl")
    sync = gsync.register(ours, codec="fp32")
    for step in range(20):
        for model in (ours, theirs):
            model.zero_grad()
            model(batch(rank, step).to(device)).square().mean().backward()
        for a, b in zip(gradients(ours), gradients(theirs), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    assert sync.stats().wire_bytes > 0


@pytest.mark.gpu
def test_gpu_sync_batch_norm():
    needs(2)
    run_on_ranks(_gpu_sync_batch_norm, 2, 120, backend="nccl", pool="gpu")


def _zero(rank, world_size, backend):
    for kind in DOORS:
        for as_view in (False, True):
            plain, zero = (Door(kind, mlp(5), backend, **FEEDBACK) for _ in range(2))
            adam = torch.optim.Adam(plain.module.parameters(), 0.01)
            part = ZeroRedundancyOptimizer(zero.module.parameters(), torch.optim.Adam, parameters_as_bucket_view=as_view, lr=0.01)
            for step in range(6):
                for door, optimizer in ((plain, adam), (zero, part)):
                    optimizer.zero_grad()
                    _loss(door, rank, step).backward()
                    gsync.clip_grad_norm_(door.sync, 0.1)
                    optimizer.step()
            assert_same_bits(*([p.detach() for p in door.module.parameters()] for door in (plain, zero)))
            assert_same_on_all_ranks([p.detach() for p in zero.module.parameters()])
            assert zero.sync.stats().wire_bytes > 0
            for door in (plain, zero):
                door.close()


@engines
def test_zero_steps_as_one_optimizer_would(backend):
    run_on_ranks(_zero, 2, 120, args=(backend,))


class Job:
    """A model in training, as torch.distributed.checkpoint saves and loads it."""

    def __init__(self, kind, backend, mode):
        self.door, self.mode = Door(kind, mlp(4), backend, **FEEDBACK), mode
        self.optimizer = torch.optim.SGD(self.door.module.parameters(), 0.1, momentum=0.9)

    def train(self, rank, steps):
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = _loss(self.door, rank, step)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state_dict(self):
        consolidated = self.mode == "consolidated"
        name = "gsync" if consolidated else f"gsync of rank {dist.get_rank()}"
        state = {"model": self.door.module.state_dict(), name: self.door.sync.state_dict(consolidate=consolidated)}
        if self.optimizer.state:  # torch wants a state to load momentum into
            state["optimizer"] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state):
        self.door.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.door.sync.load_state_dict(next(value for key, value in state.items() if key.startswith("gsync")))


def _saved(rank, world_size, backend, folder):
    for kind in DOORS:
        for mode in ("own", "consolidated"):
            path = f"{folder}/{kind}-{mode}"
            whole = Job(kind, backend, mode)
            whole.train(rank, range(4))
            dcp.save({"job": whole}, checkpoint_id=path)
            if mode == "consolidated":  # goes on from what it saved, as the resumed one will
                whole.door.sync.load_state_dict(whole.door.sync.state_dict(consolidate=True))
            losses = whole.train(rank, range(4, 8))

            again = Job(kind, backend, mode)
            again.train(rank, range(1))  # makes all that is to be loaded
            dcp.load({"job": again}, checkpoint_id=path)
            assert again.door.sync.state_dict()["step"] == 4
            assert again.train(rank, range(4, 8)) == losses
            assert_same_bits(*([p.detach() for p in job.door.module.parameters()] for job in (whole, again)))

            dcp.load({"job": again}, checkpoint_id=path)  # residuals matter
            again.door.sync.load_state_dict({**again.door.sync.state_dict(), "residuals": {}})
            assert again.train(rank, range(4, 8)) != losses
            for job in (whole, again):
                job.door.close()


@engines
def test_distributed_checkpoints_resume_bit_for_bit(backend, tmp_path):
    """Each rank's own state under a name of its own, or the consolidated one, which all ranks share."""
    run_on_ranks(_saved, 2, 120, args=(backend, str(tmp_path)))


def _one_for_all(rank, world_size, folder):
    """Own states under one name: torch saves one rank's."""
    jobs = [Job("ddp", "auto", "own") for _ in range(2)]
    for job in jobs:
        job.train(rank, range(2))
    dcp.save({"gsync": jobs[0].door.sync}, checkpoint_id=folder)
    with pytest.raises(dcp.api.CheckpointException, match=r"Size mismatch .* for gsync\.residuals"):
        dcp.load({"gsync": jobs[1].door.sync}, checkpoint_id=folder)


def test_own_states_under_one_name_do_not_load(tmp_path):
    """torch.distributed.checkpoint takes them for copies of one; what ranks reduce differs in size, so that it notices."""
    run_on_ranks(_one_for_all, 2, args=(str(tmp_path),))
