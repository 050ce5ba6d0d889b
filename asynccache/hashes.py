"""The hashes of a prompt's pages.

The chain is H(i) = sha256(H(i-1) || page bytes), where a page's bytes are its tokens as little-endian int32. H(-1) is
the digest of a namespace since its last invalidation. Pure.
"""

from __future__ import annotations

import struct
from array import array
from functools import lru_cache
from hashlib import sha256

from asynccache import checks
from asynccache.core.keys import HASH_BYTES, TOKEN_BYTES
from asynccache.errors import ConfigError

SCHEMA = b"asynccache-prefix-1"
MOST_PAGE = 1 << 16


def prompt_blocks(
    tokens: list[int], *, model: str, page_size: int, namespace: str | bytes | None = None
) -> list[int]:
    """Return what KV events call the blocks of a prompt: for each whole page of ``tokens`` the lower 64 bits of its
    hash. ``model`` and ``page_size`` are those of the caches' configuration, ``namespace`` that of the request.

    Raises:
        ConfigError: an argument is unusable.
    """
    page_size = checks.integer("page_size", page_size, 1, MOST_PAGE)
    parent = namespace_digest(checks.text("model", model), page_size, checks.namespace("namespace", namespace))
    row = checks.integers("tokens", tokens)
    if row and not 0 <= min(row) <= max(row) <= checks.INT32_MAX:
        raise ConfigError(f"tokens: each is from 0 to {checks.INT32_MAX}")
    whole = len(row) // page_size * page_size
    hashes = extend_chain(parent, array("i", row[:whole]).tobytes(), 0, whole * TOKEN_BYTES, page_size * TOKEN_BYTES)
    return [int.from_bytes(hashes[end - 8 : end], "big") for end in range(HASH_BYTES, len(hashes) + 1, HASH_BYTES)]


@lru_cache(maxsize=4096, typed=True)
def namespace_digest(model: str, page_size: int, namespace: str | bytes | None = None, epoch: int = 0) -> bytes:
    """Return H(-1) of a namespace: the digest of ``model``, ``page_size``, ``namespace`` and ``epoch``. ``epoch``: how
    often the namespace was invalidated.

    Raises:
        ConfigError: ``namespace`` is neither text nor bytes nor None, or is text that has no UTF-8.
    """
    extra, name = _tagged(namespace), model.encode()
    fields = struct.pack("<III", page_size, len(name), len(extra))
    return sha256(SCHEMA + fields + name + extra + (struct.pack("<Q", epoch) if epoch else b"")).digest()


def _tagged(namespace: str | bytes | None) -> bytes:
    """Return ``namespace`` as bytes that differ for any two namespaces."""
    if checks.namespace("namespace", namespace) is None:
        return b"-"
    return b"b" + namespace if isinstance(namespace, bytes) else b"s" + str(namespace).encode()


def extend_chain(parent: bytes, key: bytes, start: int, stop: int, page_bytes: int) -> bytes:
    """Return the hashes, joined, of the whole pages in ``key[start:stop]``. ``parent``: the hash of the page before
    them."""
    hashes = []
    for offset in range(start, stop, page_bytes):
        parent = sha256(parent + key[offset : offset + page_bytes]).digest()
        hashes.append(parent)
    return b"".join(hashes)
