"""The events and how they are encoded: msgspec structs with a tag, in a batch that is encoded as an array.

vLLM has encoded its events in two ways, under the same names: first as arrays (``["BlockStored", ...]``), as SGLang
still does, and later as maps (``{"type": "BlockStored", ...}``). A reader of one layout refuses the other, so users
choose the layout. The names of the fields and their order are vLLM's (``vllm/distributed/kv_events.py``).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that follow each other in a prompt have appeared on ``medium``.

    ``parent_block_hash``: the block before the first of them, or None. ``token_ids``: the tokens of all of them.
    ``extra_keys``: for each block the texts that distinguish it from blocks with the same tokens: the name of its
    adapter, if it has one, and its ``namespace`` (in hex if that is bytes).
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
    """Blocks have gone from ``medium``."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """No block is known to be on any medium: the cache was opened or reset, or events were lost."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one message, ``[ts, events, data_parallel_rank]``. ``ts``: when the batch was made, in seconds
    since 1970."""

    ts: float
    events: list[BlockEvent]
    data_parallel_rank: int | None = None


class EventLayout(Enum):
    """The encoding of an event: as a map, which is what vLLM does now, or as an array, which older versions of vLLM did
    and SGLang does."""

    MAP = "map"
    ARRAY = "array"


def _as_array(kind: Any, **types: Any) -> Any:
    """Return a struct with the name and the fields of ``kind`` that is encoded as an array. ``types``: the types of
    fields that have another one there."""
    fields = [(one.name, types.get(one.name, one.type), one.default) for one in msgspec.structs.fields(kind)]
    tag = kind.__struct_config__.tag
    return msgspec.defstruct(kind.__name__, fields, array_like=True, omit_defaults=True, gc=False, tag=tag)


_Stored, _Removed, _Cleared = map(_as_array, (BlockStored, BlockRemoved, AllBlocksCleared))
_ArrayBatch = _as_array(EventBatch, events=list[_Stored | _Removed | _Cleared])  # type: ignore[valid-type]
_ARRAYS: dict[type, type] = {BlockStored: _Stored, BlockRemoved: _Removed, AllBlocksCleared: _Cleared}
_MAPS = {array: kind for kind, array in _ARRAYS.items()}


class Encoder:
    """Encodes batches in one layout."""

    def __init__(self, layout: EventLayout = EventLayout.MAP) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._arrays = layout is EventLayout.ARRAY

    def encode(self, batch: EventBatch) -> bytes:
        """Return the payload of the message for ``batch``."""
        if self._arrays:
            events: list[Any] = [_as(_ARRAYS, event) for event in batch.events]
            return self._encode(_ArrayBatch(batch.ts, events, batch.data_parallel_rank))
        return self._encode(batch)


class Decoder:
    """Decodes batches in one layout."""

    def __init__(self, layout: EventLayout = EventLayout.MAP) -> None:
        self._maps = msgspec.msgpack.Decoder(EventBatch)
        self._arrays = msgspec.msgpack.Decoder(_ArrayBatch)
        self._layout = layout

    def decode(self, payload: bytes) -> EventBatch:
        """Return the batch in a message's payload.

        Raises:
            msgspec.DecodeError: the payload is no batch in this layout.
        """
        if self._layout is EventLayout.MAP:
            return self._maps.decode(payload)
        batch = self._arrays.decode(payload)
        return EventBatch(batch.ts, [_as(_MAPS, event) for event in batch.events], batch.data_parallel_rank)


def _as(other: dict[type, type], event: Any) -> Any:
    kind = other[type(event)]
    return kind(*(getattr(event, name) for name in kind.__struct_fields__))  # type: ignore[attr-defined]
