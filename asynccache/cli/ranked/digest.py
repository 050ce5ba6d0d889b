"""The tree itself as one number: every node with its key, its slots, states and pins, and what is free of every pool.

A chain of calls says that ranks were told the same; this says that they hold the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64

from asynccache.core.cache import CacheCore
from asynccache.core.tree import Node


def tree_digest(core: CacheCore) -> int:
    """Walks the whole tree, in the order in which it grew."""
    digest = xxh3_64()
    for node in _nodes(core):
        digest.update(node.key)
        for slots in node.slots:
            digest.update(slots)
        digest.update(repr((node.end, node.state, node.pins, node.stored)).encode())
    statistics = core.statistics()
    digest.update(repr((statistics.device, statistics.host, statistics.leases, statistics.operations)).encode())
    return digest.intdigest()


def _nodes(core: CacheCore) -> Iterator[Node]:
    stack: list[Node] = [*core.world.roots.values(), *core.world.dead_roots]
    while stack:
        node = stack.pop()
        yield node
        stack.extend((node.children or {}).values())
