"""The bytes on the wire: msgspec structs tagged by class name, in a batch that is an array.

vLLM has encoded its events in two ways, under the same names: as arrays (``["BlockStored", ...]``; SGLang still does)
and, later, as maps (``{"type": "BlockStored", ...}``). A reader of one refuses the other, so the layout is a choice.
Field names and their order are vLLM's (``vllm/distributed/kv_events.py``).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that follow each other appeared on ``medium``; ``token_ids`` are those of all of them.

    ``extra_keys``: for each block what beside its tokens tells it apart: its ``extra_key`` (bytes: in hex).
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks left ``medium``."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Nothing is known to be on any medium: a cache begins, is reset, or events were lost."""


class _StoredArray(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class _RemovedArray(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class _ClearedArray(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    pass


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one message carries: ``[ts, events, data_parallel_rank]``."""

    ts: float
    events: list[BlockEvent]
    data_parallel_rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


class Layout(Enum):
    """How an event is written: as vLLM writes it now, or as it did before and SGLang does."""

    MAP = "map"
    ARRAY = "array"


_ARRAYS: dict[type, type] = {BlockStored: _StoredArray, BlockRemoved: _RemovedArray, AllBlocksCleared: _ClearedArray}
_MAPS = {array: struct for struct, array in _ARRAYS.items()}


class Encoder:
    """Batches to bytes, in one layout."""

    def __init__(self, layout: Layout = Layout.MAP) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._arrays = layout is Layout.ARRAY

    def encode(self, batch: EventBatch) -> bytes:
        """The message's payload."""
        if self._arrays:
            events: list[Any] = [_as(_ARRAYS, event) for event in batch.events]
            return self._encode(_ArrayBatch(batch.ts, events, batch.data_parallel_rank))
        return self._encode(batch)


class Decoder:
    """Bytes to batches, in one layout."""

    def __init__(self, layout: Layout = Layout.MAP) -> None:
        self._maps = msgspec.msgpack.Decoder(EventBatch)
        self._arrays = msgspec.msgpack.Decoder(_ArrayBatch)
        self._layout = layout

    def decode(self, payload: bytes) -> EventBatch:
        """What ``Encoder.encode`` was given.

        Raises:
            msgspec.DecodeError: it is not such a batch.
        """
        if self._layout is Layout.MAP:
            return self._maps.decode(payload)
        batch = self._arrays.decode(payload)
        return EventBatch(batch.ts, [_as(_MAPS, event) for event in batch.events], batch.data_parallel_rank)


def _as(other: dict[type, type], event: Any) -> Any:
    kind = other[type(event)]
    return kind(*(getattr(event, name) for name in kind.__struct_fields__))  # type: ignore[attr-defined]
