"""What a cache does, for Prometheus and for people. Reads its counters when asked; costs nothing in between.

``CacheCollector`` goes into a registry of yours; ``Exposed`` serves ``/metrics``, ``/healthz``, ``/statistics`` and
``/explain``. Needs the extra ``metrics``, but for ``LoopLag`` and for an ``Exposed`` that leaves ``/metrics`` out.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynccache.extras import install
from asynccache.metrics.lag import LoopLag
from asynccache.metrics.server import Exposed

if TYPE_CHECKING:
    from asynccache.metrics.collector import CacheCollector

__all__ = ["CacheCollector", "Exposed", "LoopLag"]


def __getattr__(name: str) -> Any:
    if name != "CacheCollector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module("asynccache.metrics.collector")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {install('metrics')} brings it", name=error.name) from None
    return module.CacheCollector
