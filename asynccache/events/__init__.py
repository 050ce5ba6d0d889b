"""KV events for routers: what the cache holds on which tier, as vLLM, SGLang, Dynamo and llm-d publish and read it.

``ZmqPublisher`` sends what ``AsyncCache(on_event=...)`` tells it; ``Subscriber`` and ``Mirror`` are the other end. It
needs the extra ``events``, which is imported when it is first asked for. Knows the core's events, and no runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynccache.events.notices import Notice, Opened, StorageReport
from asynccache.extras import install

if TYPE_CHECKING:
    from asynccache.events.mirror import Mirror
    from asynccache.events.publisher import ZmqPublisher
    from asynccache.events.subscriber import Received, Subscriber
    from asynccache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, Layout

__all__ = [
    "AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "Layout", "Mirror", "Notice", "Opened",
    "Received", "StorageReport", "Subscriber", "ZmqPublisher",
]  # fmt: skip

_LAZY = {
    "AllBlocksCleared": "wire", "BlockRemoved": "wire", "BlockStored": "wire", "EventBatch": "wire", "Layout": "wire",
    "Mirror": "mirror", "Received": "subscriber", "Subscriber": "subscriber", "ZmqPublisher": "publisher",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"asynccache.events.{_LAZY[name]}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {install('events')} brings it", name=error.name) from None
    value = globals()[name] = getattr(module, name)
    return value
