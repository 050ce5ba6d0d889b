"""Who computes what in a step, who goes first, who has to go: plain functions.

Laws: higher priority first, then who came first; the last in that order is the first to be retracted. A chunk ends at
a page's end if it reaches one, so that all of it can be published, and never leaps over a mark (where a recurrent
state is to be kept).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class Ranked(Protocol):
    """``order``: when it came."""

    @property
    def priority(self) -> int: ...
    @property
    def order(self) -> int: ...


R = TypeVar("R", bound=Ranked)


def by_rank(jobs: Iterable[R]) -> list[R]:
    """Who goes first."""
    return sorted(jobs, key=lambda job: (-job.priority, job.order))


def victim(jobs: Sequence[R]) -> R | None:
    """Who is retracted: of the lowest priority, the newest."""
    return by_rank(jobs)[-1] if jobs else None


def chunk_stop(start: int, end: int, budget: int, page_size: int, marks: Sequence[int] = ()) -> int:
    """Where a chunk that begins at ``start`` stops: no later than ``end``, ``budget`` tokens and the next mark."""
    stop = min([end, start + budget, *(mark for mark in marks if mark > start)])
    if stop < end:
        whole = stop // page_size * page_size
        if whole > start:
            return whole
    return stop


def shorter(start: int, stop: int, page_size: int) -> int:
    """The next chunk to try when the one up to ``stop`` does not fit: half of it, down to the end of a page."""
    half = (start + (stop - start) // 2) // page_size * page_size
    least = start // page_size * page_size + page_size
    return min(stop, max(half, least))
