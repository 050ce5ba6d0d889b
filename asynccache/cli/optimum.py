"""The most lookups that any cache of a given size could answer, with the whole future known.

The rule is Belady's ("A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5/2,
1966), on the blocks of a prefix tree: whenever more blocks are held than fit, drop the leaf whose next use is farthest.

Why no cache answers more. A block can only be found if it was held from its previous use until now. That is an interval
of requests, in which the block takes one place. So a cache of ``capacity`` blocks chooses intervals of which at most
``capacity`` cross any gap between two requests, and it answers one lookup for each interval it chose. Go through the
gaps from left to right; where too many intervals cross, drop the one that ends last. This chooses the most: to the gaps
before, all the crossing intervals are alike, and the one that ends last crosses every later gap that the others cross.

Why the chosen blocks are prefixes. A request that uses a block also uses all blocks before it, so a block's next use
never comes before its parent's. Of blocks with the same next use the deepest is dropped first. So a parent is never
dropped while one of its children is held: only leaves are dropped, and the blocks found are always a prefix.

This cache may refuse to keep a block that was just used. A real cache must hold what it is computing, so it answers a
little less where paths are as long as the cache is large.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from asynccache.cli.curve import BlockPath

NEVER = -1


def next_uses(paths: Sequence[BlockPath]) -> list[list[int]]:
    """For each block of each path: the number of the next request that looks the block up; ``NEVER`` if none does."""
    upcoming: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(paths) - 1, -1, -1):
        found.append([upcoming.get(key, NEVER) for key in paths[number]])
        upcoming |= dict.fromkeys(paths[number], number)
    found.reverse()
    return found


def optimum(paths: Sequence[BlockPath], uses: Sequence[Sequence[int]], capacity: int) -> int:
    """The number of lookups that the best cache of ``capacity`` blocks answers if requests are served one by one.
    ``uses``: the result of ``next_uses``, which is the same for every capacity. O(n log n) in the number of blocks of
    all paths."""
    held: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for number, path in enumerate(paths):
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
