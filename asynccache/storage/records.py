"""What a stored page looks like, and the proof that bytes are the ones that were stored. Pure functions.

A record is a 64-byte header and the page's payload. The header, little-endian:

    offset  size
         0     4  magic, b"acKV"
         4     2  schema of this header (1)
         6     2  flags, 0
         8     8  payload length in bytes
        16    32  storage key
        48    16  xxh3_128 of the payload, big-endian as the library returns it

A record verifies when its header equals, byte for byte, the header that its key and payload would get now. So every bit
of header and payload is covered, and a record that landed under another key does not verify.
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
    """The header of ``payload`` stored under ``key``."""
    return _HEADER.pack(MAGIC, SCHEMA, 0, payload.nbytes, key, xxh3_128_digest(payload))


def seal(keys: Sequence[PageKey], records: Sequence[Record]) -> None:
    """Write every record's header."""
    for key, record in zip(keys, records, strict=True):
        record.header[:] = header_of(key.key, record.payload)


def verify(keys: Sequence[PageKey], records: Sequence[Record]) -> list[bool]:
    """Whether each record is whole and is its key's."""
    return [r.header.tobytes() == header_of(k.key, r.payload) for k, r in zip(keys, records, strict=True)]


def store_layout(pools: Iterable[PoolSpec]) -> StoreLayout:
    """What a backend is told about ``pools``. Logical pools have no stored object and are left out."""
    return StoreLayout({spec.name: spec.bytes_per_page for spec in pools if spec.bytes_per_page}, RECORD_SCHEMA)


def storage_key(prefix_hash: bytes, digest: bytes) -> bytes:
    """The key of one page in one pool: ``digest`` is the pool's ``pool_digest``."""
    return hashlib.sha256(prefix_hash + digest).digest()


def pool_digest(
    spec: PoolSpec,
    page_size: int,
    *,
    layout: str = "page_first",
    shard: str | None = None,
) -> bytes:
    """A digest of all that must be equal for two caches to exchange the bytes of this pool.

    Which of the model's layers they are, too. ``shard`` names this rank's part of every page, the default: what the
    spec says. Neither what indexes the pool nor how many pages it has changes the bytes.
    """
    covers = ",".join(map(str, spec.model_layers))
    part = spec.shard if shard is None else shard
    fields = (spec.name, spec.dtype, layout, part, str(page_size), str(spec.bytes_per_page), covers)
    digest = hashlib.sha256(RECORD_SCHEMA)
    for field in fields:
        data = field.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()
