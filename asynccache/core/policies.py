"""The eviction policies by name: ``lru``, which is ``eviction.Lru``, and ``p2c``, which is the rest of this file.

In ``p2c`` the page goes first that is least likely to be used again, in proportion to the room that it takes and the
time for which it would take that room.

Nodes that were used once, twice or often, and nodes that requests fork from, are used again after very different times.
The policy learns these times while it runs; nothing need be known before.

* **Classes.** There are eight. A node from which requests have forked, at its end or below, is in a class by the number
  of these forks (1, 2 to 4, 5 or more); any other node by how many requests have used it (1, 2, 3, 4 to 6, 7 or more).
* **Curves.** For each class and each of 48 bins of age: how much was used again at that age, and how much had reached
  it. What was evicted is remembered for a while as a *ghost*, so that it counts if it is used after all.
* **Worth.** The share that is used again at an age, of what has reached it, is the class's hazard there. From the
  hazards follows what a page is worth at an age: the best ratio, over all horizons, of the probability that the page is
  used before the horizon to the time for which it is expected to be held until then.
* **Choice.** The worth of a class rises and then falls with age. So in a queue that is sorted by age either the oldest
  or the newest cell is worth least. The eight classes give sixteen such ends, and the one of these that is worth least
  is the cell that is worth least of all.
* **Duel.** The policy chooses by worth only as long as that has found no less of late than giving up the oldest would
  have (``Duel``). Otherwise the oldest goes. It also goes while requests find less than they usually do, as long as
  it is in doubt whether that is chance.

Amounts are blocks of 512 tokens, so that curves do not depend on the page size. Counts fade, so that a new workload is
learned anew. Before a hundred requests have been seen, all is worth the same, and the oldest goes.

The curves are about nodes, and every request that passes through a node uses it. But the window or state at a node's
end is used only by a match that ends there. So the worth of windows and states is not known, and they go by recency.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from operator import add
from typing import ClassVar, Final

from asynccache.core.eviction import Curve, EvictionPolicy, Judged, Learned, Lru, Order, Queue
from asynccache.core.keys import TOKEN_BYTES
from asynccache.core.settings import POLICIES as POLICIES
from asynccache.core.settings import CoreConfig
from asynccache.core.tree import Node

CLASSES = ("used once", "used twice", "used 3 times", "used 4 to 6 times", "used 7 times or more",
           "forked once", "forked 2 to 4 times", "forked 5 times or more")  # fmt: skip
BINS: Final = 48
_FORKED: Final = 5
EDGES = (0.0, *(0.5 * 1.225**k for k in range(BINS - 1)))
"""Ages in seconds: bin k reaches from ``EDGES[k]`` to ``EDGES[k + 1]``; the last has no end."""
_EDGES = [int(edge * 1e6) for edge in EDGES]
_NEVER: Final = 1 << 62
_ENDS = (*_EDGES[1:], _NEVER)
_WIDTHS_BACK = tuple(0.5 * 1.225**k - EDGES[k] for k in range(BINS - 1, -1, -1))
_AROUND = tuple(min(k, 2) + 1 + min(BINS - 1 - k, 2) for k in range(BINS))
_LEARN_EVERY: Final = 100
_PRIOR_BLOCKS: Final = 300.0
_PRIOR_USES: Final = 0.02 * _PRIOR_BLOCKS
_FADE: Final = 0.99
_COHORTS: Final = 128
_BLOCK_TOKENS: Final = 512
_GHOST_SHARE: Final = 8
_MOST_GHOSTS = 1 << 17
_MOST_FORGOTTEN: Final = 64
# A dictionary that grows, or had many entries replaced, moves all that it holds: 13 ms with ``_MOST_GHOSTS`` entries.
# So ghosts are spread over several dictionaries.
_SHARDS: Final = 64

# The ``HEAT_BITS`` lowest bits of ``Node.heat`` are eight times the uses, up to 7, plus the forks, up to 5. The table
# ``_CLASS`` has the class of these bits; ``_USED`` and ``_USED_AND_FORKED`` have the bits after a use. Above these bits
# is the number of a drawn node.
HEAT_BITS: Final = 6
HEAT_MASK: Final = (1 << HEAT_BITS) - 1
_BY_USES = (0, 0, 1, 2, 3, 3, 3, 4)
_BY_FORKS = (0, 5, 6, 6, 6, 7, 7, 7)
_CLASS = tuple(_BY_FORKS[heat & 7] or _BY_USES[heat >> 3] for heat in range(64))
_USED = tuple(min(heat + 8, 56 + (heat & 7)) for heat in range(64))
_USED_AND_FORKED = tuple(heat + 1 if heat & 7 < 5 else heat for heat in _USED)

# Of the duel.
_MOST_PAGES = 1 << 15
_BOUND: Final = 16
_SWAY: Final = 8
"""``Duel.ahead`` stays within ``1 / _BOUND`` of the room, and the lead changes at ``1 / _SWAY`` of that. In small
caches both are more, at least what a request asks for on average, so that no single request decides."""
_MOST_EVICTED: Final = 64
"""The most nodes that a small cache evicts in one call, unless two for each node that is used are more. If too many
pages are left, as by a long prompt after many small nodes, later calls evict them."""
_LONGEST: Final = 256
"""The number of drawn nodes of a path that the small caches look at, from the root on. It bounds the time of a call."""
# A cumulative sum of shortfalls, in standard deviations (Page, 1954). ``_SLACK`` is taken off each shortfall, so a
# change has to exceed it; a sum above ``_ALARM`` is an alarm. Chance alone raises one alarm in 67,000 requests where
# every second request finds nothing, one in 780 to 6,250 where 2 to 30 % do, and more where those come in runs.
_SLACK: Final = 0.5
_ALARM: Final = 8.0
_DOUBT: Final = 2.0  # at 1 the trace's gains are noticeably less, at 3 a change costs up to twice as much
_LEAST_DEVIATION: Final = 0.25
_FEWEST: Final = 100
_LATELY: Final = 1 / 256


def bin_of(age: int) -> int:
    """Return the bin that ``age``, in microseconds, lies in."""
    return bisect_right(_EDGES, age) - 1 if age > 0 else 0


Ghost = tuple[int, ...]
"""A ghost, the memory of a node that left the tree: the node's name, its end in pages from the root, how many pages it
had, its heat, and the stamp of its last use in microseconds. The type leaves the length open, because ghosts are
compared by identity, and the compiler copies tuples of a fixed length."""


class Curves:
    """The curves of each class. ``worth``: by class and bin of age. Times are microseconds.

    Blocks that were not used again so far are counted by class and *cohort*: those that were used last in one stretch
    of time. If there are too many cohorts, two that are near to each other, for their age, become one.
    """

    __slots__ = ("_births", "_gone", "_used", "_waiting", "worth")

    def __init__(self) -> None:
        classes = range(len(CLASSES))
        self._used = [[0.0] * BINS for _ in classes]
        self._gone = [[0.0] * BINS for _ in classes]
        self._births = [0]
        self._waiting = [[0.0] for _ in classes]
        self.worth = [[1.0] * BINS for _ in classes]

    def begin(self, kind: int, blocks: float) -> None:
        """Count ``blocks`` that were used just now, and are of class ``kind`` from now on."""
        self._waiting[kind][-1] += blocks

    def use(self, kind: int, since: int, now: int, blocks: float) -> None:
        """Count ``blocks`` of class ``kind`` that are used again at ``now``, for the first time since ``since``."""
        self._waiting[kind][self._cohort(since)] -= blocks
        self._used[kind][bin_of(now - since)] += blocks

    def give_up(self, kind: int, since: int, now: int, blocks: float) -> None:
        """Count ``blocks`` of class ``kind`` that are forgotten at ``now``, unused since ``since``."""
        self._waiting[kind][self._cohort(since)] -= blocks
        self._gone[kind][bin_of(now - since)] += blocks

    def _cohort(self, since: int) -> int:
        """Return the number of the cohort of blocks whose last use was at ``since``. A use at the moment when a cohort
        begins counts for the one before it."""
        return bisect_left(self._births, since) - 1

    def learn(self, now: int) -> None:
        """Work out the worth of every class and age."""
        spans = self._spans(now)
        reached = [self._reached(kind, spans) for kind in range(len(CLASSES))]
        together = zip(zip(*self._used, strict=True), zip(*reached, strict=True), strict=True)
        pool = [(sum(used) + _PRIOR_USES) / (sum(there) + _PRIOR_BLOCKS) * _PRIOR_BLOCKS for used, there in together]
        flat = [_PRIOR_USES] * BINS
        for kind, seen in enumerate(reached):
            prior = flat if kind >= _FORKED else pool
            counts = zip(self._used[kind], prior, seen, strict=True)
            hazards = [min(1.0, (used + expected) / (there + _PRIOR_BLOCKS)) for used, expected, there in counts]
            self.worth[kind] = _unimodal(_smooth(_worth(hazards)))
        for table in (self._used, self._gone):
            for row in table:
                row[:] = [count * _FADE for count in row]
        self._begin_cohort(now)

    def report(self, now: int) -> tuple[Curve, ...]:
        """Return the curves of every class as they are known now."""
        spans = self._spans(now)
        found = []
        for kind, name in enumerate(CLASSES):
            used, reached = self._used[kind], self._reached(kind, spans)
            again = tuple(_again(used, reached))
            found.append(Curve(name, tuple(used), tuple(reached), again, tuple(self.worth[kind])))
        return tuple(found)

    def _spans(self, now: int) -> list[tuple[int, int, int]]:
        """Return the bins that cohorts are in now: for each the bin, its first cohort and the cohort after its last."""
        found: list[tuple[int, int, int]] = []
        births, start = self._births, 0
        while start < len(births):
            k = bin_of(now - births[start])
            stop = bisect_right(births, now - _EDGES[k], start) if k else len(births)
            found.append((k, start, stop))
            start = stop
        return found

    def _reached(self, kind: int, spans: Sequence[tuple[int, int, int]]) -> list[float]:
        """Return how many blocks reached each bin of age unused. ``spans``: as ``_spans`` returns them."""
        counts = list(map(add, self._used[kind], self._gone[kind]))
        waiting = self._waiting[kind]
        for k, start, stop in spans:
            counts[k] += sum(waiting[start:stop])
        counts.reverse()
        counts = list(accumulate(counts))
        counts.reverse()
        return counts

    def _begin_cohort(self, now: int) -> None:
        births = self._births
        if now > births[-1]:
            births.append(now)
            for row in self._waiting:
                row.append(0.0)
        if len(births) > _COHORTS:
            near = zip(births, births[1:], births[2:], strict=False)
            gaps = [(after - before) / (now - birth + 1) for before, birth, after in near]
            at = gaps.index(min(gaps)) + 1
            del births[at]
            for row in self._waiting:
                row[at - 1] += row.pop(at)


def _again(used: Sequence[float], reached: Sequence[float]) -> list[float]:
    """Return, for each bin, the share of blocks, 0 to 1, that is used again before it. The share is estimated from how
    much was used in the bins before, and how much had reached them (Kaplan and Meier, 1958)."""
    found, unused = [], 1.0
    for use, there in zip(used, reached, strict=True):
        found.append(1.0 - unused)
        if there > 0.0:
            unused *= 1.0 - min(1.0, max(0.0, use / there))
    return found


def _worth(hazards: Sequence[float]) -> list[float]:
    """Return, for each bin, the largest ratio over all horizons of two figures: the probability of a use before the
    horizon, and the expected seconds until the use or the horizon. The bins are taken from the last one back, and a bin
    is joined with the run of bins after it if that makes its ratio larger."""
    found: list[float] = []
    runs = [(0.0, 0.0, -1.0)]  # probability of a use in a run of bins, seconds in it, their ratio; the first is none
    for use, width in zip(reversed(hazards), _WIDTHS_BACK, strict=True):
        time = width * (1.0 - use / 2)
        ratio = use / time
        later, longer, best = runs[-1]
        while best > ratio:
            runs.pop()
            rest = 1.0 - use
            time += rest * longer
            use += rest * later
            ratio = use / time
            later, longer, best = runs[-1]
        runs.append((use, time, ratio))
        found.append(ratio)
    found.reverse()
    return found


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and of up to two values to each side."""
    padded = [0.0, 0.0, *values, 0.0, 0.0]
    around = zip(_AROUND, padded, padded[1:], padded[2:], padded[3:], padded[4:], strict=False)
    return [(a + b + c + d + e) / count for count, a, b, c, d, e in around]


