"""Objects and URLs of object stores as values."""

from __future__ import annotations

import random
from collections.abc import Iterator
from hashlib import sha256

import pytest
from asynccache_backends.object_store.client import connect, redacted, settings_of
from asynccache_backends.object_store.formats import (
    ENTRY_BYTES,
    TRAILER_BYTES,
    NameClock,
    Pack,
    PackIndex,
    PackIndexSnapshot,
    first_name,
    footer_bytes,
    is_name,
    pack_entries,
    pack_snapshot,
    pack_tomb,
    parse_footer,
    parse_snapshot,
    parse_tomb,
    stamp_of,
    trailer_of,
)

from asynccache.errors import ConfigError
from asynccache.storage import HEADER_BYTES, RECORD_SCHEMA, parse_url

# Packs, snapshots and tombstones say what was written, or nothing; the index answers as a simple model of it does.


OTHER = sha256(b"other").digest()


def key_of(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def entries_of(numbers: list[int]) -> bytes:
    count = len(numbers)
    return pack_entries([key_of(n) for n in numbers], [bytes(64)] * count, [10] * count, 5)


def footer_of(numbers: list[int]) -> bytes:
    entries = entries_of(numbers)
    return entries + trailer_of(entries, RECORD_SCHEMA)


def pack_of(clock: NameClock, numbers: list[int]) -> Pack:
    return Pack(clock.name(), 10 * len(numbers) + ENTRY_BYTES * len(numbers) + TRAILER_BYTES, entries_of(numbers))


def flipped(data: bytes) -> Iterator[bytes]:
    """With one bit of each byte turned."""
    for at in range(len(data)):
        yield data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def test_a_footer_comes_back_whatever_lies_before_it_and_no_flipped_bit_goes_unseen() -> None:
    footer = footer_of([1, 2, 3])
    size = 30 + len(footer)
    assert footer_bytes(footer) == footer_bytes(footer[-TRAILER_BYTES:]) == len(footer)
    for before in (b"", b"x" * 17):
        assert parse_footer(before + footer, size, RECORD_SCHEMA) == entries_of([1, 2, 3])
    assert not any(parse_footer(broken, size, RECORD_SCHEMA) for broken in flipped(footer))
    assert parse_footer(footer, size, OTHER) is None, "another schema"


def test_a_footer_that_does_not_fit_its_object_is_damaged() -> None:
    footer = footer_of([1, 2])
    for size in (0, len(footer) - 1, len(footer), 19 + len(footer), 21 + len(footer)):
        assert parse_footer(footer, size, RECORD_SCHEMA) is None
    for cut in (0, 1, TRAILER_BYTES - 1, len(footer) - 1):
        assert parse_footer(footer[len(footer) - cut :], 20 + len(footer), RECORD_SCHEMA) is None


def test_a_footer_that_lies_about_offsets_is_damaged() -> None:
    for offset in (0, 11, 2**63):
        entries = entries_of([1]) + key_of(2) + bytes(64) + offset.to_bytes(8, "little") + (10).to_bytes(8, "little")
        entries += bytes(8)
        footer = entries + trailer_of(entries, RECORD_SCHEMA)
        assert parse_footer(footer, 20 + len(footer), RECORD_SCHEMA) is None


def test_a_snapshot_comes_back_and_no_flipped_bit_goes_unseen() -> None:
    clock = NameClock()
    first, second = pack_of(clock, [1, 2]), pack_of(clock, [3])
    tombs = {clock.name(): (key_of(1), key_of(9)), clock.name(): ()}
    packs = [(pack.name, pack.size, pack.entries) for pack in (first, second)]
    data = pack_snapshot(PackIndexSnapshot(12.5, packs, tombs), RECORD_SCHEMA)
    found = parse_snapshot(memoryview(data), RECORD_SCHEMA)
    assert found is not None
    assert (found.cursor, list(found.packs), found.tombs) == (12.5, packs, tombs)
    assert parse_snapshot(memoryview(data), OTHER) is None
    for cut in (0, 10, 55, 56, len(data) - 1):
        assert parse_snapshot(memoryview(data[:cut]), RECORD_SCHEMA) is None
    assert not any(parse_snapshot(memoryview(broken), RECORD_SCHEMA) for broken in flipped(data))


def test_a_tombstone_comes_back_and_no_flipped_bit_goes_unseen() -> None:
    name, data = NameClock().name(), pack_tomb([key_of(1), key_of(2)])
    assert parse_tomb(name, data) == (key_of(1), key_of(2))
    assert parse_tomb("../" + name, data) is None
    assert not any(parse_tomb(name, broken) for broken in flipped(data))


def test_names_sort_by_time_and_never_go_back() -> None:
    now = [1000.0]
    clock = NameClock(lambda: now[0])
    names = [clock.name() for _ in range(5)]
    now[0] = 900.0
    names += [clock.name()]
    clock.seen(1_000_500)
    names += [clock.name()]
    clock.seen(int(1e14))                              # the year 5138
    now[0] = 2000.0
    names += [clock.name()]
    assert names == sorted(names)
    assert len(set(names)) == 8
    assert all(is_name(name) for name in names)
    assert stamp_of(names[6]) == 1_000_501
    assert stamp_of(names[7]) == 2_000_000
    assert first_name(2_000_000) <= names[7] < first_name(2_000_001)
    assert not is_name(names[0] + "\n")


class Model:
    """Packs and tombstones, and which pack each key is read from, one key at a time."""

    def __init__(self) -> None:
        self.packs: dict[str, list[int]] = {}
        self.tombs: dict[str, list[int]] = {}
        self.holders: dict[int, str] = {}

    def add(self, name: str, numbers: list[int]) -> None:
        self.packs[name] = numbers
        for number in numbers:
            rivals = [name, self.holders[number]] if number in self.holders else [name]
            self.holders[number] = max(rivals)
        self.bury_dead()

    def drop(self, name: str) -> None:
        self.holders = {number: holder for number, holder in self.holders.items() if holder != name}
        del self.packs[name]

    def bury_dead(self) -> None:
        for name, numbers in self.tombs.items():
            for number in numbers:
                if number in self.holders and stamp_of(self.holders[number]) <= stamp_of(name):
                    del self.holders[number]


@pytest.mark.parametrize("seed", range(40))
def test_the_index_answers_as_a_model_does(seed: int) -> None:
    rng, clock, index, model = random.Random(seed), NameClock(), PackIndex(), Model()
    told: set[bytes] = set()

    def tell(there: bool, keys: object) -> None:
        assert isinstance(keys, (list, tuple))
        assert (not told & set(keys)) if there else (told >= set(keys))
        (told.update if there else told.difference_update)(keys)

    index.tell = tell
    names = [clock.name() for _ in range(60)]
    for _ in range(120):
        step = rng.random()
        if step < 0.5 and names:
            name = names.pop(rng.randrange(len(names)))
            numbers = rng.sample(range(12), rng.randint(1, 5))
            model.add(name, numbers)
            for _ in range(2):
                index.add(Pack(name, 10 * len(numbers), entries_of(numbers)))
        elif step < 0.75 and model.packs:
            name = rng.choice(sorted(model.packs))
            model.drop(name)
            index.drop(name)
            index.drop(name)
        elif step < 0.95 and names:
            name = names.pop(rng.randrange(len(names)))
            model.tombs[name] = rng.sample(range(12), rng.randint(1, 3))
            model.bury_dead()
            index.bury(name, [key_of(n) for n in model.tombs[name]])
        elif step > 0.99:
            index.clear()
            model = Model()
        check(index, model, told)


def check(index: PackIndex, model: Model, told: set[bytes]) -> None:
    holders = model.holders
    assert set(index._locations) == {key_of(number) for number in holders} == told
    assert index.pages == len(holders)
    assert index.bytes == len(holders) * (10 + HEADER_BYTES)
    assert index.stored == sum(10 * len(numbers) for numbers in model.packs.values())
    assert {pack.name for pack in index.packs()} == set(model.packs)
    for pack in index.packs():
        live = [pack.entry(at).key for at in index.live(pack)]
        assert live == [key_of(n) for n in model.packs[pack.name] if holders.get(n) == pack.name]
        assert pack.live == len(live)


# Object store URLs: what is allowed, what is refused, and that no secret is ever shown.


SECRET = "hunter2hunter2"


def test_a_capacity_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match="there is no capacity: a lifetime rule of the bucket"):
        settings_of(parse_url("s3://bucket?capacity=5GiB"))


@pytest.mark.parametrize("url", [
    "s3://bucket/a/b?region=eu-west-1", "s3://bucket?endpoint=http://127.0.0.1:9000", "gs://bucket/a",
    "az://container/a?account=name", "s3://bucket/a/",
])
def test_places_that_are_understood(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    client = connect(parse_url(url), settings_of(parse_url(url)))
    assert url.partition("?")[0].replace("//", "") == client.shown
    assert SECRET not in repr(client)


def test_queries_and_long_texts_are_cut_from_messages() -> None:
    text = redacted(ValueError(f"GET https://x.blob/c?sig={SECRET}&se=1 failed\nheaders: {SECRET}" + "x" * 999))
    assert text == "ValueError: GET https://x.blob/c?... failed"
