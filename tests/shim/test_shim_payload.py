"""A step's batch as bytes: whatever becomes of requests and their pages, a reader has what the writer was given.

Mutations that must be caught: a change in the middle of a table is left out, a table that shrinks keeps its end, a
request that ended is remembered on one side, tokens are told from the part's start on, a table is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from asynccache_shim import Batch, Checkpoint, Chunk, Sampling, payload
from asynccache_shim.payload import ChunkPart, Payload, PayloadReader, PayloadWriter, TableChange
from msgspec import structs

from asynccache import ConfigError
from asynccache.checks import shown

encode = msgspec.msgpack.encode
PAGE = 4
SEEDS = [None, 0, -(2**64) + 1, 2**64 - 1]


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def chunk(number: int = 1, start: int = 0, stop: int = 1, *, tokens: Any = None, **more: Any) -> Chunk:
    given = np.arange(100 * number, 100 * number + stop, dtype=np.int32) if tokens is None else ints(*tokens)
    fields: dict[str, Any] = {
        "pages": ints(), "swa_pages": ints(), "states": ints(), "checkpoint": None, "sample": True
    }  # fmt: skip
    return Chunk(request_id=number, tokens=given, start=start, stop=stop, **(fields | more))


def plain(batch: Batch) -> Any:
    """What a model reads of it."""
    chunks = [
        (
            w.request_id, w.tokens[: w.stop].tolist(), w.start, w.stop, w.pages.tolist(), w.swa_pages.tolist(),
            w.states.tolist(), w.checkpoint, w.sample, w.sampling,
        )
        for w in batch.chunks
    ]  # fmt: skip
    return chunks, batch.ended


# what a scheduler may do to a request between two batches


class Change(NamedTuple):
    """``request``: whose. ``what``: see ``World``; ``size`` and ``seed`` say how much and where."""

    request: int
    what: str
    size: int
    seed: int


class Held:
    """A request of a scheduler. ``free``: page numbers that were never used."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.computed = 0
        self.pages: list[int] = []
        self.swa: list[int] = []
        self.states: list[int] = []
        self.sampling = Sampling()

    def chunk(self, stop: int, checkpoint: bool) -> Chunk:
        made = Chunk(
            self.number, ints(*self.tokens), self.computed, stop, ints(*self.pages), ints(*self.swa),
            ints(*self.states), Checkpoint(stop, 9) if checkpoint else None, stop == len(self.tokens), self.sampling,
        )  # fmt: skip
        self.computed = stop
        return made


