"""KV events for routers: which pages the cache holds on which tier, in the format of vLLM, SGLang, Dynamo and llm-d.

``ZmqPublisher`` sends what ``AsyncCache(on_event=...)`` tells it. ``Subscriber`` and ``Mirror`` are for the receiving
end. All three need the packages of the extra ``events``, which are imported when one of them is first used. This
package imports the core's events and nothing of the runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynccache.events.announcer import Notice, Opened, StorageReport
from asynccache.extras import install

if TYPE_CHECKING:
    from asynccache.events.publisher import ZmqPublisher
    from asynccache.events.subscriber import Received, Subscriber
    from asynccache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventLayout, Mirror

__all__ = [
    "AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "EventLayout", "Mirror", "Notice", "Opened",
    "Received", "StorageReport", "Subscriber", "ZmqPublisher",
]  # fmt: skip

_LAZY = {
    "AllBlocksCleared": "wire", "BlockRemoved": "wire", "BlockStored": "wire", "EventBatch": "wire",
    "EventLayout": "wire", "Mirror": "wire", "Received": "subscriber", "Subscriber": "subscriber",
    "ZmqPublisher": "publisher",
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
