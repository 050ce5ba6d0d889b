"""A step's batch as bytes: whatever becomes of requests and their pages, a reader has what the writer was given.

Mutations that must be caught: a change in the middle of a table is left out, a table that shrinks keeps its end, a
request that ended is remembered on one side, tokens are told from the part's start on, a table is changed in place.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from asynccache_shim import Batch, Checkpoint, Chunk, Sampling, payload
from asynccache_shim.payload import ChunkPart, Payload, PayloadReader, PayloadWriter, TableChange
from msgspec import structs

from asynccache import ConfigError
from asynccache.checks import shown
from tests.shim.shim_kit import PAGE, plain

encode = msgspec.msgpack.encode
SEEDS = [None, 0, -(2**64) + 1, 2**64 - 1]


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def chunk(number: int = 1, start: int = 0, stop: int = 1, *, tokens: Any = None, **more: Any) -> Chunk:
    given = np.arange(100 * number, 100 * number + stop, dtype=np.int32) if tokens is None else ints(*tokens)
    fields: dict[str, Any] = {
        "pages": ints(), "swa_pages": ints(), "states": ints(), "checkpoint": None, "sample": True
    }  # fmt: skip
    return Chunk(request_id=number, tokens=given, start=start, stop=stop, **(fields | more))


def changed(random: Random, table: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The same, or one of which some entries are others, or which is longer or shorter."""
    if random.random() < 0.3:
        return table
    kept, share = random.choice((len(table), random.randint(0, len(table)))), random.choice((0.0, 0.1, 0.6))
    pages = [random.randrange(1 << 20) if random.random() < share else page for page in table[:kept].tolist()]
    return ints(*pages, *(random.randrange(-1, 1 << 20) for _ in range(random.choice((0, 0, 1, 5)))))


def later(random: Random, number: int, before: Chunk | None) -> Chunk:
    """The next chunk of a request, or its first one, which may begin in the middle."""
    old = before or chunk(number, 0, random.randint(0, 3 * PAGE), sampling=Sampling(0.5, 1.0, random.choice(SEEDS)))
    tokens = np.append(old.tokens, ints(*random.choices(range(99), k=random.randint(1, PAGE))))
    stop = random.randint(old.stop + 1, len(tokens))
    return old._replace(
        tokens=tokens, start=old.stop, stop=stop, pages=changed(random, old.pages),
        swa_pages=changed(random, old.swa_pages), states=ints(*range(random.randint(0, 2))),
        checkpoint=random.choice((None, Checkpoint(stop, 9))), sample=random.random() < 0.5,
    )  # fmt: skip


WORLDS = 300


def play(seed: int) -> None:
    """Some of four requests begin, go on with other pages, end, and come back: in any order, also in one batch."""
    random = Random(f"{seed}/payload")
    writer, readers = PayloadWriter(), [PayloadReader(), PayloadReader()]
    live: dict[int, Chunk] = {}
    kept: list[tuple[Batch, Any]] = []
    for _ in range(random.randint(1, 25)):
        ended = tuple(number for number in live if random.random() < 0.2)
        going = {number: later(random, number, None if number in ended else live.get(number))
                 for number in random.sample(range(1, 5), random.randint(0, 4))}  # fmt: skip
        live = {number: one for number, one in live.items() if number not in ended} | going
        batch = Batch(tuple(going.values()), ended)
        content = writer.write(batch)
        for reader in readers:
            read = reader.read(content)
            assert plain(read) == plain(batch)
            kept.append((read, plain(batch)))
    for read, was in kept:
        assert plain(read) == was, "what a model was handed has changed"
    for told in (writer._told, *(reader._told for reader in readers)):
        assert told.keys() == live.keys(), "it grows without end"


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
