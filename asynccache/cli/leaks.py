"""Finds leaks in the core after a run: slots that are neither free nor in the tree, and pins that were not removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asynccache.core.cache import CacheCore
from asynccache.core.slots import SLOT_BYTES
from asynccache.core.tree import Node


class Leaks(NamedTuple):
    """What a run has left that should be gone.

    device_pages, host_pages: slots of all components that are neither free nor in the tree.
    pins: leases that are still open, and pins that the tree still counts.
    tasks: tasks of asyncio that run after the cache was closed.
    """

    device_pages: int = 0
    host_pages: int = 0
    pins: int = 0
    tasks: int = 0


def look(core: CacheCore) -> Leaks:
    """Count the pages and pins that leaked. To be called when all requests have ended and no operation is in flight; it
    walks the whole tree."""
    statistics = core.statistics()
    shelves = (*statistics.device, *statistics.host)
    missing = [shelf.capacity - shelf.free for shelf in shelves]
    pins = statistics.leases
    for node in nodes(core):
        for place, slots in enumerate(node.slots):
            missing[place] -= len(slots) // SLOT_BYTES
        pins += sum(node.pins)
    device = len(statistics.device)
    return Leaks(sum(map(abs, missing[:device])), sum(map(abs, missing[device:])), pins)


def nodes(core: CacheCore) -> Iterator[Node]:
    """All nodes of the tree, in an order that is the same for trees that grew in the same way."""
    stack: list[Node] = [*core.world.roots.values(), *core.world.dead_roots]
    while stack:
        node = stack.pop()
        yield node
        stack.extend((node.children or {}).values())
