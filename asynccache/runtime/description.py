"""What ranks must have in common before they step together, in plain values.

How many bytes of which layers a rank holds is its own affair; what the core is made from is not, nor what decides how
the runtime calls it.
"""

from __future__ import annotations

from dataclasses import asdict

import asynccache
from asynccache.config import CacheConfig
from asynccache.core.settings import CoreConfig
from asynccache.ranks.handshake import Description
from asynccache.ranks.topology import Topology


def description(config: CacheConfig, topology: Topology, events: bool, stores: int) -> Description:
    """Of this rank. ``events``: whether it tells of them; they need hashes, which the core is handed. ``stores``: how
    many there are at the start."""
    pools = {
        spec.name: {
            "component": spec.component.name, "from": spec.indices_from, "dtype": spec.dtype,
            "hit_policy": spec.hit_policy.value, "replicated": spec.replicated,
        }
        for spec in config.pools()
    }  # fmt: skip
    return {
        "version": asynccache.__version__,
        "topology": asdict(topology),
        "model": config.model,
        "pools": pools,
        "order": list(pools),
        "core": _core(config.core()),
        "events": events,
        "stores": stores,
        "prefetch_policy": config.prefetch_policy.value,
        "prefetch_threshold": config.prefetch_threshold,
        "backup_quota": config.backup_quota,
        "kept_fraction": config.kept_fraction,
    }


def _core(core: CoreConfig) -> dict[str, str]:
    return {name: repr(value) for name, value in asdict(core).items()}
