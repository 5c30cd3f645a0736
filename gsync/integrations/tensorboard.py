"""Synchronisation in TensorBoard.

from gsync.integrations.tensorboard import TensorBoard
board = TensorBoard(sync, "runs/today", every=50)     # or a SummaryWriter that is there already
for step, batch in enumerate(batches):
    ...
    board.after_step(step)
board.close()
"""

from __future__ import annotations

import os
from typing import Any

from gsync.errors import GsyncError

from .windows import Window


class TensorBoard:
    """Writes scalars named `gsync/...`, means of the steps since the last time, every so many steps.

    Args:
        sync: a `SyncState` or `GradReducer`.
        writer: a `torch.utils.tensorboard.SummaryWriter`, or the folder for a new one.
        every: steps between two points.

    Raises:
        GsyncError: a folder was given, and TensorBoard is not installed.
        ValueError: `every` is below 1.
    """

    def __init__(self, sync: Any, writer: Any, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"TensorBoard: every={every}: expected at least 1")
        self._sync, self._every, self._window = sync, every, Window()
        self._owned = isinstance(writer, (str, os.PathLike))
        self._writer = _make_writer(writer) if self._owned else writer

    def after_step(self, step: int) -> None:
        """To be called after each step, with its number. Reads `stats` when it is time to, which on CUDA waits for the device."""
        if (step + 1) % self._every:
            return
        for name, value in self._window.look(self._sync.stats()).items():
            self._writer.add_scalar(f"gsync/{name}", value, step)

    def close(self) -> None:
        """Writes what is left, of a writer that was made here."""
        if self._owned:
            self._writer.close()


def _make_writer(folder: Any) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise GsyncError(f"gsync.integrations.tensorboard needs TensorBoard (pip install tensorboard): {error}") from error
    return SummaryWriter(str(folder))
