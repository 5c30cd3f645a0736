"""gsync under Lightning's DDP strategy, on CPUs and GPUs. Lightning itself registers communication hooks on GPUs only.

from gsync.integrations.lightning import GsyncCallback
callback = GsyncCallback(codec="int8", error_feedback=True)
trainer = Trainer(strategy="ddp", callbacks=[callback])
trainer.fit(model)
print(callback.sync.stats())
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from gsync.config import SyncConfig, make_config
from gsync.errors import GsyncError
from gsync.hook import register
from gsync.state import SyncState

from .saved import on_cpu, take_state


def _library() -> Any:
    """Lightning, by the one of its two names that the program uses."""
    name = "lightning.pytorch"
    if sys.modules.get("pytorch_lightning") and name not in sys.modules:
        name = "pytorch_lightning"
    try:
        return importlib.import_module(name)
    except ImportError as error:
        try:
            return importlib.import_module("pytorch_lightning")
        except ImportError:
            raise GsyncError(f"gsync.integrations.lightning needs Lightning (pip install lightning): {error}") from error


_Callback: Any = _library().Callback


class GsyncCallback(_Callback):
    """Lets gsync synchronise the gradients of what `Trainer.fit` trains, and keeps its state in Lightning's checkpoints.

    Registers when the strategy has wrapped the module, which is before the first batch; ends with the fit. With "16-mixed" and
    error_feedback residuals follow the precision plugin's scaler. A checkpoint has the residuals of all ranks added up: every
    rank calls `Trainer.save_checkpoint`, as Lightning wants it anyway. A fit takes up what a checkpoint or the fit before left.

    Args:
        config: a `SyncConfig`; or give its fields as keywords.

    Attributes:
        sync: the `SyncState` of the last fit, None before the first. Its `stats()` can be read after the fit too.

    Raises:
        GsyncError: when imported without Lightning.
        TypeError, ValueError: see `SyncConfig`. In `fit`: the strategy does not wrap the module in DistributedDataParallel, or
            has registered a hook of its own.
    """

    def __init__(self, config: SyncConfig | None = None, **options: Any) -> None:
        super().__init__()
        self.config = make_config(config, options)
        self.sync: SyncState | None = None
        self._kept: dict[str, Any] = {}  # of a checkpoint, or of a fit that has ended

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Registers, now that the strategy is set up."""
        ddp = trainer.strategy.model
        if not isinstance(getattr(ddp, "_orig_mod", ddp), DistributedDataParallel):
            raise ValueError(
                'GsyncCallback: expected Trainer(strategy="ddp") or one of its kinds, which wraps the module in '
                f"DistributedDataParallel; got {type(trainer.strategy).__name__}, whose model is a {type(ddp).__name__}"
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None) if self.config.error_feedback else None
        self.sync = register(ddp, self.config, scaler=scaler)
        if self._kept:
            self.sync.load_state_dict(self._kept)
            self._kept = {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keeps the state for a checkpoint that is saved after the fit, when the ranks cannot add up any more."""
        if self.sync is not None:
            self._kept = on_cpu(take_state(self.sync))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends gsync with what this rank has: other ranks may be gone."""
        if self.sync is not None and not self.sync.closed:
            self._kept = on_cpu(self.sync.state_dict())
            self.sync.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Ends gsync with the fit."""
        if stage == "fit" and self.sync is not None:
            self.sync.close()

    def state_dict(self) -> dict[str, Any]:
        """What Lightning puts into its checkpoint. During a fit collective: every rank saves."""
        if self.sync is None or self.sync.closed:
            return self._kept
        return take_state(self.sync)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what Lightning finds in a checkpoint: at once in a fit, or when the next one begins."""
        if self.sync is None or self.sync.closed:
            self._kept = state_dict
        else:
            self.sync.load_state_dict(state_dict)