class World:
    """Requests that are admitted, grow, lose what a window has left behind, have pages exchanged for those of others,
    are retracted and admitted again, or end; and a batch now and then."""

    def __init__(self) -> None:
        self.held: dict[int, Held] = {}
        self.away: dict[int, Held] = {}
        self.ended: list[int] = []
        self.pages = 0

    def change(self, change: Change) -> None:
        number, what, size, seed = change
        if what == "admit":
            self._admit(number, size, seed)
        elif number in self.held:
            getattr(self, f"_{what}")(self.held[number], size, seed)

    def _fresh(self, count: int) -> list[int]:
        self.pages += count
        return list(range(self.pages - count, self.pages))

    def _admit(self, number: int, size: int, seed: int) -> None:
        if number in self.held:
            return
        held = self.away.pop(number, None) or Held(number)
        if not held.tokens:
            held.tokens = [1000 * number + i for i in range(size * PAGE + 1)]
            held.sampling = Sampling(seed / 10, 0.5, SEEDS[seed % len(SEEDS)])
        cached = seed % (len(held.tokens) // PAGE + 1)
        held.pages, held.computed = self._fresh(-(-len(held.tokens) // PAGE)), min(cached * PAGE, len(held.tokens) - 1)
        held.swa = [-1 if i + 1 < cached else page for i, page in enumerate(self._fresh(len(held.pages)))]
        held.states = self._fresh(seed % 3)
        self.held[number] = held

    def _grow(self, held: Held, size: int, seed: int) -> None:
        if held.computed == len(held.tokens):
            held.tokens.append(seed)
        pages = -(-len(held.tokens) // PAGE)
        for table in (held.pages, held.swa):
            table += self._fresh(max(0, pages + size - len(table)))

    def _exchange(self, held: Held, size: int, seed: int) -> None:
        """A commit found that the tree had some of these pages already."""
        for i in range(seed % 5, len(held.pages), size + 1):
            held.pages[i] = self._fresh(1)[0]

    def _advance(self, held: Held, size: int, seed: int) -> None:
        held.swa[:size] = [-1] * min(size, len(held.swa))

    def _truncate(self, held: Held, size: int, seed: int) -> None:
        """A draft of some tokens was refused, and its pages went back."""
        kept = -(-len(held.tokens) // PAGE)
        del held.pages[kept:], held.swa[kept:]

    def _retract(self, held: Held, size: int, seed: int) -> None:
        self._end(held, size, seed)
        self.away[held.number] = held

    def _end(self, held: Held, size: int, seed: int) -> None:
        del self.held[held.number]
        self.ended.append(held.number)

    def batch(self, chunk: int) -> Batch:
        chunks = []
        for held in self.held.values():
            stop = min(len(held.tokens), held.computed + chunk)
            if stop > held.computed:
                chunks.append(held.chunk(stop, checkpoint=not stop % PAGE))
        ended, self.ended = tuple(self.ended), []
        return Batch(tuple(chunks), ended)


WHAT = ["admit", "admit", "grow", "exchange", "advance", "truncate", "retract", "end"]
WORLDS = 300


def play(seed: int) -> None:
    random = Random(f"{seed}/payload")
    world, writer, readers = World(), PayloadWriter(), [PayloadReader(), PayloadReader()]
    kept: list[tuple[Batch, Any]] = []
    for _ in range(random.randint(1, 25)):
        for _ in range(random.randint(0, 5)):
            world.change(Change(random.randint(1, 4), random.choice(WHAT), random.randint(0, 4), random.randint(0, 9)))
        batch = world.batch(chunk=random.randint(1, 3 * PAGE))
        content = writer.write(batch)
        for reader in readers:
            read = reader.read(content)
            assert plain(read) == plain(batch)
            kept.append((read, plain(batch)))
    for read, was in kept:
        assert plain(read) == was, "what a model was handed has changed"
    assert {len(reader._told) for reader in readers} == {len(writer._told)}
    assert set(writer._told) <= {*world.held, *world.ended, *world.away}, "it grows without end"


@pytest.mark.parametrize("seeds", [range(at, at + WORLDS // 3) for at in range(0, WORLDS, WORLDS // 3)], ids=str)
def test_a_reader_has_what_the_writer_was_given_whatever_becomes_of_requests(seeds: range) -> None:
    play_all(seeds)


def play_all(seeds: range) -> None:
    for seed in seeds:
        play(seed)


def _without_changes(old: Any, new: Any) -> TableChange | None:
    kept = min(len(old), len(new))
    return TableChange(kept, b"", payload._as_bytes(new[kept:]))


def _that_never_shrink(old: Any, new: Any) -> TableChange | None:
    table = DIFFERENCE(old, new)
    return None if table is not None and not table.tail and not table.changes else table


def _changed_in_place(old: Any, table: TableChange | None) -> Any:
    if table is None or table.tail or table.kept != len(old):
        return APPLIED(old, table)
    old.flags.writeable = True
    changes = payload._as_numbers(table.changes).reshape(-1, 2)
    old[changes[:, 0]] = changes[:, 1]
    return old


def _that_remembers(self: PayloadReader, content: bytes) -> Batch:
    decoded = self._decoder.decode(content)
    return Batch(tuple(map(self._chunk, decoded.parts)), decoded.ended)


def _from_its_start(self: PayloadWriter, chunk: Chunk) -> ChunkPart:
    told = PART(self, chunk)
    return structs.replace(told, tokens=payload._as_bytes(chunk.tokens[chunk.start : chunk.stop]))


DIFFERENCE, APPLIED, PART = payload._difference, payload._applied, PayloadWriter._part


@pytest.mark.parametrize(("of", "name", "broken"), [
    (payload, "_difference", _without_changes), (payload, "_difference", _that_never_shrink),
    (payload, "_applied", _changed_in_place), (PayloadReader, "read", _that_remembers),
    (PayloadWriter, "_part", _from_its_start),
])  # fmt: skip
def test_what_is_told_or_remembered_wrongly_is_seen(
    of: Any, name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, name, broken)
    with pytest.raises((AssertionError, ConfigError)):
        play_all(range(WORLDS))


# what it weighs


def test_a_step_of_decoding_weighs_little_however_long_the_request_is() -> None:
    writer = PayloadWriter()
    tokens, pages = np.arange(100_000, dtype=np.int32), np.arange(6250, dtype=np.int32)
    first = chunk(1, 0, 99_999, tokens=tokens, pages=pages)
    assert len(writer.write(Batch((first,)))) > 4 * (len(tokens) + len(pages))
    more = np.append(pages, np.int32(7))
    assert len(writer.write(Batch((chunk(1, 99_999, 100_000, tokens=tokens, pages=pages),)))) < 40
    grown = chunk(1, 100_000, 100_001, tokens=np.append(tokens, 3), pages=more)
    assert len(writer.write(Batch((grown,)))) < 50


# what is no batch


@pytest.mark.parametrize(
    "content",
    [
        b"", b"nonsense", encode([[], [[1]]]),
        *(encode(Payload((), (ChunkPart(1, 0, stop, tokens, table, None, b"", None, True, None),)))
          for stop, tokens, table in (
              (5, b"", None), (1, bytes(4), TableChange(3, b"", b"")), (1, bytes(4), TableChange(0, b"123", bytes(4))),
              (1, bytes(4), TableChange(0, b"\xff" * 4 + bytes(4), bytes(4))))),
    ],
    ids=shown,
)  # fmt: skip
def test_what_is_no_batch_that_follows_is_refused(content: bytes) -> None:
    with pytest.raises(ConfigError, match="no batch that follows"):
        PayloadReader().read(content)


def test_requests_that_begin_in_the_middle_are_read_from_their_first_token_on() -> None:
    writer, reader = PayloadWriter(), PayloadReader()
    batch = Batch((chunk(3, 2 * PAGE, 2 * PAGE + 1, pages=ints(5, 6, 7)),))
    assert plain(reader.read(writer.write(batch))) == plain(batch)
