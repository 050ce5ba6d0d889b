"""The errors that a caller can meet, each named for its condition.

A miss is a value, never an error. ``InvariantViolation`` is a bug in asynccache: neither asynccache nor a user's code
should catch it.
"""

from __future__ import annotations

from collections.abc import Mapping


class AsyncCacheError(Exception):
    """Base of all errors that asynccache raises on purpose."""


class ConfigError(AsyncCacheError, ValueError):
    """A setting or an argument is unusable. The message names the field and the value."""


class CacheFull(AsyncCacheError):
    """There is no room for the pages that were asked for. ``lease`` raises it if there can never be room. With
    ``wait=True``, ``lease`` and ``extend`` raise it if nothing is in flight that could free any; with ``wait=False``,
    if there is none now."""


class CacheClosed(AsyncCacheError):
    """The cache was closed, or one of its workers died (then ``__cause__`` is that worker's error)."""


class LoadFailed(AsyncCacheError):
    """A load_back under a lease failed, or a batch of the engine that was to compute pages of it. The first ``valid``
    tokens of the lease are still good on the device.

    All that can be done with such a lease is to release it. The request may then ask for another one.
    """

    def __init__(self, valid: int) -> None:
        super().__init__(f"a load_back or a batch failed: only the first {valid} tokens of the lease are valid")
        self.valid = valid


class CopyFailed(AsyncCacheError):
    """A device reported an error for a copy; every byte of its destination is undefined."""


class RankFailure(AsyncCacheError):
    """A rank of a group is gone, silent, or cannot go on."""

    def __init__(self, reason: str, rank: int | None = None) -> None:
        super().__init__(reason if rank is None else f"rank {rank}: {reason}")
        self.reason = reason
        """What happened to the rank, in words."""
        self.rank = rank
        """The rank's number; None if the process has no number, or none is known."""


class BatchFailed(AsyncCacheError):
    """An engine could not run batch ``number``; what it was to compute has left the cache."""

    def __init__(self, number: int, reasons: Mapping[int, str]) -> None:
        said = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items()))
        super().__init__(f"batch {number}: {said}")
        self.number = number
        self.reasons = dict(reasons)
        """What each rank said that could not run it, by the rank's number."""


class BackendError(AsyncCacheError):
    """A storage backend could not do what was asked of it as a whole."""


class Unavailable(BackendError):
    """The backend cannot be reached or opened (locked folder, foreign schema, dead server)."""


class Timeout(BackendError):
    """The backend did not answer before its deadline."""


class WrongPages(AsyncCacheError):
    """``AsyncCache(debug=True)`` found by the bytes of pages that the program has used them wrongly. The message says
    how; ``mistake`` names the kind in a word or two. What was about to be published is not."""

    def __init__(self, mistake: str, what: str) -> None:
        super().__init__(f"{mistake}: {what}")
        self.mistake = mistake


class InvariantViolation(AssertionError):
    """A law of the core was broken. This is a bug, never a condition to handle."""


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of ``error`` and its causes before it is kept: they would keep alive the frames that it went
    through, with all memory used there."""
    found: BaseException | None = error
    while found is not None:
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
