"""``AsyncCache(debug=True)``: what a program did wrong with the cache's pages, found by their bytes and said by name.

Workers fill pages with poison when they come free and when a lease gets them (``asynccache.memory.poison``). The
sanitizer, in the head, tells them which pages, and has them look:

* when a lease is entered, or has waited for its loads: what it found is compared with what was committed, by a checksum
  for each page and state;
* when a lease has waited for all loads at once: its own pages must still be untouched;
* when it commits: each token of the pages that it publishes must have been written, in every layer, and no token may be
  all NaN; and the pages that it found must be as they were;
* when a free page is taken, and when the cache is closed: nobody may have written it.

What always holds:
* A program that is right is never accused. Where a batch of the engine may still use a page, nobody fills it and
  nobody judges it. A commit ``after`` an event is judged when its batches are over; what is wrong is logged then, and
  raised by the next call that looks, or at the end of the cache's ``async with``.
* All of it is a call between others: without ``debug`` there is no ``Sanitizer``, and nothing is counted or filled.
* A fill is told to the workers in the turn of the core call that freed or granted the pages, before the plan's copies.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from asynccache.config import POOL_NAME
from asynccache.core.cache import CacheCore, CoreLease
from asynccache.core.keys import HASH_BYTES, TOKEN_BYTES
from asynccache.core.plan import SLOT_BYTES
from asynccache.core.settings import ComponentKind
from asynccache.core.tree import PRESENT
from asynccache.errors import WrongPages
from asynccache.runtime.engine_batches import EngineBatches
from asynccache.worker.local import LocalWorker
from asynccache.worker.work import BatchInFlight, DamagedPage, Inspected, PageBytes, PageQuestion

if TYPE_CHECKING:
    from asynccache.runtime.supervisor import Supervisor

LOG = logging.getLogger("asynccache")
SLOW = (
    "debug=True: fresh and free pages are filled with poison, and what is published or found is looked at, which takes "
    "milliseconds for each MiB; for tests, not for service"
)
REMEMBERED = 1 << 20
"""The most pages and states whose checksums are remembered."""
_MOST_SUMS = 4
"""Checksums that are remembered of one page: that of each commit, since an engine may compute it anew."""
_PART, _WHOLE, _NAN, _WRITTEN = 1, 2, 4, 8  # as in ``asynccache.memory.poison``, which the head does not import

Slots = npt.NDArray[np.int32]
Taken = Callable[[], str]
"""Returns the place in the code where a lease was taken."""
_Page = tuple[int, bytes]  # a component and a prefix hash


class _Watched:
    """One lease, as far as it is known here."""

    __slots__ = ("own", "replaced", "taken", "task")

    def __init__(self, taken: Taken) -> None:
        self.taken = taken
        """Where the lease was taken."""
        self.own: dict[int, set[int]] = {}
        """The lease's own pages, by component."""
        self.replaced = False
        """True once a commit has replaced some of the lease's pages."""
        self.task: weakref.ref[asyncio.Task[Any]] | None = None
        """The task that made the last commit."""


class _Owner:
    """The last lease that had a page of its own, and how it went on: ``held``, ``given`` back by ``advance`` or
    ``truncate``, ``committed``, ``replaced`` by another's page in a commit, or the lease ``ended``.
    """

    __slots__ = ("before", "how", "lease")

    def __init__(self, lease: _Watched, before: _Owner | None) -> None:
        self.lease = lease
        self.how = "held"
        self.before = before
        """The page's owner before this one."""
        if before is not None:
            before.before = None

    def taken(self) -> str:
        """Return where the lease was taken."""
        return self.lease.taken()


class Commit(NamedTuple):
    """A commit that was looked at and is to be made. ``checkpoint``: the slot and the page number of a state."""

    space: bytes
    key: bytes
    hashes: bytes
    """The hashes of all whole pages of the key."""
    slots: dict[int, dict[int, int]]
    """The lease's own pages that it publishes, by component and page number."""
    sums: dict[tuple[int, int], bytes] | None
    """Checksums by component and page number; None: batches may still compute them."""
    taken: Taken


