"""``p2c``: evict what is least likely to be wanged again for the room and the time that it would take. Learned online.

Blocks that requests fork from, and blocks that were used once, twice or often, come back after very different times; which, the
policy learns while it runs. Eight classes: ``shared`` (1, 2 to 4, 5 or more forks at the node or below it), else by uses (1,
2, 3, 4 to 6, 7 or more). For each class it counts after which time its pages were used again, and how many pages have waited
for how long in vain. From that follows a *worth* for each class and age: the best ratio, over all horizons, of the
probability that the page is used again by then to the time that it is expected to be held until then. A class's worth rises and
then falls with age, so of a queue sorted by recency either the oldest or the newest is worth least: sixteen
candidates stand for all cells, and the one that is worth least goes.

What was evicted is remembered as a *ghost* for a while, so that a use after the eviction counts, too. All counts are of tokens in
blocks of 512. The counts fade, so that a new workload is learned anew. Until a hundred uses were seen all ages are worth
the same, and the oldest goes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import log
from typing import NamedTuple

from asynccache.core.eviction import Queue
from asynccache.core.tree import Node

CLASSES = ("used once", "used twice", "used 3 times", "used 4 to 6 times", "used 7 times or more",
           "forked once", "forked 2 to 4 times", "forked 5 times or more")  # fmt: skip
BINS = 48
_SHARED = 5
_LEAST = 0.5
_GROWTH = 1.225
_LOG_GROWTH = log(_GROWTH)
EDGES = (0.0, *(_LEAST * _GROWTH**k for k in range(BINS)))
"""Ages in seconds: bin k reaches from ``EDGES[k]`` to ``EDGES[k + 1]``; the last has no end."""
_ENDS = (*EDGES[1:BINS], float("inf"))
_WIDTHS = tuple(high - low for low, high in zip(EDGES, EDGES[1:], strict=False))
_LEARN_EVERY = 100
_PRIOR_PAGES = 300.0
_PRIOR_HAZARD = 0.02
_FADE = 0.99
_COHORTS = 128
_BLOCK = 512

# ``Node.heat``: uses, up to 7, times eight; and forks, up to 5.
_FEW_USES = (0, 0, 1, 2, 3, 3, 3, 4)
_FEW_FORKS = (0, 5, 6, 6, 6, 7)
_CLASS = tuple(_FEW_FORKS[min(heat & 7, 5)] or _FEW_USES[heat >> 3] for heat in range(64))


def bin_of(age: float) -> int:
    """The bin that an age in seconds lies in."""
    if age < _LEAST:
        return 0
    return min(BINS - 1, 1 + int(log(age / _LEAST) / _LOG_GROWTH))


class Ghost(NamedTuple):
    """What is remembered of a node that left: where it ended, and what the policy knew of it."""

    end: int
    heat: int
    used: float
    blocks: float


class Learned(NamedTuple):
    """One class, for whoever wants to look: blocks used again and blocks that had reached that age, by bin; and the
    worth of each bin."""

    name: str
    used: tuple[float, ...]
    reached: tuple[float, ...]
    worth: tuple[float, ...]


class Curves:
    """What is known of each class: when it is used again, how much of it waits since when."""

    __slots__ = ("_alive", "_births", "_given_up", "_used", "worth")

    def __init__(self) -> None:
        classes = range(len(CLASSES))
        self._used = [[0.0] * BINS for _ in classes]
        self._given_up = [[0.0] * BINS for _ in classes]
        self._births = [0.0]
        self._alive = [[0.0] for _ in classes]
        self.worth = [[1.0] * BINS for _ in classes]

    def born(self, kind: int, blocks: float) -> None:
        """``blocks`` of this class were used just now."""
        self._alive[kind][-1] += blocks

    def used(self, kind: int, since: float, age: float, blocks: float) -> None:
        """They are used again, ``age`` seconds after ``since``."""
        self._alive[kind][bisect_right(self._births, since) - 1] -= blocks
        self._used[kind][bin_of(age)] += blocks

    def given_up(self, kind: int, since: float, age: float, blocks: float) -> None:
        """They are forgotten, unused for ``age`` seconds."""
        self._alive[kind][bisect_right(self._births, since) - 1] -= blocks
        self._given_up[kind][bin_of(age)] += blocks

    def moved(self, before: int, after: int, since: float, blocks: float) -> None:
        """They belong to another class now, without having been used."""
        at = bisect_right(self._births, since) - 1
        self._alive[before][at] -= blocks
        self._alive[after][at] += blocks

    def learn(self, now: float) -> None:
        """Work out the worth of every class and age."""
        reached = [self._reached(kind, now) for kind in range(len(CLASSES))]
        pool = [
            (sum(used[k] for used in self._used) + _PRIOR_PAGES * _PRIOR_HAZARD)
            / (sum(seen[k] for seen in reached) + _PRIOR_PAGES)
            for k in range(BINS)
        ]
        for kind, seen in enumerate(reached):
            used = self._used[kind]
            prior = [_PRIOR_HAZARD] * BINS if kind >= _SHARED else pool
            self.worth[kind] = _unimodal(_smooth(_worth([
                min(1.0, (used[k] + _PRIOR_PAGES * prior[k]) / (seen[k] + _PRIOR_PAGES)) for k in range(BINS)
            ])))
        self._fade()
        self._begin_cohort(now)

    def report(self, now: float) -> tuple[Learned, ...]:
        """Every class as it is known now."""
        return tuple([Learned(name, tuple(self._used[kind]), tuple(self._reached(kind, now)), tuple(self.worth[kind]))
                      for kind, name in enumerate(CLASSES)])

    def _reached(self, kind: int, now: float) -> list[float]:
        """Blocks that were seen unused at the beginning of each bin."""
        counts = [a + b for a, b in zip(self._used[kind], self._given_up[kind], strict=True)]
        for birth, blocks in zip(self._births, self._alive[kind], strict=True):
            counts[bin_of(now - birth)] += blocks
        above = 0.0
        for k in range(BINS - 1, -1, -1):
            counts[k] = above = max(0.0, above + counts[k])
        return counts

    def _fade(self) -> None:
        for table in (self._used, self._given_up):
            for row in table:
                row[:] = [count * _FADE for count in row]

    def _begin_cohort(self, now: float) -> None:
        """What is used from now on was used after ``now``. Of too many cohorts the two that are nearest to each other,
        for their age, become one."""
        births = self._births
        if now > births[-1]:
            births.append(now)
            for row in self._alive:
                row.append(0.0)
        if len(births) > _COHORTS:
            at = min(range(1, len(births) - 1), key=lambda i: (births[i] - births[i - 1]) / (now - births[i] + 1e-9))
            del births[at]
            for row in self._alive:
                row[at - 1] += row.pop(at)


def _worth(hazards: Sequence[float]) -> list[float]:
    """For each bin the largest ratio, over all horizons, of the probability of a use to the expected time until it or
    the horizon. From the last bin back: a bin and those after it are one as long as that makes the ratio larger."""
    found: list[float] = []
    runs: list[tuple[float, float, float]] = []  # probability of a use in the run, time in it, ratio; the next one last
    for k in range(len(hazards) - 1, -1, -1):
        use, time = hazards[k], _WIDTHS[k] * (1.0 - hazards[k] / 2)
        ratio = use / time
        while runs and runs[-1][2] > ratio:
            later, longer, _ = runs.pop()
            time += (1.0 - use) * longer
            use += (1.0 - use) * later
            ratio = use / time
        runs.append((use, time, ratio))
        found.append(ratio)
    found.reverse()
    return found


def _smooth(values: Sequence[float]) -> list[float]:
    """The mean over two bins to each side."""
    return [sum(part) / len(part) for k in range(len(values)) if (part := values[max(0, k - 2) : k + 3])]


def _unimodal(values: Sequence[float]) -> list[float]:
    """Rising to the peak and falling from there, never below what was given before it nor above it after it."""
    peak = max(range(len(values)), key=values.__getitem__)
    risen, fallen = [], []
    high = 0.0
    for value in values[: peak + 1]:
        high = max(high, value)
        risen.append(high)
    for value in values[peak + 1 :]:
        high = min(high, value)
        fallen.append(high)
    return risen + fallen


class P2c:
    """The policy. ``ghosts``: how many are remembered; at most ``ghost_blocks`` blocks of them. ``returned``: blocks that
    came back while they were remembered."""

    __slots__ = ("_blocks", "_fifo", "_ghost_blocks", "_ghosts", "_held", "_page_bytes", "_uses",
                 "_version", "curves", "queues", "returned")  # fmt: skip

    def __init__(self, page_size: int, ghost_blocks: float) -> None:
        self._page_bytes = 4 * page_size
        self._version = 0
        self.queues = 1 + len(CLASSES)
        self.curves = Curves()
        self.returned = 0.0
        self._blocks = page_size / _BLOCK
        self._ghost_blocks = ghost_blocks
        self._ghosts: dict[int, Ghost] = {}
        self._fifo: deque[tuple[int, Ghost]] = deque()
        self._held = 0.0
        self._uses = 0

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)

    def queue(self, node: Node, c: int) -> int:
        return 0 if node.stamp[c] < 0 else 1 + _CLASS[node.heat]

    def choose(self, queues: Sequence[Queue], now: float) -> Node | None:
        best, chosen, least = None, 0.0, queues[0]
        if least.slices:
            return least.oldest()
        for kind in range(1, len(queues)):
            queue = queues[kind]
            if not queue.slices:
                continue
            if queue.changed or now >= queue.until or queue.version != self._version:
                self._look(queue, self.curves.worth[kind - 1], now)
            if best is None or queue.value < chosen or (queue.value == chosen and _older(queue, best)):
                best, chosen = queue, queue.value
        if best is None:
            return None
        return best.newest() if best.takes_newest else best.oldest()

    def _look(self, queue: Queue, worth: Sequence[float], now: float) -> None:
        """Work out which end of ``queue`` is worth less, and until when that holds: until either is a bin older."""
        young, old = now - queue.slices[-1].stamps[-1] * 1e-6, now - queue.slices[0].stamps[0] * 1e-6
        newer, older = bin_of(young), bin_of(old)
        queue.takes_newest = worth[newer] < worth[older]
        queue.value = worth[newer] if queue.takes_newest else worth[older]
        queue.until = now + min(_ENDS[newer] - young, _ENDS[older] - old)
        queue.changed, queue.version = False, self._version

    def use(self, node: Node, pages: int, forked: bool, now: float) -> None:
        blocks, heat, since = pages * self._blocks, node.heat, node.used
        if since >= 0.0:
            self.curves.used(_CLASS[heat], since, now - since, blocks)
            heat = min(heat + 8, 56 + (heat & 7))
        elif not heat:
            heat = 8
        if forked and heat & 7 < 5:
            heat += 1
        node.heat = heat
        node.used = now
        self.curves.born(_CLASS[heat], blocks)

    def tick(self, now: float) -> None:
        self._uses += 1
        if not self._uses % _LEARN_EVERY:
            self.curves.learn(now)
            self._version += 1

    # ghosts

    def forget(self, node: Node, parent: Node, page: bytes, pages: int, now: float) -> None:
        if node.used < 0.0:
            return
        key, blocks = hash((self._name(parent), page)), pages * self._blocks
        ghost = Ghost(node.end, node.heat, node.used, blocks)
        before = self._ghosts.pop(key, None)
        if before is not None:
            self._give_up(before, now)
        self._ghosts[key] = ghost
        self._fifo.append((key, ghost))
        self._held += blocks
        while self._held > self._ghost_blocks or len(self._fifo) > 2 * len(self._ghosts) + 64:
            key, ghost = self._fifo.popleft()
            if self._ghosts.get(key) is ghost:
                del self._ghosts[key]
                self._give_up(ghost, now)

    def _give_up(self, ghost: Ghost, now: float) -> None:
        self._held -= ghost.blocks
        self.curves.given_up(_CLASS[ghost.heat], ghost.used, now - ghost.used, ghost.blocks)

    def remember(self, parent: Node, page: bytes) -> int:
        ghost = self._ghosts.get(hash((self._name(parent), page))) if self._ghosts else None
        return ghost.end if ghost is not None else 0

    def restore(self, node: Node, page: bytes, now: float) -> None:
        parent = node.parent
        assert parent is not None
        ghost = self._ghosts.pop(hash((self._name(parent), page)), None) if self._ghosts else None
        if ghost is None:
            return
        self._held -= ghost.blocks
        self.returned += ghost.blocks
        self.curves.used(_CLASS[ghost.heat], ghost.used, now - ghost.used, ghost.blocks)
        node.heat = min(ghost.heat + 8, 56 + (ghost.heat & 7))

    def _name(self, node: Node) -> int:
        """A number for the path down to the end of ``node``, the same for the same tokens divided at the same places."""
        unnamed = []
        while not node.name and node.parent is not None:
            unnamed.append(node)
            node = node.parent
        name = node.name or hash(node.hashes)
        for node in reversed(unnamed):
            name = node.name = hash((name, node.key[: self._page_bytes], node.end))
        return name


def _older(queue: Queue, other: Queue) -> bool:
    return queue.slices[0].stamps[0] < other.slices[0].stamps[0]