def _unimodal(values: Sequence[float]) -> list[float]:
    """Return ``values`` made to rise up to their peak and to fall from there."""
    after = values.index(max(values)) + 1
    return [*accumulate(values[:after], max), *accumulate(values[after:], min)]


class _Seen:
    """A drawn node as the small caches know it. ``number``: its number in ``Node.heat``. ``end``: in pages from the
    root. ``pages``: its size. ``lately``: True if the small cache that evicts the least recently used node has it.
    ``worthy``: True if the small cache that evicts by worth has it. The other attributes belong to the cache that
    evicts by worth: ``kids`` counts the drawn nodes that hang below this one there, and a node without such children
    waits in the queue of its class ``kind``."""

    __slots__ = ("end", "kids", "kind", "lately", "number", "pages", "parent", "used", "worthy")

    def __init__(self, number: int, end: int, pages: int) -> None:
        self.number = number
        self.end = end
        self.pages = pages
        self.kids = self.kind = self.used = 0
        self.parent: _Seen | None = None
        self.lately = self.worthy = False


class _Usual:
    """Knows which share of their pages requests usually find, from ``_FEWEST`` requests on, and notices when it
    falls."""

    __slots__ = ("_mean", "_requests", "_short", "_square")

    def __init__(self) -> None:
        self._requests = 0
        self._mean = self._square = self._short = 0.0

    @property
    def doubtful(self) -> bool:
        """True if requests find so much less of late that it may be no chance. It is false again when they find as much
        as they did for some time."""
        return self._short > _DOUBT

    def falls(self, share: float) -> bool:
        """Note that a request has found ``share``, 0 to 1, of its pages. Returns True if requests find so much less of
        late that it cannot be chance. The usual share is learned anew then."""
        off = self._mean - share
        if self._requests >= _FEWEST:
            self._short = max(0.0, self._short + off / max(_LEAST_DEVIATION, self._square**0.5) - _SLACK)
        if self._short > _ALARM:
            self._requests = 0
            self._mean = self._square = self._short = 0.0
            return True
        self._requests += 1
        weight = max(_LATELY, 1 / self._requests)
        self._mean -= weight * off
        self._square += weight * (off * off * (1 - weight) - self._square)
        return False


