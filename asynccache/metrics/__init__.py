"""Metrics of a cache, for Prometheus and for people. The counters are read when somebody asks, and cost nothing else.

``CacheCollector`` is for a registry of prometheus-client. ``app`` makes an ASGI app with ``/metrics``, ``/healthz``,
``/statistics`` and ``/explain``, and ``start_metrics_server`` serves it. ``CacheCollector``, ``start_metrics_server``
and ``/metrics`` need the packages of the extra ``metrics``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynccache.extras import install
from asynccache.metrics.asgi import app
from asynccache.metrics.loop_lag import LoopLag

if TYPE_CHECKING:
    from asynccache.metrics.collector import CacheCollector
    from asynccache.metrics.server import MetricsServer, start_metrics_server

__all__ = ["CacheCollector", "LoopLag", "MetricsServer", "app", "start_metrics_server"]

_LAZY = {"CacheCollector": "collector", "MetricsServer": "server", "start_metrics_server": "server"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"asynccache.metrics.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {install('metrics')} brings it", name=error.name) from None
    return getattr(module, name)
