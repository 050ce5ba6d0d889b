"""Seeded worlds: clients that copy in small steps, die or lie between any two of them, beside a server's own sessions
and its real memory; and servers that take over from each other. Every hit is compared, and at the end nothing is
reserved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from random import Random

import pytest

from asynccache.host import wire
from asynccache.host.memory import HostMemory
from asynccache.host.pages import PageTable, Writer
from asynccache.host.session import FAILED, HIT, MISS, HostSession
from asynccache.storage import Hint

SIZES = (1000, 4096, 16384, 50_000)
KEYS = 24
PIECES = 3
STEPS = 600


def name_of(number: int) -> bytes:
    return sha256(b"%d" % number).digest()


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


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
