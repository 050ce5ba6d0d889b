"""The eviction policies that there are, by name."""

from __future__ import annotations

from collections.abc import Callable

from asynccache.core.eviction import EvictionPolicy, Lru
from asynccache.core.reuse import P2c
from asynccache.core.settings import CoreConfig

PolicyFactory = Callable[[CoreConfig], EvictionPolicy]

POLICIES: dict[str, PolicyFactory] = {"p2c": P2c, "lru": lambda config: Lru()}
"""What makes the policy of one core, by the name that ``CoreConfig.eviction`` has."""


def make_policy(config: CoreConfig) -> EvictionPolicy:
    """The policy that ``config.eviction`` names."""
    return POLICIES[config.eviction](config)
