"""KV events for routers: which pages the cache holds on which tier, in the format of vLLM, SGLang, Dynamo and llm-d.

``ZmqPublisher`` sends what ``AsyncCache(on_event=...)``, or a host process, tells it. ``Subscriber`` and ``Mirror`` are
for the receiving end, and ``Fleet`` for a router with many of those. They need the packages of the extra ``events``,
which are imported when one of them is first used. ``prompt_blocks`` says what a prompt's blocks are called. This
package imports the core's events and nothing of the runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asynccache.events.announcer import HeldReport, Notice, Opened, StorageReport
from asynccache.extras import install
from asynccache.hashes import prompt_blocks

if TYPE_CHECKING:
    from asynccache.events.fleet import EventStream, Fleet, StreamStats, TierHits
    from asynccache.events.publisher import ZmqPublisher
    from asynccache.events.subscriber import Received, Subscriber
    from asynccache.events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventLayout, Mirror

__all__ = [
    "AllBlocksCleared", "BlockRemoved", "BlockStored", "EventBatch", "EventLayout", "EventStream", "Fleet",
    "HeldReport", "Mirror", "Notice", "Opened", "Received", "StorageReport", "StreamStats", "Subscriber", "TierHits",
    "ZmqPublisher", "prompt_blocks",
]  # fmt: skip

_LAZY = {
    "AllBlocksCleared": "wire", "BlockRemoved": "wire", "BlockStored": "wire", "EventBatch": "wire",
    "EventLayout": "wire", "EventStream": "fleet", "Fleet": "fleet", "Mirror": "wire", "Received": "subscriber",
    "StreamStats": "fleet", "Subscriber": "subscriber", "TierHits": "fleet", "ZmqPublisher": "publisher",
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
