"""Hints in the extra info of SGLang's calls. The version tested here passes none so far: the tests put them there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: make test-sglang", allow_module_level=True)

from tests.sglang import standins

standins.install()

from sglang.srt.managers.kv_hints import KvHintsEnvelope, decode_kv_hints_envelope
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer

from asynccache.host.server import HostServer
from tests.host.host_kit import serving, socket_path
from tests.sglang.host_pools import PAGES, indices, mha, opened

KEYS = [f"{page:064x}" for page in range(PAGES)]


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not what():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.002)


def extra(*actions: tuple[str, Any], prefix: list[str] | None = None, typed: bool = True) -> HiCacheStorageExtraInfo:
    made = [{"action_id": "a", "action_type": kind, "action_version": "1.0", "payload": said} for kind, said in actions]
    envelope: Any = {"protocol_version": "0.1", "message_id": "m", "actions": made}
    if typed:
        envelope = decode_kv_hints_envelope(envelope)
        assert isinstance(envelope, KvHintsEnvelope)
    return HiCacheStorageExtraInfo(prefix_keys=prefix, extra_info={"kv_hints": envelope})


async def beside(work: Callable[[Any, HostServer], None], **more: Any) -> None:
    path = socket_path()
    async with serving(path, **more) as server:

        def play() -> None:
            storage = opened({"kv": mha(), "swa": mha("page_first_direct", seed=5)}, {"storage": f"host:{path}"})
            try:
                work(storage, server)
            finally:
                storage.close()

        await asyncio.to_thread(play)


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.asyncio
async def test_what_is_kept_or_has_ended_is_told_to_the_host_process(typed: bool) -> None:
    def work(storage: Any, server: HostServer) -> None:
        size = storage._pools["kv"].source.page_size if storage._pools else None
        assert size is not None
        assert all(storage.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3), extra(typed=typed)))
        told = extra(("kv.retain", {"duration": 60, "end": 5 * size}), prefix=KEYS[:4], typed=typed)
        assert all(storage.batch_set_v1(KEYS[4:6], indices(4, 5), told))
        wait_for(lambda: server.table.counts["kept"] == 5)
        ended = extra(("kv.end", {}), prefix=KEYS[:6], typed=typed)
        done = storage.batch_set_v2([PoolTransfer(PoolName.SWA, indices(1, 2), keys=KEYS[6:8])], ended)
        assert done == {PoolName.SWA: [True, True]}
        wait_for(lambda: server.table.counts["ended"] == 2)
        from_here = extra(("kv.deref", {"start": 3 * size}), prefix=KEYS[:6], typed=typed)
        assert all(storage.batch_set_v1(KEYS[6:7], indices(6), from_here))
        wait_for(lambda: server.table.counts["ended"] == 6)
        assert storage.hint_counts == {"keep": 1, "ended": 2}

    await beside(work)


@pytest.mark.asyncio
async def test_a_prefetch_reads_into_the_memory_and_what_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    def work(storage: Any, server: HostServer) -> None:
        skip = extra(("kv.skip_store", {}))
        assert storage.batch_set_v1(KEYS[:2], indices(0, 1), skip) == [False, False]
        assert storage.batch_set_v2([PoolTransfer(PoolName.SWA, indices(1), keys=KEYS[:1])], skip) == {"swa": [False]}
        assert not server.table.index
        assert all(storage.batch_set_v1(KEYS[:3], indices(0, 1, 2)))
        behind = server.behind
        assert behind is not None
        wait_for(lambda: behind.counts().get("file.written") == 3)
        server.table.clear()
        assert storage.batch_exists(KEYS[:3], extra(("kv.prefetch", {}))) == 3
        wait_for(lambda: len(server.table.index) == 3)

    await beside(work, stores=[f"file:{tmp_path}/kv?capacity=64MiB"])


@pytest.mark.parametrize("said", [
    None, "kv.end", {"kv_hints": 3}, {"kv_hints": {"actions": [{"action_type": 7}]}}, [], {"kv_hints": {"actions": {}}},
])  # fmt: skip
@pytest.mark.asyncio
async def test_absurd_extra_info_changes_nothing(said: Any) -> None:
    def work(storage: Any, server: HostServer) -> None:
        info = HiCacheStorageExtraInfo(prefix_keys=None, extra_info=said)
        assert all(storage.batch_set_v1(KEYS[:3], indices(0, 1, 2), info))
        assert storage.batch_exists(KEYS[:3], info) == 3
        assert set(storage.hint_counts) <= {"malformed"}
        assert server.table.counts["kept"] == server.table.counts["ended"] == 0

    await beside(work)


def test_stores_that_take_no_hints_are_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = opened({"kv": mha()}, {"storage": f"file:{tmp_path / 'kv'}?capacity=16MiB"})
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert all(storage.batch_set_v1(KEYS[:3], indices(0, 1, 2), extra(("kv.retain", {"ttl": 5}))))
    finally:
        storage.close()
    assert storage.hint_counts == {"keep": 3, "unheard": 3}
    assert sum("take no hints" in one.getMessage() for one in caplog.records) == 1
