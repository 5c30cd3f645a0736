"""A word that only the ranks of this run can know, so that keys which an earlier run left in the store are not taken for theirs.

torchrun keeps its store when it starts ranks again after a failure, and with it every key of the run before: addresses of
processes that are gone, agreements with them. A file may be used again, too. So ranks put their keys under a word that rank 0 has
just made up, and learn it from rank 0 itself:

1. each rank says a word of its own (``hello/<rank>``),
2. rank 0 answers that word together with the session's (``welcome/<rank>``), again whenever it hears another,
3. the rank repeats the session's word (``joined/<rank>``).

A rank trusts an answer to its own word only, rank 0 a repetition of its own word only: both have been made in this run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

_FIRST_POLL_S, _LONGEST_POLL_S = 0.001, 0.05


def open_session(
    store: Any, rank: int, size: int, timeout_s: float, wait: Callable[[str], bytes], late: Callable[[int], Exception]
) -> str:
    """Returns the word of this run's session, the same on all ranks. Costs three keys for each rank.

    Args:
        wait: returns the value of a key of rank 0's once it is there, or raises.
        late: the error to raise for a rank that has not come after `timeout_s`.
    """
    mine, pause = secrets.token_hex(8), _Pause(timeout_s)
    if rank != 0:
        store.set(f"hello/{rank}", mine)
        answer = wait(f"welcome/{rank}").decode()
        while not answer.startswith(mine):  # left over
            if pause.is_over():
                raise late(0)
            answer = store.get(f"welcome/{rank}").decode()
        session = answer.removeprefix(mine)
        store.set(f"joined/{rank}", session)
        return session
    heard: dict[int, str] = {}
    missing = list(range(1, size))
    while True:
        for other in missing:
            word = _value(store, f"hello/{other}")
            if word != heard.get(other, ""):
                heard[other] = word
                store.set(f"welcome/{other}", word + mine)
        missing = [other for other in missing if _value(store, f"joined/{other}") != mine]
        if not missing:
            return mine
        if pause.is_over():
            raise late(missing[0])


class _Pause:
    """Pauses that grow, up to a deadline."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline, self._next = time.monotonic() + timeout_s, _FIRST_POLL_S

    def is_over(self) -> bool:
        """Sleeps, and returns whether the deadline has passed."""
        left = self._deadline - time.monotonic()
        time.sleep(max(0.0, min(self._next, left)))
        self._next = min(2 * self._next, _LONGEST_POLL_S)
        return left <= 0


def _value(store: Any, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""
