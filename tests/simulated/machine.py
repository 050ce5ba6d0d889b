"""CacheMachine: every core call in any order, against a dict of what was ever committed.

Law: after each step the audit holds and every page that a request may read has the right bytes (``SynchronousRuntime``
checks both), no match is longer than what was ever committed, and while nothing was evicted, every match is as
long as what was committed. At the end everything is released, and nothing may be left.

A Hypothesis state machine. Subclass it and set ``components`` and whatever else should differ.
"""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asynccache.core.cache import Access, Backfill, Begin, Match
from asynccache.core.keys import HASH_BYTES
from asynccache.core.plan import More, Plan, Status, Wait
from asynccache.core.settings import CoreConfig
from asynccache.errors import CacheFull
from tests.simulated.fetching import Fetch, open_fetch
from tests.simulated.synchronous import FULL, MAMBA, SWA, Running, Slots, SynchronousRuntime, core_config, spell

SPACES = (b"one".ljust(32), b"two".ljust(32))

HOLDERS = range(1, 5)

texts = st.text(alphabet="ab", min_size=1, max_size=9)
spaces = st.sampled_from(SPACES)
holders = st.sampled_from(HOLDERS)


class Recording(SynchronousRuntime):
    """Knows everything that was ever committed: prefix hashes, by component."""

    def __init__(self, config: CoreConfig) -> None:
        super().__init__(config)
        self._held: dict[int, set[bytes]] = {FULL: set(), SWA: set(), MAMBA: set()}

    def published(
        self, running: Running, length: int, window: Slots, checkpoint: tuple[int, int] | None
    ) -> None:
        chain = self.chain(running.space, running.key)[: length // self.page]
        self._held[FULL].update(chain)
        self._held[SWA].update(digest for digest, slot in zip(chain, window, strict=False) if slot >= 0)
        if checkpoint is not None:
            self._held[MAMBA].add(chain[checkpoint[0] // self.page - 1])

    def longest(self, chain: list[bytes]) -> tuple[int, int]:
        """The longest valid end, and how far FULL alone goes; pages."""
        full = next((i for i, digest in enumerate(chain) if digest not in self._held[FULL]), len(chain))
        return next((end for end in range(full, 0, -1) if self._valid(chain, end)), 0), full

    def _valid(self, chain: list[bytes], end: int) -> bool:
        first = max(0, end - -(-self.window // self.page))
        if SWA in self.kinds and not self._held[SWA].issuperset(chain[first:end]):
            return False
        return MAMBA not in self.kinds or chain[end - 1] in self._held[MAMBA]


class CacheMachine(RuleBasedStateMachine):
    """Requests, completions, prefetches and invalidations in any order."""

    components: ClassVar[str] = "full"
    options: ClassVar[dict[str, Any]] = {}
    roomy: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"device": 400, "host": 400, "states": 100} if self.roomy else {
            "device": 24, "host": 32, "states": 8
        }
        self.run = Recording(core_config(self.components, **(sizes | {"window": 10} | self.options)))
        self.requests: list[Running] = []
        self.fetches: list[Fetch] = []
        self.fills: list[Backfill] = []
        self.keys: dict[bytes, set[str]] = {space: set() for space in SPACES}
        self.disturbed = False
        self.now = 1.0

    # requests

    @initialize(text=texts, space=spaces)
    def begin_with_something(self, text: str, space: bytes) -> None:
        """Commit something first, because few calls do anything in an empty cache."""
        self.run.insert(text, space=space)
        self.keys[space].add(text)

    @rule(text=texts, new=st.integers(0, 24), space=spaces, states=st.integers(1, 3))
    def lease(self, text: str, new: int, space: bytes, states: int) -> None:
        """A request arrives; if it must wait it goes away again."""
        before = self.run.core.statistics()
        key = spell(text, self.run.page)
        try:
            request = self.run.lease(key, new, space=space, states=states)
        except CacheFull:
            assert len(key) // 4 + new > self.run.config.components[0].device * self.run.page - self.run.page
            return
        if request is None:
            after = self.run.core.statistics()
            assert before.leases == after.leases, "a request that waits holds something"
            return
        request.key = key + bytes(new * 4)
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.integers(0, 60), fails=st.integers(0, 9))
    def compute(self, data: st.DataObject, tokens: int, fails: int) -> None:
        """The engine computes some of a request, or fails to, which is known later."""
        request = self._pick(data)
        if request.ready:
            tokens = max(request.computed, min(tokens, request.lease.reserved, len(request.key) // 4))
            if self._has_pages(request, tokens):
                request.compute(tokens, fails == 0)

    def _has_pages(self, request: Running, tokens: int) -> bool:
        """SWA may have been given back beyond what is computed: the engine never computes there."""
        if SWA not in self.run.kinds:
            return True
        page = self.run.page
        table = self.run.table(request.lease, SWA)
        return all(slot >= 0 for slot in table[request.computed // page : -(-tokens // page)])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), checkpoint=st.booleans(), computed=st.booleans())
    def commit(self, data: st.DataObject, checkpoint: bool, computed: bool) -> None:
        """A request publishes what it has computed, or is about to."""
        request = self._pick(data)
        if not request.ready or request.computed < request.lease.length:
            return
        end = request.computed // self.run.page * self.run.page
        spare = MAMBA in self.run.kinds and len(request.lease.states) > 4 and checkpoint and end
        request.commit(checkpoint=end if spare else None, computed=computed)
        text = "".join(chr(int.from_bytes(request.key[i : i + 4], "little")) for i in range(0, end * 4, 16))
        self.keys[request.space].add(text)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), by=st.integers(0, 12))
    def advance(self, data: st.DataObject, by: int) -> None:
        """A request decodes on."""
        request = self._pick(data)
        if request.ready:
            request.advance(min(request.position + by, request.computed))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.integers(1, 16))
    def extend(self, data: st.DataObject, tokens: int) -> None:
        """A request asks for more room."""
        request = self._pick(data)
        wanted = request.lease.reserved + tokens
        while isinstance(answer := self.run.core.extend(request.lease, wanted, wanted), More):
            self.run.perform(answer.plan)
        self.run.perform(answer.plan if isinstance(answer, Wait) else answer)
        if not isinstance(answer, Wait):
            request.key += bytes(4 * tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), drop=st.integers(0, 12))
    def truncate(self, data: st.DataObject, drop: int) -> None:
        """Speculative tokens were rejected."""
        request = self._pick(data)
        if not request.ready:
            return
        keep = max(request.lease.length, request.advanced, request.computed - drop)
        request.computed = keep
        request.position = min(request.position, keep)
        self.run.perform(self.run.core.truncate(request.lease, keep))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), ended=st.booleans(), retire=st.booleans())
    def release(self, data: st.DataObject, ended: bool, retire: bool) -> None:
        """A request is done or cancelled; loads for it may be in flight."""
        request = self._pick(data)
        self.requests.remove(request)
        request.release(ended=ended, retire=retire)

    @rule(text=texts, space=spaces, checkpoint=st.booleans(), fails=st.booleans())
    def whole_request(self, text: str, space: bytes, checkpoint: bool, fails: bool) -> None:
        """From arrival to release, if it fits and nothing is in the way. Its batch may fail, which is known later."""
        request = self.run.lease(spell(text, self.run.page), space=space)
        if request is None:
            return
        self.run.complete(*[op for op in request.lease.loads if op in self.run.jobs])
        if request.ready:
            request.compute(len(text) * self.run.page, fails)
            spare = checkpoint and MAMBA in self.run.kinds
            request.commit(checkpoint=request.computed if spare else None)
            self.keys[space].add(text)
        request.release()

    # the world around it

    @rule(seconds=st.sampled_from((1e-4, 1e-3, 0.1)))
    def time_passes(self, seconds: float) -> None:
        """Time passes, so data and waiting operations get older."""
        self.now += seconds
        self.run.core.at(self.now)

    @precondition(lambda self: self.run.jobs)
    @rule(data=st.data(), fails=st.integers(0, 4))
    def complete(self, data: st.DataObject, fails: int) -> None:
        """An operation ends, in any order, well or not."""
        op = data.draw(st.sampled_from(self.run.in_flight()))
        self.disturbed |= fails == 0
        self.run.complete(op, status=Status.FAILED if fails == 0 else Status.DONE)
        self.disturbed |= bool(self.run.told)

    @precondition(lambda self: len(self.run.jobs) > 1)
    @rule(data=st.data())
    def complete_many(self, data: st.DataObject) -> None:
        """Several operations end at once."""
        ops = data.draw(st.lists(st.sampled_from(self.run.in_flight()), unique=True, min_size=2, max_size=5))
        self.run.complete(*ops)
        self.disturbed |= bool(self.run.told)

    @precondition(lambda self: any(self.run.batches.values()))
    @rule(data=st.data())
    def fail_batch(self, data: st.DataObject) -> None:
        """It becomes known that a batch fails, while the engine still uses its pages."""
        self.run.tell(data.draw(st.sampled_from([op for op, batches in self.run.batches.items() if batches])))
        self.disturbed = True

    @rule(text=texts, space=spaces, holder=holders)
    def claim(self, text: str, space: bytes, holder: int) -> None:
        """A request that is to come claims what the host has for it."""
        self.run.perform(self.run.core.claim(holder, space, spell(text, self.run.page)))

    @rule(holder=holders, firm=st.booleans())
    def confirm(self, holder: int, firm: bool) -> None:
        """The request of a claim stands in line, or not any more."""
        self.run.core.confirm_claim(holder, firm)

    @rule(holder=holders)
    def drop_claim(self, holder: int) -> None:
        """The lease of a claim's request is granted, or the request is gone."""
        self.run.perform(self.run.core.release_claim(holder))

    @rule()
    def nobody_follows_up(self) -> None:
        """From now on nobody takes the tree lock after a call and follows up, or somebody does again."""
        self.run.prompt = not self.run.prompt
        self.run.perform(Plan())

    @rule(text=texts, space=spaces, bad=st.integers(0, 30), begin=st.sampled_from(Begin))
    def prefetch(self, text: str, space: bytes, bad: int, begin: Begin) -> None:
        """A prefetch begins, if it may."""
        known = sorted(self.keys[space])
        text = known[len(text) % len(known)] + text if known and bad % 2 else text
        fetch = open_fetch(self.run, spell(text, self.run.page), space, {(FULL, bad), (SWA, bad - 2)}, begin)
        if isinstance(fetch, Fetch):
            self.fetches.append(fetch)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data(), pages=st.integers(1, 4))
    def fetch_some(self, data: st.DataObject, pages: int) -> None:
        """Some pages of a prefetch arrive."""
        fetch = data.draw(st.sampled_from(self.fetches))
        left = fetch.usable() // self.run.page - fetch.anchor - len(fetch.full)
        if left > 0:
            fetch.take_full(min(left, pages))

    @precondition(lambda self: self.fetches)
    @rule(data=st.data(), limit=st.integers(4, 60), holder=holders)
    def fetch_finish(self, data: st.DataObject, limit: int, holder: int) -> None:
        """A prefetch commits what can be had up to some limit, or is released."""
        fetch = data.draw(st.sampled_from(self.fetches))
        self.fetches.remove(fetch)
        fetch.finish(limit, [holder])

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def fetch_release(self, data: st.DataObject) -> None:
        """The request of a prefetch was aborted, so the prefetch is released."""
        fetch = data.draw(st.sampled_from(self.fetches))
        self.fetches.remove(fetch)
        fetch.release()

    @precondition(lambda self: self.keys[SPACES[0]] or self.keys[SPACES[1]])
    @rule(space=spaces)
    def drain(self, space: bytes) -> None:
        """Everything that can be saved now is started."""
        self.run.drain()

    @precondition(lambda self: self.run.core.world.has_host)
    @rule(access=st.sampled_from((Access.READ, Access.WRITE)), store=st.booleans(), really=st.integers(0, 2))
    def attach(self, access: Access, store: bool, really: int) -> None:
        """Another store is attached, and what the tree knows is told it."""
        if really and self.run.core.world.access is not Access.NONE:
            return
        self.run.perform(self.run.core.attach_storage(access))
        self.fills.append(self.run.core.backfill(store=store))

    @precondition(lambda self: self.fills)
    @rule(data=st.data(), ops=st.integers(1, 4))
    def fill_some(self, data: st.DataObject, ops: int) -> None:
        """A slice of that."""
        fill = data.draw(st.sampled_from(self.fills))
        plan, over = fill.some(ops, 8)
        self.run.perform(plan)
        if over:
            self.fills.remove(fill)

    @precondition(lambda self: self.run.core.world.has_host)
    @rule(access=st.sampled_from(Access), kept=st.integers(0, 3), really=st.integers(0, 5))
    def detach(self, access: Access, kept: int, really: int) -> None:
        """One is detached; the others have some of what it had."""
        if really:
            return
        for number, place in enumerate(list(self.run.storage)):
            if access is Access.NONE or number % 4 >= kept:
                del self.run.storage[place]
        self.run.perform(self.run.core.detach_storage(access))

    @precondition(lambda self: len(self.requests) + len(self.fetches) < 3)
    @rule(space=spaces, really=st.integers(0, 5))
    def invalidate(self, space: bytes, really: int) -> None:
        """A namespace is forgotten; those who hold some of it go on."""
        if really:
            return
        self._perform_all(space)
        assert self.run.match(spell("a" * 9), space) == Match()

    def _perform_all(self, space: bytes | None) -> None:
        for _ in range(1000):
            answer = self.run.core.invalidate(space)
            self.run.perform(answer.plan if isinstance(answer, More) else answer)
            if isinstance(answer, Plan):
                break
        self.disturbed = True

    # what must hold

    @rule(text=texts, space=spaces)
    def match(self, text: str, space: bytes) -> None:
        """A match is what was committed, or less if something was lost."""
        self._compare(text, space)

    @invariant()
    def known_keys_match(self) -> None:
        """A hit is never longer than what was committed."""
        for space in SPACES:
            for text in sorted(self.keys[space])[:4]:
                self._compare(text, space)

    @invariant()
    def what_is_known_to_be_stored_is(self) -> None:
        """The tree never says of a page that it is in storage if it is not."""
        world = self.run.core.world
        nodes = [node for root in world.roots.values() for node in (root.children or {}).values()]
        for node in nodes:
            nodes.extend((node.children or {}).values())
            hashes = [node.hashes[at : at + HASH_BYTES] for at in range(0, len(node.hashes), HASH_BYTES)]
            for c in world.bits[world.stored(node)]:
                component = world.components[c]
                for digest in hashes if component.divides else hashes[-1:]:
                    assert (int(component.kind), digest) in self.run.storage, f"{node!r} passes for stored"

    def _compare(self, text: str, space: bytes) -> None:
        page = self.run.page
        key = spell(text, page)
        found = self.run.core.match(space, key)
        longest, full = self.run.longest(self.run.chain(space, key))
        assert found.device <= found.host <= found.full <= full * page
        assert found.host <= longest * page, f"{text!r}: a match that nobody committed"
        statistics = self.run.core.statistics()
        if not (self.disturbed or statistics.evicted_device or statistics.evicted_host):
            assert found.device == longest * page, f"{text!r}: nothing was lost, and {longest} pages do not match"

    def _pick(self, data: st.DataObject) -> Running:
        return data.draw(st.sampled_from(self.requests))

    def teardown(self) -> None:
        """Release everything, let everything end: nothing is left, and an invalidation empties every tier."""
        self.run.prompt = True
        for holder in HOLDERS:
            self.run.perform(self.run.core.release_claim(holder))
        for fetch in self.fetches:
            fetch.release()
        for request in self.requests:
            request.release()
        self.run.settle()
        self.run.audit(idle=True)
        self._perform_all(None)
        self.run.settle()
        self.run.audit(idle=True)
        statistics = self.run.core.statistics()
        assert statistics.nodes == 0
        assert all(shelf.free == shelf.capacity for shelf in (*statistics.device, *statistics.host))
