"""Trees in which a core call meets very many cells or nodes that are not its request's: the slowest calls of ``growth``
in ``tree.py``, and the steps that tests count.

Every leaf hangs below the root: prompts of one page, or of 1,000. ``SHAPES`` has the functions; each fills a core and
makes the calls that such a tree makes long. ``Calls`` keeps the longest call of each kind. Imports no torch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from asynccache.core.cache import Begin, CacheCore, CoreLease, Grant, LeaseRequest, PrefetchBegun
from asynccache.core.plan import BackupStorage, Outcome, Plan, Status, Wait, operations
from asynccache.core.plan import More as MoreToDo
from asynccache.core.settings import SLICE_STEPS, ComponentKind, ComponentSlots, CoreConfig, WritePolicy

_T = TypeVar("_T")

SPACE = b"shapes".ljust(32)
EVERY = 64  # after so many prompts, the operations of a tree that is being filled end
OPS = 256
HOPELESS_ROUNDS = 3
MOST = 25_000
FREEZE_EVERY = 4096


class Longest(NamedTuple):
    """The longest call of one kind, by steps and by CPU milliseconds."""

    steps: int
    cpu_ms: float


class Calls:
    """A core, and the calls that are made of it. Pages have one token. ``longest``: the longest call of each kind since
    ``forget`` was called. ``refused``: hashes that storage never takes."""

    def __init__(
        self, device: int, host: int = 0, *, eviction: str = "lru", policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        storage: bool = False, watermark: float = 0.0, steps: int = SLICE_STEPS,
    ) -> None:  # fmt: skip
        full = ComponentSlots(ComponentKind.FULL, device, host)
        self.core = CacheCore(CoreConfig(
            page_size=1, components=(full,), write_policy=policy, storage=storage, eviction=eviction, slice_steps=steps,
            write_back_watermark=watermark, max_backup_ops=1 << 30, prefetch_threshold=1,
        ))  # fmt: skip
        self.longest: dict[str, Longest] = {}
        self.refused: set[bytes] = set()
        self.tokens = 0
        self._flying: list[Outcome] = []
        self._now = 1.0
        self._frozen = 0

    def forget(self) -> None:
        """Begin to keep the longest calls. What was made before does not concern the garbage collector any more."""
        self.settle()
        self.longest = {}
        gc.collect()
        gc.freeze()

    def call(self, kind: str, work: Callable[[], _T]) -> _T:
        """Make one core call and return its answer. Now and then the garbage collector is told to leave alone what
        there is, as the runtime does."""
        if self.core.world.steps - self._frozen > FREEZE_EVERY:
            gc.freeze()
            self._frozen = self.core.world.steps
        steps, cpu = self.core.world.steps, time.thread_time_ns()
        answer = work()
        took = Longest(self.core.world.steps - steps, (time.thread_time_ns() - cpu) / 1e6)
        before = self.longest.get(kind, Longest(0, 0.0))
        self.longest[kind] = Longest(*map(max, took, before))
        return answer

    def slices(self, kind: str, work: Callable[[], _T | MoreToDo]) -> _T:
        """Make a core call, slice after slice, and return its answer."""
        while isinstance(answer := self.call(kind, work), MoreToDo):
            self.perform(answer.plan)
        return answer

    def perform(self, plan: Plan) -> None:
        """Note what ``plan`` begins. What the core has left to do is done at once, in slices."""
        self._note(plan)
        while self.core.behind:
            self._note(self.call("follow_up", self.core.follow_up))

    def _note(self, plan: Plan) -> None:
        for effect in plan.effects:
            for op in operations(effect):
                bad = isinstance(effect, BackupStorage) and not self.refused.isdisjoint(
                    pages.hashes[at : at + 32] for pages in effect.pages for at in range(0, len(pages.hashes), 32)
                )
                self._flying.append(Outcome(op, Status.FAILED if bad else Status.DONE))

    def settle(self) -> None:
        """End all operations in flight, all at once, and those that follow from that."""
        while self._flying:
            ended, self._flying = self._flying, []
            self.perform(self.call("complete", lambda ended=ended: self.core.complete(ended)))  # type: ignore[misc]

    # requests

    def prompt(self, pages: int) -> bytes:
        """Return a prompt that nobody had before."""
        self.tokens += pages
        return b"".join([token.to_bytes(4, "little") for token in range(self.tokens - pages, self.tokens)])

    def hashes(self, key: bytes) -> bytes:
        """Return a hash for each page."""
        return b"".join([key[at : at + 4].ljust(32, b"h") for at in range(0, len(key), 4)])

    def lease(self, key: bytes, pages: int, limit: int = 0) -> CoreLease:
        """Return a lease for ``pages`` pages that matches up to ``limit`` of those of ``key``."""
        self._now += 1e-4
        self.core.at(self._now)
        ask = LeaseRequest(SPACE, key, limit, pages, pages)
        while isinstance(answer := self.slices("lease", lambda: self.core.lease(ask)), Wait):
            self.perform(answer.plan)
            self.settle()
        assert isinstance(answer, Grant)
        self.perform(answer.plan)
        return answer.lease

    def commit(self, lease: CoreLease, key: bytes) -> None:
        """Publish ``key``."""
        hashes = self.hashes(key)
        answer = self.call("commit", lambda: self.core.commit(lease, key, hashes))
        assert not isinstance(answer, Wait)
        self.perform(answer.plan)

    def release(self, lease: CoreLease) -> None:
        """Give the lease back."""
        self.perform(self.call("release", lambda: self.core.release(lease)))

    def insert(self, key: bytes, limit: int = 0) -> None:
        """Serve a whole request."""
        lease = self.lease(key, len(key) // 4, limit)
        self.commit(lease, key)
        self.release(lease)

    def fill(self, leaves: int, pages: int) -> list[bytes]:
        """Serve so many requests, of so many pages each, and return their prompts."""
        keys = [self.prompt(pages) for _ in range(leaves)]
        for number, key in enumerate(keys):
            self.insert(key)
            if not number % EVERY:
                self.settle()
        self.settle()
        return keys

    def take(self, pages: int) -> None:
        """Serve a request that needs room for so many pages."""
        lease = self.lease(b"", pages)
        self.settle()
        self.release(lease)

    # passes

    def drain(self) -> None:
        """Save everything that can be saved, as the runtime does."""
        hopeless = 0
        while hopeless < HOPELESS_ROUNDS:
            walk = self.core.walk()
            self.perform(self.slices("drain", lambda walk=walk: self.core.drain(walk)))  # type: ignore[misc]
            if not self._flying:
                return
            hopeless = hopeless + 1 if all(outcome.status is Status.FAILED for outcome in self._flying) else 0
            self.settle()

    def unsaved(self) -> int:
        """Return how many pages a close would lose."""
        survey = self.core.survey()
        return sum(self.slices("survey", survey.unsaved))

    def forget_all(self) -> None:
        """List the namespace and invalidate it."""
        listing = self.core.listing(SPACE)
        self.slices("listing", listing.some)
        first = self.call("invalidate", lambda: self.core.invalidate(SPACE))
        if isinstance(first, MoreToDo):
            self.perform(first.plan)
            self.perform(self.slices("sweep", self.core.sweep))
        else:
            self.perform(first)

    def backfill(self) -> None:
        """Report all pages to a store that was attached, and store them there."""
        walk, over = self.core.backfill(store=True), False
        while not over:
            plan, over = self.call("backfill", lambda: walk.some(OPS, 1 << 30))
            self.perform(plan)
            self.settle()

    def fetch(self, pages: int) -> None:
        """Take host pages for a prefetch, and give them back."""
        key = self.prompt(pages)
        begun = self.slices("prefetch", lambda: self.core.prefetch_open(SPACE, key, Begin.NOW))
        assert isinstance(begun, PrefetchBegun)
        self.perform(begun.plan)
        self.perform(self.slices("prefetch", lambda: self.core.prefetch_take_full(begun.op, pages)).plan)
        self.perform(self.call("prefetch", lambda: self.core.prefetch_release(begun.op)))


def stale(leaves: int, pages: int) -> Calls:
    """Every leaf was used again since it came to wait, on the device and on the host."""
    room = leaves * pages
    calls = Calls(room, room // 2, eviction="p2c")
    keys = calls.fill(leaves, pages)
    for key in keys[-leaves // 2 :]:
        lease = calls.lease(key + b"\0\0\0\0", pages + 1 - calls.core.config.page_size, pages)
        calls.release(lease)
    calls.forget()
    calls.take(1)
    calls.take(some(room))
    return calls


def reused(leaves: int, pages: int) -> Calls:
    """The device was never full, there is no host, and every leaf was used again."""
    room = leaves * pages
    calls = Calls(room)
    for key in calls.fill(leaves, pages):
        lease = calls.lease(key, pages, pages)
        calls.release(lease)
    calls.forget()
    calls.take(1)
    calls.take(some(room))
    return calls


def continued(leaves: int, pages: int) -> Calls:
    """Every leaf was continued, so none of the cells that wait is a candidate."""
    calls = Calls(leaves * (pages + 1))
    for key in calls.fill(leaves, pages):
        calls.insert(key + calls.prompt(1), pages)
    calls.forget()
    calls.take(1)
    calls.take(some(leaves * pages))
    return calls


def saved(leaves: int, pages: int) -> Calls:
    """The coldest leaf of the device is an only copy, all others have one on the host."""
    room = leaves * pages
    calls = Calls(room, room - pages, policy=WritePolicy.WRITE_BACK)
    calls.fill(leaves, pages)
    calls.drain()
    calls.forget()
    calls.take(some(room))
    return calls


def condemned(leaves: int, pages: int) -> Calls:
    """Half of all leaves are condemned at once; then they are wanted again, and room is made."""
    room = leaves * pages
    calls = Calls(room, room, policy=WritePolicy.WRITE_BACK)
    keys = calls.fill(leaves - 1, pages)
    calls.drain()
    calls.insert(calls.prompt(pages))
    object.__setattr__(calls.core.config, "write_back_watermark", 0.5)
    calls.forget()
    for key in keys[: leaves // 4]:
        calls.release(calls.lease(key, pages, pages))
    calls.take(some(room))
    return calls


def unsaved(leaves: int, pages: int) -> Calls:
    """No leaf has a copy. Room is made, all are saved, counted, listed and forgotten."""
    room = leaves * pages
    calls = Calls(room, room, policy=WritePolicy.WRITE_BACK, storage=True)
    calls.fill(leaves, pages)
    calls.forget()
    calls.take(some(room))
    calls.drain()
    assert calls.unsaved() == 0
    calls.backfill()
    calls.forget_all()
    return calls


def duplicates(leaves: int, pages: int) -> Calls:
    """The host is full of copies that storage has, too, and must take what comes."""
    room = leaves * pages
    calls = Calls(2 * room, room, storage=True)
    calls.fill(leaves, pages)
    calls.forget()
    for part in (1, 2):
        calls.insert(calls.prompt(some(room) // part))
        calls.settle()
    calls.fetch(some(room))
    object.__setattr__(calls.core.config, "write_policy", WritePolicy.WRITE_BACK)
    for _ in range(20):
        calls.insert(calls.prompt(some(room) // 10))
    calls.drain()
    return calls


def refused(leaves: int, pages: int) -> Calls:
    """The host has a quarter of the pages, and storage refuses one of them for good."""
    room = leaves * pages
    calls = Calls(room, max(room // 4, pages), policy=WritePolicy.WRITE_BACK, storage=True)
    calls.refused = {calls.hashes((0).to_bytes(4, "little"))}
    calls.fill(leaves, pages)
    calls.forget()
    calls.drain()
    assert calls.unsaved() == pages
    calls.take(some(room))
    return calls


SHAPES: dict[str, Callable[[int, int], Calls]] = {
    shape.__name__: shape
    for shape in (stale, reused, continued, saved, condemned, unsaved, duplicates, refused)
}


def some(room: int) -> int:
    """Return a quarter of ``room``, but no more pages than the longest prompts have."""
    return min(room // 4, MOST)


def sizes(nodes: int) -> Sequence[tuple[int, int]]:
    """Return how many leaves of how many pages a tree of ``nodes`` pages may have: all of one page, or of 1,000."""
    return (nodes, 1), (max(4, nodes // 50), 1000)
