"""asynccache's stores as a secondary tier of vLLM's offloading connector: the tier type ``asynccache``.

vLLM copies KV between the device and a region of host memory; this package moves chunks of that region to stores
(files, Redis, object stores) and back, with checksums, deadlines and a breaker. vLLM's own LRU decides what stays in
the region. vLLM finds ``register`` by its entry point, and imports the rest when the tier is configured. Importing this
package imports nothing of vLLM, and works where vLLM is not installed.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynccache_vllm.interface import check_installed, unsuitable

if TYPE_CHECKING:
    from asynccache_vllm.tier import AsyncCacheTier

__all__ = ["TIER_TYPE", "AsyncCacheTier", "register"]

TIER_TYPE = "asynccache"
_FACTORY = "vllm.v1.kv_offload.tiering.factory"

_log = logging.getLogger("vllm.asynccache")


def register() -> None:
    """Register the tier type ``asynccache`` with vLLM. vLLM calls this in each of its processes; a second call does
    nothing.

    If the installed vLLM has no secondary tiers, a warning is logged and nothing is raised, because vLLM may be used
    without them.

    Raises:
        ImportError: vLLM is not installed.
    """
    check_installed()
    try:
        factory = import_module(_FACTORY).SecondaryTierFactory
        register_tier, known = factory.register_tier, factory._registry
    except (ImportError, AttributeError) as error:
        why = unsuitable(f"it has no secondary tiers ({error})")
        _log.warning("the tier type %r was not registered: %s", TIER_TYPE, why)
        return
    if TIER_TYPE not in known:
        register_tier(TIER_TYPE, "asynccache_vllm.tier", "AsyncCacheTier")


def __getattr__(name: str) -> Any:
    """``AsyncCacheTier``, which needs vLLM.

    Raises:
        ImportError: vLLM is not installed or has another interface; the message says what to do.
    """
    if name != "AsyncCacheTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asynccache_vllm.tier import AsyncCacheTier

    return AsyncCacheTier
