"""Errors and warnings of gsync.

Wrong use raises ``ValueError`` or ``TypeError`` with the argument, what came and what is accepted. Everything below is for what
can go wrong although gsync was used rightly. The native engine looks these classes up by name.
"""

from __future__ import annotations


class GsyncError(RuntimeError):
    """Base of the errors that gsync raises itself."""


class SyncError(GsyncError):
    """Gradients could not be synchronised: a rank died, a collective failed, or a hook raised.

    The gradients concerned are filled with NaN before this is raised. Go on with ``reset()`` on every rank, or end the process.
    """


class SyncTimeoutError(SyncError):
    """A collective was not finished within ``timeout_s``: a rank is late, has died, or runs other collectives."""


class InternalError(GsyncError):
    """A rule inside gsync is broken. This is a fault of gsync: please report it with the message."""


class GsyncWarning(UserWarning):
    """Warnings of gsync, for example about gradients that vanish in fp16."""
