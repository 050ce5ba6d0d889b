"""The eviction policies that there are, by name."""

from __future__ import annotations

from asynccache.core.eviction import EvictionPolicy, Lru
from asynccache.core.reuse import P2c
from asynccache.core.settings import POLICIES as POLICIES
from asynccache.core.settings import CoreConfig

POLICIES.update({"lru": lambda config: Lru(), "p2c": P2c})


def make_policy(config: CoreConfig) -> EvictionPolicy:
    """The policy that ``config.eviction`` names."""
    policy: EvictionPolicy = POLICIES[config.eviction](config)
    return policy
