"""Finds leaks in the core after a run: slots that are neither free nor in the tree, and pins that no lease explains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asynccache.core.cache import CacheCore
from asynccache.core.slots import SLOT_BYTES
from asynccache.core.tree import Node


class Left(NamedTuple):
    """What leaked. ``device_pages``, ``host_pages``: slots of all components that are neither free nor in the tree.
    ``pins``: leases that are still open, and pins that the tree still counts."""

    device_pages: int
    host_pages: int
    pins: int


def look(core: CacheCore) -> Left:
    """Count what leaked. To be called when all requests have ended and no operation is in flight; it walks the whole
    tree."""
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
    """All nodes of the tree, in an order that is the same for trees that grew in the same way."""
    stack: list[Node] = [*core.world.roots.values(), *core.world.dead_roots]
    while stack:
        node = stack.pop()
        yield node
        stack.extend((node.children or {}).values())
