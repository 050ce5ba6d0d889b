"""The most that any cache of a given size could find, with the whole future known.

The rule is Belady's ("A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5/2,
1966), on the blocks of a prefix tree: whenever more is held than fits, the leaf goes whose next use is farthest.

Why nothing finds more. To find a block means to have held it from its use before until now: an interval of requests
that takes one place. A cache of ``capacity`` blocks is a choice of intervals of which at most ``capacity`` cross any
gap between two requests, and it finds as many blocks as it chose. Going from left to right and giving up, where there
are too many, the one that ends last chooses the most: all that cross the gap are alike to what came before it, and
whoever ends last stands in the way of every later gap that the others stand in the way of.

Why that is a cache of prefixes. Whoever uses a block uses all before it, so no block's next use comes before its
parent's. Of blocks with the same next use the deepest goes first, so a parent is never given up while a child of it is
held, what goes is always a leaf, and what is found is always a prefix.

The cache that this describes may also refuse to keep a block that was just used; that one must hold what it is
computing makes real caches find a little less where paths are as long as the cache is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from asynccache.cli.curve import Request

NEVER = -1


def next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each block of each path: the number of the next request that looks it up, or ``NEVER`` if none does before
    it is gone, for it is of no use to hold it until then."""
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        path, looked_up = requests[number]
        found.append([upcoming.get(key, NEVER) for key in path])
        for place, key in enumerate(path):
            if place < looked_up:
                upcoming[key] = number
            else:
                upcoming.pop(key, None)
    found.reverse()
    return found


def optimum(requests: Sequence[Request], uses: Sequence[Sequence[int]], capacity: int) -> int:
    """Lookups that the best cache of ``capacity`` blocks answers, one request at a time. ``uses``: of ``next_uses``,
    which is the same for every capacity. O(n log n) in the number of blocks of all paths."""
    held: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for number, (path, _) in enumerate(requests):
        for key in path:
            if key in held:
                hits += held.pop(key) == number
        for depth, (key, use) in enumerate(zip(path, uses[number], strict=True)):
            if use != NEVER:
                held[key] = use
                heappush(farthest, (-use, -depth, key))
        while len(held) > capacity:
            use, _, key = heappop(farthest)
            if held.get(key) == -use:
                del held[key]
    return hits
