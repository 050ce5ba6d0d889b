"""What vLLM's events call a block is in our storage keys."""

from __future__ import annotations

from hashlib import sha256

import pytest
from asynccache_vllm.namespace import block_named


@pytest.mark.parametrize("length", [32, 16])
@pytest.mark.parametrize("group", [0, 7])
def test_a_block_is_named_by_the_lower_64_bits_of_its_hash(length: int, group: int) -> None:
    digest = sha256(b"block").digest()[:length]
    assert block_named("pages", digest + group.to_bytes(4, "big")) == int.from_bytes(digest, "big") % (1 << 64)


def test_vllm_says_the_same() -> None:
    keys = pytest.importorskip("vllm.v1.kv_offload.base")
    utils = pytest.importorskip("vllm.v1.core.kv_cache_utils")
    digest = utils.BlockHash(sha256(b"block").digest())
    assert block_named("pages", keys.make_offload_key(digest, 3)) == utils.maybe_convert_block_hash(digest)
