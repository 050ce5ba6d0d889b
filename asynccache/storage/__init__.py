"""Where L3 bytes go: the contract a backend fulfils, and the verified store that the runtime talks to.

``contract`` is all that a backend needs. ``CheckedStore`` adds headers, checksums, deadlines and a breaker;
``open_store`` finds a backend by its URL. Knows nothing of the core, the tiers or the runtime.
"""

from __future__ import annotations

from asynccache.settle import completed, settled
from asynccache.storage.attaching import close_unattached, open_all, open_attached, options_of
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
from asynccache.storage.opening import CheckableClass, backend_class, check_store, check_stores, no_store, open_store
from asynccache.storage.options import StoreOptions, take_options
from asynccache.storage.pages import Closed, Pages
from asynccache.storage.probing import Probeable
from asynccache.storage.records import (
    RECORD_SCHEMA,
    header_of,
    pool_digest,
    seal,
    storage_key,
    store_layout,
    verify,
)
from asynccache.storage.scrub import Part, Scrubbable, Scrubbed, Verify
from asynccache.storage.tiers import Attached, TieredStore
from asynccache.storage.url import ParsedUrl, Place, parse_place, parse_size, parse_url
from asynccache.storage.watching import Reporting, Tell, Watchable, watch
from asynccache.storage.weights import weights_digest
from asynccache.storage.workers import Workers

__all__ = [
    "HEADER_BYTES", "KEY_BYTES", "RECORD_SCHEMA", "REFUSED", "Attached", "Breaker", "BreakerState",
    "CheckableClass", "CheckedStore", "Closed", "Collectable", "Collected", "Listable", "PageKey", "Pages",
    "ParsedUrl", "Part", "Permit", "Place", "Probeable", "Record", "Reporting", "Result", "Scrubbable", "Scrubbed",
    "StorageBackend", "StoreLayout", "StoreOptions", "Stored", "Tell", "TieredStore", "Verify", "Watchable",
    "Workers", "backend_class", "check_store", "check_stores", "close_unattached", "completed", "header_of",
    "no_store", "open_all", "open_attached", "open_store", "options_of", "parse_place", "parse_size", "parse_url",
    "pool_digest", "seal", "settled", "storage_key", "store_layout", "take_options", "verify", "watch",
    "weights_digest",
]
