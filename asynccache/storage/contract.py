"""The contract a storage backend fulfils: it keeps bytes under keys and knows nothing else.

A backend stores *records*: a 64-byte header and a payload, two buffers, under a 32-byte key, in a named pool. It never
looks inside a header. Integrity is not its business: ``CheckedStore`` builds the header on the way out and verifies
it on the way in, whatever the backend claims.

Every call is batched and answers per key, in order. A call never raises for one key's sake: that key is FAILED. It
raises ``BackendError`` (``Unavailable``, ``Timeout``) when the whole call could not be made. Cancelling a call returns
only after the backend has let go of every buffer that was passed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from asynccache import checks

HEADER_BYTES = 64
KEY_BYTES = 32


class Result(IntEnum):
    """The fate of one key in one call. For ``put``, HIT means: stored (or there already)."""

    MISS = 0
    HIT = 1
    CORRUPT = 2
    FAILED = 3


class PageKey(NamedTuple):
    """A pool's name and a page's 32-byte storage key, unique over all pools."""

    pool: str
    key: bytes


class Record(NamedTuple):
    """The two buffers of a stored page: ``header`` is 64 writable bytes, ``payload`` the pool's page size."""

    header: memoryview
    payload: memoryview


class StoreLayout(NamedTuple):
    """What a backend is told when it is opened: payload bytes per pool, and a digest of the record schema."""

    page_bytes: Mapping[str, int]
    schema: bytes


def check_layout(layout: object) -> StoreLayout:
    """``layout`` as it is.

    Raises:
        ConfigError: it is no layout of pools that have names, with 1 or more bytes a page, and of a digest.
    """
    found = checks.instance("layout", layout, StoreLayout)
    sizes = checks.instance("layout: page_bytes", found.page_bytes, Mapping)
    for pool, size in sizes.items():
        checks.integer(f"layout: page_bytes of {checks.shown(pool)}", size, 1)
        checks.text("layout: page_bytes: a pool", pool)
    checks.instance("layout: schema", found.schema, bytes)
    return found


def is_shared(backend: object) -> bool:
    """Whether what other processes store in the same place is found through ``backend``, and the other way round: it
    says so by an attribute ``shared``, which is optional. Of pages that several workers hold alike one is written there
    for all; to any other store each worker writes its own."""
    return bool(getattr(backend, "shared", False))


class StorageBackend(Protocol):
    """Async and batched over keys. One instance serves one event loop. One that processes share has an attribute
    ``shared`` that is true (``is_shared``)."""

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """HIT or MISS per key, FAILED where it cannot be known."""
        ...

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Fill ``records[i]`` with what is stored under ``keys[i]``. Only HIT means that the bytes are there; the
        content of every other buffer is undefined. A record of another length is CORRUPT."""
        ...

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        """Store each record; HIT when a later ``get`` may find it. A key that exists keeps its old record. FAILED
        leaves either nothing or the whole record."""
        ...

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Forget each key; HIT if it was there."""
        ...

    async def clear(self) -> None:
        """Forget everything."""
        ...

    def register(self, pool: str, memory: memoryview) -> None:
        """Told once per host pool, before use: payloads of ``pool`` are slices of ``memory``. May do nothing."""
        ...

    def stats(self) -> Mapping[str, int | float]:
        """Plain counters; at least ``pages``, ``bytes``, ``errors``."""
        ...

    async def flush(self) -> None:
        """Return once everything put so far would survive a power loss, as far as the backend can promise that."""
        ...

    async def aclose(self) -> None:
        """Finish or abandon what is in flight, release all resources. Calling it twice is fine."""
        ...