class Sanitizer:
    """Finds what a program did wrong with its pages. Mutable state: what is known of each lease and of each page's last
    owner, checksums by component and prefix hash, the pages that batches still compute, and the mistakes that nobody
    was told of yet."""

    def __init__(
        self, worker: LocalWorker, core: CacheCore, batches: EngineBatches, supervisor: Supervisor
    ) -> None:  # fmt: skip
        self._worker = worker
        self._core = core
        self._batches = batches
        self._supervisor = supervisor
        self._size = core.config.page_size
        self._leases: dict[int, _Watched] = {}
        self._owners: dict[tuple[int, int], _Owner] = {}
        self._sums: OrderedDict[_Page, list[bytes]] = OrderedDict()
        self._computing: dict[_Page, int] = {}
        self._untold: list[WrongPages] = []
        self._kinds = [int(component.kind) for component in core.world.components]

    def __repr__(self) -> str:
        return f"Sanitizer({len(self._leases)} leases, {len(self._sums)} checksums)"

    # filling

    def given_back(self) -> None:
        """Have the pages filled that the core has freed since the last call. To be called before a plan is
        performed."""
        world = self._core.world
        for kind, shelf in zip(self._kinds, world.shelves, strict=False):
            given = shelf.slots.given
            if given:
                slots = b"".join(given)
                given.clear()
                for slot in _slots(slots).tolist():
                    owner = self._owners.get((kind, slot))
                    if owner is not None and owner.how == "held":
                        owner.how = "given"
                        owner.lease.own[kind].discard(slot)
                self._fill(kind, slots, fresh=False)

    def granted(self, core: CoreLease, taken: Taken | None = None) -> None:
        """Have the lease's own pages filled that it has got since the last call. To be called in the turn in which the
        core has granted them."""
        self.given_back()
        watched = self._leases.get(core.id)
        if watched is None:
            assert taken is not None
            watched = self._leases[core.id] = _Watched(taken)
        for kind, slots in self._own(core).items():
            had = watched.own.setdefault(kind, set())
            new = [slot for slot in slots if slot not in had]
            watched.own[kind] = set(slots)
            self._owners |= {(kind, slot): _Owner(watched, self._owners.get((kind, slot))) for slot in new}
            self._fill(kind, np.array(new, np.int32).tobytes(), fresh=True)

    def _own(self, core: CoreLease) -> dict[int, list[int]]:
        own = {}
        for c, kind in enumerate(self._kinds):
            slots = core.states if kind == ComponentKind.MAMBA else core.own[c]
            own[kind] = _slots(slots).tolist()
        return own

    def _fill(self, kind: int, slots: bytes, *, fresh: bool) -> None:
        if not slots:
            return
        fences = self._batches.fences
        if len(fences) and fences.before([(kind, slots)]):
            each = [slots[at : at + SLOT_BYTES] for at in range(0, len(slots), SLOT_BYTES)]
            used = [slot for slot in each if fences.before([(kind, slot)])]
            self._worker.forget_fill(kind, b"".join(used))
            slots = b"".join(slot for slot in each if slot not in set(used))
        self._worker.fill(kind, slots, fresh)

    # what a lease does

    async def entered(self, core: CoreLease, space: bytes, key: bytes) -> None:
        """Compare what a lease has found with what was committed. Nothing of it may still be on its way.

        Raises:
            WrongPages: a page is another one; or a free page was written.
        """
        await self._look_at_found(core, space, key, states=True)

    async def _look_at_found(self, core: CoreLease, space: bytes, key: bytes, *, states: bool) -> None:
        asks, pages = self._found(core, space, key[: core.cached * TOKEN_BYTES], states=states)
        seen = await self._inspect(asks)
        self._compare(asks, pages, seen, core)

    async def arrived(self, core: CoreLease, space: bytes, key: bytes, *, first: bool, waited: bool) -> None:
        """Check a lease, as ``entered`` does, when all its loads have arrived. ``first``: nobody has waited for any of
        them before, so that the engine has not gone on from a state yet; ``waited``: they had not arrived when this was
        asked for, so that the lease's own pages must be as it got them. Raises as ``entered``."""
        if first and waited and core.length == core.cached:
            own = {kind: slots for kind, slots in self._own(core).items() if kind != ComponentKind.MAMBA and slots}
            asks = [PageQuestion(kind, np.array(slots, np.int32).tobytes()) for kind, slots in own.items()]
            for ask, seen in zip(asks, (await self._inspect(asks)).pages, strict=True):
                per = len(seen.tokens) * SLOT_BYTES // len(ask.slots)
                for i, bits in enumerate(seen.tokens):
                    if bits & _WRITTEN:
                        raise WrongPages("computed too early", (
                            f"page {_slots(ask.slots)[i // per]} of {POOL_NAME[ComponentKind(ask.component)]!r} was "
                            f"written while the pages that the lease loads had not arrived, so what was computed from "
                            f"them is wrong: await loaded(), or layer by layer, before the engine computes "
                            f"({self._who(core)})"))
        await self._look_at_found(core, space, key, states=first)

    def diverged(self, core: CoreLease) -> None:
        """A commit was refused because it does not go on from what the lease holds. Raises ``WrongPages`` if another
        task has made the last one and still runs."""
        watched = self._leases.get(core.id)
        other = None if watched is None or watched.task is None else watched.task()
        if other is not None and other is not asyncio.current_task() and not other.done():
            raise WrongPages("two tasks on one lease", (
                f"task {other.get_name()!r} has committed other tokens, so both have computed into the same pages: a "
                f"lease is for one request ({self._who(core)})"))

    async def committing(
        self, core: CoreLease, space: bytes, key: bytes, hashes: bytes, checkpoint: tuple[int, int] | None,
        batches: Sequence[BatchInFlight],
    ) -> Commit:
        """Look at what a lease is about to publish. ``batches``: those that compute it.

        Raises:
            WrongPages: something of it was not computed, or was computed wrongly; or a page that the lease has found is
                another one now; or a free page was written.
        """
        watched = self._leases[core.id]
        task = asyncio.current_task()
        watched.task = None if task is None else weakref.ref(task)
        slots = self._to_publish(core, len(key) // (TOKEN_BYTES * self._size), checkpoint)
        commit = Commit(space, key, hashes, slots, None, watched.taken)
        if any(not batch.done() for batch in batches):
            return commit
        begin, length = core.length, core.length // self._size * self._size
        own = [PageQuestion(kind, np.array(list(of.values()), np.int32).tobytes()) for kind, of in slots.items()]
        asks, pages = self._found(core, space, key[: length * TOKEN_BYTES], states=False)
        seen = await self._inspect([*own, *asks])
        self._compare(asks, pages, Inspected(seen.pages[len(own) :], []), core)
        return self._judged(commit, seen.pages[: len(own)], begin, len(key) // TOKEN_BYTES, watched.replaced)

    def _to_publish(
        self, core: CoreLease, total: int, checkpoint: tuple[int, int] | None
    ) -> dict[int, dict[int, int]]:
        found: dict[int, dict[int, int]] = {}
        begin = core.length // self._size
        for c, kind in enumerate(self._kinds):
            if kind == ComponentKind.MAMBA:
                if checkpoint is not None:
                    found[kind] = {checkpoint[0] // self._size - 1: checkpoint[1]}
                continue
            own = enumerate(_slots(core.own[c]).tolist(), core.own_from[c])
            pages = {page: slot for page, slot in own if begin <= page < total}
            if pages:
                found[kind] = pages
        return found

    def _judged(
        self, commit: Commit, seen: Sequence[PageBytes], begin: int, end: int, replaced: bool
    ) -> Commit:
        """Return ``commit`` with its checksums. Raises ``WrongPages``: something of it was not computed."""
        sums: dict[tuple[int, int], bytes] = {}
        for (kind, slots), page in zip(commit.slots.items(), seen, strict=True):
            first = min(slots)
            if page.tokens:
                per = len(page.tokens) // len(slots)
                unit = self._size if per > 1 else 1
                mistake = _named(page, per, first * unit, begin, end, POOL_NAME[ComponentKind(kind)], replaced)
                if mistake is not None:
                    raise WrongPages(mistake[0], f"{mistake[1]} (the lease taken at {commit.taken()})")
            width = len(page.sums) // len(slots)
            sums |= {(kind, number): page.sums[i * width : (i + 1) * width] for i, number in enumerate(slots)}
        return commit._replace(sums=sums)

    def committed(self, core: CoreLease, commit: Commit, batches: Sequence[BatchInFlight]) -> None:
        """Note what a commit has published, in the turn in which it was made. If ``batches`` may still compute it, it
        is judged when they are over."""
        watched = self._leases.get(core.id)
        published = self._in_tree(commit)
        for kind, slots in commit.slots.items():
            for page, slot in slots.items():
                owner = self._owners.get((kind, slot))
                there = published.get((kind, page)) == slot
                if owner is not None:
                    owner.how = "committed" if there else "replaced"
                if watched is not None and not there and kind != ComponentKind.MAMBA:
                    watched.replaced = True
                if there and commit.sums is not None:
                    self._remember(self._page(commit, kind, page), commit.sums[kind, page])
        if watched is not None:
            watched.own = {kind: set(slots) for kind, slots in self._own(core).items()}
        if commit.sums is None and commit.slots:
            pages = [self._page(commit, kind, page) for kind, slots in commit.slots.items() for page in slots]
            for one in pages:
                self._computing[one] = self._computing.get(one, 0) + 1
            self._supervisor.spawn(self._judge_later(commit, tuple(batches), pages), "asynccache-debug")

    async def _judge_later(
        self, commit: Commit, batches: Sequence[BatchInFlight], pages: Sequence[_Page]
    ) -> None:
        """Judge what ``batches`` have computed, as far as it is in the tree when they are over."""
        try:
            for batch in batches:
                await batch.wait()
            if any(batch.failed for batch in batches):
                return
            there = self._in_tree(commit)
            slots = {kind: {page: slot for page, slot in own.items() if there.get((kind, page)) == slot}
                     for kind, own in commit.slots.items()}
            commit = commit._replace(slots={kind: own for kind, own in slots.items() if own})
            asks = [PageQuestion(kind, np.array(list(own.values()), np.int32).tobytes())
                    for kind, own in commit.slots.items()]
            try:
                seen = await self._inspect(asks)
                begin = min((min(own) for own in commit.slots.values()), default=0) * self._size
                commit = self._judged(commit, seen.pages, begin, len(commit.key) // TOKEN_BYTES, False)
            except WrongPages as error:
                LOG.error("%s", error)
                self._untold.append(error)
                return
            for (kind, number), checksum in (commit.sums or {}).items():
                self._remember(self._page(commit, kind, number), checksum)
        finally:
            for one in pages:
                self._computing[one] -= 1
                if not self._computing[one]:
                    del self._computing[one]

    def released(self, core: CoreLease) -> None:
        """Note that a lease is about to be released."""
        self._leases.pop(core.id, None)
        for kind, slots in self._own(core).items():
            for slot in slots:
                owner = self._owners.get((kind, slot))
                if owner is not None and owner.how == "held":
                    owner.how = "ended"

    async def closing(self) -> WrongPages | None:
        """Look at all free pages a last time. Returns the first mistake that nobody was told of."""
        try:
            await self._inspect([], free=True)
        except WrongPages as error:
            return error
        return None

    # looking

    async def _inspect(self, asks: Sequence[PageQuestion], *, free: bool = False) -> Inspected:
        """Ask the workers. Raises ``WrongPages`` for the first mistake that nobody was told of."""
        seen = await self._worker.inspect(asks, free)
        self._untold += [self._damage(page) for page in seen.damaged]
        if self._untold:
            error, self._untold = self._untold[0], []
            raise error
        return seen

    def _damage(self, page: DamagedPage) -> WrongPages:
        what = f"page {page.slot} of {page.pool!r} was written while it was free"
        owner = self._owners.get((page.component, page.slot))
        if owner is not None and owner.how == "held":  # it was granted anew before anybody has looked
            owner = owner.before
        if owner is None:
            return WrongPages("wrote pages of somebody else", (
                f"{what}: no lease has had it. Is a page table padded with a page number that may be somebody's, or do "
                "bytes_per_token and the view of the tensor not fit?"))
        if owner.how == "given":
            return WrongPages("wrote pages that were given back", (
                f"{what}: advance or truncate had given it back for the lease taken at {owner.taken()}"))
        if owner.how == "replaced":
            return WrongPages("used an old page table", (
                f"{what}: a commit had replaced it by a page that others had published before, for the lease taken at "
                f"{owner.taken()}: use the table that commit() returns"))
        return WrongPages("wrote after the lease's end", (
            f"{what}: it was the page of the lease taken at {owner.taken()}, which has ended. A thread or a kernel "
            f"that outlives its lease? Wait for it, or name its event: release(after=event)"))

    def _found(
        self, core: CoreLease, space: bytes, key: bytes, *, states: bool
    ) -> tuple[list[PageQuestion], list[list[_Page]]]:
        """Return questions for the pages of ``key`` that a lease has from the tree and whose checksums are known, and
        what they are."""
        hashes = self._core.known_hashes(space, key)
        asks: list[PageQuestion] = []
        pages: list[list[_Page]] = []
        for c, kind in enumerate(self._kinds):
            if kind == ComponentKind.MAMBA:
                last = core.cached // self._size - 1
                if not states or last < 0 or not core.states or len(hashes) <= last * HASH_BYTES:
                    continue
                numbered = [(last, int(_slots(core.states)[0]))]
            else:
                table = _slots(self._core.pages(core, kind)).tolist()[: len(hashes) // HASH_BYTES]
                numbered = [(i, slot) for i, slot in enumerate(table) if slot >= 0 and i < core.own_from[c]]
            named = [((kind, hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]), slot) for i, slot in numbered]
            known = [(page, slot) for page, slot in named if page in self._sums and page not in self._computing]
            if known:
                asks.append(PageQuestion(kind, np.array([slot for _, slot in known], np.int32).tobytes()))
                pages.append([page for page, _ in known])
        return asks, pages

    def _compare(
        self, asks: Sequence[PageQuestion], pages: Sequence[Sequence[_Page]], seen: Inspected, core: CoreLease
    ) -> None:
        for ask, own, bytes_ in zip(asks, pages, seen.pages, strict=True):
            width = len(bytes_.sums) // len(own)
            for i, page in enumerate(own):
                if bytes_.sums[i * width : (i + 1) * width] not in self._sums.get(page, ()):
                    slot = int(_slots(ask.slots)[i])
                    owner = self._owners.get((ask.component, slot))
                    by = "" if owner is None else f", by the lease taken at {owner.taken()},"
                    self._sums.pop(page, None)
                    raise WrongPages("wrote published pages", (
                        f"page {slot} of {POOL_NAME[ComponentKind(ask.component)]!r} is not what was committed{by} any "
                        f"more. Did a thread outlive its lease, was an old page table used, or is a table padded with "
                        f"this page? ({self._who(core)} has found it)"))

    def _in_tree(self, commit: Commit) -> dict[tuple[int, int], int]:
        """Return the device slots that the tree has for the key of ``commit``, by component and page number."""
        found: dict[tuple[int, int], int] = {}
        path, _ = self._core.world.find(commit.space, commit.key)
        for node in path:
            start = 0 if node.parent is None else node.parent.end
            for c, kind in enumerate(self._kinds):
                if node.state[c] != PRESENT:
                    continue
                slots = _slots(node.slots[c]).tolist()
                first = node.end - 1 if kind == ComponentKind.MAMBA else start
                found |= {(kind, page): slot for page, slot in enumerate(slots, first)}
        return found

    def _page(self, commit: Commit, kind: int, page: int) -> _Page:
        return kind, commit.hashes[page * HASH_BYTES : (page + 1) * HASH_BYTES]

    def _remember(self, page: _Page, one: bytes) -> None:
        known = self._sums.setdefault(page, [])
        if one not in known:
            known.append(one)
            del known[:-_MOST_SUMS]
        self._sums.move_to_end(page)
        if len(self._sums) > REMEMBERED:
            self._sums.popitem(last=False)

    def _who(self, core: CoreLease) -> str:
        watched = self._leases.get(core.id)
        return "a lease" if watched is None else f"the lease taken at {watched.taken()}"


def _named(
    page: PageBytes, per: int, first: int, begin: int, end: int, pool: str, replaced: bool
) -> tuple[str, str] | None:
    """Return the mistake that the bytes of a commit's pages show, and what shows it; None: they show none. ``per``:
    tokens of a page, 1 for a state; ``first``: the token that the first bits are about. The lease had ``begin`` tokens
    and commits ``end``."""
    bits = np.frombuffer(page.tokens, np.uint8)
    nan, missing, part = (np.flatnonzero(bits & bit) for bit in (_NAN, _WHOLE, _PART))
    if len(nan):
        what = f"{pool}: token {first + int(nan[0])} is NaN"
        if replaced:
            return "used an old page table", (
                f"{what}. It was computed from a page that a commit had replaced: use the table that commit() returns")
        return "computed from pages that are not the lease's", (
            f"{what}, as free pages are, and pages that have not arrived: the engine has read a page that the "
            "lease does not have, or has no more")
    if not len(part):
        return None
    if len(missing) == len(bits) and not (bits & _WRITTEN).any():
        return "committed without computing", f"{pool}: nobody has written any byte of tokens {first} to {end - 1}"
    if page.untouched and len(missing) == len(bits):
        return "committed without computing", f"nobody has written {', '.join(page.untouched)}"
    if per == 1:
        return "committed without computing", f"{pool}: the state is not written, or not all of it"
    if len(missing) < len(part):
        return "bytes and view do not fit", (
            f"{pool}: of {len(part)} tokens, from {first + int(part[0])} on, some bytes were not written")
    pages, whole = len(bits) // per, sum(bool((bits[i : i + per] & _WHOLE).all()) for i in range(0, len(bits), per))
    if whole * per == len(missing) and whole * 2 >= pages > 1:
        return "bytes and view do not fit", (
            f"{pool}: {whole} of {pages} pages were not written, from token {first + int(missing[0])} on. If they "
            "were computed, bytes_per_token and the view of the tensor do not fit; else they were committed too early")
    tokens = (first + missing).tolist()
    if tokens == [begin]:
        return "computed from cached + 1", (
            f"{pool}: token {begin} was not computed, but those behind it were: the first token that needs computing "
            "is lease.cached itself")
    if tokens == list(range(tokens[0], first + len(bits))):
        return "committed tokens that were not computed", (
            f"{pool}: tokens {tokens[0]} to {tokens[-1]} have no KV. The last sampled token is computed in the next "
            "step: commit tokens[:-1]")
    return "committed tokens that were not computed", f"{pool}: {len(tokens)} tokens, from {tokens[0]} on"


def _slots(slots: bytes) -> Slots:
    return np.frombuffer(slots, np.int32)
