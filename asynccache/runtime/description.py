"""What ranks must have in common before they step together, in plain values.

How many bytes of which layers a rank holds is its own affair; what the core is made from is not, nor what decides how
the runtime calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import asynccache
from asynccache.config import CacheConfig
from asynccache.core.settings import CoreConfig
from asynccache.ranks.handshake import Description
from asynccache.ranks.topology import Topology
from asynccache.worker.contract import StoreOptions


def description(
    config: CacheConfig, topology: Topology, events: bool, stores: Sequence[StoreOptions | None]
) -> Description:
    """Of this rank. ``events``: whether it tells of them; they need hashes, which the core is handed. ``stores``: those
    that there are at the start, nearest first; None: of one that cannot be opened."""
    pools = {
        spec.name: {
            "component": spec.component.name, "from": spec.indices_from, "dtype": spec.dtype,
            "replicated": ",".join(spec.replicated),
        }
        for spec in config.pools()
    }  # fmt: skip
    return {
        "version": asynccache.__version__,
        "topology": asdict(topology),
        "model": config.model,
        "pools": pools,
        "order": list(pools),
        "events": events,
        "stores": len(stores),
        "store": [{} if store is None else {"name": store.name, "write": store.write} for store in stores],
        "core": _core(config.core()),
        "prefetch_policy": config.prefetch_policy.value,
        "backup_quota": config.backup_quota,
        "kept_fraction": config.kept_fraction,
    }


def _core(core: CoreConfig) -> dict[str, str]:
    return {name: repr(value) for name, value in asdict(core).items()}
