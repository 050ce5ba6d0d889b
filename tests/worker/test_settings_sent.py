"""A configuration as it goes to a worker: of this process, or over a link."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.worker import Topology, listen
from asynccache.worker.messages import encode
from asynccache.worker.rank_server import ORDERS, decode_orders


def config(threshold: int) -> CacheConfig:
    full = Full(bytes_per_token=4, device_tokens=160, host_tokens=160)
    return CacheConfig(model="m", components=(full,), prefetch_threshold=threshold)


@pytest.mark.parametrize("threshold", [0, 1 << 60])
def test_what_is_sent_is_the_configuration(threshold: int) -> None:
    order: Any
    (order,) = decode_orders(encode([ORDERS["open"].message(1, config(threshold), False)]))
    assert type(order) is ORDERS["open"].message
    assert order.settings == config(threshold)


async def test_a_worker_of_this_process_may_have_what_no_frame_can_hold(tmp_path: object) -> None:
    async with (
        listen(f"unix:{tmp_path}/group", Topology(), secret=b"x" * 16, own=0) as workers,
        AsyncCache(config(1 << 70), workers=workers) as cache,
    ):
        async with cache.lease([1, 2, 3]) as lease:
            assert lease.cached == 0
