"""asynccache's stores as a secondary tier of vLLM's offloading connector: the tier type ``asynccache``.

vLLM copies KV between the device and a region of host memory; this package moves chunks of that region to stores
(files, Redis, object stores) and back, with checksums, deadlines and a breaker. vLLM's own LRU decides what stays in
the region. vLLM finds ``register`` by its entry point, and imports the rest when the tier is configured. Importing this
package imports nothing of vLLM, and works where vLLM is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asynccache_vllm.registering import TIER_TYPE, register

if TYPE_CHECKING:
    from asynccache_vllm.tier import AsyncCacheTier

__all__ = ["TIER_TYPE", "AsyncCacheTier", "register"]


def __getattr__(name: str) -> Any:
    """``AsyncCacheTier``, which needs vLLM.

    Raises:
        ImportError: vLLM is not installed or has another interface; the message says what to do.
    """
    if name != "AsyncCacheTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from asynccache_vllm.tier import AsyncCacheTier

    return AsyncCacheTier
