"""A step's batch as bytes, for the ranks that compute a part of it. Only what has changed since the last step is sent.

What always holds:
* Payloads are read once each, in the order in which they were written. So writer and reader know the same of every
  request.
* Both sides forget a request that ended before they do anything else. If it comes back, all of it is sent again.
* An array that a model was handed never changes: a page table that changes becomes a new array.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from asynccache import ConfigError
from asynccache_shim.model import Batch, Checkpoint, Chunk, Pages, Sampling

_SEED_BYTES = 9  # a seed lies between -(2**64) and 2**64, which is more than msgpack's integers hold
_NONE = np.empty(0, np.int32)


class TableChange(msgspec.Struct, array_like=True, frozen=True):
    """The differences of a page table from the previous one: its first ``kept`` entries are those of the previous
    table, except for ``changes`` (pairs of place and slot), and ``tail`` follows. All numbers are int32,
    little-endian."""

    kept: int
    changes: bytes
    tail: bytes


class ChunkPart(msgspec.Struct, array_like=True, frozen=True):
    """A ``Chunk`` as it is sent. None in ``pages``, ``swa_pages`` or ``sampling``: the same as in the request's
    previous part.
    """

    request: int
    start: int
    stop: int
    tokens: bytes
    """The tokens before ``stop`` that no earlier part of this request had."""
    pages: TableChange | None
    swa_pages: TableChange | None
    states: bytes
    checkpoint: tuple[int, int] | None
    sample: bool
    sampling: tuple[float, float, bytes, int] | None


class Payload(msgspec.Struct, array_like=True, frozen=True):
    """A ``Batch`` as it is sent."""

    ended: tuple[int, ...]
    parts: tuple[ChunkPart, ...]


class _SentRequest:
    """The part of a request that has been sent so far. The writer and the reader each keep one."""

    def __init__(self) -> None:
        self.tokens = _NONE
        """The reader's buffer, of which the first ``length`` tokens are known."""
        self.length = 0
        self.pages = self.swa_pages = _NONE
        self.sampling = Sampling()


class PayloadWriter:
    """Turns batches into bytes, for one ``PayloadReader`` on every other rank."""

    def __init__(self) -> None:
        self._told: dict[int, _SentRequest] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, batch: Batch) -> bytes:
        """The bytes of ``batch``, for readers that have read everything that was written before."""
        for number in batch.ended:
            self._told.pop(number, None)
        return self._encoder.encode(Payload(batch.ended, tuple(map(self._part, batch.chunks))))

    def _part(self, chunk: Chunk) -> ChunkPart:
        told = self._told.setdefault(chunk.request_id, _SentRequest())
        part = ChunkPart(
            chunk.request_id, chunk.start, chunk.stop, _as_bytes(chunk.tokens[told.length : chunk.stop]),
            _difference(told.pages, chunk.pages), _difference(told.swa_pages, chunk.swa_pages), _as_bytes(chunk.states),
            chunk.checkpoint, chunk.sample, None if chunk.sampling == told.sampling else _packed(chunk.sampling),
        )  # fmt: skip
        told.length = max(told.length, chunk.stop)
        told.pages, told.swa_pages, told.sampling = chunk.pages, chunk.swa_pages, chunk.sampling
        return part


class PayloadReader:
    """Turns the bytes of a ``PayloadWriter`` into batches."""

    def __init__(self) -> None:
        self._told: dict[int, _SentRequest] = {}
        self._decoder = msgspec.msgpack.Decoder(Payload)

    def read(self, content: bytes) -> Batch:
        """The batch that was written, where each chunk has only its tokens before ``stop``.

        Raises:
            ConfigError: ``content`` is no batch, or a batch that was written before it has not been read.
        """
        try:
            payload = self._decoder.decode(content)
            for number in payload.ended:
                self._told.pop(number, None)
            return Batch(tuple(map(self._chunk, payload.parts)), payload.ended)
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            raise ConfigError(f"a payload of {len(content)} bytes is no batch that follows: {error}") from error

    def _chunk(self, part: ChunkPart) -> Chunk:
        told = self._told.setdefault(part.request, _SentRequest())
        _append(told, _as_numbers(part.tokens))
        if part.stop > told.length:
            raise ValueError(f"request {part.request} has {told.length} tokens, and stops at {part.stop}")
        told.pages = _applied(told.pages, part.pages)
        told.swa_pages = _applied(told.swa_pages, part.swa_pages)
        if part.sampling is not None:
            temperature, top_p, seed, top_k = part.sampling
            exact = int.from_bytes(seed, "little", signed=True) if seed else None
            told.sampling = Sampling(temperature, top_p, exact, top_k)
        return Chunk(
            part.request, told.tokens[: part.stop], part.start, part.stop, told.pages, told.swa_pages,
            _as_numbers(part.states), None if part.checkpoint is None else Checkpoint(*part.checkpoint), part.sample,
            told.sampling,
        )  # fmt: skip


def _append(told: _SentRequest, tokens: Pages) -> None:
    """Add ``tokens`` to those of ``told``. Tokens that were handed to a model are never overwritten: the buffer only
    grows, or is replaced by a larger copy."""
    length = told.length + len(tokens)
    if length > len(told.tokens):
        known = told.tokens[: told.length]
        told.tokens = np.empty(max(length, 2 * len(known)), np.int32)
        told.tokens[: len(known)] = known
    told.tokens[told.length : length] = tokens
    told.length = length


def _difference(old: Pages, new: Pages) -> TableChange | None:
    """Return how ``new`` differs from ``old``; None if they are the same."""
    if new is old:
        return None
    kept = min(len(old), len(new))
    places = np.flatnonzero(old[:kept] != new[:kept])
    if not len(places) and len(old) == len(new):
        return None
    if 2 * len(places) >= kept:  # the pairs would take more bytes than the whole table
        return TableChange(0, b"", _as_bytes(new))
    return TableChange(kept, _as_bytes(np.stack((places, new[places]), axis=1)), _as_bytes(new[kept:]))


def _applied(old: Pages, table: TableChange | None) -> Pages:
    """``old`` with the difference ``table`` applied, as a new array; ``old`` itself if ``table`` is None."""
    if table is None:
        return old
    if not 0 <= table.kept <= len(old):
        raise ValueError(f"{table.kept} pages are kept, there are {len(old)}")
    made = np.concatenate((old[: table.kept], _as_numbers(table.tail)))
    places, slots = _as_numbers(table.changes).reshape(-1, 2).T
    if (places < 0).any():
        raise ValueError(f"places of a table are not {places.tolist()}")
    made[places] = slots
    made.flags.writeable = False
    return made


def _as_bytes(numbers: Pages | Sequence[int]) -> bytes:
    return np.asarray(numbers).astype("<i4").tobytes()


def _as_numbers(content: bytes) -> Pages:
    return np.frombuffer(content, "<i4").astype(np.int32, copy=False)


def _packed(sampling: Sampling) -> tuple[float, float, bytes, int]:
    seed = b"" if sampling.seed is None else sampling.seed.to_bytes(_SEED_BYTES, "little", signed=True)
    return sampling.temperature, sampling.top_p, seed, sampling.top_k
