"""Under Accelerate, two ranks over Gloo: gsync synchronises, and what `load_state` resumes is the run that was not broken off."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as functional
from ranks import run_on_ranks
from torch.utils.data import DataLoader
from trainer_cases import BATCH_SIZE, FEEDBACK, NUM_BATCHES, assert_trained, data, mean_over_ranks, net

import gsync

accelerate = pytest.importorskip("accelerate")

from gsync.integrations.accelerate import register  # noqa: E402


def _accelerator(accumulate=1, scaler=None):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # wanted, though there is a group already
    os.environ.setdefault("MASTER_PORT", "29500")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    accelerator.scaler = scaler  # Accelerate makes one on GPUs only
    return accelerator


class Run:
    """A model in training, from its start or from a folder."""

    def __init__(self, accumulate=1, scaler=None, folder=None, **options):
        self.accelerator = _accelerator(accumulate, scaler)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
        loader = DataLoader(data(2), BATCH_SIZE)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.sync = register(self.accelerator, self.model, **(options or FEEDBACK))
        if folder is not None:
            self.accelerator.load_state(folder)

    def epochs(self, count, max_norm=None):
        """Trains, and returns this rank's losses."""
        losses = []
        for _ in range(count):
            for inputs, classes in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = functional.cross_entropy(self.model(inputs), classes)
                    self.accelerator.backward(loss)
                    if max_norm is not None and self.accelerator.sync_gradients:
                        gsync.clip_grad_norm_(self.sync, max_norm, scaler=self.accelerator.scaler)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                losses.append(loss.item())
        return losses


def _resumes(rank, world_size, folder, accumulate, init_scale):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3) if init_scale else None

    whole = Run(accumulate, scaler())
    losses = whole.epochs(2)
    whole.accelerator.save_state(folder)
    whole.accelerator.wait_for_everyone()
    state = torch.load(f"{folder}/gsync.pt", weights_only=True)
    assert state["consolidated"] and state["step"] == 2 * NUM_BATCHES // accumulate
    losses += whole.epochs(2, max_norm=1.0)
    assert_trained(whole.sync, whole.model, 4 * NUM_BATCHES // accumulate)
    assert sum(losses[-NUM_BATCHES:]) < 0.5 * sum(losses[:NUM_BATCHES])

    again = Run(accumulate, scaler(), folder)
    assert again.epochs(2, max_norm=1.0) == losses[2 * NUM_BATCHES :]
    assert_trained(again.sync, again.model, 2 * NUM_BATCHES // accumulate)
    if init_scale:
        assert again.accelerator.scaler.get_scale() > init_scale
        assert again.sync.state_dict()["loss_scale"] > init_scale
    fresh = Run(accumulate, scaler(), folder)  # what is in the file matters
    fresh.sync.load_state_dict({**state, "residuals": {}})
    assert mean_over_ranks(fresh.epochs(2, max_norm=1.0)) != mean_over_ranks(losses[2 * NUM_BATCHES :])
    for run in (whole, again, fresh):
        run.sync.close()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("init_scale", [None, 2.0**10])
def test_a_run_that_is_resumed_has_the_losses_of_one_that_is_not(tmp_path, accumulate, init_scale):
    run_on_ranks(_resumes, 2, args=(str(tmp_path), accumulate, init_scale), pool="trainers")


def _several(rank, world_size, folder):
    """Two models, one accelerator: a file for each; a state that was closed has none, and a missing file is told."""
    run = Run(codec="bf16")
    second = run.accelerator.prepare(net())
    other = register(run.accelerator, second, gsync.SyncConfig(codec="int8", rounding="stochastic", seed=7))
    run.epochs(1)
    second(torch.ones(1, 16)).sum().backward()
    run.accelerator.save_state(f"{folder}/both")
    run.sync.close()
    run.accelerator.save_state(f"{folder}/one")
    run.accelerator.wait_for_everyone()
    first, other_file = (torch.load(f"{folder}/both/{name}", weights_only=True) for name in ("gsync.pt", "gsync_1.pt"))
    assert (first["step"], other_file["step"], other_file["seed"]) == (NUM_BATCHES, 1, 7)
    assert not os.path.exists(f"{folder}/one/gsync.pt")
    register(run.accelerator, run.model, codec="fp16")
    with pytest.warns(gsync.GsyncWarning, match=r"there is no '.*one/gsync.pt': residuals and step stay as they are"):
        run.accelerator.load_state(f"{folder}/one")
    other.close()


def test_several_models_and_files_that_are_missing(tmp_path):
    run_on_ranks(_several, 2, args=(str(tmp_path),), pool="trainers")


def _rank_0_alone(rank, world_size, folder):
    run = Run()
    run.epochs(1)
    if run.accelerator.is_main_process:
        with pytest.raises(gsync.GsyncError, match="every rank has to save, not rank 0 alone"):
            run.accelerator.save_state(folder)


def test_saving_on_rank_0_alone_is_told(tmp_path):
    run_on_ranks(_rank_0_alone, 2, args=(str(tmp_path),), group_timeout_s=3.0, pool="trainers")


def _refused(rank, world_size):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]  # a single process
    accelerator = _accelerator()
    module = net()
    with pytest.raises(TypeError, match=r"expected an accelerate.Accelerator, got Sequential"):
        register(module, accelerator)
    with pytest.raises(ValueError, match=r"expected a model that accelerator.prepare returned"):
        register(accelerator, module)
    with pytest.raises(ValueError, match="distributed_type=NO it is a Sequential"):
        register(accelerator, accelerator.prepare(module))


def test_what_cannot_be_served_is_refused():
    run_on_ranks(_refused, 1, backend=None, pool="trainers alone")
