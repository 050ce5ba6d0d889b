"""asynccache: a hierarchical KV-cache runtime for LLM serving, built on asyncio.

These are the public names. Each is imported when it is first asked for, so that torch, and whatever else takes long to
import, waits until it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynccache import compiled
from asynccache.extras import without_torch
from asynccache.version import VERSION

if TYPE_CHECKING:
    from asynccache.config import CacheConfig, Full, Mamba, Replicated, Sidecar, SlidingWindow
    from asynccache.configuration import load_config
    from asynccache.core.keys import Adapter
    from asynccache.core.passes import Unsaved
    from asynccache.core.settings import HitPolicy, PrefetchPolicy, WritePolicy
    from asynccache.errors import (
        AsyncCacheError,
        BackendError,
        BatchFailed,
        CacheClosed,
        CacheFull,
        ConfigError,
        CopyFailed,
        InvariantViolation,
        LoadFailed,
        RankFailure,
        Timeout,
        Unavailable,
        WrongPages,
    )
    from asynccache.geometry import components_from
    from asynccache.memory.pools import BlockTable, DevicePool
    from asynccache.runtime.cache import AsyncCache
    from asynccache.runtime.head import CloseReport
    from asynccache.runtime.lease import Hits, Lease
    from asynccache.runtime.prefetch import PrefetchHandle, PrefetchResult, PrefetchStatus

__version__ = VERSION
compiled.choose()                                      # before anything of the core is imported

__all__ = [
    "Adapter",
    "AsyncCache",
    "AsyncCacheError",
    "BackendError",
    "BatchFailed",
    "BlockTable",
    "CacheClosed",
    "CacheConfig",
    "CacheFull",
    "CloseReport",
    "ConfigError",
    "CopyFailed",
    "DevicePool",
    "Full",
    "HitPolicy",
    "Hits",
    "InvariantViolation",
    "Lease",
    "LoadFailed",
    "Mamba",
    "PrefetchHandle",
    "PrefetchPolicy",
    "PrefetchResult",
    "PrefetchStatus",
    "RankFailure",
    "Replicated",
    "Sidecar",
    "SlidingWindow",
    "Timeout",
    "Unavailable",
    "Unsaved",
    "WritePolicy",
    "WrongPages",
    "__version__",
    "components_from",
    "load_config",
]

_LAZY = {
    "Adapter": "asynccache.core.keys",
    "AsyncCache": "asynccache.runtime.cache",
    "AsyncCacheError": "asynccache.errors",
    "BackendError": "asynccache.errors",
    "BatchFailed": "asynccache.errors",
    "BlockTable": "asynccache.memory.pools",
    "CacheClosed": "asynccache.errors",
    "CacheConfig": "asynccache.config",
    "CacheFull": "asynccache.errors",
    "CloseReport": "asynccache.runtime.head",
    "ConfigError": "asynccache.errors",
    "CopyFailed": "asynccache.errors",
    "DevicePool": "asynccache.memory.pools",
    "Full": "asynccache.config",
    "HitPolicy": "asynccache.core.settings",
    "Hits": "asynccache.runtime.lease",
    "InvariantViolation": "asynccache.errors",
    "Lease": "asynccache.runtime.lease",
    "LoadFailed": "asynccache.errors",
    "Mamba": "asynccache.config",
    "PrefetchHandle": "asynccache.runtime.prefetch",
    "PrefetchPolicy": "asynccache.core.settings",
    "PrefetchResult": "asynccache.runtime.prefetch",
    "PrefetchStatus": "asynccache.runtime.prefetch",
    "RankFailure": "asynccache.errors",
    "Replicated": "asynccache.config",
    "Sidecar": "asynccache.config",
    "SlidingWindow": "asynccache.config",
    "Timeout": "asynccache.errors",
    "Unavailable": "asynccache.errors",
    "Unsaved": "asynccache.core.passes",
    "WritePolicy": "asynccache.core.settings",
    "WrongPages": "asynccache.errors",
    "components_from": "asynccache.geometry",
    "load_config": "asynccache.configuration",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(without_torch(error), name=error.name) from None
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
