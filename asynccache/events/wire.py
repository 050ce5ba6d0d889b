"""The events and how they are encoded: msgspec structs with a tag, in a batch that is encoded as an array.

vLLM has encoded its events in two ways, under the same names: first as arrays (``["BlockStored", ...]``), as SGLang
still does, and later as maps (``{"type": "BlockStored", ...}``). A reader of one layout refuses the other, so users
choose the layout. The names of the fields and their order are vLLM's (``vllm/distributed/kv_events.py``).

``Mirror`` is a router's picture of one cache: the blocks on each tier, as the events tell it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from asynccache import checks
from asynccache.core.plan import Medium


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


class Mirror:
    """The blocks of one cache. ``blocks[medium]`` is the set of block hashes on ``GPU``, ``CPU`` or ``STORAGE`` after
    the events that were applied so far. Events are checked before they change anything."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {medium.value: set() for medium in Medium}

    def __repr__(self) -> str:
        return f"Mirror({', '.join(f'{medium} {len(held)}' for medium, held in self.blocks.items())})"

    def apply(self, batch: EventBatch) -> None:
        """Apply the events of one batch.

        Raises:
            ConfigError: ``batch`` is no ``EventBatch``, or one of its events is unusable. Then none of its events was
                applied.
        """
        events = checks.instance("batch: events", checks.instance("batch", batch, EventBatch).events, (list, tuple))
        for event in events:
            _check("batch: events", event)
        for event in events:
            self._note(event)

    def note(self, event: BlockEvent) -> None:
        """Apply one event.

        Raises:
            ConfigError: ``event`` is no block event, or its block hashes or its medium are unusable.
        """
        _check("event", event)
        self._note(event)

    def forget(self) -> None:
        """Forget all blocks."""
        for held in self.blocks.values():
            held.clear()

    def _note(self, event: BlockEvent) -> None:
        match event:
            case BlockStored():
                self.blocks.setdefault(event.medium or "GPU", set()).update(event.block_hashes)
            case BlockRemoved():
                self.blocks.setdefault(event.medium or "GPU", set()).difference_update(event.block_hashes)
            case AllBlocksCleared():
                self.forget()

    def prefix(self, hashes: list[int], medium: str = "GPU") -> int:
        """Return how many of ``hashes``, the blocks of a prompt from its start, are on ``medium`` without a gap.

        Raises:
            ConfigError: ``hashes`` is no list of integers, or there is no such medium.
        """
        hashes = checks.integers("hashes", hashes)
        checks.choice("medium", medium, self.blocks)
        held = self.blocks[medium]
        return next((i for i, block in enumerate(hashes) if block not in held), len(hashes))


def _check(name: str, event: BlockEvent) -> None:
    checks.instance(name, event, (BlockStored, BlockRemoved, AllBlocksCleared))
    if not isinstance(event, AllBlocksCleared):
        checks.integers(f"{name}: block_hashes", event.block_hashes)
        if event.medium is not None:
            checks.text(f"{name}: medium", event.medium)
