"""asynccache: a hierarchical KV-cache runtime for LLM serving, built on asyncio.

The public names. ``AsyncCache`` (and what else needs torch) is imported when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynccache.config import CacheConfig, Full, Mamba, Sidecar, SlidingWindow
from asynccache.core.keys import Adapter
from asynccache.core.settings import HitPolicy, PrefetchPolicy, WritePolicy
from asynccache.errors import (
    AsyncCacheError,
    BackendError,
    CacheClosed,
    CacheFull,
    ConfigError,
    CopyFailed,
    LoadFailed,
    RankDivergence,
    RankFailure,
)

if TYPE_CHECKING:
    from asynccache.configuration import load_config
    from asynccache.runtime.cache import AsyncCache, CloseReport
    from asynccache.runtime.lease import Hits, Lease
    from asynccache.runtime.prefetch import PrefetchHandle, PrefetchResult, PrefetchStatus

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AsyncCache",
    "AsyncCacheError",
    "BackendError",
    "CacheClosed",
    "CacheConfig",
    "CacheFull",
    "CloseReport",
    "ConfigError",
    "CopyFailed",
    "Full",
    "HitPolicy",
    "Hits",
    "Lease",
    "LoadFailed",
    "Mamba",
    "PrefetchHandle",
    "PrefetchPolicy",
    "PrefetchResult",
    "PrefetchStatus",
    "RankDivergence",
    "RankFailure",
    "Sidecar",
    "SlidingWindow",
    "WritePolicy",
    "__version__",
    "load_config",
]

_LAZY = {
    "AsyncCache": "asynccache.runtime.cache",
    "CloseReport": "asynccache.runtime.cache",
    "Hits": "asynccache.runtime.lease",
    "Lease": "asynccache.runtime.lease",
    "PrefetchHandle": "asynccache.runtime.prefetch",
    "PrefetchResult": "asynccache.runtime.prefetch",
    "PrefetchStatus": "asynccache.runtime.prefetch",
    "load_config": "asynccache.configuration",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
