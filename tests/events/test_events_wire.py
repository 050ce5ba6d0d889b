"""The stream as others decode it. Their struct definitions are transcribed here, fields only.

Sources: vLLM ``vllm/distributed/kv_events.py``. ``NOW``: events are maps (0.33.0, 2026). ``BEFORE``: events are
arrays, with ``data_parallel_rank``, ``medium`` and ``lora_name`` (0.11 to 0.13). ``FIRST``: events are arrays without
them (0.9, and SGLang's ``sglang/srt/disaggregation/kv_events.py`` of that time).
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from asynccache import Adapter, AsyncCache
from asynccache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventLayout, Notice
from asynccache.events.announcer import Announcer
from asynccache.events.wire import Decoder, Encoder
from asynccache.memory.cpu import CpuDevice
from tests.runtime.runtime_kit import compute, settings, text


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


def test_vllm_reads_the_maps() -> None:
    batch = msgspec.msgpack.Decoder(NowBatch).decode(Encoder(EventLayout.MAP).encode(BATCH))
    stored, tenant, removed, cleared = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 3)
    assert isinstance(stored, NowStored)
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == ([BIG, 7], 11, [5, 6, 7, 8])
    assert (stored.block_size, stored.lora_id, stored.medium, stored.lora_name) == (2, None, "GPU", None)
    assert stored.extra_keys is None
    assert isinstance(tenant, NowStored)
    assert (tenant.parent_block_hash, tenant.extra_keys) == (None, [("tenant",)])
    assert isinstance(removed, NowRemoved)
    assert (removed.block_hashes, removed.medium) == ([BIG], "CPU")
    assert isinstance(cleared, NowCleared)


@pytest.mark.parametrize("reader", [BeforeBatch, FirstBatch])
def test_older_vllm_and_sglang_read_the_arrays(reader: type[BeforeBatch | FirstBatch]) -> None:
    batch = msgspec.msgpack.Decoder(reader).decode(Encoder(EventLayout.ARRAY).encode(BATCH))
    stored, _, removed, cleared = batch.events
    assert isinstance(stored, (BeforeStored, FirstStored))
    assert (stored.block_hashes, stored.parent_block_hash, stored.token_ids) == ([BIG, 7], 11, [5, 6, 7, 8])
    assert (stored.block_size, stored.lora_id) == (2, None)
    assert isinstance(removed, (BeforeRemoved, FirstRemoved))
    assert removed.block_hashes == [BIG]
    assert isinstance(cleared, BeforeCleared)


def test_the_layouts_are_not_each_others() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.Decoder(NowBatch).decode(Encoder(EventLayout.ARRAY).encode(BATCH))


@pytest.mark.parametrize("layout", EventLayout)
def test_a_batch_comes_back_as_it_was(layout: EventLayout) -> None:
    assert Decoder(layout).decode(Encoder(layout).encode(BATCH)) == BATCH


def test_the_batch_is_an_array_tagged_by_class_name() -> None:
    ts, events, rank = msgspec.msgpack.decode(Encoder(EventLayout.ARRAY).encode(BATCH))
    assert (ts, rank) == (12.5, 3)
    assert [event[0] for event in events] == ["BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"]
    _, maps, _ = msgspec.msgpack.decode(Encoder(EventLayout.MAP).encode(BATCH))
    assert [event["type"] for event in maps] == [event[0] for event in events]


ADAPTER = Adapter("sql-v2", lora_name="sql", lora_id=7)


@pytest.mark.asyncio
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
