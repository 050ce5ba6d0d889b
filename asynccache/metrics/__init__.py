"""Metrics of a cache, for Prometheus and for people. The counters are read when somebody asks, and cost nothing else.

``CacheCollector`` is for a registry of prometheus-client. ``Exposed`` serves ``/metrics``, ``/healthz``,
``/statistics`` and ``/explain`` over HTTP. ``CacheCollector`` and ``/metrics`` need the package of the extra
``metrics``; ``LoopLag`` and the other pages of ``Exposed`` do not.
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
