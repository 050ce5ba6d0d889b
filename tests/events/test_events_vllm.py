"""vLLM's own module reads our stream, and our subscriber reads vLLM's own publisher. Nothing of vLLM is copied here.

Runs where vLLM is installed, or where ``ASYNCCACHE_VLLM`` names a folder with its package (an unpacked wheel, of which
only ``vllm/distributed/kv_events.py`` is needed). vLLM itself is not imported: that module's four imports of others are
answered by stubs, none of which has to do with the format. Last checked with the wheel of vLLM 0.33.0: events as maps,
replayed batches with a topic, lora_id and lora_name of an ``Adapter``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq

from asynccache import Adapter, AsyncCache
from asynccache.events import AllBlocksCleared, BlockStored, Subscriber, ZmqPublisher
from asynccache.events.announcer import block_hashes
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.tokens import as_key
from tests.runtime.runtime_kit import compute, parts, settings, text

LOCAL = "tcp://127.0.0.1:*"
PATIENCE = 20.0


def _module_file() -> Path | None:
    folder = os.environ.get("ASYNCCACHE_VLLM")
    if folder:
        return Path(folder, "vllm", "distributed", "kv_events.py")
    spec = importlib.util.find_spec("vllm")
    places = (spec.submodule_search_locations or []) if spec else []
    return next((Path(place, "distributed", "kv_events.py") for place in places), None)


FILE = _module_file()
pytestmark = pytest.mark.skipif(
    FILE is None or not FILE.is_file(), reason="vLLM is not installed, and ASYNCCACHE_VLLM names no unpacked wheel"
)


class _Settings:
    """Stands for vLLM's ``KVEventsConfig``: holds what it is given."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)


STUBS: dict[str, dict[str, Any]] = {
    "vllm.config.kv_events": {"KVEventsConfig": _Settings},
    "vllm.logger": {"init_logger": __import__("logging").getLogger},
    "vllm.utils.network_utils": dict.fromkeys(("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")),
    "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, as it is in the package."""
    for name, values in STUBS.items():
        parts = name.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        stub = ModuleType(name)
        vars(stub).update(values)
        monkeypatch.setitem(sys.modules, name, stub)
    assert FILE is not None
    spec = importlib.util.spec_from_file_location("vllm_kv_events", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "vllm_kv_events", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.asyncio
async def test_its_decoder_reads_what_a_cache_publishes(vllm: ModuleType) -> None:
    """By replay, frame for frame as its subscribers take it."""
    adapter, device = Adapter("sql-v2", lora_name="sql", lora_id=7), CpuDevice()
    with ZmqPublisher(LOCAL, LOCAL, gather=0.0, topic="kv", rank=1) as publisher:
        async with AsyncCache(settings(host=16), device=device, on_event=publisher) as cache:
            async with cache.lease(text(4), namespace=adapter) as lease:
                compute(cache, lease, text(4))
                await lease.commit(text(4))
            await cache.flush()
            space = parts(cache).namespaces.space("sql-v2")
            hashes = block_hashes(cache.core.known_hashes(space, as_key(text(4))))
            wanted = {"GPU": 4, "CPU": 4}
            events = await asyncio.to_thread(_replayed, vllm, publisher, lambda found: _media(found) == wanted)
            await cache.reset()
    await device.aclose()
    stored = [event for event in events if isinstance(event, vllm.BlockStored)]
    assert _media(events) == wanted
    for event in stored:
        assert (event.lora_id, event.lora_name) == (7, "sql")
        assert event.extra_keys == [("sql", "sql-v2")] * len(event.block_hashes)
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        assert hash(event) == hash(event)
    assert {block for event in stored for block in event.block_hashes} == set(hashes)


def _media(events: list[Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for event in events:
        if hasattr(event, "token_ids"):
            found[event.medium] = found.get(event.medium, 0) + len(event.block_hashes)
    return found


def _replayed(vllm: ModuleType, publisher: ZmqPublisher, until: Any) -> list[Any]:
    decoder = msgspec.msgpack.Decoder(vllm.KVEventBatch)
    context, end = zmq.Context(), time.monotonic() + PATIENCE
    try:
        while True:
            asking = context.socket(zmq.DEALER)  # a REQ hears the first batch only
            asking.connect(publisher.replay or "")
            asking.send_multipart([b"", bytes(8)])
            events: list[Any] = []
            while asking.poll(1000):
                _, topic, number, payload = asking.recv_multipart()
                if number == vllm.ZmqEventPublisher.END_SEQ:
                    break
                assert topic == b"kv"
                batch = decoder.decode(payload)
                assert batch.data_parallel_rank == 1
                events += batch.events
            asking.close(linger=0)
            if until(events):
                return events
            assert time.monotonic() < end, events
    finally:
        context.destroy(linger=0)


def test_our_subscriber_reads_its_publisher(vllm: ModuleType, tmp_path: Path) -> None:
    """What it publishes reaches ours, and what was missed comes by its replay."""
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    theirs = vllm.ZmqEventPublisher(0, endpoints[0], endpoints[1], topic="kv")
    try:
        for number in range(5):
            events = [vllm.BlockStored([number], None, [1, 2], 2, None, "GPU", "sql"), vllm.AllBlocksCleared()]
            theirs.publish(vllm.KVEventBatch(ts=float(number), events=events))
        end, got = time.monotonic() + PATIENCE, list[Any]()
        with Subscriber(*endpoints, topic="kv") as ours:
            while len(got) < 5 and time.monotonic() < end:
                got += ours.catch_up()
    finally:
        theirs.shutdown()
    assert [number for number, _ in got] == list(range(5))
    assert got[3].batch.events == [BlockStored([3], None, [1, 2], 2, None, "GPU", "sql"), AllBlocksCleared()]
