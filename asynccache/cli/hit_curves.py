"""How many lookups of a trace a cache of each size answers: under LRU, at best, and under a policy of the core.

**LRU**, of every size from one pass over the requests. Mattson et al., "Evaluation techniques for storage hierarchies"
(IBM Systems Journal 9/2, 1970): LRU is a stack algorithm, so a cache of C blocks holds the C blocks that were touched
last. Order the blocks by their last touch. A block is a hit in every cache that has at least as many blocks as its
place in that order; its place is 1 plus the number of blocks that were touched after it.

A request looks up its whole path first and then touches it, leaf first, as the radix tree does. So no block stays
longer than the block before it, and what is found is always a prefix. The result is exact for LRU over whole blocks
when requests are served one at a time.

**At best**, with the whole future known. The rule is Belady's ("A study of replacement algorithms for a virtual-storage
computer", IBM Systems Journal 5/2, 1966), on the blocks of a prefix tree: whenever more blocks are held than fit, drop
the leaf whose next use is farthest.

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

**Under a policy**: the requests go through the core itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.cli.traces import BLOCK_TOKENS
from asynccache.core.cache import CacheCore, Grant, LeaseRequest, Wait
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig

BlockPath = Sequence[int]
"""The blocks of one request. There is a key for each block, root first; it stands for the block and all blocks before
it."""


class HitCurve(NamedTuple):
    """``hits[c]``: how many lookups a cache of c blocks answers; the last entry holds for every larger cache as well.
    """

    hits: npt.NDArray[np.int64]
    lookups: int
    """How many lookups there are in all."""
    blocks: int
    """How many different blocks the requests have."""

    def found(self, capacity: float) -> int:
        """The number of lookups that a cache of ``capacity`` blocks answers."""
        return int(self.hits[min(len(self.hits) - 1, max(0, int(capacity)))])


def curve(paths: Sequence[BlockPath]) -> HitCurve:
    """The curve of requests with these paths, from one pass over them.

    Each block is a mark at the moment when it was touched last, so its place is the number of marks from its own to the
    latest. The marks are summed by a Fenwick tree ("A new data structure for cumulative frequency tables", Software:
    Practice and Experience 24/3, 1994).
    """
    lookups = sum(map(len, paths))
    last, places, sums, now = dict[int, int](), array("q"), array("q", bytes(8 * (lookups + 1))), 0

    def mark(time: int, by: int) -> None:
        time += 1
        while time <= lookups:
            sums[time] += by
            time += time & -time

    def marks_before(time: int) -> int:
        found = 0
        while time:
            found += sums[time]
            time &= time - 1
        return found

    for path in paths:
        before, place = -1, 0
        for key in path:
            if (time := last.get(key, -1)) >= 0:
                place = place + 1 if time == before - 1 else len(last) - marks_before(time)
                before = time
                places.append(place)
        for key in reversed(path):  # the leaf first, so that the root is the latest
            if key in last:
                mark(last[key], -1)
            mark(now, 1)
            last[key], now = now, now + 1
    return HitCurve(np.bincount(np.asarray(places, dtype=np.int64), minlength=1).cumsum(), lookups, len(last))


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


_SPACE = bytes(32)
_UNSLICED = 1 << 30


def policy_hits(
    paths: Sequence[BlockPath], capacity: int, eviction: str, times: Sequence[float], block_size: int = BLOCK_TOKENS,
    ended: Sequence[bool] = (),
) -> int:
    """The number of lookups that a device of ``capacity`` blocks of ``block_size`` tokens answers under the policy
    named ``eviction``. ``times``: the seconds at which the requests come, ascending. ``ended``: of which requests the
    cache is told that their conversations are over; of none, if it is empty.

    The requests go through a core one at a time, at these times, with one page for each block, no host tier and no
    store. No byte is moved. So the answer is that of the policy's own code, with what it learns on the way.
    Unlike ``optimum`` and ``curve``, this cache keeps every block that a request holds while the request runs. A
    request whose path is longer than the cache only looks up what is there and leaves nothing.
    """
    if capacity < 1:
        return 0
    core = CacheCore(CoreConfig(
        page_size=block_size, components=(ComponentSlots(ComponentKind.FULL, capacity),), eviction=eviction,
        slice_steps=_UNSLICED,
    ))  # fmt: skip
    hits = 0
    for path, at, over in zip(paths, times, ended or [False] * len(paths), strict=True):
        core.at(at)
        key, length = np.repeat(np.asarray(path, dtype=np.int32), block_size).tobytes(), len(path) * block_size
        if len(path) > capacity:
            hits += core.match(_SPACE, key).device // block_size
            continue
        granted = core.lease(LeaseRequest(_SPACE, key, length, length, length))
        assert isinstance(granted, Grant), f"nobody else uses the {capacity} blocks of the device"
        hits += granted.lease.cached // block_size
        waits = core.commit(granted.lease, key, b"")
        assert not isinstance(waits, Wait), "there is nowhere that pages could come from"
        core.release(granted.lease, ended=over)
    return hits
