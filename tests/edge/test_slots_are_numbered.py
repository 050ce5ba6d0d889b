"""A pool without bytes fits into any memory; but its slots are int32."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache import AsyncCache, CacheConfig, ConfigError, Full


@pytest.mark.parametrize("tier", ["device", "host"])
async def test_more_slots_than_can_be_numbered_are_refused(tier: str) -> None:
    tokens: dict[str, Any] = {"device_tokens": 16, "host_tokens": 16, f"{tier}_tokens": 16 << 31}
    config = CacheConfig(model="m", components=(Full(bytes_per_token=0, **tokens),))
    cache = AsyncCache(config)
    with pytest.raises(ConfigError, match=f"full: 2147483648 slots on the {tier}"):
        async with cache:
            pass
    assert cache.closed == "the cache is not open"
