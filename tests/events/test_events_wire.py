"""The stream as others decode it. Their struct definitions are transcribed here, fields only.

Sources: vLLM ``vllm/distributed/kv_events.py``. ``NOW``: events are maps (0.33.0, 2026). ``BEFORE``: events are
arrays, with ``data_parallel_rank``, ``medium`` and ``lora_name`` (0.11 to 0.13). ``FIRST``: events are arrays without
them (0.9, and SGLang's ``sglang/srt/disaggregation/kv_events.py`` of that time).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import time
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq

from asynccache import Adapter, AsyncCache
from asynccache.core.plan import Cleared, Medium, Publish
from asynccache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventLayout,
    Notice,
    Opened,
    StorageReport,
    Subscriber,
    ZmqPublisher,
)
from asynccache.events.announcer import Announcer, block_hashes
from asynccache.events.wire import Decoder, Encoder
from asynccache.memory.cpu import CpuDevice
from asynccache.runtime.tokens import as_key
from tests.runtime.runtime_kit import compute, parts, settings, text


class NowBatchBase(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class NowEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class NowStored(NowEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class NowRemoved(NowEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class NowCleared(NowEvent, tag="AllBlocksCleared"):
    pass


class NowBatch(NowBatchBase):
    events: list[NowStored | NowRemoved | NowCleared]


class BeforeEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BeforeStored(BeforeEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BeforeRemoved(BeforeEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class BeforeCleared(BeforeEvent, tag="AllBlocksCleared"):
    pass


class BeforeBatch(NowBatchBase):
    events: list[BeforeStored | BeforeRemoved | BeforeCleared]


class FirstStored(BeforeEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class FirstRemoved(BeforeEvent, tag="BlockRemoved"):
    block_hashes: list[int]


class FirstBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[FirstStored | FirstRemoved | BeforeCleared]


BIG = 2**64 - 3
STORED = BlockStored([BIG, 7], 11, [5, 6, 7, 8], 2, None, "GPU", None)
TENANT = BlockStored([9], None, [1, 2], 2, None, "STORAGE", None, [("tenant",)])
BATCH = EventBatch(12.5, [STORED, TENANT, BlockRemoved([BIG], "CPU"), AllBlocksCleared()], 3)


def read(reader: Any, layout: EventLayout) -> tuple[Any, list[tuple[Any, ...]]]:
    """What a reader's own decoder makes of the batch: the whole, and its events as values."""
    batch = msgspec.msgpack.Decoder(reader).decode(Encoder(layout).encode(BATCH))
    return batch, [(type(event).__name__, *msgspec.structs.astuple(event)) for event in batch.events]


def test_vllm_reads_the_maps_and_no_arrays() -> None:
    batch, events = read(NowBatch, EventLayout.MAP)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    assert events == [
        ("NowStored", [BIG, 7], 11, [5, 6, 7, 8], 2, None, "GPU", None, *[None] * 8),
        ("NowStored", [9], None, [1, 2], 2, None, "STORAGE", None, [("tenant",)], *[None] * 7),
        ("NowRemoved", [BIG], "CPU", None, None, None), ("NowCleared",),
    ]  # fmt: skip
    with pytest.raises(msgspec.ValidationError):
        read(NowBatch, EventLayout.ARRAY)


@pytest.mark.parametrize(("reader", "names"), [(BeforeBatch, "Before"), (FirstBatch, "First")])
def test_older_vllm_and_sglang_read_the_arrays(reader: Any, names: str) -> None:
    _, events = read(reader, EventLayout.ARRAY)
    stored, _, removed, cleared = events
    assert stored[:6] == (f"{names}Stored", [BIG, 7], 11, [5, 6, 7, 8], 2, None)
    assert stored[6:] == (("GPU", None) if names == "Before" else ())
    assert removed[:2] == (f"{names}Removed", [BIG])
    assert cleared == ("BeforeCleared",)


@pytest.mark.parametrize("layout", EventLayout)
def test_a_batch_comes_back_as_it_was(layout: EventLayout) -> None:
    assert Decoder(layout).decode(Encoder(layout).encode(BATCH)) == BATCH


ADAPTER = Adapter("sql-v2", lora_name="sql", lora_id=7)


async def test_vllm_reads_which_adapter_a_block_is_of() -> None:
    """Whatever names the namespace: the adapter, its key as plain text, or a tenant that is no adapter."""
    notices: list[Notice] = []
    device = CpuDevice()
    async with AsyncCache(settings(), device=device, on_event=notices.append) as cache:
        for namespace in (ADAPTER, "tenant", Adapter("code"), None):
            async with cache.lease(text(2), namespace=namespace) as lease:
                compute(cache, lease, text(2))
                await lease.commit(text(2))
        async with cache.lease(text(3), namespace="sql-v2") as lease:
            assert lease.hits.device == len(text(2)), "an adapter's pages are found by its key"
            compute(cache, lease, text(3))
            await lease.commit(text(3))
    await device.aclose()
    sent = Encoder(EventLayout.MAP).encode(EventBatch(0.0, list(Announcer().announce(notices)), None))
    stored = [e for e in msgspec.msgpack.Decoder(NowBatch).decode(sent).events if isinstance(e, NowStored)]
    told = [(e.lora_id, e.lora_name, e.extra_keys and e.extra_keys[0]) for e in stored if e.medium == "GPU"]
    assert told == [(7, "sql", ("sql", "sql-v2")), (None, None, ("tenant",)), (None, "code", ("code",)),
                    (None, None, None), (7, "sql", ("sql", "sql-v2"))]
    first = [e.block_hashes[0] for e in stored if e.parent_block_hash is None and e.medium == "GPU"]
    assert len(set(first)) == 4


