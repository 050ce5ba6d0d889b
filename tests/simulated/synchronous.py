"""A runtime without time: it plays engine, device, host and storage for one core, one step at a time.

Law: it knows at every moment which content every slot of every tier holds, so whatever the core gets wrong with a slot
shows as wrong bytes somewhere. A copy tears its destination when it starts, checks when it ends that nobody touched its
source, and only then delivers. Operations stay in flight until the test says how they end, in any order.

Content is named by the prefix hash of its page; what nobody may read is garbage, each piece its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

from asynccache.core import audit
from asynccache.core.cache import CacheCore, CoreLease, Grant, LeaseRequest, Match, Unsaved
from asynccache.core.plan import (
    BackupHost,
    BackupStorage,
    Cleared,
    Clone,
    Compute,
    Effect,
    Failing,
    LoadBack,
    Medium,
    More,
    Move,
    Outcome,
    Plan,
    Publish,
    Retire,
    Status,
    Wait,
)
from asynccache.core.settings import ComponentKind, ComponentSlots, CoreConfig, WritePolicy
from tests.simulated.leading import check_books

DEVICE, HOST = 0, 1
FULL, SWA, MAMBA = 0, 1, 2
HASH = 32
SPACE = sha256(b"space").digest()

_TIERS: dict[type, tuple[int, int]] = {BackupHost: (DEVICE, HOST), LoadBack: (HOST, DEVICE), Clone: (DEVICE, DEVICE)}

Place = tuple[int, int, int]     # tier, component, slot
Transfer = BackupHost | LoadBack | Clone | BackupStorage | Retire | Compute


def spell(text: str, page_size: int = 4) -> bytes:
    """A key with a page for every letter."""
    return b"".join(ord(letter).to_bytes(4, "little") * page_size for letter in text)


def core_config(
    components: str = "full", *, device: int = 64, host: int = 64, window: int = 8, states: int = 16, **options: Any
) -> CoreConfig:
    """Small settings: ``components`` such as "full,swa,mamba"; ``device`` and ``host`` in pages, ``states`` on each."""
    slots = {
        "full": ComponentSlots(ComponentKind.FULL, device, host),
        "swa": ComponentSlots(ComponentKind.SWA, device, host, window),
        "mamba": ComponentSlots(ComponentKind.MAMBA, states, states if host else 0),
    }
    options = {"page_size": 4, "publish": True, "storage": host > 0, "prefetch_threshold": 4} | options
    options["write_policy"] = WritePolicy(options.get("write_policy", WritePolicy.WRITE_THROUGH))
    return CoreConfig(components=tuple(slots[name] for name in components.split(",")), **options)


class WrongBytes(AssertionError):
    """A slot does not hold what the core says it holds."""


class Slots(tuple[int, ...]):
    """Slot numbers from the core's bytes."""

    @classmethod
    def of(cls, raw: bytes) -> Slots:
        """The ids in ``raw``."""
        return cls(int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4))


class Job:
    """One operation in flight: what it reads, and where each read goes. ``landed``: how its I/O ended; only the report
    is missing then."""

    def __init__(self, effect: Transfer, reads: dict[Place, bytes], writes: Sequence[tuple[Place, Place]]) -> None:
        self.effect = effect
        self.reads = reads
        self.writes = writes
        self.landed: Status | None = None

    def __repr__(self) -> str:
        return f"<Job {type(self.effect).__name__} {self.effect[0]}>"


