"""The order of requests, whom to retract, and where a chunk ends: plain functions.

Laws: requests of higher priority go first, and among equals the one that came first. The last in this order is the
first to be retracted. A chunk ends at the end of a page if it reaches one, so that all of it can be published. It never
goes beyond a mark, which is a position whose recurrent state is to be kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Ranked(Protocol):
    """An item that has a place in the order. ``order``: a number that grows with each request that comes."""

    @property
    def priority(self) -> int: ...
    @property
    def order(self) -> int: ...


R = TypeVar("R", bound=Ranked)


def by_rank(jobs: Iterable[R]) -> list[R]:
    """The jobs in their order, the one that goes first at the front."""
    return sorted(jobs, key=lambda job: (-job.priority, job.order))


def victim(jobs: Sequence[R]) -> R | None:
    """The job to be retracted: the newest of those of the lowest priority; None if there are no jobs."""
    return by_rank(jobs)[-1] if jobs else None


def chunk_stop(start: int, end: int, budget: int, page_size: int, marks: Sequence[int] = ()) -> int:
    """Return the position at which a chunk that begins at ``start`` stops: not after ``end``, not after ``budget``
    tokens, not after the next of ``marks``, and at the end of a page if it stops before ``end`` and reaches one."""
    stop = min([end, start + budget, *(mark for mark in marks if mark > start)])
    if stop < end:
        whole = stop // page_size * page_size
        if whole > start:
            return whole
    return stop


def shorter(start: int, stop: int, page_size: int) -> int:
    """The stop to try next when there is no room up to ``stop``: half of the chunk, rounded down to whole pages, but at
    least to the end of the page that ``start`` is in."""
    half = (start + (stop - start) // 2) // page_size * page_size
    least = start // page_size * page_size + page_size
    return min(stop, max(half, least))
