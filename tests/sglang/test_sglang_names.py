"""What SGLang's events call a block is in our storage keys: SGLang's own function says it."""

from __future__ import annotations

from hashlib import sha256

import pytest
from asynccache_sglang import identity


def test_a_block_is_named_by_the_first_64_bits_of_its_hash_as_a_signed_number() -> None:
    behind = bytes(identity.SUFFIX_BYTES)
    names = []
    for number in range(20):
        text = sha256(b"%d" % number).hexdigest()
        [key] = identity.page_keys([text], behind)
        name = identity.block_named("kv", key)
        assert name is not None
        assert name % (1 << 64) == int(text[:16], 16)
        assert -(1 << 63) <= name < 1 << 63
        names.append(name)
        assert identity.block_named("mamba", key) is None
    assert min(names) < 0 < max(names)
    assert identity.block_named("kv", b"no hash" + behind) is None


def test_sglang_says_the_same() -> None:
    utils = pytest.importorskip("sglang.srt.mem_cache.utils")
    hicache = pytest.importorskip("sglang.srt.mem_cache.hicache_storage")
    assert hicache.PoolName.KV.value == identity.NAMED_POOL
    for number in range(20):
        text = sha256(b"%d" % number).hexdigest()
        [key] = identity.page_keys([text], bytes(identity.SUFFIX_BYTES))
        assert identity.block_named("kv", key) == utils.hash_str_to_int64(text)
