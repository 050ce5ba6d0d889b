"""Which of two ways to evict finds more of late: by what was used least recently, or by what ``p2c`` has learned.

Two small caches are played beside the real one. They hold no data: they know which nodes they would have. Both see the
same *drawn* nodes, one of so many, and have room for that share of what the real cache has room for; one evicts what
was used least recently, the other what is worth least. Whatever the real cache does, both go on, so each can be seen to
be better.

The difference of what they find is added up, within bounds: so what was long ago counts for no more than the bound, and
a change of workload is noticed after so many pages that one has found and the other has not. The real cache then has
what it had: what the other way would have kept may be missing once, so a change costs the bound and the room at most.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from asynccache.core.tree import Node

HEAT: Final = 6
"""``Node.heat`` of a drawn node: its number, and below it so many bits that are the policy's."""
_MOST_PAGES = 1 << 15
_BOUND: Final = 16
_ENTER: Final = 8


class _Seen:
    """A drawn node as the small caches know it. ``lately``, ``worthy``: which of them have it. The rest but ``pages``
    is for the latter: ``kids``, drawn nodes that hang below it there; without any it waits in the queue of ``kind``."""

    __slots__ = ("end", "kids", "kind", "lately", "number", "pages", "parent", "used", "worthy")

    def __init__(self, number: int, end: int, pages: int) -> None:
        self.number = number
        self.end = end
        self.pages = pages
        self.kids = self.kind = self.used = 0
        self.parent: _Seen | None = None
        self.lately = self.worthy = False


class Duel:
    """Says which of both leads. ``ahead``: drawn pages that the learned way has found of late and the other has not."""

    __slots__ = ("_bound", "_draws", "_edges", "_held_lately", "_held_worthy", "_lately", "_mask", "_number", "_queues",
                 "_room", "_seen", "_worth", "ahead", "leads")  # fmt: skip

    def __init__(self, pages: int, worth: list[list[float]], edges: Sequence[int]) -> None:
        """``pages``: the room of the real cache. ``worth``: by kind and age, as it is at any time; ``edges``:
        microseconds at which the ages begin."""
        shift = 0
        while pages > _MOST_PAGES << shift:
            shift += 1
        self._mask = (1 << shift) - 1
        self._room = max(1, pages >> shift)
        self._bound = max(1, self._room // _BOUND)
        self._worth = worth
        self._edges = edges
        self._draws = self._number = self._held_lately = self._held_worthy = self.ahead = 0
        self._seen: dict[int, _Seen] = {}
        self._lately: OrderedDict[int, _Seen] = OrderedDict()
        self._queues: list[list[tuple[int, int, _Seen]]] = [[] for _ in worth]
        self.leads = False

    def draw(self) -> int:
        """The number of a node that is new, 0 if it is not drawn."""
        if self._mask:
            self._draws = draws = (self._draws * 1103515245 + 12345) & 0x7FFFFFFF
            if draws >> 12 & self._mask:
                return 0
        self._number += 1
        return self._number

    def use(self, path: Sequence[tuple[Node, int]], now: int) -> bool:
        """Drawn nodes of one path are used, the root's first, each with its kind from now on. Whether the lead has
        changed."""
        found, used = 0, []
        above: _Seen | None = None
        for node, kind in path:
            one = self._find(node)
            found += one.pages * (one.worthy - one.lately)
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
        while self._held_lately > self._room and len(self._lately) > len(used):
            self._leave_lately(self._lately.popitem(last=False)[1])
        while self._held_worthy > self._room and self._evict(now):
            pass
        if above is not None and not above.kids:
            insort(self._queues[above.kind], (now, above.number, above))
        self.ahead = max(-self._bound, min(self._bound, self.ahead + found))
        leads = self.ahead > 0 if self.leads else self.ahead * _ENTER >= self._bound
        changed = leads != self.leads
        self.leads = leads
        return changed

    def end(self, node: Node) -> None:
        """A drawn node, of the path that was used last, goes before all others: both give it up."""
        one = self._seen.get(node.heat >> HEAT)
        if one is not None and one.lately:
            del self._lately[one.number]
            self._leave_lately(one)
        if one is not None and one.worthy and not one.kids:
            self._withdraw(one)
            self._leave_worthy(one, -1)

    def _find(self, node: Node) -> _Seen:
        """Return a drawn node's entry. If the node was divided since, the first part keeps it, others get new ones."""
        one, pages = self._seen.get(node.heat >> HEAT), node.end - node.parent.end  # type: ignore[union-attr]
        if one is not None and one.end > node.end:
            self._held_lately -= (one.pages - pages) * one.lately
            self._held_worthy -= (one.pages - pages) * one.worthy
            one.pages, one.end = pages, node.end
        elif one is None or one.end < node.end:
            if one is not None:
                self._number += 1
                node.heat = self._number << HEAT | node.heat & (1 << HEAT) - 1
            number = node.heat >> HEAT
            self._seen[number] = one = _Seen(number, node.end, pages)
        return one

    def _keep(self, one: _Seen, above: _Seen | None, kind: int, now: int) -> None:
        """``one`` is used, and ``above`` is the drawn node above it. It waits in no queue for now."""
        if one.worthy:
            if not one.kids:
                self._withdraw(one)
            if one.parent is not above:
                self._orphan(one, now)
        else:
            one.worthy = True
            self._held_worthy += one.pages
        if above is not None and one.parent is None:
            above.kids += 1
            one.parent = above
        one.kind, one.used = kind, now

    def _orphan(self, one: _Seen, now: int) -> None:
        """``one`` hangs below nothing any more; what it hung below may go, unless it is being used ``now``."""
        parent, one.parent = one.parent, None
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
        self._orphan(one, now)
        if not one.lately:
            del self._seen[one.number]

    def _leave_lately(self, one: _Seen) -> None:
        one.lately = False
        self._held_lately -= one.pages
        if not one.worthy:
            del self._seen[one.number]