class Duel:
    """The duel between two ways to evict: which one has found more pages of late? One evicts the node that was used
    least recently, the other the node that is worth least by ``Curves``.

    Two small caches are simulated beside the real one. They hold no data, only the names of the nodes that such a cache
    would have. Both see only the *drawn* nodes: all nodes, or one in 2, 4, 8 ... of them if the real cache is large.
    Both have the same share of the real cache's room. Both go on whatever the real cache does, so each way can turn out
    to be better.

    The difference between how many pages the two find is added up, within bounds. So the past counts for no more than
    the bound, and the latest requests decide which way leads. Where there is hardly a difference, the learned way (by
    worth) takes the lead when it has found as many pages as there is room for. It has that chance once, after the first
    lesson.

    The curves were learned from one workload. When the workload changes, nobody asks for the pages that were kept for
    the old one, and the learned way's small cache finds fewer pages than before, by more than chance. Then the learned
    way loses the lead at once, and has to win it anew. By then many pages of the new workload are lost that were used
    once. So the learned way does not lead, either, while it is in doubt whether the change is chance.

    ``leads``: True while the learned way leads. ``ahead``: how many drawn pages more the learned way has found of late
    than the other; negative if it has found fewer.
    """

    __slots__ = (
        "_asked", "_bound", "_draws", "_edges", "_found", "_held_lately", "_held_worthy", "_lately", "_mask", "_number",
        "_queues", "_room", "_seen", "_trial", "_usual", "_won", "_worth", "ahead", "leads",
    )  # fmt: skip

    def __init__(self, pages: int, worth: list[list[float]], edges: Sequence[int]) -> None:
        """``pages``: the room of the real cache. ``worth``: by class and bin of age; the caller keeps it up to date.
        ``edges``: the microseconds at which each bin begins."""
        shift = 0
        while pages > _MOST_PAGES << shift:
            shift += 1
        self._mask = (1 << shift) - 1
        self._room = max(1, pages >> shift)
        self._bound = max(1, self._room // _BOUND)
        self._worth = worth
        self._edges = edges
        self._draws = self._number = self._held_lately = self._held_worthy = self._found = self.ahead = 0
        self._seen: dict[int, _Seen] = {}
        self._lately: OrderedDict[int, _Seen] = OrderedDict()
        self._queues: list[list[tuple[int, int, _Seen]]] = [[] for _ in worth]
        self._usual = _Usual()
        self._asked = 0.0
        self.leads = self._won = self._trial = False

    def __len__(self) -> int:
        """Return how many nodes the small caches know. Each has room for at most ``_MOST_PAGES`` pages."""
        return len(self._seen)

    def begin(self) -> None:
        """Note that the curves were learned for the first time. The learned way takes the lead when it has found as
        many pages as there is room for, unless the other way has found more by then."""
        self._trial = True

    def draw(self) -> int:
        """Decide whether a new node is drawn. Returns its number; 0 if it is not drawn."""
        if self._mask:
            self._draws = draws = (self._draws * 1103515245 + 12345) & 0x7FFFFFFF
            if draws >> 12 & self._mask:
                return 0
        self._number += 1
        return self._number

    def use(self, path: Sequence[tuple[Node, int]], now: int) -> bool:
        """Note a use of the drawn nodes of one path, the one nearest to the root first, each with its class from now
        on. ``now``: microseconds. Returns True if the lead has changed."""
        found = asked = better = 0
        used = []
        above: _Seen | None = None
        seen = self._seen
        for node, kind in path:
            known = seen.get(node.heat >> HEAT_BITS)
            pages = node.end - node.parent.end  # type: ignore[union-attr]
            if known is not None and known.end == node.end and known.pages == pages:
                one = known
            else:
                one = self._enter(node, pages, known)
            asked += pages
            if one.worthy:
                found += pages
                if not one.lately:
                    better += pages
            elif one.lately:
                better -= pages
            if one.worthy and one.kids and one.parent is above:
                one.kind, one.used = kind, now
            else:
                self._keep(one, above, kind, now)
            used.append(one)
            above = one
        for one in reversed(used):
            if not one.lately:
                one.lately = True
                self._held_lately += one.pages
                self._lately[one.number] = one
            else:
                self._lately.move_to_end(one.number)
        most = max(_MOST_EVICTED, 2 * len(used))
        for _ in range(most):
            if self._held_lately <= self._room or len(self._lately) <= len(used):
                break
            self._leave_lately(self._lately.popitem(last=False)[1])
        for _ in range(most):
            if self._held_worthy <= self._room or not self._evict(now):
                break
        if above is not None and not above.kids:
            insort(self._queues[above.kind], (now, above.number, above))
        return self._judge(found, asked, better)

    def _judge(self, found: int, asked: int, better: int) -> bool:
        """Decide which way leads after a request for ``asked`` pages. The learned way has found ``found`` of them,
        which are ``better`` more than the other way has found. Returns True if the lead has changed."""
        led, won = self.leads, self._won
        self._asked += _LATELY * (asked - self._asked) if self._asked else asked
        sway = max(1, self._bound // _SWAY, int(self._asked))
        bound = max(self._bound, 2 * sway)
        self.ahead = max(-bound, min(bound, self.ahead + better))
        if self._usual.falls(found / asked) and won:
            self.ahead, self._won = 0, False
        elif abs(self.ahead) >= sway:
            self._won, self._trial = self.ahead > 0, False
        elif self._trial:
            self._found += found
            if self._found >= self._room:
                self._won, self._trial = self.ahead >= 0, False
        self.leads = self._won and not self._usual.doubtful
        return self.leads != led

    def end(self, node: Node) -> None:
        """Have both small caches give up a drawn node of the path that was used last: its conversation has ended."""
        one = self._seen.get(node.heat >> HEAT_BITS)
        if one is not None and one.lately:
            del self._lately[one.number]
            self._leave_lately(one)
        if one is not None and one.worthy and not one.kids:
            self._withdraw(one)
            self._leave_worthy(one, -1)

    def _enter(self, node: Node, pages: int, one: _Seen | None) -> _Seen:
        """Return a new entry for a drawn node of so many pages. ``one``: the entry that has its number, if any. If the
        node was split since, its last part keeps the number, and the first part gets a new one. So the entry of the
        part that was not used does not change."""
        if one is not None:
            self._number += 1
            node.heat = self._number << HEAT_BITS | node.heat & HEAT_MASK
        number = node.heat >> HEAT_BITS
        self._seen[number] = new = _Seen(number, node.end, pages)
        if one is not None and one.end > node.end and one.pages > pages:
            self._divide(one, new)
        return new

    def _divide(self, one: _Seen, first: _Seen) -> None:
        """Put ``first``, the first part of the node of ``one``, which was split, into each small cache that has
        ``one``."""
        one.pages -= first.pages
        if one.lately:
            first.lately = True
            self._lately[first.number] = first
        if one.worthy:
            first.worthy, first.kids, first.kind, first.used = True, 1, one.kind, one.used
            first.parent, one.parent = one.parent, first

    def _keep(self, one: _Seen, above: _Seen | None, kind: int, now: int) -> None:
        """Have the small cache that evicts by worth keep ``one``, which is used now. ``above``: the drawn node above
        it. While it is used, ``one`` waits in no queue."""
        if not one.worthy:
            one.worthy = True
            self._held_worthy += one.pages
        elif not one.kids:
            self._withdraw(one)
        self._hang(one, above, now)
        one.kind, one.used = kind, now

    def _hang(self, one: _Seen, above: _Seen | None, now: int) -> None:
        """Hang ``one`` below ``above``; None: below nothing. The node that ``one`` hung below until now may be evicted
        then, unless other nodes hang below it or it is being used ``now``."""
        parent, one.parent = one.parent, above
        if above is not None:
            above.kids += 1
        if parent is not None:
            parent.kids -= 1
            if not parent.kids and parent.used != now:
                insort(self._queues[parent.kind], (parent.used, parent.number, parent))

    def _withdraw(self, one: _Seen) -> None:
        queue = self._queues[one.kind]
        del queue[bisect_left(queue, (one.used, one.number, one))]

    def _evict(self, now: int) -> bool:
        """Evict the node that is worth least of all that wait. Returns whether there was any."""
        best, least, oldest, last = -1, 0.0, 0, False
        for kind, queue in enumerate(self._queues):
            if not queue:
                continue
            worth = self._worth[kind]
            for newest in (False, True):
                used = queue[-1 if newest else 0][0]
                value = worth[bisect_right(self._edges, now - used) - 1]
                if best < 0 or value < least or (value == least and used < oldest):
                    best, least, oldest, last = kind, value, used, newest
        if best < 0:
            return False
        one = self._queues[best].pop(-1 if last else 0)[2]
        self._leave_worthy(one, now)
        return True

    def _leave_worthy(self, one: _Seen, now: int) -> None:
        one.worthy = False
        self._held_worthy -= one.pages
        self._hang(one, None, now)
        if not one.lately:
            del self._seen[one.number]

    def _leave_lately(self, one: _Seen) -> None:
        one.lately = False
        self._held_lately -= one.pages
        if not one.worthy:
            del self._seen[one.number]


class _Ends:
    """The two ends of a queue, looked at. ``worth``: of the cell at the cheaper end. ``newest``: whether that is the
    newest cell and not the oldest. ``bin``: the cell's bin of age. ``until``: until when this holds, in microseconds,
    if ``version`` is still that of the curves."""

    __slots__ = ("bin", "newest", "until", "version", "worth")

    def __init__(self) -> None:
        self.bin = self.until = self.version = 0
        self.newest = False
        self.worth = 0.0


class _Lead:
    """The queue that the last choice fell on. The next choice falls there, too, before ``until`` (microseconds), if
    nothing else has changed and the queue's cheaper end is still in its bin. ``ends``: None if the oldest cell goes;
    then the choice falls there as long as the queue's oldest cell has a stamp below ``until``."""

    __slots__ = ("ends", "queue", "until", "version")

    def __init__(self, queue: Queue, ends: _Ends | None, until: int, version: int) -> None:
        self.queue = queue
        self.ends = ends
        self.until = until
        self.version = version


class P2c(EvictionPolicy):
    """The policy of one core. ``returned``: how many blocks came back while their nodes were remembered as ghosts."""

    __slots__ = ("_blocks", "_fifo", "_ghosts", "_held", "_learn_every", "_lessons", "_most_ghosts", "_most_pages",
                 "_page_bytes", "_uses", "_version", "curves", "duel", "returned")  # fmt: skip

    queues: ClassVar[int] = len(CLASSES)
    learns: ClassVar[bool] = True
    full_only: ClassVar[bool] = True                   # a node is used far more often than the state at its end

    def __init__(self, config: CoreConfig, learn_every: int = _LEARN_EVERY) -> None:
        """``learn_every``: after how many requests it works out anew what each class and age is worth."""
        full = config.components[0]
        self._learn_every = learn_every
        self._page_bytes = config.page_size * TOKEN_BYTES
        self._blocks = config.page_size / _BLOCK_TOKENS
        self._most_pages = _GHOST_SHARE * (full.device + full.host)
        self._most_ghosts = min(_MOST_GHOSTS, 2 * self._most_pages)
        self._version = self._lessons = self._uses = self._held = 0
        self._ghosts: tuple[dict[int, Ghost], ...] = tuple([{} for _ in range(_SHARDS)])
        self._fifo: deque[Ghost] = deque()
        self.curves = Curves()
        self.duel = Duel(full.device + full.host, self.curves.worth, _EDGES)
        self.returned = 0.0

    def learned(self, now: int) -> Learned | None:
        return Learned(
            self.curves.report(now), EDGES, self._uses, self._lessons, sum(map(len, self._ghosts)), self.returned,
            self.duel.leads, len(self.duel),
        )  # fmt: skip

    def judge(self, node: Node, age: int) -> Judged | None:
        kind = _CLASS[node.heat & HEAT_MASK]
        return Judged(CLASSES[kind], age / 1e6, self.curves.worth[kind][bin_of(age)])

    # the choice

    def queue(self, node: Node, c: int) -> int:
        return _CLASS[node.heat & HEAT_MASK]

    def choose(self, order: Order, now: int) -> Node | None:
        lead: _Lead | None = order.note
        if lead is not None and not order.changed and lead.version == self._version:
            chunks, ends = lead.queue.chunks, lead.ends
            if chunks:
                if ends is None:
                    if chunks[0].stamps[0] < lead.until:
                        return chunks[0].nodes[0]
                elif now < lead.until:
                    if not ends.newest:
                        if chunks[0].stamps[0] <= now - _EDGES[ends.bin]:
                            return chunks[0].nodes[0]
                    elif chunks[-1].stamps[-1] > now - _ENDS[ends.bin]:
                        return chunks[-1].nodes[-1]
        return self._compare(order, now) if self.duel.leads else self._oldest(order)

    def sooner(self, node: Node, other: Node, c: int, now: int, share: float) -> bool:
        since, before = node.stamp[c], other.stamp[c]
        if since < 0 or before < 0 or not self.duel.leads:
            return since < before
        worth = self.curves.worth
        value = worth[_CLASS[node.heat & HEAT_MASK]][bin_of(now - since)] * share
        others = worth[_CLASS[other.heat & HEAT_MASK]][bin_of(now - before)]
        return value < others or (value == others and since < before)

    def _oldest(self, order: Order) -> Node | None:
        """Return the least recently used node of all queues; None if all are empty."""
        best: Queue | None = None
        least = second = _NEVER
        for queue in order.rest:
            if queue.chunks:
                stamp = queue.chunks[0].stamps[0]
                if best is None or stamp < least:
                    best, least, second = queue, stamp, least
                elif stamp < second:
                    second = stamp
        if best is None:
            return None
        order.note = _Lead(best, None, second, self._version)
        order.changed = False
        return best.oldest()

    def _compare(self, order: Order, now: int) -> Node | None:
        """Return the node that is worth least of all queues' ends; None if all queues are empty."""
        best: Queue | None = None
        found: _Ends | None = None
        version, kind, until, second = self._version, -1, _NEVER, inf
        for queue in order.rest:
            kind += 1
            if not queue.chunks:
                continue
            ends: _Ends | None = queue.note
            if ends is None or queue.changed or ends.version != version or now >= ends.until:
                ends = self._look(queue, self.curves.worth[kind], now)
            until = min(until, ends.until)
            if found is None or ends.worth < found.worth or (ends.worth == found.worth and _is_older(queue, best)):
                if found is not None:
                    second = found.worth
                best, found = queue, ends
            elif ends.worth < second:
                second = ends.worth
        if best is None or found is None:
            return None
        order.note = _Lead(best, found, until, version) if found.worth < second else None
        order.changed = False
        return best.newest() if found.newest else best.oldest()

    def _look(self, queue: Queue, worth: Sequence[float], now: int) -> _Ends:
        chunks = queue.chunks
        young, old = now - chunks[-1].stamps[-1], now - chunks[0].stamps[0]
        newer, older = bin_of(young), bin_of(old)
        ends: _Ends | None = queue.note
        if ends is None:
            queue.note = ends = _Ends()
        ends.until = now + min(_ENDS[newer] - young, _ENDS[older] - old)
        ends.newest = worth[newer] < worth[older]
        ends.bin = newer if ends.newest else older
        ends.worth = worth[ends.bin]
        ends.version = self._version
        queue.changed = False
        return ends

    # learning

    def use(self, end: Node, forked: int, now: int) -> None:
        below, drawn = end.end, []
        heat = since = -1
        kind = gain = 0
        forks = False
        node, parent = end, end.parent
        if parent is None:
            return
        while parent is not None:
            known, last = node.heat, node.used
            if not last:
                if self._held:
                    self._return(node, parent, now)
                    known, last = node.heat, node.used
                if known <= HEAT_MASK:
                    known |= self.duel.draw() << HEAT_BITS
            if known & HEAT_MASK != heat or last != since or (node.end <= forked) != forks:
                if heat >= 0:
                    self._count(heat, since, forks, now, below - node.end)
                below, heat, since, forks = node.end, known & HEAT_MASK, last, node.end <= forked
                after = (_USED_AND_FORKED if forks else _USED)[heat]
                kind, gain = _CLASS[after], after - heat
            node.heat = known + gain
            node.used = now
            if known > HEAT_MASK:
                drawn.append((node, kind))
            node, parent = parent, parent.parent
        self._count(heat, since, forks, now, below)
        self._uses += 1
        if not self._uses % self._learn_every:
            self.curves.learn(now)
            if not self._lessons:
                self.duel.begin()
            self._lessons += 1
            self._version += 1
        if drawn:
            drawn.reverse()
            self._version += self.duel.use(drawn[:_LONGEST], now)

    def _count(self, heat: int, since: int, forked: bool, now: int, pages: int) -> None:
        """Count a use of ``pages`` pages of this heat, the first one since ``since``; 0: the first one at all."""
        blocks = pages * self._blocks
        if since:
            self.curves.use(_CLASS[heat], since, now, blocks)
        self.curves.begin(_CLASS[(_USED_AND_FORKED if forked else _USED)[heat]], blocks)

    def end(self, node: Node) -> None:
        if node.heat > HEAT_MASK:
            self.duel.end(node)

    # ghosts

    def forget(self, node: Node, parent: Node, page: bytes, now: int) -> None:
        used = node.used
        if not used:
            return
        pages, name = node.end - parent.end, node.name or self._name_of(parent, page)
        ghost: Ghost = (name, node.end, pages, node.heat, used)
        if node.root.dead or self._ghosts[name % _SHARDS].setdefault(name, ghost) is not ghost:
            self.curves.give_up(_CLASS[node.heat & HEAT_MASK], used, now, pages * self._blocks)
            return
        self._fifo.append(ghost)
        self._held += pages
        if self._held > self._most_pages or len(self._fifo) > self._most_ghosts:
            self._forget_ghosts(now)

    def _forget_ghosts(self, now: int) -> None:
        """Forget ghosts, the oldest first, while there are too many. The entries in ``_fifo`` of ghosts that came back
        are removed on the way. A call removes at most ``_MOST_FORGOTTEN`` entries."""
        fifo = self._fifo
        for _ in range(min(_MOST_FORGOTTEN, len(fifo))):
            ghost = fifo[0]
            name, _end, pages, heat, used = ghost
            ghosts = self._ghosts[name % _SHARDS]
            remembered = ghosts.get(name) is ghost
            if remembered and self._held <= self._most_pages and len(fifo) <= self._most_ghosts:
                return
            fifo.popleft()
            if remembered:
                del ghosts[name]
                self._held -= pages
                self.curves.give_up(_CLASS[heat & HEAT_MASK], used, now, pages * self._blocks)

    def recall(self, parent: Node, page: bytes) -> int:
        if not self._held:
            return 0
        name = self._name_of(parent, page)
        ghost = self._ghosts[name % _SHARDS].get(name)
        return ghost[1] if ghost is not None else 0

    def _return(self, node: Node, parent: Node, now: int) -> None:
        """If ``node``, which is new, is remembered as a ghost, give it the ghost's heat and last use."""
        if not node.name:
            node.name = self._name_of(parent, node.key[: self._page_bytes])
        ghost = self._ghosts[node.name % _SHARDS].pop(node.name, None)
        if ghost is None:
            return
        _, end, pages, heat, used = ghost
        self._held -= pages
        self.returned += pages * self._blocks
        node.heat = heat
        begins_alike = end - pages == parent.end       # if pages repeat, a node elsewhere may have the same name
        more = end - node.end if begins_alike else -1
        lost = more if more >= 0 else pages            # a node longer than its ghost was not used as a whole before
        node.used = used if more >= 0 else 0
        self.curves.give_up(_CLASS[heat & HEAT_MASK], used, now, lost * self._blocks)

    def _name_of(self, parent: Node, page: bytes) -> int:
        """Return a number for the path that ends with ``page`` below ``parent``. It is made of the first pages of the
        path's nodes, so the same first pages give the same number."""
        if parent.name:
            return hash((parent.name, page))
        unnamed = []
        node = parent
        while not node.name and node.parent is not None:
            unnamed.append(node)
            node = node.parent
        name = node.name or hash(node.hashes)
        for node in reversed(unnamed):
            name = node.name = hash((name, node.key[: self._page_bytes]))
        return hash((name, page))


def _is_older(queue: Queue, other: Queue | None) -> bool:
    return other is not None and queue.chunks[0].stamps[0] < other.chunks[0].stamps[0]


POLICIES.update({"lru": lambda config: Lru(), "p2c": P2c})


def make_policy(config: CoreConfig) -> EvictionPolicy:
    """Return a new policy of the kind that ``config.eviction`` names."""
    policy: EvictionPolicy = POLICIES[config.eviction](config)
    return policy
