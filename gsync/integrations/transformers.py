"""gsync under the Trainer of transformers, which wraps its model in DistributedDataParallel out of sight.

from gsync.integrations.transformers import GsyncCallback
callback = GsyncCallback(codec="int8", error_feedback=True)
trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
trainer.train()
print(callback.sync.stats())
"""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gsync.config import SyncConfig, make_config
from gsync.errors import GsyncError, GsyncWarning
from gsync.hook import register
from gsync.state import SyncState

from .saved import FILE_NAME, read_state, take_state, write_state


def _library() -> Any:
    try:
        import transformers
        from transformers import TrainerCallback  # noqa: F401  (comes with an error of its own where parts are missing)
    except ImportError as error:
        raise GsyncError(f"gsync.integrations.transformers needs transformers (pip install transformers): {error}") from error
    return transformers


_Callback: Any = _library().TrainerCallback


class GsyncCallback(_Callback):
    """Lets gsync synchronise the gradients of what a `Trainer` trains, and keeps its state beside the Trainer's checkpoints.

    Registers when training begins, ends with it. Saves gsync.pt into each checkpoint's folder, with the residuals of all ranks
    added up, and takes it from there in a training that is resumed. With fp16 and error_feedback residuals follow the Trainer's
    GradScaler. Nothing is saved under `save_only_model`.

    Args:
        config: a `SyncConfig`; or give its fields as keywords.
        resume_from_checkpoint: the folder that `Trainer.train` resumes from, where it is not the one that this output_dir has for
            the step: a callback is not told. In a folder without gsync.pt there is a `GsyncWarning`, and residuals begin anew.

    Attributes:
        sync: the `SyncState` of the last training, None before the first. Its `stats()` can be read afterwards too.

    Raises:
        GsyncError: when imported without transformers.
        TypeError, ValueError: see `SyncConfig`. In `train`: the Trainer does not wrap the model in DistributedDataParallel.
    """

    def __init__(
        self, config: SyncConfig | None = None, resume_from_checkpoint: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        self.config = make_config(config, options)
        self.sync: SyncState | None = None
        self._folder = os.fspath(resume_from_checkpoint) if resume_from_checkpoint is not None else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Registers on the DDP instance around the Trainer's model, and loads what the checkpoint has."""
        if self.sync is not None:  # a training before this one, which may have ended by an exception
            self.sync.close()
        scaler = getattr(kwargs.get("optimizer"), "scaler", None) if self.config.error_feedback else None
        self.sync = register(_find_ddp(kwargs["model"], args), self.config, scaler=scaler)
        if state.global_step > 0:
            path = os.path.join(self._folder or _folder_of(args, state), FILE_NAME)
            if os.path.exists(path):
                self.sync.load_state_dict(read_state(path))
            else:
                message = f"gsync: there is no {path!r}: residuals begin at zero. Give GsyncCallback resume_from_checkpoint="
                warnings.warn(message, GsyncWarning, stacklevel=2)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Saves. The Trainer calls it on every rank, when it has written the rest."""
        if self.sync is None or self.sync.closed or args.save_only_model:
            return
        saved = take_state(self.sync)
        folder = _folder_of(args, state)
        if args.should_save:
            if not os.path.isdir(folder):
                raise GsyncError(f"GsyncCallback: expected the Trainer's checkpoint in {folder!r}, and there is no such folder")
            write_state(saved, os.path.join(folder, FILE_NAME))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends gsync with the training."""
        if self.sync is not None:
            self.sync.close()


def _folder_of(args: Any, state: Any) -> str:
    return os.path.join(args.output_dir, f"checkpoint-{state.global_step}")


def _find_ddp(model: Any, args: Any) -> DistributedDataParallel:
    """The DDP instance around `model`, by a search of all objects that Python's garbage collector knows (about 0.2 s)."""
    gc.collect()  # one of a training before may lie about
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel) and each.module is model]
    if len(found) != 1:
        raise ValueError(
            f"GsyncCallback: expected one DistributedDataParallel around the Trainer's model, a {type(model).__name__}, and "
            f"found {len(found)}, under parallel_mode={args.parallel_mode.value}. Start it by torchrun; FSDP and DeepSpeed "
            "synchronise by themselves"
        )
    return found[0]
