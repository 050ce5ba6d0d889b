"""The tree itself as one number: every node with its key, its slots, states and pins, and what is free of every pool.

A chain of calls says that ranks were told the same; this says that they hold the same.
"""

from __future__ import annotations

from array import array

from xxhash import xxh3_64_intdigest

from asynccache.cli.leaks import nodes
from asynccache.core.cache import CacheCore


def tree_digest(core: CacheCore) -> int:
    """Walks the whole tree, in the order in which it grew; some microseconds a node."""
    parts: list[bytes] = []
    words = array("Q")
    for node in nodes(core):
        parts.append(node.key)
        parts += node.slots
        words.extend((len(node.key), node.end, node.stored, *map(len, node.slots), *node.state, *node.pins))
    statistics = core.statistics()
    parts.append(repr((statistics.device, statistics.host, statistics.leases, statistics.operations)).encode())
    return xxh3_64_intdigest(b"".join((words.tobytes(), *parts)))