def test_an_adapter_is_its_key() -> None:
    assert ADAPTER == "sql-v2"
    assert hash(ADAPTER) == hash("sql-v2")
    assert Adapter("code").lora_name == "code"
    assert repr(ADAPTER) == "Adapter('sql-v2', lora_name='sql', lora_id=7)"


# What is announced of the changes that the core names and the stores report.


SPACE = b"n" * 32
PAGES = [sha256(bytes([i])).digest() for i in range(6)]
LOW = [int.from_bytes(page[24:], "big") for page in PAGES]
OPENED = Opened(2, lambda page: b"key of " + page, lambda space: "tenant" if space == SPACE else None)


def key(i: int) -> bytes:
    return b"key of " + PAGES[i]


def named(medium: Medium, first: int, last: int, parent: int | None = None, space: bytes = b"") -> Publish:
    tokens = b"".join(token.to_bytes(4, "little") for i in range(first, last) for token in (2 * i, 2 * i + 1))
    before = b"" if parent is None else PAGES[parent]
    return Publish(medium, True, before, b"".join(PAGES[first:last]), tokens, space)


def removed(medium: Medium, first: int, last: int) -> Publish:
    return Publish(medium, False, b"", b"".join(PAGES[first:last]), b"", b"")


THERE = named(Medium.STORAGE, 0, 1)
ANNOUNCED: dict[str, tuple[list[Notice], list[Notice], list[Any]]] = {
    "device and host as the core says": ([], [named(Medium.GPU, 0, 2), named(Medium.CPU, 2, 3, parent=1)], [
        BlockStored(LOW[:2], None, [0, 1, 2, 3], 2, None, "GPU", None),
        BlockStored(LOW[2:3], LOW[1], [4, 5], 2, None, "CPU", None)]),
    "removals from one medium in a row as one event": (
        [], [removed(Medium.GPU, 1, 2), removed(Medium.GPU, 0, 1), removed(Medium.CPU, 0, 1)],
        [BlockRemoved([LOW[1], LOW[0]], "GPU"), BlockRemoved([LOW[0]], "CPU")]),
    "nothing that is there and not named": ([], [StorageReport(True, [key(0), key(1), key(3)])], []),
    "what is named and there": ([StorageReport(True, [key(0), key(1), key(3)])], [named(Medium.STORAGE, 0, 4)], [
        BlockStored(LOW[:2], None, [0, 1, 2, 3], 2, None, "STORAGE", None),
        BlockStored(LOW[3:4], LOW[2], [6, 7], 2, None, "STORAGE", None)]),
    "a stored page once": ([StorageReport(True, [key(0)]), THERE], [THERE], []),
    "what the store loses, if it was": ([StorageReport(True, [key(0), key(1)]), THERE],
                                        [StorageReport(False, [key(0), key(1)])], [BlockRemoved([LOW[0]], "STORAGE")]),
    "what was lost and came again": (
        [StorageReport(True, [key(0)]), THERE, StorageReport(False, [key(0)]), StorageReport(True, [key(0)])],
        [THERE], [BlockStored(LOW[:1], None, [0, 1], 2, None, "STORAGE", None)]),
    "a cleared tree, and not what the store loses then": (
        [StorageReport(True, [key(0)]), THERE], [Cleared(), StorageReport(False, [key(0)])], [AllBlocksCleared()]),
    "the name of a namespace": ([], [named(Medium.GPU, 0, 2, space=SPACE)], [
        BlockStored(LOW[:2], None, [0, 1, 2, 3], 2, None, "GPU", None, [("tenant",), ("tenant",)])]),
}  # fmt: skip
"""What was told before, what is told, and what is announced of it."""


@pytest.mark.parametrize("case", ANNOUNCED)
def test_what_is_announced(case: str) -> None:
    before, told, events = ANNOUNCED[case]
    announcer = Announcer()
    assert announcer.announce([OPENED]) == [AllBlocksCleared()]
    announcer.announce(before)
    assert announcer.announce(told) == events


# vLLM's own module reads our stream, and our subscriber reads vLLM's own publisher. Nothing of vLLM is copied here.
# Runs where vLLM is installed, or where ``ASYNCCACHE_VLLM`` names a folder with its package (an unpacked wheel; of it
# only ``vllm/distributed/kv_events.py`` is needed). vLLM itself is not imported: that module's four imports of others
# are answered by stubs, none of which has to do with the format. Last checked with the wheel of vLLM 0.33.0: events as
# maps, replayed batches with a topic, lora_id and lora_name of an ``Adapter``.


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
needs_vllm = pytest.mark.skipif(
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


@needs_vllm
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


@needs_vllm
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
