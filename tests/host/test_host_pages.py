"""Which page lies where: extents and the page table beside simple models of both, for any order of calls; and in
worlds of clients and servers."""

from __future__ import annotations

import math
import os
import sys
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Collection, Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from asynccache.errors import ConfigError
from asynccache.host import wire
from asynccache.host.memory import UNIT, Extents, HostMemory, layout_of, units_of
from asynccache.host.pages import KEPT_SHARE, LONGEST_KEPT, PageTable, Writer
from asynccache.host.session import FAILED, HIT, MISS, HostSession
from asynccache.storage import Hint

SIZES = (1, 1000, UNIT, 3 * UNIT + 1, 16 * UNIT)


def name_of(number: int) -> bytes:
    return sha256(number.to_bytes(2, "big")).digest()


def table_of(size: int = 1 << 20, **more: Any) -> PageTable:
    layout = layout_of(size)
    table = PageTable(layout, array("Q", [0] * layout.slots), **more)
    table.grow(layout.units)
    return table


def stored(table: PageTable, writer: Writer, number: int, size: int = UNIT, label: str = "") -> int:
    slot = table.reserve(writer, name_of(number), "full", size, table.label(label))
    assert slot is not None
    assert table.publish(writer, slot, 1.0) == slot
    return slot


def full(size: int = 0) -> tuple[PageTable, Writer, list[bytes], int]:
    """A table that is full of pages of this size, the longest there may be: who stored them, their names, the size."""
    table, writer = table_of(), Writer("w")
    size = size or table.longest
    names = [name_of(number) for number in range(table.layout.units * UNIT // size)]
    for number in range(len(names)):
        stored(table, writer, number, size)
    return table, writer, names, size


def longest_gap(table: PageTable, spared: Collection[int] = ()) -> int:
    """The units in the longest row in which all may go but what is ``spared``."""
    fixed, longest, run = set[int](), 0, 0
    for slot in (*table._fixed, *spared):
        fixed.update(range(table.starts[slot], table.starts[slot] + units_of(table.lengths[slot])))
    for unit in range(table.usable):
        run = 0 if unit in fixed else run + 1
        longest = max(longest, run)
    return longest


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_extents_are_taken_once_and_the_smallest_that_fits_is(steps: list[tuple[bool, int]]) -> None:
    extents, taken, free = Extents(200), list[tuple[int, int]](), [True] * 200
    extents.give(0, 200)
    for takes, units in steps:
        if takes:
            runs, at = list[int](), 0
            for is_free in [*free, False]:
                if is_free:
                    at += 1
                elif at:
                    runs.append(at)
                    at = 0
            start = extents.take(units, 7)
            fitting = [run for run in runs if run >= units]
            assert (start is None) == (not fitting)
            if start is not None:
                assert all(free[start : start + units])
                end = begin = start
                while begin and free[begin - 1]:
                    begin -= 1
                while end < 200 and free[end]:
                    end += 1
                assert end - begin == min(fitting)
                free[start : start + units] = [False] * units
                taken.append((start, units))
        elif taken:
            start, units = taken.pop(units % len(taken))
            extents.give(start, units)
            free[start : start + units] = [True] * units
        assert extents.free == sum(free)
    again = Extents(200)
    again.give_all_but([(start, units, 7) for start, units in taken], 200)
    assert (again.free, again.largest) == (extents.free, extents.largest)


class TableMachine(RuleBasedStateMachine):
    """Three processes, twenty keys, memory for few of them; a model that knows which are stored and in which order."""

    @initialize(limited=st.booleans())
    def begin(self, limited: bool) -> None:
        self.table = table_of(quota=400 << 10, limits={"small": 100 << 10} if limited else None)
        self.writers = [Writer(str(number)) for number in range(3)]
        self.held: list[list[int]] = [[], [], []]
        self.store = Writer("store")
        self.pinned: list[int] = []
        self.seen: dict[tuple[int, int], bytes] = {}

    @rule(who=st.integers(0, 2), key=st.integers(0, 19), size=st.sampled_from(SIZES), small=st.booleans())
    def reserve(self, who: int, key: int, size: int, small: bool) -> None:
        table, writer, before = self.table, self.writers[who], dict(self.table.index)
        sizes = {name: table.lengths[at] for name, at in before.items()}
        fixed, gap, label = set(table._fixed), longest_gap(table), table.label("small" if small else "")
        kept = {slot for slot, until in table.kept.items() if until > table.now}
        spared = longest_gap(table, kept)
        allowed = writer.bytes + units_of(size) * UNIT <= table.quota and units_of(size) <= gap
        allowed = allowed and table.reserved_bytes + units_of(size) * UNIT <= table.usable * UNIT // 2
        allowed = allowed and size <= table.longest
        slot = table.reserve(writer, name_of(key), "full", size, label)
        gone = {name: before[name] for name in before if name not in table.index}
        assert not fixed & set(gone.values())
        if slot is None:
            assert label.limit is not None or not gone, "pages go only for one that finds room"
            assert label.limit is not None or not allowed, "there is a place, and nobody who may not go is in it"
            return
        assert allowed
        assert writer.bytes <= table.quota
        assert table.lengths[slot] == size
        assert table.layout.payloads_at <= table.offsets([slot])[0] <= table.layout.size - size
        self.held[who].append(slot)
        if label.limit is None and units_of(size) <= spared:
            assert not kept & set(gone.values()), "there is a place beside what is kept"
        if label.limit is None and gone:  # those that have gone were there, or next to it
            assert sum(units_of(sizes[name]) for name in gone) < units_of(size) + units_of(SIZES[-1])
        label = table.label("small")
        assert label.limit is None or label.bytes <= label.limit

    @rule(who=st.integers(0, 2), which=st.integers(0, 99), foreign=st.booleans())
    def publish(self, who: int, which: int, foreign: bool) -> None:
        held = self.held[who]
        if not held:
            assert self.table.publish(self.writers[who], which, 1.0) is None
            return
        slot = held[which % len(held)]
        if foreign:
            assert self.table.publish(self.writers[who - 1], slot, 1.0) is None
            return
        held.remove(slot)
        assert self.table.publish(self.writers[who], slot, 1.0) == self.table.index.get(self.table.key(slot), slot)
        assert self.table.publish(self.writers[who], slot, 1.0) is None

    @rule(who=st.integers(0, 2), slots=st.lists(st.integers(0, 127), max_size=3))
    def give_back(self, who: int, slots: list[int]) -> None:
        self.table.give_back(self.writers[who], slots)
        self.held[who] = [slot for slot in self.held[who] if slot not in slots]

    @rule(who=st.integers(0, 2))
    def die(self, who: int) -> None:
        assert self.table.end(self.writers[who]) == len(self.held[who])
        assert self.table.end(self.writers[who]) == 0
        self.held[who] = []

    @rule(keys=st.lists(st.integers(0, 19), max_size=4, unique=True))
    def touch(self, keys: list[int]) -> None:
        names = [name_of(key) for key in keys]
        self.table.touch(names)
        there = [name for name in names if name in self.table.index]
        assert list(self.table.index)[len(self.table.index) - len(there) :] == there[::-1]

    @rule(keys=st.lists(st.integers(0, 19), max_size=4, unique=True))
    def ended(self, keys: list[int]) -> None:
        names, before = [name_of(key) for key in keys], list(self.table.index)
        assert self.table.ended(names) == [name in self.table.index for name in names]
        first = [name for name in names[::-1] if self.table.index.get(name, -1) not in {-1, *self.table.kept}]
        assert list(self.table.index) == first + [name for name in before if name not in first]

    @rule(keys=st.lists(st.integers(0, 19), max_size=6), seconds=st.sampled_from([0.0, 1.0, 30.0, 1e300, math.nan]))
    def keep(self, keys: list[int], seconds: float) -> None:
        table, names = self.table, [name_of(key) for key in keys]
        before = list(table.index)
        was = {name: table.kept.get(slot, 0.0) for name, slot in table.index.items()}
        for name, done in zip(names, table.keep(names, seconds), strict=True):
            slot = table.index.get(name)
            until = table.now + min(seconds, LONGEST_KEPT)
            if seconds > 0 and slot is not None and was[name] <= table.now:
                size = units_of(table.lengths[slot]) * UNIT
                assert (done or table.kept_bytes + size > table.usable * UNIT // KEPT_SHARE
                        or len(table.kept) >= table.layout.slots // KEPT_SHARE)
            assert not done or (slot is not None and table.kept[slot] >= until)
        assert set(table.index) == set(before)

    @rule(seconds=st.sampled_from([0.5, 5.0, LONGEST_KEPT]))
    def wait(self, seconds: float) -> None:
        self.table.now += seconds

    @rule(key=st.integers(0, 19), pin=st.booleans())
    def drop(self, key: int, pin: bool) -> None:
        slot = self.table.index.get(name_of(key))
        if slot is not None and pin:
            self.table.pin(self.store, slot)
            self.pinned.append(slot)
        self.table.drop(name_of(key))
        assert name_of(key) not in self.table.index

    @rule(key=st.integers(0, 19))
    def pin(self, key: int) -> None:
        slot = self.table.index.get(name_of(key))
        if slot is not None:
            self.table.pin(self.store, slot)
            self.pinned.append(slot)

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.table.unpin(self.store, self.pinned.pop())

    @rule()
    def clear(self) -> None:
        self.table.clear()
        assert not self.table.index

    @rule()
    def next_server(self) -> None:
        old, books = self.table, [self.table.held_by(writer) for writer in (*self.writers, self.store)]
        new = PageTable(old.layout, old._shared, quota=old.quota,
                        limits={name: label.limit for name, label in old.known_labels.items() if label.limit})
        hands = [Writer(str(number)) for number in range(4)]
        new.now = 7.0
        new.restore(old.books(), [(hand, *kept) for hand, kept in zip(hands, books, strict=True)])
        assert list(new.index.items()) == list(old.index.items())
        for slot in [*self.pinned, *old.index.values(), *(slot for held in self.held for slot in held)]:
            assert (new.keys[slot], new.starts[slot], new.lengths[slot], new.labels[slot].name) == (
                old.keys[slot], old.starts[slot], old.lengths[slot], old.labels[slot].name)
        left = {key: seconds for key, seconds in old.kept_for() if seconds > 0}
        assert dict(new.kept_for()) == pytest.approx(left)
        new.audit()
        self.table, self.writers, self.store, self.pinned = new, hands[:3], Writer("store"), []
        self.held = [list(writer.reserved) for writer in self.writers]
        new.end(hands[3])  # the process whose store hangs is dead at last

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.audit()
        held, table = [slot for each in self.held for slot in each], self.table
        assert table.reserved_bytes == sum(units_of(table.lengths[slot]) * UNIT for slot in held)
        for slot in [*held, *table.index.values()]:
            assert table._shared[slot] == table.generations[slot]
            assert self.seen.setdefault((slot, table.generations[slot]), table.key(slot)) == table.key(slot)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_of_a_prefix_the_deepest_page_goes_first() -> None:
    table, writer, names, size = full()
    table.touch(names[:3])
    table.touch(names[3:])
    stored(table, writer, 50, size)
    assert [name in table.index for name in names[:3]] == [True, True, False]


def test_of_a_conversation_that_has_ended_the_deepest_page_goes_first_of_all() -> None:
    table, writer, names, size = full()
    assert table.ended(names[-2:]) == [True, True]
    for number, gone in ((50, names[-1:]), (51, names[-2:])):
        stored(table, writer, number, size)
        assert [name for name in names if name not in table.index] == gone


@pytest.mark.parametrize("seconds", [[10.0], [10.0, 30.0], [30.0, 10.0]])
def test_a_page_that_is_kept_outlives_newer_ones_until_its_last_time_has_come_and_goes_at_once_then(
    seconds: list[float],
) -> None:
    table, writer, names, size = full()
    assert [table.keep(names[:1], each) for each in seconds] == [[True]] * len(seconds)
    table.now = max(seconds) - 1.0
    for number in range(50, 50 + 3 * len(names)):
        stored(table, writer, number, size)
        assert names[0] in table.index
    table.now = max(seconds)
    stored(table, writer, 200, size)
    assert names[0] not in table.index


@pytest.mark.parametrize("size", [UNIT, 3 * UNIT + 1])
def test_nobody_keeps_more_than_a_share_of_the_memory_however_often_he_asks(size: int) -> None:
    table, writer = table_of(), Writer("w")
    most = min(table.usable * UNIT, table.layout.slots * units_of(size) * UNIT) // KEPT_SHARE
    for number in range(100):
        stored(table, writer, number, size)
        for _ in range(50):
            table.keep([name_of(n) for n in range(100)], 1e9 + number)
            table.now += 0.01
    assert most - units_of(size) * UNIT < table.kept_bytes <= most
    assert len(table._until) < 10_000, "times of before are forgotten"
    table.now += LONGEST_KEPT
    table.keep([], 1.0)
    assert table.kept_bytes == 0


def test_where_slots_run_out_first_kept_pages_have_a_share_of_them_and_go_in_their_time() -> None:
    table, writer = table_of(), Writer("w")
    slots = table.layout.slots
    for number in range(slots):
        stored(table, writer, number, UNIT)
    table.keep([name_of(number) for number in range(slots)], 10.0)
    assert len(table.kept) == slots // KEPT_SHARE
    table.now = 11.0
    stored(table, writer, slots, UNIT)
    assert not table.kept


def test_a_dropped_page_that_two_processes_read_from_stays_until_both_are_dead() -> None:
    """Two servers one after the other were writing it to stores that hang, and both live on."""
    table, hung = table_of(), Writer("first")
    stored(table, hung, 1)
    slot = table.index[name_of(1)]
    second = Writer("second")
    table.pin(hung, slot)
    table.pin(second, slot)
    table.drop(name_of(1))
    new, hands = PageTable(table.layout, table._shared), [Writer("first"), Writer("second")]
    new.restore(table.books(), [(hand, *table.held_by(was)) for hand, was in zip(hands, (hung, second), strict=True)])
    generation = new.generations[slot]
    new.end(hands[0])
    assert new.generations[slot] == generation, "the other still reads there"
    new.audit()
    new.end(hands[1])
    assert new.generations[slot] == generation + 1
    new.audit()


def test_kept_pages_all_over_the_memory_do_not_keep_out_a_long_page() -> None:
    table, writer = table_of(), Writer("w")
    for number in range(200):
        stored(table, writer, number)
    table.keep([name_of(number) for number in range(0, 200, 4)], 60.0)
    before = len(table.index)
    stored(table, writer, 201, table.longest)
    assert before - len(table.index) < before / 2 + 1, "it costs no more than some times its room"
    table.audit()


def test_a_label_at_its_limit_gives_up_its_own_oldest() -> None:
    table, writer = table_of(limits={"a": 3 * UNIT}), Writer("w")
    for number in range(5):
        stored(table, writer, number, label="a" if number != 2 else "b")
    assert [number for number in range(5) if name_of(number) in table.index] == [1, 2, 3, 4]
    assert table.reserve(writer, name_of(9), "full", 4 * UNIT, table.label("a")) is None
    assert table.counts["over_limit"] == 1, "no page goes for one that is longer than the limit"


def test_where_reservations_scatter_the_memory_no_page_goes_for_one_that_finds_no_place() -> None:
    table = table_of(quota=1 << 30)
    held, writer, label = Writer("held"), Writer("w"), table.label("")
    for number in range(table.layout.units // 4):
        slot = table.reserve(held, name_of(number), "full", 4 * UNIT, label)
        assert slot is not None
        if number % 8:
            table.publish(held, slot, 1.0)
    index = list(table.index)
    assert len(index) > 50
    assert table.reserve(writer, name_of(251), "full", 29 * UNIT, label) is None
    assert list(table.index) == index
    assert table.reserve(writer, name_of(252), "full", 28 * UNIT, label) is not None
    assert len(table.index) == len(index) - 7
    assert table.reserve(writer, name_of(253), "full", 28 * UNIT, label) is not None, "other places are looked for"
    table.audit()


def test_too_little_memory_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="memory=4096: a host process needs 1048576 bytes at least"):
        HostMemory.make(4096)


def test_memory_cannot_be_cut_short_under_a_client() -> None:
    memory = HostMemory.make(1 << 20)
    for size in (0, 1 << 19, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, size)
    memory.close()


def test_huge_pages_that_nobody_reserved_are_a_sentence_and_those_that_are_there_work() -> None:
    told = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if not told.exists() or int(told.read_text()) < 2:
        with pytest.raises(ConfigError, match=r"memory=4194304: .*; reserve huge pages first, as by sysctl"):
            HostMemory.make(4 << 20, huge=True)
        return
    memory = HostMemory.make(4 << 20, huge=True)
    assert memory.allocate() == memory.layout.units
    memory.close()


def test_pages_of_a_label_that_are_being_written_count_for_its_limit() -> None:
    table, writer = table_of(limits={"a": 4 * UNIT}), Writer("one")
    label = table.label("a")
    stored(table, writer, 0, label="a")
    slots = [table.reserve(writer, name_of(n), "full", UNIT, label) for n in range(1, 9)]
    granted = [slot for slot in slots if slot is not None]
    assert len(granted) == 4
    assert name_of(0) not in table.index
    for slot in granted:
        table.publish(writer, slot, 1.0)
    assert (label.bytes, label.reserved) == (4 * UNIT, 0)
    assert table.reserve(writer, name_of(9), "full", 5 * UNIT, label) is None
    assert label.pages == 4, "nothing goes for a page that is longer than the limit"
    table.audit()


def test_pages_are_listed_in_steps_that_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccache.host.pages.MOST_SCANNED", 4)
    table, writer, slot, found = table_of(), Writer("one"), 0, list[bytes]()
    for number in range(20):
        stored(table, writer, number)
        if number % 7:
            table.drop(name_of(number))
    while slot >= 0:
        keys, slot = table.listed(slot, 3)
        found += keys
    assert sorted(found) == sorted(table.index)
    assert table.listed(1 << 61, 3) == ([], -1)


def test_the_index_takes_no_more_than_what_the_layout_counts_for_it() -> None:
    count, size = 20_000, 16 << 10
    layout = layout_of(count * size)
    shared = array("Q", bytes(8 * layout.slots))
    keys = [name_of(n % 256)[:28] + n.to_bytes(4, "big") for n in range(count)]
    names = sum(map(sys.getsizeof, keys))
    tracemalloc.start()
    try:
        table, writer = PageTable(layout, shared, quota=1 << 40), Writer("w")
        table.grow(layout.units)
        for key in keys:
            slot = table.reserve(writer, key, "full", size, table.label(""))
            assert slot is not None
            table.publish(writer, slot, 1.0)
        taken = tracemalloc.get_traced_memory()[0] + names
    finally:
        tracemalloc.stop()
    assert len(table.index) > 0.95 * count
    assert layout.size + taken <= count * size


# Seeded worlds: clients that copy in small steps, die or lie between any two of them, beside a server's own sessions
# and its real memory; and servers that take over from each other. Every hit is compared, and at the end nothing is
# reserved.


WORLD_SIZES = (1000, 4096, 16384, 50_000)
KEYS = 24
PIECES = 3
STEPS = 600


def size_of(number: int) -> int:
    return WORLD_SIZES[number % len(WORLD_SIZES)]


def content(number: int) -> bytes:
    return (name_of(number) * (size_of(number) // 32 + 1))[: size_of(number)]


class WorldClient:
    """A client: its session, and what it is about: steps that are still to be done."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.writer = Writer(str(number))
        self.session = world.session_of(self.writer)
        self.steps = self.work()

    def work(self) -> Iterator[None]:
        """Puts and gets for ever. Whoever drives it may stop after any step."""
        world, random = self.world, self.world.random
        while True:
            numbers = random.sample(range(KEYS), random.randrange(1, 5))
            keys, sizes = [name_of(n) for n in numbers], [size_of(n) for n in numbers]
            if random.random() < 0.2:
                verb = random.choice([*(hint.value for hint in Hint), "DEMOTE"])
                seconds = random.choice([0.0, 9e9])
                told = self.session.handle(wire.Hint(1, verb, keys, ["p"] * len(keys), sizes, seconds))
                assert isinstance(told, wire.Verdicts)
                world.met[f"{verb} {told.codes.count(HIT) > 0}"] += 1
            elif random.random() < 0.5:
                places = self.session.handle(wire.Reserve(1, keys, ["p"] * len(keys), sizes))
                assert isinstance(places, wire.Places)
                new = [n for n, code in zip(numbers, places.codes, strict=True) if code == MISS]
                world.seen.update(places.codes)
                yield
                for number, slot, offset in zip(new, places.slots, places.offsets, strict=True):
                    world.memory.header(slot)[:32] = name_of(number)
                    yield from world.copy(content(number), offset)
                kept, given = dict(zip(places.slots, places.generations, strict=True)), dict[int, int]()
                for slot in places.slots:
                    if random.random() < 0.1:
                        given[slot] = kept.pop(slot)
                self.session.handle(wire.GiveBack([*given], [*given.values()]))
                yield
                self.session.handle(wire.Publish(2, [*kept], [*kept.values()]))
            else:
                places = self.session.handle(wire.Find(1, keys, ["p"] * len(keys), sizes))
                assert isinstance(places, wire.Places)
                found = [n for n, code in zip(numbers, places.codes, strict=True) if code == HIT]
                yield
                for number, slot, offset, generation in zip(
                    found, places.slots, places.offsets, places.generations, strict=True
                ):
                    got = b""
                    for at in range(0, size_of(number), size_of(number) // PIECES + 1):
                        end = min(at + size_of(number) // PIECES + 1, size_of(number))
                        got += bytes(world.memory.view[offset + at : offset + end])
                        yield
                    header = bytes(world.memory.header(slot)[:32])
                    if world.memory.generations[slot] != generation:
                        world.met["overtaken"] += 1
                    else:
                        world.met["hits"] += 1
                        assert (got, header) == (content(number), name_of(number))
            yield


class World:
    """A server's table and memory, and clients."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.memory = HostMemory.make(1 << 20)
        self.memory.allocate()
        self.table = PageTable(self.memory.layout, self.memory.generations, quota=200_000)
        self.table.grow(self.random.choice([40, 80, 200]))
        self.met: Counter[str] = Counter()
        self.seen: Counter[int] = Counter()
        self.clients = [WorldClient(self, number) for number in range(4)]

    def session_of(self, writer: Writer) -> HostSession:
        return HostSession(self.table, writer, self.table.label(""), behind=None, now=lambda: 1.0, clock=lambda: 1.0,
                           counts=dict)  # fmt: skip

    def copy(self, data: bytes, offset: int) -> Iterator[None]:
        for at in range(0, len(data), len(data) // PIECES + 1):
            part = data[at : at + len(data) // PIECES + 1]
            self.memory.view[offset + at : offset + at + len(part)] = part
            yield

    def die(self, at: int) -> None:
        """A client ends in the middle of whatever it does. Its pidfd fires, maybe later than others go on."""
        self.met["deaths"] += 1
        self.table.end(self.clients[at].writer)
        self.clients[at] = WorldClient(self, at)

    def lie(self, at: int) -> None:
        """A client says something that is not so, of slots and pages that are not its own, and goes on."""
        random, session = self.random, self.clients[at].session
        slots = [random.randrange(self.memory.layout.slots) for _ in range(5)]
        theirs = [slot for slot in slots if slot not in self.clients[at].writer.reserved]
        keys, now = [name_of(random.randrange(KEYS)) for _ in range(3)], [self.memory.generations[at] for at in theirs]
        for lie in (wire.GiveBack(theirs, now), wire.Publish(1, theirs, now),
                    wire.Hint(5, "KEEP", keys, [], [], float("nan")), wire.Hint(6, "PREFETCH", keys, [], [1], 0.0),
                    wire.Damaged(2, keys, [random.randrange(9)] * 3), wire.Remove(3, keys[:1], []),
                    wire.Reserve(4, keys, ["p"] * 3, [0, 1 << 50, 1 << 61])):  # fmt: skip
            session.handle(lie)

    def taken_over(self) -> None:
        """Another server takes over. Clients that were writing go on over a new session."""
        self.met["takeovers"] += 1
        old = self.table
        self.table = PageTable(old.layout, self.memory.generations, quota=old.quota)
        held = [(client.writer, *old.held_by(client.writer)) for client in self.clients]
        for client in self.clients:
            client.writer.reserved, client.writer.bytes = set(), 0
        self.table.restore(old.books(), held)
        for client in self.clients:
            client.session = self.session_of(client.writer)

    def run(self) -> None:
        for _ in range(STEPS):
            chance, at = self.random.random(), self.random.randrange(len(self.clients))
            if chance < 0.02:
                self.die(at)
            elif chance < 0.04:
                self.lie(at)
            elif chance < 0.05:
                self.taken_over()
            else:
                next(self.clients[at].steps)
            self.table.audit()
        for client in self.clients:
            self.table.end(client.writer)
        self.table.audit()
        assert self.table.reserved_bytes == 0
        self.memory.close()


@pytest.mark.parametrize("seed", range(40))
def test_every_hit_is_right_whoever_dies_lies_or_takes_over(seed: int) -> None:
    World(seed).run()


def test_the_worlds_meet_all_that_there_is() -> None:
    met, seen = Counter[str](), Counter[int]()
    for seed in range(12):
        world = World(seed)
        world.run()
        met += world.met
        seen += world.seen
        met["evicted"] += world.table.counts["evicted"]
    assert min(met[what] for what in ("hits", "overtaken", "deaths", "takeovers", "evicted")) > 0
    assert all(seen[code] for code in (HIT, MISS, FAILED))
    assert min(met[f"{verb} True"] for verb in ("KEEP", "ENDED", "PREFETCH")) > 0
    assert met["DEMOTE False"] > met["DEMOTE True"] == 0
