"""Computes how many pages of a prefix can be restored, given the pages that the stores have. Pure functions.

All KV pages of the prefix must be stored. Of another pool either every page up to the prefix's end must be stored
(ALL_PAGES), or those of a window that ends there (TRAILING_PAGES). With a window it can happen that a prefix of five
pages can be restored and one of four cannot. SGLang's ranks agree on a length that all of them can restore. So the
result has all lengths that can be restored, and not only the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class PoolPresence(NamedTuple):
    """A pool besides KV. ``there``: whether each page of the prefix is stored. ``window``: how many pages at the end of
    a prefix must be stored; None: all of them."""

    name: str
    there: Sequence[bool]
    window: int | None = None


class RestorablePages(NamedTuple):
    """The prefixes that can be restored, in pages. ``pages``: the longest prefix. ``restorable``: all lengths of
    prefixes, ascending. ``by_pool``: for each pool the longest prefix if only that pool and KV counted; without pools
    for which there is none."""

    pages: int
    by_pool: dict[str, int]
    restorable: list[int]


def leading(there: Sequence[bool]) -> int:
    """Return how many pages are stored before the first one that is not."""
    return next((at for at, is_there in enumerate(there) if not is_there), len(there))


def fold(kv_name: str, kv: Sequence[bool], others: Sequence[PoolPresence]) -> RestorablePages:
    """Return the prefixes that can be restored, where ``kv`` says which KV pages are stored, and ``others`` which of
    the other pools."""
    most = leading(kv)
    by_pool = {kv_name: most} if most else {}
    restorable = list(range(1, most + 1))
    for pool in others:
        lengths = _lengths(pool, most)
        if lengths:
            by_pool[pool.name] = lengths[-1]
        can = set(lengths)
        restorable = [length for length in restorable if length in can]
    return RestorablePages(restorable[-1] if restorable else 0, by_pool, restorable)


def _lengths(pool: PoolPresence, most: int) -> list[int]:
    """The lengths of prefixes, up to ``most``, that ``pool`` can restore, ascending."""
    if pool.window is None:
        return list(range(1, leading(pool.there[:most]) + 1))
    found, run = [], 0
    for length in range(1, most + 1):
        run = run + 1 if pool.there[length - 1] else 0
        if run >= min(pool.window, length):
            found.append(length)
    return found
