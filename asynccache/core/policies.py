"""The eviction policies by name, and how the configured one is made."""

from __future__ import annotations

from asynccache.core.eviction import EvictionPolicy, Lru
from asynccache.core.reuse import P2c
from asynccache.core.settings import POLICIES as POLICIES
from asynccache.core.settings import CoreConfig

POLICIES.update({"lru": lambda config: Lru(), "p2c": P2c})


def make_policy(config: CoreConfig) -> EvictionPolicy:
    """Return a new policy of the kind that ``config.eviction`` names."""
    policy: EvictionPolicy = POLICIES[config.eviction](config)
    return policy
