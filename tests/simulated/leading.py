"""A ``p2c`` that leads, for worlds that are too short for it to earn that, and the law of its books.

``leading()`` puts it in the place of ``p2c``. Whether it leads, and what each class and age is worth, is drawn again
and again; in between it is worth what was learned. Ages begin at 50 microseconds instead of half a second, since no
world takes long. So it evicts data that recency would not. All else is ``P2c``'s own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from unittest.mock import patch

import pytest

from asynccache.core import policies
from asynccache.core.cache import CacheCore
from asynccache.core.eviction import EvictionPolicy, Judged, Learned, Order
from asynccache.core.policies import _CLASS, BINS, CLASSES, HEAT_BITS, HEAT_MASK, POLICIES, Duel, P2c
from asynccache.core.settings import CoreConfig
from asynccache.core.tree import Node


class Leading(EvictionPolicy):
    """``p2c`` with a lesson every second request, and a lead and worths that ``random`` draws. ``seen`` counts its
    choices: ``choices``; ``led``, of those, while it led; of the latter ``not the oldest``, and ``pinned``: the node
    was in use."""

    queues = P2c.queues
    learns = True
    full_only = True

    def __init__(self, config: CoreConfig, random: Random, seen: Counter[str]) -> None:
        self.p2c = P2c(config, learn_every=2)
        self.random = random
        self.seen = seen
        self.leads = True
        self._draw()

    def _draw(self) -> None:
        if self.random.random() < 0.2:
            self.leads = self.random.random() < 0.9
        self.p2c.duel.leads = self.leads
        if self.random.random() < 0.7:
            self.p2c.curves.worth[:] = [self._worth() for _ in CLASSES]
        self.p2c._version += 1

    def use(self, end: Node, forked: int, now: int) -> None:
        self.p2c.use(end, forked, now)
        self._draw()

    def _worth(self) -> list[float]:
        """Rises and then falls; often some are equal."""
        steps = sorted(self.random.choice((0.1, 0.2, 0.5, self.random.random())) for _ in range(BINS))
        peak = self.random.randrange(BINS + 1)
        return steps[:peak] + steps[peak:][::-1]

    def choose(self, order: Order, now: int) -> Node | None:
        node = self.p2c.choose(order, now)
        if node is not None:
            self.seen["choices"] += 1
            if self.p2c.duel.leads:
                queue = next(part.queue for part in node.entry if part is not None and part.queue.order is order)
                self.seen["led"] += 1
                self.seen["not the oldest"] += node is not min(
                    (queue.chunks[0] for queue in order.rest if queue.chunks), key=lambda part: part.stamps[0]
                ).nodes[0]
                self.seen["pinned"] += node.pins[queue._place] > 0
        return node

    def end(self, node: Node) -> None:
        self.p2c.end(node)
        seen = self.p2c.duel._seen.get(node.heat >> HEAT_BITS)
        assert seen is None or seen.kids, "the duel has what was ended, and nothing hangs below it there"

    def queue(self, node: Node, c: int) -> int:
        return self.p2c.queue(node, c)

    def sooner(self, node: Node, other: Node, c: int, now: int, share: float) -> bool:
        return self.p2c.sooner(node, other, c, now, share)

    def recall(self, parent: Node, page: bytes) -> int:
        return self.p2c.recall(parent, page)

    def forget(self, node: Node, parent: Node, page: bytes, now: int) -> None:
        self.p2c.forget(node, parent, page, now)

    def learned(self, now: int) -> Learned | None:
        return self.p2c.learned(now)

    def judge(self, node: Node, age: int) -> Judged | None:
        return self.p2c.judge(node, age)


@contextmanager
def leading(seed: int | str = 0) -> Iterator[Counter[str]]:
    """A core that is set up with ``p2c`` within the block has ``Leading``. Yields what all of these have ``seen``
    together."""
    seen: Counter[str] = Counter()
    edges = [edge // 10_000 for edge in policies._EDGES]
    with (
        patch.dict(POLICIES, {"p2c": lambda config: Leading(config, Random(f"{seed}/leading"), seen)}),
        patch.object(policies, "_EDGES", edges), patch.object(policies, "_ENDS", (*edges[1:], policies._NEVER)),
    ):  # fmt: skip
        yield seen


# the books


def check_books(core: CacheCore) -> None:
    """Every block that ``p2c`` has seen used and waits for is a node's in the tree or a ghost's, class by class; and
    the duel's sums are right. Nothing is checked of another policy."""
    policy = core.world.policy
    p2c = policy.p2c if isinstance(policy, Leading) else policy
    if not isinstance(p2c, P2c):
        return
    check_duel(p2c.duel)
    there = [0.0] * len(CLASSES)
    stack: list[Node] = [*core.world.roots.values(), *core.world.dead_roots]
    while stack:
        node = stack.pop()
        if node.parent is not None and node.used:
            there[_CLASS[node.heat & HEAT_MASK]] += (node.end - node.parent.end) * p2c._blocks
        stack.extend((node.children or {}).values())
    held = 0
    for ghosts in p2c._ghosts:
        for _, _, pages, heat, _ in ghosts.values():
            there[_CLASS[heat & HEAT_MASK]] += pages * p2c._blocks
            held += pages
    assert p2c._held == held, "pages of ghosts"
    assert [sum(row) for row in p2c.curves._waiting] == pytest.approx(there, abs=1e-6), "blocks that wait for a use"


def check_duel(duel: Duel) -> None:
    """Every sum of a duel is what it should be, and nothing is forgotten or kept for nothing."""
    seen = duel._seen.values()
    assert duel._held_lately == sum(one.pages for one in seen if one.lately)
    assert duel._held_worthy == sum(one.pages for one in seen if one.worthy)
    assert all(one.lately or one.worthy for one in seen)
    assert {one.number for one in seen if one.lately} == set(duel._lately)
    waiting = [one.number for queue in duel._queues for _, _, one in queue]
    assert sorted(waiting) == sorted(one.number for one in seen if one.worthy and not one.kids)
    for kind, queue in enumerate(duel._queues):
        assert all((one.used, one.number) == (used, number) for used, number, one in queue)
        assert all(one[:2] < other[:2] for one, other in pairwise(queue))
        assert all(one.kind == kind for _, _, one in queue)
    kids = Counter(one.parent.number for one in seen if one.worthy and one.parent is not None)
    for one in seen:
        assert one.kids == kids[one.number]
        if one.worthy and one.parent is not None:
            assert one.parent.worthy, "what hangs below a node goes before it"
