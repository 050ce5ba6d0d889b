"""What is left of a run in the core when nothing should be: slots that nobody has, and pins that nobody holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asynccache.core.cache import CacheCore
from asynccache.core.slots import SLOT_BYTES
from asynccache.core.tree import Node


class Left(NamedTuple):
    """``device_pages`` and ``host_pages``: slots neither free nor in the tree, all components."""

    device_pages: int
    host_pages: int
    pins: int


def look(core: CacheCore) -> Left:
    """Walks the whole tree."""
    statistics = core.statistics()
    shelves = (*statistics.device, *statistics.host)
    missing = [shelf.capacity - shelf.free for shelf in shelves]
    pins = statistics.leases
    for node in nodes(core):
        for place, slots in enumerate(node.slots):
            missing[place] -= len(slots) // SLOT_BYTES
        pins += sum(node.pins)
    device = len(statistics.device)
    return Left(sum(map(abs, missing[:device])), sum(map(abs, missing[device:])), pins)


def nodes(core: CacheCore) -> Iterator[Node]:
    """All of them, in an order that is the same for trees that grew the same way."""
    stack: list[Node] = [*core.world.roots.values(), *core.world.dead_roots]
    while stack:
        node = stack.pop()
        yield node
        stack.extend((node.children or {}).values())
