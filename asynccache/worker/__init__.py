"""Workers move bytes. A worker has the pools of a device and of the host, the streams between them, and the stores.

The cache's head (``asynccache.runtime``) decides through the core and hands *work* to a worker; outcomes come back.
Work and outcomes are values of integers and bytes (``work``). A worker knows pools, slots and hashes; it knows no
tree, no lease and no request.

Cancelling a call that only waits or asks stops the waiting and changes nothing. Where cancelling does more, the call
says so.

An engine of several ranks has a worker in each of its processes. ``listen`` is for the head's process, ``connect`` for
all others. ``listen`` gives what ``AsyncCache(workers=...)`` takes; ``connect`` gives a rank's pools and batches.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynccache.worker.rank_server import EngineBatch, RankWorker, connect
    from asynccache.worker.ranks import RankPlace, Topology, Workers, listen

__all__ = ["EngineBatch", "RankPlace", "RankWorker", "Topology", "Workers", "connect", "listen"]

_LAZY = {
    "EngineBatch": "asynccache.worker.rank_server",
    "RankPlace": "asynccache.worker.ranks",
    "RankWorker": "asynccache.worker.rank_server",
    "Topology": "asynccache.worker.ranks",
    "Workers": "asynccache.worker.ranks",
    "connect": "asynccache.worker.rank_server",
    "listen": "asynccache.worker.ranks",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
