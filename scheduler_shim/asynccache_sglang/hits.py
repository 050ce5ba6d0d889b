"""How many pages of a prefix can be restored, from which pages the stores have. Pure.

The KV pages must be there from the first on. Of another pool either every page must be, up to the prefix's end
(ALL_PAGES), or those of a window that ends there (TRAILING_PAGES): so of the latter a prefix of five pages can be
restored where one of four cannot. SGLang's ranks agree on a length that all of them can restore, so all such lengths
are told, and not only the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Asked(NamedTuple):
    """A pool beside KV. ``there``: of each page of the prefix, whether it is stored. ``window``: how many pages at the
    end of a prefix must be there; None: all of them."""

    name: str
    there: Sequence[bool]
    window: int | None = None


class Hits(NamedTuple):
    """``pages``: of the longest prefix that can be restored. ``by_pool``: the same as far as one pool is concerned,
    within the KV pages that are there; without those of which it is none. ``restorable``: all lengths, ascending."""

    pages: int
    by_pool: dict[str, int]
    restorable: list[int]


def leading(there: Sequence[bool]) -> int:
    """How many are there before the first that is not."""
    return next((at for at, is_there in enumerate(there) if not is_there), len(there))


def fold(kv_name: str, kv: Sequence[bool], others: Sequence[Asked]) -> Hits:
    """What can be restored, if ``kv`` says which KV pages are stored."""
    most = leading(kv)
    by_pool = {kv_name: most} if most else {}
    restorable = list(range(1, most + 1))
    for pool in others:
        lengths = _lengths(pool, most)
        if lengths:
            by_pool[pool.name] = lengths[-1]
        can = set(lengths)
        restorable = [length for length in restorable if length in can]
    return Hits(restorable[-1] if restorable else 0, by_pool, restorable)


def _lengths(pool: Asked, most: int) -> list[int]:
    """The lengths of prefixes that this pool can restore."""
    if pool.window is None:
        return list(range(1, leading(pool.there[:most]) + 1))
    found, run = [], 0
    for length in range(1, most + 1):
        run = run + 1 if pool.there[length - 1] else 0
        if run >= min(pool.window, length):
            found.append(length)
    return found
