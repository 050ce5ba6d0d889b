"""The duel between two ways to evict: which one has found more pages of late? One evicts the node that was used least
recently, the other the node that is worth least by the curves of ``p2c``.

Two small caches are simulated beside the real one. They hold no data, only the names of the nodes that such a cache
would have. Both see only the *drawn* nodes: all nodes, or one in 2, 4, 8 ... of them if the real cache is large. Both
have the same share of the real cache's room. Both go on whatever the real cache does, so each way can turn out to be
better.

The difference between how many pages the two find is added up, within bounds. So the past counts for no more than the
bound, and the latest requests decide which way leads. Where there is hardly a difference, the learned way (by worth)
takes the lead when it has found as many pages as there is room for. It has that chance once, after the first lesson.

The curves were learned from one workload. When the workload changes, nobody asks for the pages that were kept for the
old one, and the learned way's small cache finds fewer pages than before, by more than chance. Then the learned way
loses the lead at once, and has to win it anew.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from asynccache.core.tree import Node

HEAT: Final = 6
"""The number of the lowest bits of ``Node.heat`` that belong to the policy. Above them is the number of a drawn
node."""
_MOST_PAGES = 1 << 15
_BOUND: Final = 16
_SWAY: Final = 8
"""The bounds of ``ahead``: at most one ``_BOUND``-th of the room; the lead changes at one ``_SWAY``-th of that, to
either side. In small caches both are more: the lead changes at no less than what a request asks for on average, so that
no single request decides."""
_MOST_AT_ONCE: Final = 64
"""The number of nodes that a small cache evicts in one call at most, or two for each node that is used, if that is
more. A long prompt after many small nodes may leave too many pages; these are evicted in later calls, since each call
may evict more nodes than it brings."""
LONGEST: Final = 256
"""The number of drawn nodes of a path that the small caches look at, from the root on. It bounds the time of a call."""
# A cumulative sum of shortfalls, in standard deviations (Page, 1954). ``_SLACK`` is taken off each shortfall, so a
# change has to exceed it; a sum above ``_ALARM`` is an alarm. Chance alone raises one alarm in 67,000 requests where
# every second request finds nothing, one in 780 to 6,250 where 2 to 30 % do, and more where those come in runs.
_SLACK: Final = 0.5
_ALARM: Final = 8.0
_LEAST_DEVIATION: Final = 0.25
_FEWEST: Final = 100
_LATELY: Final = 1 / 256


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
    """Plays the two small caches. ``leads``: True while the learned way leads. ``ahead``: how many drawn pages more the
    learned way has found of late than the other; negative if it has found fewer."""

    __slots__ = (
        "_asked", "_bound", "_draws", "_edges", "_found", "_held_lately", "_held_worthy", "_lately", "_mask", "_number",
        "_queues", "_room", "_seen", "_trial", "_usual", "_worth", "ahead", "leads",
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
        self.leads = self._trial = False

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
            known = seen.get(node.heat >> HEAT)
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
        most = max(_MOST_AT_ONCE, 2 * len(used))
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
        led = self.leads
        self._asked += _LATELY * (asked - self._asked) if self._asked else asked
        sway = max(1, self._bound // _SWAY, int(self._asked))
        bound = max(self._bound, 2 * sway)
        self.ahead = max(-bound, min(bound, self.ahead + better))
        if self._usual.falls(found / asked) and led:
            self.ahead, self.leads = 0, False
        elif abs(self.ahead) >= sway:
            self.leads, self._trial = self.ahead > 0, False
        elif self._trial:
            self._found += found
            if self._found >= self._room:
                self.leads, self._trial = self.ahead >= 0, False
        return self.leads != led

    def end(self, node: Node) -> None:
        """Have both small caches give up a drawn node of the path that was used last: its conversation has ended."""
        one = self._seen.get(node.heat >> HEAT)
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
            node.heat = self._number << HEAT | node.heat & (1 << HEAT) - 1
        number = node.heat >> HEAT
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
