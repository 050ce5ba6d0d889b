"""The format of a stored page, and how its bytes are verified. Pure functions.

A record is a 64-byte header and the page's payload. The header, little-endian:

    offset  size
         0     4  magic, b"acKV"
         4     2  schema of this header (1)
         6     2  flags, 0
         8     8  payload length in bytes
        16    32  storage key
        48    16  xxh3_128 of the payload, big-endian as the library returns it

A record verifies if its header equals, byte for byte, the header that its key and payload would get now. So a change of
any bit of header or payload is found, and a record that was stored under another key does not verify.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from xxhash import xxh3_128_digest

from asynccache.config import PoolSpec
from asynccache.storage.contract import HEADER_BYTES, PageKey, Record, StoreLayout

MAGIC = b"acKV"
SCHEMA = 1

_HEADER = struct.Struct("<4sHHQ32s16s")
assert _HEADER.size == HEADER_BYTES

RECORD_SCHEMA = hashlib.sha256(b"asynccache record 1: magic, schema, flags, length, key, xxh3_128").digest()


def header_of(key: bytes, payload: memoryview) -> bytes:
    """Return the header of ``payload`` when it is stored under ``key``: 64 bytes."""
    return _HEADER.pack(MAGIC, SCHEMA, 0, payload.nbytes, key, xxh3_128_digest(payload))


def seal(keys: Sequence[PageKey], records: Sequence[Record]) -> None:
    """Fill in each record's header for its key and payload."""
    for key, record in zip(keys, records, strict=True):
        record.header[:] = header_of(key.key, record.payload)


def verify(keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
    """Return for each record whether it is undamaged and belongs to its key."""
    return [r.header.tobytes() == header_of(k.key, r.payload) for k, r in zip(keys, records, strict=True)]


def store_layout(pools: Iterable[PoolSpec]) -> StoreLayout:
    """Return what a backend is told about ``pools``. Logical pools have no bytes, so nothing of them is stored, and
    they are left out."""
    return StoreLayout({spec.name: spec.bytes_per_page for spec in pools if spec.bytes_per_page}, RECORD_SCHEMA)


def storage_key(prefix_hash: bytes, digest: bytes) -> bytes:
    """Return the storage key, 32 bytes, of the page with this prefix hash in the pool with this ``pool_digest``."""
    return hashlib.sha256(prefix_hash + digest).digest()


def pool_digest(
    spec: PoolSpec,
    page_size: int,
    *,
    layout: str = "page_first",
    shard: str | None = None,
) -> bytes:
    """Return a digest of all that must be equal for two caches to exchange the bytes of this pool: its name, dtype,
    layout, page size in tokens and bytes, the model's layers in it, and the part of every page that this rank has.

    ``shard`` names that part; by default it is the spec's. The number of pages and the pool whose slots index this one
    do not change the bytes, so they are not in the digest.
    """
    covers = ",".join(map(str, spec.model_layers))
    part = spec.shard if shard is None else shard
    fields = (spec.name, spec.dtype, layout, part, str(page_size), str(spec.bytes_per_page), covers)
    digest = hashlib.sha256(RECORD_SCHEMA)
    for field in fields:
        data = field.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()
