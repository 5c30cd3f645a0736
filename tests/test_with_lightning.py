"""Under Lightning's own Trainer, two ranks over Gloo: gsync synchronises, and a fit that is resumed is the one not broken off."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from ddp_cases import assert_same_bits
from ranks import run_on_ranks
from torch.utils.data import DataLoader
from trainer_cases import BATCH_SIZE, FEEDBACK, NUM_BATCHES, assert_trained, data, mean_over_ranks, net

pl = pytest.importorskip("lightning.pytorch")

from gsync.integrations.lightning import GsyncCallback  # noqa: E402


class Task(pl.LightningModule):
    """Counts its batches; `fails_at` is the one that raises, on every rank."""

    def __init__(self, fails_at=None):
        super().__init__()
        self.net, self.losses, self.fails_at = net(), [], fails_at

    def training_step(self, batch, batch_idx):
        if len(self.losses) == self.fails_at:
            raise RuntimeError("out of luck")
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)


def _trainer(folder, callbacks, **options):
    options = {"strategy": "ddp", "devices": 2, "max_epochs": 4} | options
    return pl.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _fit(folder, callback, ckpt_path=None, task=None, **options):
    """Trains, with a checkpoint after each epoch."""
    task = task or Task()
    saver = pl.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1)
    trainer = _trainer(folder, [saver, callback], **options)
    trainer.fit(task, DataLoader(data(2), BATCH_SIZE), ckpt_path=ckpt_path)
    return trainer, task


def _resumes(rank, world_size, folder, accumulate):
    whole = GsyncCallback(**FEEDBACK)
    _, task = _fit(folder, whole, accumulate_grad_batches=accumulate)
    assert whole.sync.closed
    assert_trained(whole.sync, task, 4 * NUM_BATCHES // accumulate)
    assert sum(task.losses[-NUM_BATCHES:]) < 0.5 * sum(task.losses[:NUM_BATCHES])

    path = f"{folder}/epoch=1.ckpt"
    saved = torch.load(path, weights_only=False)
    state = saved["callbacks"]["GsyncCallback"]
    assert state["consolidated"] and state["step"] == 2 * NUM_BATCHES // accumulate
    assert any(entry["error"].abs().sum() > 0 for entry in state["residuals"].values())
    resumed = GsyncCallback(**FEEDBACK)
    _, again = _fit(f"{folder}/again", resumed, path, accumulate_grad_batches=accumulate)
    assert again.losses == task.losses[2 * NUM_BATCHES :]
    assert_same_bits([p.detach() for p in again.parameters()], [p.detach() for p in task.parameters()])
    assert_trained(resumed.sync, again, 2 * NUM_BATCHES // accumulate)

    if rank == 0:  # what is in the checkpoint matters
        torch.save(saved | {"callbacks": {}}, f"{folder}/without.ckpt")
    torch.distributed.barrier()
    _, without = _fit(
        f"{folder}/without", GsyncCallback(**FEEDBACK), f"{folder}/without.ckpt", accumulate_grad_batches=accumulate
    )
    assert mean_over_ranks(without.losses) != mean_over_ranks(again.losses)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_fit_that_is_resumed_has_the_losses_of_one_that_is_not(tmp_path, accumulate):
    run_on_ranks(_resumes, 2, 120, args=(str(tmp_path), accumulate), pool="trainers")


def _saved_later(rank, world_size, folder):
    """A checkpoint of after the fit, and a second fit of the same Trainer, go on from the first one's end."""
    _, whole = _fit(f"{folder}/whole", GsyncCallback(**FEEDBACK))
    callback = GsyncCallback(**FEEDBACK)
    trainer, task = _fit(folder, callback, max_epochs=2)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    resumed = GsyncCallback(**FEEDBACK)
    _, again = _fit(f"{folder}/again", resumed, f"{folder}/after.ckpt")
    assert task.losses + again.losses == whole.losses
    trainer.fit_loop.max_epochs = 4
    trainer.fit(task, DataLoader(data(2), BATCH_SIZE))
    assert callback.sync.state_dict()["step"] == 4 * NUM_BATCHES


def test_a_checkpoint_saved_after_the_fit_has_its_state(tmp_path):
    run_on_ranks(_saved_later, 2, 120, args=(str(tmp_path),), pool="trainers")


def _fails(rank, world_size, folder):
    callback, task = GsyncCallback(**FEEDBACK), Task(fails_at=3)
    with pytest.raises(RuntimeError, match="out of luck"):
        _fit(folder, callback, task=task)
    assert callback.sync.closed and callback.state_dict()["step"] == 3
    assert not callback.state_dict()["consolidated"]  # others may be gone
    task.fails_at = None
    _fit(folder, callback, task=task, max_epochs=1)
    assert callback.sync.state_dict()["step"] == 3 + NUM_BATCHES


def test_an_exception_ends_it_and_the_next_fit_goes_on(tmp_path):
    run_on_ranks(_fails, 2, 120, args=(str(tmp_path),), pool="trainers")


def _scaled(rank, world_size, folder):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    plugin = pl.plugins.precision.MixedPrecision("16-mixed", "cpu", scaler)
    callback = GsyncCallback(**FEEDBACK)
    _, task = _fit(folder, callback, plugins=[plugin], gradient_clip_val=1.0)
    assert_trained(callback.sync, task, 4 * NUM_BATCHES)
    assert scaler.get_scale() == 2.0**15 and callback.state_dict()["loss_scale"] in (2.0**14, 2.0**15)
    assert sum(task.losses[-NUM_BATCHES:]) < 0.5 * sum(task.losses[:NUM_BATCHES])


def test_residuals_follow_lightnings_scaler(tmp_path):
    run_on_ranks(_scaled, 2, 120, args=(str(tmp_path),), pool="trainers")


def _without_ddp(rank, world_size, folder):
    trainer = _trainer(folder, [GsyncCallback()], strategy="auto", devices=1)
    with pytest.raises(ValueError, match=r'expected Trainer\(strategy="ddp"\).*got SingleDeviceStrategy, whose model is a Task'):
        trainer.fit(Task(), DataLoader(data(1), BATCH_SIZE))
    with pytest.raises(ValueError, match="codec='int9'"):
        GsyncCallback(codec="int9")


def test_a_strategy_without_ddp_is_refused(tmp_path):
    run_on_ranks(_without_ddp, 1, 120, backend=None, args=(str(tmp_path),), pool="trainers alone")
