"""CacheCore: the synchronous state machine behind the cache. The core decides everything by numbers, and copies no
data.

One call is one transaction: it returns a frozen ``Plan`` (or a value that carries one) and leaves every invariant of
``audit.check`` true. The caller enqueues the plan's effects before anything else can run, performs them, and reports
one outcome per operation to ``complete``. Lengths and positions are tokens; keys are bytes of little-endian int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache.core.commits import Commits, Committed
from asynccache.core.eviction import Learned
from asynccache.core.keys import HASH_BYTES, TOKEN_BYTES
from asynccache.core.leases import EVERYTHING, Grant, LeaseRequest, Leases
from asynccache.core.ledger import COMPUTE, CoreLease, Hold, Kind
from asynccache.core.match import Explanation, Explanations, Match, Matches
from asynccache.core.passes import Backfill, Filled, Invalidation, Listed, Listing, Survey, Unsaved
from asynccache.core.plan import Failing, More, Outcome, Plan, Status, Wait
from asynccache.core.prefetch import (
    Begin,
    PrefetchBegun,
    PrefetchInFlight,
    PrefetchOperations,
    PrefetchShape,
    Skip,
    Taken,
    needed_pages,
    usable_end,
)
from asynccache.core.settings import Access, CoreConfig
from asynccache.core.transfers import Transfers
from asynccache.core.world import Walk, World
from asynccache.errors import ConfigError


class ShelfStatistics(NamedTuple):
    """One component on one tier, in slots."""

    capacity: int
    free: int
    evictable: int


class Statistics(NamedTuple):
    """Counts: as of now up to ``deferred_backups``, since the start after it. ``device`` and ``host`` are in the order
    of the components.
    """

    nodes: int
    leases: int
    device: tuple[ShelfStatistics, ...]
    host: tuple[ShelfStatistics, ...]
    operations: dict[str, int]
    """How many operations are in flight, by kind."""
    deferred_backups: int
    evicted_device: int
    evicted_host: int
    """Pages and states, as in ``evicted_device``."""
    lost_pages: int
    """How many evicted pages were only copies, dropped although the write policy meant to keep them."""
    splits: int
    failed_loads: int


class CacheCore:
    """The core. It is not thread-safe, never blocks, and keeps no clock.

    A call takes at most about ``CoreConfig.slice_steps`` steps beside the walk along its own path. What is left then is
    done by the next slice of the call (``More``), or by ``follow_up``.

    ``release``, ``claim``, ``release_claim`` and ``prefetch_release`` split, evict and back up nothing, so they may be
    called at any time. If that makes room for something that waits, such as a backup, ``follow_up`` starts it;
    ``behind`` is True until then.
    """

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.world = World(config)
        self._transfers = Transfers(self.world)
        self._matches = Matches(self.world)
        self._leases = Leases(self.world, self._transfers, self._matches)
        self._commits = Commits(self.world, self._transfers, self._matches)
        self._prefetches = PrefetchOperations(self.world, self._transfers, self._matches)
        self._invalidation = Invalidation(self.world, self._transfers.room)
        self.explanations = Explanations(self.world, self._matches)

    @property
    def behind(self) -> bool:
        """True if there is work that ``follow_up`` would do."""
        return self.world.behind

    def at(self, now: float) -> None:
        """Set the core's time to ``now``, in seconds of a clock that never goes back. All calls that follow happen at
        this time, and from it the eviction policy works out how long ago a page was used. The core has no clock of its
        own: its time stands still until the next call of ``at``."""
        self.world.recency.time = int(now * 1e6)

    def match(self, space: bytes, key: bytes) -> Match:
        """Return how far ``key`` is cached in the namespace ``space`` (32 bytes). The only change is that the matched
        pages become recent."""
        return self._matches.match(space, key)

    def explain(self, space: bytes, key: bytes) -> Explanation:
        """Return where each page of ``key`` is, and what ends its match. Changes nothing, not even recency."""
        return self.explanations.explain(space, key)

    def known_hashes(self, space: bytes, key: bytes) -> bytes:
        """Return the prefix hashes that the tree has for the start of ``key``: 32 bytes a page, from the root; b"" if
        there are none."""
        path, reached = self.world.find(space, key)
        return b"".join([node.hashes for node in path])[: reached // self.world.page_bytes * HASH_BYTES]

    def lease(self, ask: LeaseRequest) -> Grant | Wait | More:
        """Pin the longest usable match, start a load_back of its pages that only the host has, and take all new pages.
        Returns a ``Grant`` then. Otherwise nothing is taken: ``Wait`` says that the lease does not fit now, and
        ``More`` that the call is to be repeated, since this slice of the work was not enough.

        Raises:
            CacheFull: the reservation exceeds the device.
        """
        return self._leases.lease(ask)

    def something_ends(self) -> bool:
        """Return True if any operation is in flight whose end may be awaited. That of a late store may not."""
        return self._transfers.room.something_ends()

    def check_possible(self, ask: LeaseRequest) -> None:
        """Check that ``lease`` could grant ``ask`` if the device were empty, so that a request that is too large need
        not wait in line to learn that. Changes nothing.

        Raises:
            CacheFull: the reservation exceeds the device.
        """
        self._leases.check_possible(ask)

    def extend(self, lease: CoreLease, reserve: int, reserve_swa: int, states: int = 0) -> Plan | More | Wait:
        """Grow the reservation to the positions ``reserve`` (FULL) and ``reserve_swa``, in tokens, and by ``states``
        MAMBA slots. ``Wait``: the growth does not fit now. The ``ops`` of the ``Wait`` are the operations that make
        room or let go of device pages; try again when one of them ends."""
        return self._leases.extend(lease, reserve, reserve_swa, states)

    def advance(self, lease: CoreLease, position: int) -> Plan:
        """Unpin or give back the SWA pages that are out of the window when the next token is computed at ``position``.
        One page more than the window is kept."""
        return self._leases.advance(lease, position)

    def truncate(self, lease: CoreLease, length: int) -> Plan:
        """Give back the lease's own pages that lie wholly beyond ``length`` tokens."""
        return self._leases.truncate(lease, length)

    def commit(
        self, lease: CoreLease, key: bytes, hashes: bytes, checkpoint: tuple[int, int] | None = None,
        computed: bool = True,
    ) -> Committed | Wait:  # fmt: skip
        """Publish the whole pages of ``key`` (at least ``lease.length`` tokens).

        ``hashes``: 32 bytes for each whole page of ``key`` from the root, or b"". ``checkpoint``: a position, at the
        end of a page, and a slot out of ``lease.states``. ``computed``: False if the engine may still be computing
        pages of ``key``; then the plan has a ``Compute``. It has a ``Retire`` for duplicates. ``Wait``: pages on this
        path are just being loaded for another request; nothing was changed.

        Raises:
            ConfigError: the key is shorter than what the lease has committed, or ``check_checkpoint`` refuses the
                checkpoint. Nothing was changed.
        """
        if len(key) < lease.length * TOKEN_BYTES:
            raise ConfigError(f"{len(key) // TOKEN_BYTES} tokens are fewer than the {lease.length} committed already")
        if checkpoint is not None:
            self.check_checkpoint(lease, min(len(key) // TOKEN_BYTES, lease.reserved), checkpoint)
        return self._commits.commit(lease, key, hashes, checkpoint, computed)

    def check_checkpoint(self, lease: CoreLease, tokens: int, checkpoint: tuple[int, int]) -> None:
        """Check that a commit of ``tokens`` tokens may hand in ``checkpoint``. Changes nothing.

        Raises:
            ConfigError: the position is not the end of a committed page, or the slot is not one of the lease's states.
                The slot may belong to another lease, or an earlier commit gave it to the tree.
        """
        size, (position, slot) = self.config.page_size, checkpoint
        if position % size or not 0 < position <= tokens:
            raise ConfigError(f"checkpoint: position={position} must be a multiple of page_size={size}, above 0 and at "
                              f"most the {tokens} tokens that are committed")
        states = memoryview(lease.states).cast("i").tolist()
        if slot not in states:
            raise ConfigError(f"checkpoint: slot={slot} is not one of the lease's states, which are {states}: a slot "
                              "that a commit has given to the tree cannot be handed in again")

    def pages(self, lease: CoreLease, kind: int) -> bytes:
        """Return the page table of FULL or SWA from token 0 to ``lease.reserved``: int32 a page, -1 where there is
        none."""
        return self._leases.pages(lease, kind)

    def release(self, lease: CoreLease, *, ended: bool = False, retire: bool = False, used: bool = True) -> Plan:
        """Give back everything that the lease holds; a second call does nothing. ``ended``: the conversation is over,
        so pages that no other conversation used are evicted before all others. ``retire``: the lease's own pages come
        as ``Retire`` in the plan instead of being free at once. ``used``: False if no request ran with this lease, so
        that its pages do not count as used."""
        self._leases.release(lease, ended, retire, used)
        return self._given_back()

    def prefetch_look(self, space: bytes, key: bytes) -> PrefetchShape | Skip:
        """Return what a prefetch of ``key`` would bring now; ``Skip`` if it would not begin. Changes nothing."""
        return self._prefetches.look(space, key)

    def prefetch_open(
        self, space: bytes, key: bytes, begin: Begin = Begin.NEXT
    ) -> PrefetchBegun | Wait | Skip | More:
        """Begin to fetch ``key``, which storage has, beyond what the host has. ``Wait`` and ``Skip``: no prefetch
        began, and nothing was taken."""
        return self._prefetches.open(space, key, begin)

    def prefetch_take_full(self, op: int, pages: int, later: int = 0) -> Taken | More:
        """Take host slots for the next ``pages`` FULL pages from the anchor on; fewer if the host is short. ``later``:
        how many more the prefetch will want after these."""
        return self._prefetches.take_full(op, pages, later)

    def prefetch_take_aux(self, op: int, end: int) -> Taken | More:
        """Take host slots for the auxiliary pages that a match ending at ``end`` (tokens) needs, all or none. Slots
        taken for an earlier end go back."""
        return self._prefetches.take_aux(op, end)

    def prefetch_commit(self, op: int, end: int, hashes: bytes, holders: Sequence[int] = ()) -> Plan | Wait:
        """Hang the fetched pages up to ``end`` (tokens) into the tree as it is now, and give the other slots back.

        ``hashes``: 32 bytes a page from the anchor to ``end``. ``holders``: the requests that claim the pages; see
        ``claim``. ``Wait``: its ``ops`` are backups that must end first; nothing was done. If the anchor has left the
        tree for good, the prefetch is released: the plan says that it FAILED.
        """
        blockers = self._prefetches.commit(op, end, hashes, holders)
        return Wait(self.world.plan(), blockers) if blockers else self.follow_up()

    def prefetch_release(self, op: int) -> Plan:
        """Give all slots of a prefetch back. To be called only when its I/O has let go of their buffers."""
        self._prefetches.release(op)
        return self._given_back()

    def claim(self, holder: int, space: bytes, key: bytes) -> Plan:
        """Pin what the host has of the match of ``key``, for the request with the number ``holder``. The pins stay
        until ``release_claim``, or until the core needs their pages for a request that could not go on otherwise. An
        earlier claim of this request is replaced."""
        path, reached = self.world.find(space, key)
        if path:
            self._transfers.claims.take(holder, path, self._matches.ends(path, reached).union)
        return self._given_back()

    def confirm_claim(self, holder: int, firm: bool) -> None:
        """Note whether the request ``holder`` stands in line for its lease (``firm``). If it does, its claim is among
        the last to be taken away."""
        self._transfers.claims.confirm(holder, firm)

    def release_claim(self, holder: int) -> Plan:
        """Unpin the pages that ``holder`` claims. Nothing happens if it has no claim, or if its claim was taken
        away."""
        if holder not in self._transfers.claims.held:
            return self.world.plan()
        self._transfers.claims.release(holder)
        return self._given_back()

    def complete(self, outcomes: Sequence[Outcome | Failing]) -> Plan:
        """Apply the outcomes of operations of any kind but prefetch, and return the plan that follows from them. If
        there are many, some are left to ``follow_up``; until then their operations are in flight. Batches that fail
        come first: what they were to compute leaves the tree before anything else is decided.

        Raises:
            InvariantViolation: an operation is unknown, or had its outcome already.
        """
        known: list[Outcome] = []
        for outcome in outcomes:
            if isinstance(outcome, Outcome):
                known.append(outcome)
            if not isinstance(outcome, Outcome) or outcome.status is not Status.DONE:
                op = self.world.ledger.ops.get(outcome.op)
                if op is not None and op.kind is COMPUTE and not op.doomed:
                    self._leases.fail_computing(op)
        self._transfers.note_outcomes(known)
        return self.follow_up()

    def follow_up(self) -> Plan:
        """Apply outcomes that wait, and do what can be done since pages or pins came free: start backups that waited
        for them, and drop nodes of forgotten namespaces that nobody uses any more. A call does a slice of that;
        ``behind`` is True if the next one is to go on."""
        self.world.behind = self._transfers.settle()
        if not self.world.behind:
            self._transfers.store_again()
            self._transfers.retry_deferred()
            if self.world.dead_roots:
                self.world.behind |= self._invalidation.sweep()
        return self.world.plan()

    def _given_back(self) -> Plan:
        self.world.behind = self.world.behind or bool(self._transfers.deferred or self.world.dead_roots)
        return self.world.plan()

    def walk(self) -> Walk:
        """Begin a walk for ``drain``, over all live nodes that can be saved: none if there is no host tier."""
        return Walk(self.world, self.world.roots.values() if self.world.has_host else ())

    def drain(self, walk: Walk) -> Plan | More:
        """Start every backup, to host and storage, that can start now, whatever the write policy is. A call does one
        slice of ``walk``: it returns ``More`` if the next call is to go on, else the last plan."""
        self._transfers.backup_some(walk)
        return self.world.plan() if walk.over() else More(self.world.plan())

    def survey(self) -> Survey:
        """Begin to count, over all live nodes, which pages are unsaved."""
        return Survey(self.world)

    def listing(self, space: bytes) -> Listing:
        """Begin to list the pages that the namespace ``space`` has now, also those that leave the tree until the list
        is done. The namespace may be invalidated meanwhile."""
        return Listing(self.world, space)

    def invalidate(self, space: bytes | None) -> Plan | More:
        """Forget the namespace ``space`` (None: all of them) on device and host. Leases and operations in flight finish
        undisturbed: their nodes stay, in a part of the tree that nobody matches any more, and leave it one by one when
        nothing pins them. If it returns ``More``, call ``sweep`` until it does not."""
        self._invalidation.invalidate(space, self._transfers.claims)
        return self.sweep()

    def sweep(self) -> Plan | More:
        """Drop some nodes of forgotten namespaces that nothing pins. Returns ``More`` if there may be more of them."""
        goes_on = self._invalidation.sweep()
        return More(self.world.plan()) if goes_on else self.world.plan()

    def attach_storage(self, access: Access) -> Plan:
        """Note that a store was attached. ``access``: what may be done with all stores that are attached now."""
        self.world.access = access
        return self.world.plan()

    def note_late_storage(self, late: bool) -> Plan:
        """Note whether storage takes too long to answer. While it does, requests go on without the host pages that
        backups to storage pin and prefetches have taken, and wait for none of them."""
        self.world.storage_is_late = late
        self.world.freed |= late
        return self.world.plan()

    def detach_storage(self, access: Access) -> Plan:
        """Note that a store was detached. ``access``: what may be done with the stores that are left. No page counts as
        stored any more. Operations in flight finish."""
        self.world.access = access
        self.world.forget_stored()
        return self.world.plan()

    def backfill(self, *, store: bool) -> Backfill:
        """Begin a pass over the tree for a store that was attached, and return it. Each slice of the pass is a call of
        its own. ``store``: True if host pages are also written to that store."""
        return Backfill(self.world, self._transfers, store=store)

    def learned(self, now: float = 0.0) -> Learned | None:
        """Return what the eviction policy has learned from all requests together; None if it learns nothing. Ages are
        as of ``now``, in seconds, or the time last given to ``at``, if that is later. For any thread."""
        return self.world.policy.learned(max(int(now * 1e6), self.world.recency.time))

    def statistics(self) -> Statistics:
        """Return the counts of now. This is cheap."""
        world = self.world
        shelves = [ShelfStatistics(s.slots.capacity, s.slots.left, s.evictable) for s in world.shelves]
        counters = world.counters
        return Statistics(
            nodes=counters.nodes,
            leases=len(self._leases.active),
            device=tuple(shelves[: world.count]),
            host=tuple(shelves[world.count :]),
            operations={kind.name.lower(): world.ledger.count[kind] for kind in Kind},
            deferred_backups=len(self._transfers.deferred),
            evicted_device=counters.evicted_device,
            evicted_host=counters.evicted_host,
            lost_pages=counters.lost_pages,
            splits=counters.splits,
            failed_loads=counters.failed_loads,
        )

    def active_leases(self) -> tuple[CoreLease, ...]:
        """Return the leases that are not released, for the audit and for tools."""
        return tuple(self._leases.active.values())

    def active_holds(self) -> list[Hold]:
        """Return the holds of all leases, claims and prefetches, for the audit."""
        leases = [lease.hold for lease in self._leases.active.values()]
        fetches = [fetch.hold for fetch in self._prefetches.active.values()]
        return [*leases, *self._transfers.claims.held.values(), *fetches]

    def active_claims(self) -> tuple[Hold, ...]:
        """Return the claims that are held, for the audit."""
        return tuple(self._transfers.claims.held.values())

    def active_fetches(self) -> tuple[PrefetchInFlight, ...]:
        """Return the prefetches in flight, for the audit."""
        return tuple(self._prefetches.active.values())


__all__ = [
    "EVERYTHING", "Access", "Backfill", "Begin", "CacheCore", "Committed", "CoreLease", "Filled", "Grant",
    "LeaseRequest", "Listed", "Listing", "Match", "More", "Plan", "PrefetchBegun", "PrefetchShape", "Skip",
    "Statistics", "Survey", "Taken", "Unsaved", "Wait", "Walk", "needed_pages", "usable_end",
]  # fmt: skip
