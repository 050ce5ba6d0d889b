"""A storage key says by its last bytes which block it is about, in the words of the engine's own KV events."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.errors import ConfigError
from asynccache.events.announcer import block_hash
from asynccache.storage import KEY_BYTES, Pages
from asynccache.storage.checked import storage_key
from asynccache.storage.contract import block_in, named_key
from asynccache.worker.pool_layout import PoolMap

DIGEST = hashlib.sha256(b"a page").digest()
ENDS = (0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -(1 << 63))


@pytest.mark.parametrize("block", ENDS)
def test_a_key_says_its_block(block: int) -> None:
    key = named_key(DIGEST, block)
    assert len(key) == KEY_BYTES
    assert block_in(key) == block
    assert key[:23] == DIGEST[:23]


def test_keys_of_all_blocks_and_digests_differ() -> None:
    random = Random(5)
    digests = [random.randbytes(32) for _ in range(20)]
    blocks = [*ENDS, *(random.getrandbits(64) for _ in range(20)), None]
    assert len({named_key(digest, block) for digest in digests for block in blocks}) == 20 * len(blocks)


def test_a_key_without_a_block_says_none_whatever_its_digest_is() -> None:
    random = Random(6)
    for _ in range(1000):
        assert block_in(named_key(random.randbytes(32), None)) is None


def test_of_a_caches_pools_the_one_that_is_stored_last_names_the_block() -> None:
    specs = [
        PoolSpec(name=name, component=kind, dtype="uint8", layers=1, bytes_per_page=64, device_pages=1, host_pages=1,
                 hit_policy=HitPolicy.ALL_PAGES)
        for name, kind in (("full", ComponentKind.FULL), ("swa", ComponentKind.SWA))
    ]  # fmt: skip
    pools, page = PoolMap(specs, 16, {}), hashlib.sha256(b"chain").digest()
    assert pools.key("full", page).key == storage_key(page, pools.digest) == pools.keys("full", page)[0].key
    assert block_in(pools.key("full", page).key) == block_hash(page)
    assert block_in(pools.key("swa", page).key) is None
    assert pools.key("swa", page) == pools.keys("swa", page)[0]


def opened(blocks: Any) -> tuple[Pages, MemoryBackend]:
    backend = MemoryBackend()
    return Pages.open(backend, bytearray(2 * 64), 64, "model", blocks=blocks), backend


def test_pages_name_blocks_as_the_caller_says() -> None:
    pages, backend = opened(lambda pool, key: -5 if key == b"one" and pool == "pages" else None)
    with pages:
        pages.put([b"one", b"two"], [0, 1]).result()
        assert [block_in(key) for key in backend._stored] == [-5, None]
        assert [int(result) for result in pages.get([b"one", b"two"], [1, 0]).result()] == [1, 1]


@pytest.mark.parametrize("wrong", [1 << 64, -(1 << 63) - 1, "7", 1.0, True])
def test_a_name_that_is_none_is_refused(wrong: Any) -> None:
    pages, _ = opened(lambda pool, key: wrong)
    with pages, pytest.raises(ConfigError, match="is no hash of 64 bits"):
        pages.exists([b"key"])


def test_a_caller_that_raises_is_told_so() -> None:
    pages, _ = opened(lambda pool, key: 1 // 0)
    with pages, pytest.raises(ConfigError, match="blocks: it raises"):
        pages.exists([b"key"])
    with pytest.raises(ConfigError, match="cannot be called"):
        opened(7)