class Running:
    """A request that holds a lease: the engine's side of it. ``computed``: tokens whose KV is there. ``batches``: those
    of its own that fail, though nobody knows that yet. ``taint``: the same, and those that computed what it has
    read."""

    def __init__(self, runtime: SynchronousRuntime, lease: CoreLease, space: bytes, key: bytes) -> None:
        self.runtime = runtime
        self.lease = lease
        self.space = space
        self.key = key
        self.computed = lease.cached
        self.position = lease.cached
        self.advanced = 0
        self.state_untouched = True
        self.batches: frozenset[int] = frozenset()
        self.taint: frozenset[int] = frozenset()

    @property
    def ready(self) -> bool:
        """Whether every load that it waits for is done."""
        ended = self.runtime.ended
        return self.lease.valid is None and all(ended.get(op) is Status.DONE for op in self.lease.loads)

    def expected(self) -> dict[Place, bytes]:
        """Every place that this request may read now, and what it must find there."""
        lease, runtime, page = self.lease, self.runtime, self.runtime.page
        if lease.released or not (self.ready or lease.valid is not None):
            return {}
        end = (self.computed if lease.valid is None else min(lease.valid, self.computed)) // page
        chain = runtime.chain(self.space, self.key)
        tables = [(c, runtime.table(lease, c)) for c in (FULL, SWA) if c in runtime.kinds]
        wanted: dict[Place, bytes] = {}
        for c, table in tables:
            low = 0 if c == FULL else max(0, (self.position - runtime.window) // page)
            if c == SWA and lease.valid is not None:
                continue
            for i in range(low, end):
                if table[i] < 0:
                    raise WrongBytes(f"{lease!r}: component {c} has no page {i}, the window begins at {low}")
                wanted[DEVICE, c, table[i]] = chain[i]
        if MAMBA in runtime.kinds and self.state_untouched and lease.cached and lease.valid is None:
            wanted[DEVICE, MAMBA, Slots.of(lease.states)[0]] = chain[lease.cached // page - 1]
        return wanted

    def _own(self) -> dict[Place, bytes]:
        """Those of ``expected`` that belong to the lease alone: pages after what it has committed."""
        committed = set(self.runtime.chain(self.space, self.key)[: self.lease.length // self.runtime.page])
        memory = self.runtime.memory
        return {place: memory[place] for place, content in self.expected().items() if content not in committed}

    def verify(self) -> None:
        """Check every page that it may read. Nobody knows better of pages of a batch that fails, before that is
        told."""
        for place, content in self.expected().items():
            if not self.runtime.is_doubtful(place):
                self.runtime.check(place, content, self.lease)

    def _read(self) -> None:
        """Note what is wrong with the pages that the engine reads: so will be what it computes from them."""
        for place in self.expected():
            self.taint |= self.runtime.wrong.get(self.runtime.memory[place], frozenset())

    def compute(self, tokens: int, fails: bool = False) -> None:
        """Write KV up to ``tokens``. Pages before the committed end belong to the tree and are not written. ``fails``:
        the batch does not compute what it should, which nobody knows yet."""
        runtime, page = self.runtime, self.runtime.page
        assert self.ready
        self._read()
        if fails:
            self.batches |= {runtime.next_batch()}
            self.taint |= self.batches
        chain = runtime.chain(self.space, self.key)
        low = max(self.computed, self.lease.length) // page
        for c in (FULL, SWA):
            if c in runtime.kinds:
                table = runtime.table(self.lease, c)
                for i in range(low, -(-tokens // page)):
                    if table[i] >= 0:
                        whole = (i + 1) * page <= tokens
                        runtime.memory[DEVICE, c, table[i]] = self._made(chain[i]) if whole else runtime.garbage()
        if MAMBA in runtime.kinds:
            runtime.memory[DEVICE, MAMBA, Slots.of(self.lease.states)[0]] = runtime.garbage()
        self.computed = tokens
        self.state_untouched = False
        self.position = max(self.position, tokens)

    def _made(self, content: bytes) -> bytes:
        """What the engine makes where ``content`` belongs."""
        if not self.taint:
            return content
        garbage = self.runtime.garbage()
        self.runtime.wrong[garbage] = self.taint
        return garbage

    def advance(self, position: int) -> None:
        """Decode at ``position``: what left the window may go."""
        self.position = self.advanced = position
        self.runtime.perform(self.runtime.core.advance(self.lease, position))

    def write_checkpoint(self, position: int) -> tuple[int, int]:
        """Save the state at ``position`` in one of its slots; the pair that ``commit`` takes."""
        slot = Slots.of(self.lease.states)[-1]
        end = position // self.runtime.page
        self.runtime.memory[DEVICE, MAMBA, slot] = self._made(self.runtime.chain(self.space, self.key)[end - 1])
        return position, slot

    def commit(self, tokens: int | None = None, checkpoint: int | None = None, computed: bool = True) -> bool:
        """Publish what was computed (up to ``tokens``); False if the core said to wait. ``computed``: False if the
        batches may not be over; they are not if one of them fails."""
        tokens = self.computed if tokens is None else tokens
        pair = self.write_checkpoint(checkpoint) if checkpoint else None
        key = self.key[: tokens * 4]
        before = self._own()
        window = self.runtime.table(self.lease, SWA) if SWA in self.runtime.kinds else Slots()
        hashes, computed = self.runtime.hashes(self.space, key), computed and not self.batches
        answer = self.runtime.core.commit(self.lease, key, hashes, pair, computed=computed)
        if isinstance(answer, Wait):
            self.runtime.perform(answer.plan)
            return False
        after = set(self.expected())
        self.runtime.guard(answer.plan, {place: held for place, held in before.items() if place not in after})
        self.runtime.published(self, answer.length, window, pair if answer.took else None)
        if answer.computing:
            self.runtime.batches[answer.computing] = self.batches
        self.runtime.perform(answer.plan)
        return True

    def release(self, *, ended: bool = False, retire: bool = False) -> None:
        """Give the lease back."""
        before = self._own() if retire else {}
        plan = self.runtime.core.release(self.lease, ended=ended, retire=retire)
        self.runtime.running.discard(self)
        self.runtime.guard(plan, before)
        self.runtime.perform(plan)


class SynchronousRuntime:
    """One core and everything around it. ``memory``, ``storage``, ``jobs`` and ``index`` are all of its state."""

    def __init__(
        self, config: CoreConfig, seed: int = 0, storage: dict[tuple[int, bytes], bytes] | None = None
    ) -> None:
        self.config = config
        self.core = CacheCore(config)
        self.page = config.page_size
        self.kinds = [c.kind for c in config.components]
        self.window = next((c.window for c in config.components if c.window), 0)
        self.random = random.Random(seed)
        self.memory: dict[Place, bytes] = {}
        self.storage: dict[tuple[int, bytes], bytes] = {} if storage is None else storage
        self.jobs: dict[int, Job] = {}
        self.ended: dict[int, Status] = {}
        self.running: set[Running] = set()
        self.index: dict[Medium, Counter[bytes]] = {medium: Counter() for medium in Medium}
        self.log: list[Effect] = []
        self.audits = 0
        self.wrong: dict[bytes, frozenset[int]] = {}  # content that batches which fail have made, and which ones
        self.told: set[int] = set()  # batches of which the core knows that they failed
        self.batches: dict[int, frozenset[int]] = {}  # by COMPUTE: the batches for it that fail
        self.prompt = True  # whether somebody takes the tree lock after each call, and follows up
        self._guards: dict[int, dict[Place, bytes]] = {}
        self._parents: dict[bytes, tuple[bytes, bytes]] = {}
        self._pieces = self._batch = 0

    # batches that fail

    def next_batch(self) -> int:
        """The number of a new batch, which fails."""
        self._batch += 1
        return self._batch

    def is_doubtful(self, place: Place) -> bool:
        """Whether ``place`` holds what a batch has made that fails, without anybody knowing."""
        batches = self.wrong.get(self.memory.get(place, b""))
        return batches is not None and self.told.isdisjoint(batches)

    def failing(self, *ops: int) -> list[Failing]:
        """The news that the batches of these COMPUTEs have failed, for all commits that stand on them."""
        failed: frozenset[int] = frozenset().union(*[self.batches[op] for op in ops])
        self.told |= failed
        return [Failing(op) for op, batches in self.batches.items() if not failed.isdisjoint(batches)]

    def tell(self, *ops: int) -> None:
        """Tell the core that these COMPUTEs fail, before their batches are over."""
        self.perform(self.core.complete(self.failing(*ops)))

    # content

    def garbage(self) -> bytes:
        """New content that equals no other content."""
        self._pieces += 1
        return b"garbage %d" % self._pieces

    def chain(self, space: bytes, key: bytes) -> list[bytes]:
        """The prefix hash of every whole page of ``key``."""
        size, before, chain = self.page * 4, space, []
        for at in range(0, len(key) // size * size, size):
            page = key[at : at + size]
            digest = sha256(before + page).digest()
            self._parents[digest] = (before, page)
            chain.append(digest)
            before = digest
        return chain

    def hashes(self, space: bytes, key: bytes) -> bytes:
        """The hashes that ``commit`` takes; empty if nobody would use them."""
        return b"".join(self.chain(space, key)) if self.core.world.has_host or self.config.publish else b""

    def table(self, lease: CoreLease, component: int) -> Slots:
        """A lease's page table."""
        return Slots.of(self.core.pages(lease, component))

    def check(self, place: Place, content: bytes, who: object) -> None:
        """Raise unless ``place`` holds ``content``."""
        if self.memory.get(place) != content:
            raise WrongBytes(f"{who!r}: {place} holds {self.memory.get(place)!r}, not {content!r}")

    # requests

    def ask(
        self, key: bytes, new: int = 0, space: bytes = SPACE, states: int = 3, limit: int | None = None
    ) -> LeaseRequest:
        """A request for ``key`` and ``new`` more tokens."""
        tokens = len(key) // 4
        limit = max(0, tokens - 1) if limit is None else limit
        return LeaseRequest(space, key, limit, tokens + new, tokens + new, states if MAMBA in self.kinds else 0)

    def lease(self, key: bytes, new: int = 0, **options: int | bytes | None) -> Running | None:
        """A running request, or None if it would have to wait."""
        ask = self.ask(key, new, **options)  # type: ignore[arg-type]
        while isinstance(answer := self.core.lease(ask), More):
            self.perform(answer.plan)
        if isinstance(answer, Wait):
            self.perform(answer.plan)
            return None
        assert isinstance(answer, Grant)
        running = Running(self, answer.lease, ask.space, key)
        self.running.add(running)
        self.perform(answer.plan)
        return running

    def insert(self, text: str, *, checkpoint: int = 0, **options: Any) -> None:
        """A whole request: compute and commit ``text``, a page a letter; ``checkpoint``: after so many pages. If it
        would have to wait for backups, everything in flight ends first."""
        running = self.lease(spell(text, self.page), **options)
        for _ in range(8):
            if running is None:
                self.settle()
                running = self.lease(spell(text, self.page), **options)
        assert running is not None, f"{text!r} would have to wait"
        self.complete(*[op for op in running.lease.loads if op in self.jobs])
        running.compute(len(text) * self.page)
        assert running.commit(checkpoint=checkpoint * self.page or None), f"the commit of {text!r} would have to wait"
        running.release()

    def reach(self, text: str, space: bytes = SPACE) -> tuple[int, int]:
        """How many pages of ``text`` are valid on the device, on device or host."""
        found = self.match(spell(text, self.page), space)
        return found.device // self.page, found.host // self.page

    def match(self, key: bytes, space: bytes = SPACE) -> Match:
        """The core's match."""
        found = self.core.match(space, key)
        self.audit()
        return found

    def published(
        self, running: Running, length: int, window: Slots, checkpoint: tuple[int, int] | None
    ) -> None:
        """Called at every commit, with the SWA pages that the request had; for subclasses that keep a model."""

    def published_on(self, medium: Medium) -> set[bytes]:
        """The pages on ``medium`` as a subscriber to the events knows them."""
        return {page for page, times in self.index[medium].items() if times}

    # plans

    def perform(self, plan: Plan) -> None:
        """Start a plan's effects, note what ended, audit."""
        self._perform(plan)
        while self.prompt and self.core.behind:
            self._perform(self.core.follow_up())

    def _perform(self, plan: Plan) -> None:
        self.log.extend(plan.effects)
        for op, status in plan.ended:
            self.ended[op] = status
        for effect in plan.effects:
            self._start(effect)
        self.audit()
        for running in self.running:
            running.verify()

    def audit(self, idle: bool = False) -> None:
        """Check every law of the core."""
        self.audits += 1
        audit.check(self.core, idle)
        check_books(self.core)

    def guard(self, plan: Plan, places: dict[Place, bytes]) -> None:
        """The engine still reads ``places`` until the retirements in ``plan`` are done."""
        for effect in plan.effects:
            if isinstance(effect, Retire):
                self._guards[effect.op] = places

    def _start(self, effect: Effect) -> None:
        match effect:
            case Publish():
                self._publish(effect)
            case Cleared():
                self.index = {medium: Counter() for medium in Medium}
            case BackupStorage():
                reads: dict[Place, bytes] = {}
                for place, digest in _stored(effect):
                    self.check(place, digest, effect)
                    reads[place] = digest
                self.jobs[effect.op] = Job(effect, reads, ())
            case Compute():
                self.batches.setdefault(effect.op, frozenset())
                self.jobs[effect.op] = Job(effect, {}, ())
            case Retire():
                self.jobs[effect.op] = Job(effect, self._guards.pop(effect.op, {}), ())
            case BackupHost():
                self._start_backups(effect)
            case _:
                self._start_copy(effect.op, effect)

    def _start_backups(self, effect: BackupHost) -> None:
        """Start each operation of ``effect`` by itself: it may end before the others, and as none of them does."""
        world = self.core.world
        left = {component: (src, dst) for component, src, dst in effect.moves}
        for op in effect.ops:
            pages: Counter[int] = Counter()
            for node, mask, _ in world.ledger.ops[op].fragments:
                for c in world.bits[mask]:
                    pages[int(world.components[c].kind)] += world.pages(node, c)
            moves = []
            for component, count in sorted(pages.items()):
                src, dst = left[component]
                assert len(src) >= 4 * count, f"{effect} has no slots for all that operation {op} covers"
                moves.append(Move(component, src[: 4 * count], dst[: 4 * count]))
                left[component] = src[4 * count :], dst[4 * count :]
            self._start_copy(op, BackupHost((op,), tuple(moves)))
        assert not any(any(slots) for slots in left.values()), f"{effect} copies what none of its operations covers"

    def _start_copy(self, op: int, effect: BackupHost | LoadBack | Clone) -> None:
        source, target = _TIERS[type(effect)]
        writes = [pair for move in effect.moves for pair in _pairs(move, source, target)]
        waits = isinstance(effect, Clone) and effect.after in self.jobs
        reads = {} if waits else {read: self.memory[read] for read, _ in writes}
        for _, write in writes:
            self.memory[write] = self.garbage()
        self.jobs[op] = Job(effect, reads, writes)

    def _publish(self, event: Publish) -> None:
        held = self.index[event.medium]
        pages = [event.hashes[i : i + HASH] for i in range(0, len(event.hashes), HASH)]
        if not event.stored:
            assert all(held[page] for page in pages), f"{event.medium} forgets what it never had"
            held.subtract(pages)
            return
        size = self.page * 4
        before = event.parent or self._parents[pages[0]][0]
        for i, page in enumerate(pages):
            parent, tokens = self._parents[page]
            assert before == parent, f"event on {event.medium}: page {i} names the wrong parent"
            assert tokens == event.tokens[i * size : (i + 1) * size], f"event on {event.medium}: wrong tokens"
            before = page
        rooted = self._parents[pages[0]][0] not in self._parents
        assert event.medium is Medium.STORAGE or rooted or held[event.parent], "published before its parent"
        held.update(pages)

    # completions

    def land(self, op: int, status: Status = Status.DONE) -> None:
        """The operation's I/O is over: its source must be as it was, its bytes are there. Nobody is told yet."""
        job = self.jobs[op]
        if job.landed is not None:
            return
        if isinstance(job.effect, Clone) and job.effect.after in self.jobs:
            self.land(job.effect.after)
        if isinstance(job.effect, Clone) and not job.reads:
            job.reads = {read: self.memory[read] for read, _ in job.writes}
        for place, content in job.reads.items():
            self.check(place, content, job)
        job.landed = status
        if status is Status.DONE:
            for read, write in job.writes:
                self.memory[write] = job.reads[read]
            if isinstance(job.effect, BackupStorage):
                for place, digest in _stored(job.effect):
                    self.storage[place[1], digest] = job.reads[place]

    def complete(self, *ops: int, status: Status = Status.DONE) -> None:
        """Land these operations and tell the core, all at once."""
        outcomes: list[Outcome | Failing] = [*self.failing(*[op for op in ops if op in self.batches])]
        for op in ops:
            if op in self.batches:
                self.land(op, Status.FAILED if self.batches.pop(op) else Status.DONE)
            self.land(op, status)
        outcomes += [Outcome(op, self.jobs.pop(op).landed or status) for op in ops]
        self.perform(self.core.complete(outcomes))

    def fail(self, *ops: int) -> None:
        """Land these operations as FAILED and tell the core."""
        self.complete(*ops, status=Status.FAILED)

    def in_flight(self, *kinds: type) -> list[int]:
        """Operations in flight, of these kinds, oldest first."""
        return sorted(op for op, job in self.jobs.items() if not kinds or isinstance(job.effect, kinds))

    def settle(self, rounds: int = 1000) -> None:
        """Complete everything, oldest first, until nothing is in flight."""
        for _ in range(rounds):
            if not self.jobs:
                return
            self.complete(self.in_flight()[0])
        raise AssertionError("it never settles")

    def drain(self) -> None:
        """Start whatever can be saved now, slice by slice."""
        walk = self.core.walk()
        while isinstance(answer := self.core.drain(walk), More):
            self.perform(answer.plan)
        self.perform(answer)

    def unsaved(self) -> Unsaved:
        """The pages that would be lost now."""
        survey = self.core.survey()
        while isinstance(answer := survey.unsaved(), More):
            self.perform(answer.plan)
        return answer

    def flush(self) -> None:
        """Save everything that can be saved."""
        for _ in range(1000):
            self.settle()
            self.drain()
            if not self.jobs:
                return
        raise AssertionError("it never drains")


def _pairs(move: Move, source: int, target: int) -> Iterator[tuple[Place, Place]]:
    for read, write in zip(Slots.of(move.src), Slots.of(move.dst), strict=True):
        yield (source, move.component, read), (target, move.component, write)


def _stored(effect: BackupStorage) -> Iterable[tuple[Place, bytes]]:
    for component, hashes, slots in effect.pages:
        ids = Slots.of(slots)
        assert len(hashes) == HASH * len(ids), "a hash for every slot"
        for i, slot in enumerate(ids):
            yield (HOST, component, slot), hashes[i * HASH : (i + 1) * HASH]
