"""Who is to be told in a forked process that its threads and connections are another process's. The C++ engine looks itself."""

from __future__ import annotations

import os
import weakref
from typing import Any

# Of engines that a fork has copied: taking it down would wait for threads that are not there.
left_behind: list[Any] = []
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def tell(engine: Any) -> None:
    """Calls `engine.see_fork()` in processes that are forked from now on. Holds it weakly."""
    _told.add(engine)


def _see_fork() -> None:
    for engine in list(_told):
        engine.see_fork()


os.register_at_fork(after_in_child=_see_fork)
