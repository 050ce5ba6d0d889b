"""The prefix hash chain: H(i) = sha256(H(i-1) || page bytes), H(-1) = the namespace digest.

The core never hashes; this module does, in slices short enough for the loop. A slice of small pages runs on the loop
(sha256 of less than 2 KiB keeps the GIL, so a thread would not help); larger pages go to a thread.
"""

from __future__ import annotations

import asyncio
import struct
from functools import lru_cache
from hashlib import sha256

from asynccache import checks
from asynccache.runtime.tokens import TOKEN_BYTES

HASH_BYTES = 32
SCHEMA = b"asynccache-prefix-1"
SLICE_BYTES = 12 << 10
"""Page bytes hashed per loop turn, each page counting ``PER_PAGE_BYTES`` more: under 100 us at any page size."""
PER_PAGE_BYTES = 192
THREAD_PAGE_BYTES = 2048


@lru_cache(maxsize=4096, typed=True)
def namespace_digest(model: str, page_size: int, extra_key: str | bytes | None = None, epoch: int = 0) -> bytes:
    """H(-1): a digest of everything but tokens that a page depends on. ``epoch`` counts the namespace's invalidations.

    Raises:
        ConfigError: ``extra_key`` is something else, or text that has no UTF-8.
    """
    extra, name = _tagged(extra_key), model.encode()
    fields = struct.pack("<III", page_size, len(name), len(extra))
    return sha256(SCHEMA + fields + name + extra + (struct.pack("<Q", epoch) if epoch else b"")).digest()


def _tagged(extra_key: str | bytes | None) -> bytes:
    """``extra_key`` as bytes, different for any two keys."""
    if checks.namespace("extra_key", extra_key) is None:
        return b"-"
    return b"b" + extra_key if isinstance(extra_key, bytes) else b"s" + str(extra_key).encode()


def extend_chain(parent: bytes, key: bytes, start: int, stop: int, page_bytes: int) -> bytes:
    """The hashes of the pages that lie in ``key[start:stop]`` (bytes, whole pages), after ``parent``."""
    hashes = []
    for offset in range(start, stop, page_bytes):
        parent = sha256(parent + key[offset : offset + page_bytes]).digest()
        hashes.append(parent)
    return b"".join(hashes)


class Chain:
    """The hashes of one growing key. Mutable state: ``key``, the part that has been hashed, and ``hashes``, one for
    each of its pages."""

    __slots__ = ("_page_bytes", "_space", "hashes", "key")

    def __init__(self, space: bytes, page_size: int, key: bytes = b"", hashes: bytes = b"") -> None:
        self._space = space
        self._page_bytes = page_size * TOKEN_BYTES
        self.key = key[: len(hashes) // HASH_BYTES * self._page_bytes]
        self.hashes = hashes

    def __repr__(self) -> str:
        return f"Chain({len(self.hashes) // HASH_BYTES} pages)"

    def copy(self) -> Chain:
        """An independent chain with the same key and hashes."""
        return Chain(self._space, self._page_bytes // TOKEN_BYTES, self.key, self.hashes)

    def covers(self, key: bytes) -> bool:
        """Return True if every whole page of ``key`` is hashed already."""
        whole = len(key) // self._page_bytes * self._page_bytes
        return len(self.key) >= whole and self.key.startswith(key[:whole])

    def known(self, key: bytes, hashes: bytes) -> None:
        """Take over ``hashes`` of the first pages of ``key``, if these are more pages than have been hashed here."""
        if len(hashes) > len(self.hashes) or not key.startswith(self.key):
            self.key = key[: len(hashes) // HASH_BYTES * self._page_bytes]
            self.hashes = hashes

    async def extend(self, key: bytes) -> bytes:
        """The hashes of all whole pages of ``key``. Several calls at once do not disturb each other.

        Cancelling keeps what is hashed so far.
        """
        stop = len(key) // self._page_bytes * self._page_bytes
        if self.covers(key):
            return self.hashes[: stop // self._page_bytes * HASH_BYTES]
        threaded = self._page_bytes >= THREAD_PAGE_BYTES
        pages = max(1, (64 * SLICE_BYTES if threaded else SLICE_BYTES) // (self._page_bytes + PER_PAGE_BYTES))
        at, hashes = (len(self.key), self.hashes) if key.startswith(self.key) else (0, b"")
        while at < stop:
            if at:
                await asyncio.sleep(0)
            end = min(stop, at + pages * self._page_bytes)
            parent = hashes[-HASH_BYTES:] or self._space
            if threaded:
                new = await asyncio.to_thread(extend_chain, parent, key, at, end, self._page_bytes)
            else:
                new = extend_chain(parent, key, at, end, self._page_bytes)
            at, hashes = end, hashes + new
            if at > len(self.key):
                self.key, self.hashes = key[:at], hashes
        return hashes
