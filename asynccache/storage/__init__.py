"""Stores, where L3 bytes go: the contract that a backend fulfils, and the verified store that the runtime talks to.

``contract`` is all that a backend needs. ``CheckedStore`` adds headers, checksums, deadlines and a breaker;
``open_store`` finds a backend by its URL; ``Pages`` is several stores without a cache. The names exported here are for
users and for the authors of backends. This package imports neither the core nor the workers nor the runtime.
"""

from __future__ import annotations

from asynccache.settle import completed, settled
from asynccache.storage.blocking_threads import Workers
from asynccache.storage.breaker import REFUSED, Breaker, BreakerState, Permit
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import (
    HEADER_BYTES,
    KEY_BYTES,
    PageKey,
    Record,
    Result,
    StorageBackend,
    StoreLayout,
)
from asynccache.storage.listing import Collectable, Collected, Listable, Stored
from asynccache.storage.opening import CheckableClass, backend_class, check_store, check_stores, open_store
from asynccache.storage.options import StoreOptions, take_options
from asynccache.storage.pages import Closed, Pages
from asynccache.storage.probing import Probeable
from asynccache.storage.records import RECORD_SCHEMA
from asynccache.storage.scrub import Part, Scrubbable, Scrubbed, Verify
from asynccache.storage.url import ParsedUrl, Place, parse_place, parse_size, parse_url
from asynccache.storage.watching import Tell, Watchable
from asynccache.storage.weights import weights_digest

__all__ = [
    "HEADER_BYTES", "KEY_BYTES", "RECORD_SCHEMA", "REFUSED", "Breaker", "BreakerState", "CheckableClass",
    "CheckedStore", "Closed", "Collectable", "Collected", "Listable", "PageKey", "Pages", "ParsedUrl", "Part",
    "Permit", "Place", "Probeable", "Record", "Result", "Scrubbable", "Scrubbed", "StorageBackend", "StoreLayout",
    "StoreOptions", "Stored", "Tell", "Verify", "Watchable", "Workers", "backend_class", "check_store",
    "check_stores", "completed", "open_store", "parse_place", "parse_size", "parse_url", "settled", "take_options",
    "weights_digest",
]
