"""Who is late: what the ranks tell each other now and then through their group's store.

No collective is needed for it, so the order of collectives stays what it is, and nobody waits: a rank writes what it knows and
reads what the others wrote last. Three requests to the store, at most once a second.
"""

from __future__ import annotations

import time

from .groups import Meeting

_EVERY_S = 1.0


class Arrivals:
    """What each rank waited for at the end of a backward pass."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._rank, self._store = meeting.rank, meeting.store("arrivals")
        self._keys = [f"exposed/{rank}" for rank in range(meeting.size)]
        self._asked = 0.0
        self._known: list[float] | None = None

    def exchange(self, exposed_ms: float) -> list[float] | None:
        """Tells the other ranks this one's mean `exposed_ms` of a step; returns theirs, by rank, as far as they have told.

        None: not all have, or the store is gone. Never waits for another rank.
        """
        if self._meeting.is_forked:  # the connection to the store is another process's
            return None
        now = time.monotonic()
        if self._known is not None and now - self._asked < _EVERY_S:
            return self._known
        self._asked = now
        try:
            self._store.set(self._keys[self._rank], repr(exposed_ms))
            if self._store.check(self._keys):
                self._known = [float(value) for value in self._store.multi_get(self._keys)]
        except RuntimeError:  # the process that served it has left; training may go on without
            self._known = None
        return self._known

    def forget(self) -> None:
        """The means begin anew."""
        self._known = None
