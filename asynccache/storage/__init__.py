"""Stores, where L3 bytes go: the contract that a backend fulfils, and the verified store that the runtime talks to.

``contract`` is all that a backend needs. ``CheckedStore`` adds headers, checksums, deadlines and a breaker;
``open_store`` finds a backend by its URL; ``Pages`` is several stores without a cache. The names exported here are for
users and for the authors of backends. This package imports neither the core nor the workers nor the runtime.
"""

from __future__ import annotations

from asynccache.settings import MOST_SIZE, Size, parse_size
from asynccache.settle import OpenCalls, ThreadPool, completed, completed_in_thread, settled
from asynccache.storage.attachment import CheckableClass, backend_class, check_store, check_stores, open_store
from asynccache.storage.call_guard import REFUSED, Breaker, BreakerState, Permit
from asynccache.storage.checked import RECORD_SCHEMA, CheckedStore, Part, Scrubbable, Scrubbed, Verify
from asynccache.storage.contract import (
    HEADER_BYTES,
    KEY_BYTES,
    Collectable,
    Collected,
    Counting,
    Hint,
    Hintable,
    Layered,
    Listable,
    PageKey,
    Probeable,
    Record,
    Result,
    StorageBackend,
    Stored,
    StoreLayout,
)
from asynccache.storage.hints import RequestHints, read_hints
from asynccache.storage.pages import Closed, Pages
from asynccache.storage.url import HostPort, ParsedUrl, StoreOptions, parse_host_port, parse_url, take_options
from asynccache.storage.weights import weights_digest
from asynccache.storage.wrapper import Tell, Watchable

__all__ = [
    "HEADER_BYTES", "KEY_BYTES", "MOST_SIZE", "RECORD_SCHEMA", "REFUSED", "Breaker", "BreakerState", "CheckableClass",
    "CheckedStore", "Closed", "Collectable", "Collected", "Counting", "Hint", "Hintable", "HostPort", "Layered",
    "Listable", "OpenCalls", "PageKey", "Pages", "ParsedUrl", "Part", "Permit", "Probeable", "Record", "RequestHints",
    "Result", "Scrubbable", "Scrubbed", "Size", "StorageBackend", "StoreLayout", "StoreOptions", "Stored", "Tell",
    "ThreadPool", "Verify", "Watchable", "backend_class", "check_store", "check_stores", "completed",
    "completed_in_thread", "open_store", "parse_host_port", "parse_size", "parse_url", "read_hints", "settled",
    "take_options", "weights_digest",
]
