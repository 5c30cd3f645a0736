"""What the main job is doing, on rank 0's terminal.

The bar is drawn between rounds by the measuring thread itself: a thread that redraws would take time from the rank it shows.
"""

from __future__ import annotations

import time
from typing import Any

_REDRAW_S = 0.25


class Progress:
    """A progress bar on standard error, or nothing where `shown` is false. Use as a context manager."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None
        self._task: Any = None
        self._drawn = 0.0
        self._phase = ""

    def __enter__(self) -> Progress:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description:<11}"),
                BarColumn(24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[what]}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, name: str, done: int, total: int, what: str = "") -> None:
        """Show that of `total` parts of phase `name`, `done` are done, and which part is next."""
        if self._bar is None:
            return
        now = time.monotonic()
        if name == self._phase and now - self._drawn < _REDRAW_S:
            return
        if name != self._phase:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(name, total=total, what=what)
        self._phase, self._drawn = name, now
        self._bar.update(self._task, completed=done, total=total, what=what)
        self._bar.refresh()
