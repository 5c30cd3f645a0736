"""Under the Trainer of transformers, two ranks over Gloo: gsync synchronises, a resumed training is the unbroken one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as functional
from ddp_cases import assert_same_bits
from ranks import run_on_ranks
from trainer_cases import BATCH_SIZE, FEEDBACK, NUM_BATCHES, assert_trained, data, mean_over_ranks, net

import gsync

transformers = pytest.importorskip("transformers")

from gsync.integrations.transformers import GsyncCallback  # noqa: E402

STEPS = 2 * NUM_BATCHES


class Classifier(nn.Module):
    """Takes and returns what the Trainer does; keeps this rank's losses."""

    def __init__(self):
        super().__init__()
        self.net, self.losses = net(), []

    def forward(self, inputs, labels):
        loss = functional.cross_entropy(self.net(inputs), labels)
        self.losses.append(loss.item())
        return {"loss": loss}


def _trainer(folder, callback, accumulate=1, scaler=None, **options):
    from accelerate.state import AcceleratorState

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # wanted, though there is a group already
    os.environ.setdefault("MASTER_PORT", "29500")
    AcceleratorState._reset_state(True)
    arguments = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": BATCH_SIZE,
        "gradient_accumulation_steps": accumulate,
        "max_steps": STEPS // accumulate,
        "save_steps": STEPS // accumulate // 2,
        "learning_rate": 0.02,
        "max_grad_norm": 0.0 if scaler else 1.0,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    dataset = [{"inputs": x, "labels": y} for x, y in zip(*data(2).tensors, strict=True)]
    args = transformers.TrainingArguments(**(arguments | options))
    trainer = transformers.Trainer(Classifier(), args, train_dataset=dataset, callbacks=[callback])
    trainer.accelerator.scaler = scaler  # Accelerate makes one on GPUs only
    return trainer


def _resumes(rank, world_size, folder, accumulate):
    whole = GsyncCallback(**FEEDBACK)
    trainer = _trainer(folder, whole, accumulate)
    trainer.train()
    losses = trainer.model.losses
    assert whole.sync.closed and len(losses) == STEPS
    assert_trained(whole.sync, trainer.model, STEPS // accumulate)
    assert sum(losses[-NUM_BATCHES:]) < 0.8 * sum(losses[:NUM_BATCHES])

    half = f"{folder}/checkpoint-{STEPS // accumulate // 2}"
    state = torch.load(f"{half}/gsync.pt", weights_only=True)
    assert state["consolidated"] and state["step"] == STEPS // accumulate // 2
    resumed = GsyncCallback(**FEEDBACK)
    again = _trainer(folder, resumed, accumulate)
    again.train(resume_from_checkpoint=half)
    assert again.model.losses == losses[STEPS // 2 :]
    assert_same_bits([p.detach() for p in again.model.parameters()], [p.detach() for p in trainer.model.parameters()])
    assert_trained(resumed.sync, again.model, STEPS // accumulate // 2)

    elsewhere = GsyncCallback(**FEEDBACK, resume_from_checkpoint=half)
    moved = _trainer(f"{folder}/elsewhere", elsewhere, accumulate)
    moved.train(resume_from_checkpoint=half)
    assert moved.model.losses == again.model.losses

    without = _trainer(f"{folder}/nowhere", GsyncCallback(**FEEDBACK), accumulate)  # what is in the file matters
    with pytest.warns(gsync.GsyncWarning, match=r"there is no '.*/gsync.pt': residuals begin at zero"):
        without.train(resume_from_checkpoint=half)
    assert mean_over_ranks(without.model.losses) != mean_over_ranks(again.model.losses)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_that_is_resumed_has_the_losses_of_one_that_is_not(tmp_path, accumulate):
    run_on_ranks(_resumes, 2, 120, args=(str(tmp_path), accumulate), pool="trainers")


def _again(rank, world_size, folder):
    """The Trainer keeps its DDP instance for the next training, also after one that has failed."""
    callback = GsyncCallback(codec="bf16")
    trainer = _trainer(folder, callback, save_strategy="no")
    trainer.train()
    trainer.train()
    assert_trained(callback.sync, trainer.model, STEPS)
    forward = trainer.model.forward
    trainer.model.forward = lambda inputs, labels: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    trainer.model.forward = forward
    trainer.train()
    assert_trained(callback.sync, trainer.model, STEPS)


def test_a_trainer_that_trains_several_times(tmp_path):
    run_on_ranks(_again, 2, 120, args=(str(tmp_path),), pool="trainers")


def _scaled(rank, world_size, folder):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    callback = GsyncCallback(**FEEDBACK)
    trainer = _trainer(folder, callback, scaler=scaler)
    trainer.train()
    assert_trained(callback.sync, trainer.model, STEPS)
    torch.distributed.barrier()  # rank 0 has written
    assert torch.load(f"{folder}/checkpoint-{STEPS}/gsync.pt")["loss_scale"] in (scaler.get_scale(), scaler.get_scale() / 2)
    assert scaler.get_scale() == 2.0**12


def test_residuals_follow_the_trainers_scaler(tmp_path):
    run_on_ranks(_scaled, 2, 120, args=(str(tmp_path),), pool="trainers")


def _without_ddp(rank, world_size, folder):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]  # a single process
    trainer = _trainer(folder, GsyncCallback())
    with pytest.raises(ValueError, match=r"expected one DistributedDataParallel around .* a Classifier, and found 0"):
        trainer.train()


def test_a_trainer_without_ddp_is_refused(tmp_path):
    run_on_ranks(_without_ddp, 1, 120, backend=None, args=(str(tmp_path),), pool="trainers alone")
