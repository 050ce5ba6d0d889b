"""One fetch: storage to host, from the first question to commit or revoke.

The steps: ask what is there; open an operation of the core for that (``Prefetching`` waits for room); read FULL pages,
some at a time; find the end that they allow; read FULL's sidecars; read the auxiliary components and their sidecars,
for the end that is left; put the commit into the queue of acks, or revoke.

Laws:
* A question takes nothing: while a fetch asks, it has no page, pin or operation.
* Which pages the stores have is asked once and noted (``_present``). Only pages that the tree has lost since then, and
  that were not asked for, are asked for when the fetch has begun. Whenever the end has to move (there is no room on the
  host, a page failed, or the fetch is to stop), it becomes the longest shorter end at which every pool has what it
  needs.
* No slot is given back before the I/O that uses it has let go.
* A fetch does not commit by itself. It puts its commit into the queue in which acks travel (``Driver.acks``) and is
  done. Whoever takes the tree lock next makes the commit. Where another operation must end first (a backup of the same
  pages), the driver queues the commit again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from asynccache.config import PoolSpec
from asynccache.core.cache import PrefetchBegun, PrefetchShape, Taken, needed_pages, usable_end
from asynccache.core.plan import SLOT_BYTES, More, Status, Wait
from asynccache.core.settings import ComponentKind
from asynccache.core.tree import common_pages
from asynccache.runtime.driver import Driver
from asynccache.runtime.driving import drive
from asynccache.runtime.outbox import Lateness, StoreCall
from asynccache.runtime.prefetch import Cut, Prefetch, PrefetchStatus, Wish
from asynccache.runtime.tokens import HASH_BYTES, TOKEN_BYTES
from asynccache.worker.local import LocalWorker, Result
from asynccache.worker.pool_layout import FULL, PoolLayout
from asynccache.worker.stats import StageMeter
from asynccache.worker.work import ReadOrder, StoreQuestion

BATCH_BYTES = 4 << 20
BATCH_PAGES = 128

_HITS = bytes(result == Result.HIT for result in range(256))


class Fetch:
    """One fetch, for the prefetch that began it and for those that share it: from the first question to its end.

    ``op``: its operation; 0 before it has begun. ``shape``: which pages it is to bring; once it has begun, those that
    storage has. ``sharers``: the prefetches that it serves. ``wish``: theirs, taken together. ``cut``: why it got less
    than storage had. ``end``: how far it was committed, in tokens; 0 before, or if it was revoked. ``skipped``: why it
    did not begin although storage had something; may be empty. ``asleep``: what it awaits until it may begin, and once
    it has read its pages. ``over``: True once it was committed or revoked, or did not begin. ``first``: the prefetch
    whose task runs it. ``threshold``: how many tokens it must add to be committed, at least.
    """

    def __init__(
        self, driver: Driver, worker: LocalWorker, pools: PoolLayout, meter: StageMeter, lateness: Lateness,
        first: Prefetch, shape: PrefetchShape, threshold: int,
    ) -> None:  # fmt: skip
        self.op = 0
        self.shape = shape
        self.sharers: dict[Prefetch, None] = {}
        self.wish = Wish.RUN
        self.cut = Cut.NOTHING
        self.end = 0
        self.skipped = ""
        self.asleep: asyncio.Future[Any] | None = None
        self.over = False
        self._queued = False
        self.space = first.space
        self._first = first
        self._key = first.key
        self._chain = first.chain
        self._wanted_end = shape.length
        self._driver = driver
        self._worker = worker
        self._pools = pools
        self._meter = meter
        self._lateness = lateness
        self._threshold = max(threshold, shape.page_size)
        self._hashes = b""
        self._slots = b""
        pages = shape.length // shape.page_size
        self._present = {name: bytearray(pages) for name, _ in pools.named()}
        self._asked_from: dict[int, int] = {}
        self._hole = -1
        self.join(first)

    def __repr__(self) -> str:
        return f"Fetch(op {self.op}, {self.shape.anchor}..{self.shape.length}, {len(self.sharers)} sharers)"

    # who shares it

    def brings(self, key: bytes, shape: PrefetchShape) -> bool:
        """Return True if a prefetch of ``key``, which has ``shape``, should share this fetch: it is not given up, and
        ``key`` has more pages in common with its key than the tree has, or all that it may bring."""
        if self.over or self.wish is Wish.CANCEL:
            return False
        common = self._common(key) * shape.page_size
        return common > shape.anchor or common == shape.length == shape.anchor

    def _common(self, key: bytes) -> int:
        return common_pages(self._key, 0, len(self._key), key, self.shape.page_size * TOKEN_BYTES)

    def join(self, handle: Prefetch) -> None:
        """Serve ``handle``, too."""
        self.sharers[handle] = None
        handle.fetch = self

    def leave(self, handle: Prefetch) -> None:
        """Serve ``handle`` no more. The last handle that leaves cancels the fetch."""
        self.sharers.pop(handle, None)
        handle.fetch = None
        if not self.sharers:
            self.wish = Wish.CANCEL
            if self._queued:  # all I/O has let go, and what the commit waits for may take long
                self.close()

    def told(self, handle: Prefetch) -> None:
        """Act on the wish of ``handle``, one of the sharers, which has changed. A stop holds for all sharers, a
        cancellation for ``handle`` alone. So does a stop before the fetch has begun: nothing was read that it could
        keep. But the handle whose task runs the fetch can only stop it for all."""
        if handle.wish is Wish.CANCEL:
            self.leave(handle)
            if self.sharers:
                handle.finish(PrefetchStatus.CANCELLED)
        elif not self.op and handle is not self._first:
            self.leave(handle)
        else:
            self.wish = max(self.wish, Wish.STOP)
        if self.wish is not Wish.RUN:
            self._wake()

    def _wake(self) -> None:
        if self.asleep is not None and not self.asleep.done():
            self.asleep.set_result(None)

    def answer(self, handle: Prefetch) -> PrefetchStatus | None:
        """Return how ``handle`` ends with this fetch, which is over; None if ``handle`` is to fetch the rest, or has
        stopped before the fetch began. What storage lacks of the pages that two prefetches have in common, it lacks for
        both."""
        if handle.wish is Wish.CANCEL:
            return PrefetchStatus.CANCELLED
        if not self.op and handle.wish is Wish.STOP:
            return None
        if handle.wish is Wish.RUN:
            alike = handle.key == self._key or 0 <= self._hole < self._common(handle.key)
            if self.wish is not Wish.RUN or not alike:
                return None
        if self.skipped:
            return PrefetchStatus.COMPLETE if handle.tokens() else PrefetchStatus.SKIPPED
        if not self.end:
            return PrefetchStatus.MISS
        return PrefetchStatus.COMPLETE if self.end == self._wanted_end else PrefetchStatus.PARTIAL

    # its course

    async def ask(self) -> bytes:
        """Ask the stores which pages there are. Returns the key up to the end that is worth fetching; empty if there is
        none. Cancelling it stops the waiting for the answer."""
        self._hashes = await self._chain.extend(self._key)
        await self._ask()
        end = self._usable(self.shape.length)
        return self._key[: end * TOKEN_BYTES] if self._worth(end) and self.wish is Wish.RUN else b""

    def begun(self, answer: PrefetchBegun) -> None:
        """Note that the core has begun the operation."""
        self.op, self.shape = answer.op, answer.shape

    async def read(self) -> None:
        """Read the pages, and queue their commit. If they are not worth it, or nobody wants them any more, nothing is
        queued. To be called when it has begun. Cancelling it returns after the I/O has let go."""
        if any(self._first_needed(component) < first for component, first in self._asked_from.items()):
            await self._ask()
        end = await self._transfer()
        if self._worth(end) and self._wanted():
            self._queued = True
            self._driver.post_commit(partial(self._commit, end))

    async def committed(self) -> None:
        """Return when the commit that ``read`` has queued was made, or nobody wants it any more; at once if there is
        none. Cancelling it stops the waiting only."""
        while self._queued and not self.over:
            self.asleep = asyncio.get_running_loop().create_future()
            try:
                await self.asleep
            finally:
                self.asleep = None

    def close(self) -> None:
        """Revoke the operation if it is under way, and let the sharers go. Does nothing if the fetch is over."""
        if self.over:
            return
        self.over = True
        self._wake()
        if self.op and not self.end:
            self._driver.perform(self._driver.give_back(self._driver.core.prefetch_revoke, self.op))
        for sharer in self.sharers:
            sharer.cut = self.cut
            sharer.fetch = None
            sharer.wake()
        self.sharers.clear()

    async def _transfer(self) -> int:
        """Read pages, and return the end of a match, in tokens, that has all pages it needs; 0 if no such end is worth
        it."""
        end = self._usable(self.shape.length)
        if not self._worth(end) or not self._wanted():
            return 0
        end = self._usable(await self._fetch_full(end))
        if self._pools.sidecars and self._worth(end) and self._wanted():
            end = self._usable(await self._fetch_sidecars(end))
        while self._worth(end) and self._wanted():
            taken = await self._take_aux(end)
            if taken.aux is None:
                self.cut = Cut.ROOM
                end = self._usable(end - self.shape.page_size)
            elif not taken.aux or await self._fetch_aux(end, taken.aux):
                return end
            else:
                end = self._usable(end)
        return 0

    # where it may end

    def _usable(self, limit: int) -> int:
        """Return the longest end up to ``limit`` (tokens) at which every pool has what it needs."""
        return usable_end(self.shape, self._pools.named(), cast(Mapping[str, bytes], self._present), limit)

    def _wanted(self) -> bool:
        return self.wish is not Wish.CANCEL

    def _worth(self, end: int) -> bool:
        return end - self.shape.covered >= self._threshold

    # asking

    async def _ask(self) -> None:
        """Ask the stores which pages they have: FULL's, up to the first one that they lack or a stop, and the auxiliary
        pages up to there."""
        self._asked_from = {component: self._first_needed(component) for component in self._pools.components}
        full_end, last = self._asked_from[FULL], self._pages_of(self.shape.length)
        while full_end < last and self.wish is Wish.RUN:
            stop = min(last, full_end + BATCH_PAGES)
            await self._ask_pools([(spec, range(full_end, stop)) for spec in self._pools.of[FULL]])
            held = self._run_of_full(full_end, stop)
            full_end += held
            if full_end < stop:
                self._hole = full_end
                break
        auxiliary = [
            (spec, range(self._asked_from[component], full_end))
            for component in self._pools.components[1:] for spec in self._pools.of[component]
        ]  # fmt: skip
        if any(pages for _, pages in auxiliary):
            await self._ask_pools(auxiliary)

    def _first_needed(self, component: int) -> int:
        """Return the first page of ``component`` that an end of this fetch could need. It may lie before the anchor."""
        shape, anchor = self.shape, self._pages_of(self.shape.anchor)
        if component == FULL:
            return anchor
        first = self._pages_of(shape.covered)
        if component == ComponentKind.SWA:
            first = max(0, first + 1 - -(-shape.window // shape.page_size))
            behind = shape._replace(window=shape.anchor - first * shape.page_size)
            first = min(needed_pages(behind, component, shape.anchor), default=anchor)
        return min(first, anchor)

    async def _ask_pools(self, questions: Sequence[tuple[PoolSpec, range]]) -> None:
        """Ask for some pages of several pools, in one call."""
        asked = [StoreQuestion(spec.name, self._hashes_of(pages)) for spec, pages in questions]
        with self._lateness.call(StoreCall.READ):
            answers = await self._worker.ask(asked)
        for (spec, pages), results in zip(questions, answers, strict=True):
            self._look_at(results)
            self._present[spec.name][pages.start : pages.stop] = results.translate(_HITS)

    def _look_at(self, results: bytes) -> None:
        """Note in ``cut`` if a page was damaged or a store failed. A page that is not there is neither."""
        if Result.CORRUPT in results:
            self.cut = Cut.CHECKSUM
        elif Result.FAILED in results:
            self.cut = Cut.BACKEND

    def _run_of_full(self, start: int, stop: int) -> int:
        """Return how many pages from ``start`` to ``stop``, without a gap, all pools of FULL have in storage."""
        maps = [self._present[spec.name] for spec in self._pools.of[FULL]]
        for page in range(start, stop):
            if not all(present[page] for present in maps):
                return page - start
        return stop - start

    # fetching

    async def _fetch_full(self, end: int) -> int:
        """Read FULL up to ``end``, or until a stop, a shortage of slots or a page that fails. Slots are taken batch by
        batch. Returns how far it got, in tokens."""
        page, last = self._pages_of(self.shape.anchor), self._pages_of(end)
        some = _batch(self._pools.lead)
        while page < last and self.wish is Wish.RUN:
            wanted = min(some, last - page)
            slots = await self._take_full(wanted, last - page - wanted)
            self._slots += slots
            held = page + len(slots) // SLOT_BYTES
            if held < page + wanted:
                self.cut = Cut.ROOM
            reached = await self._read(self._pools.lead, page, held)
            if reached < page + wanted:
                return reached * self.shape.page_size
            page = reached
        return page * self.shape.page_size

    async def _fetch_sidecars(self, end: int) -> int:
        """Read the sidecars of FULL, whose own pages up to ``end`` have been read. Returns how far it got, in tokens.
        Only a stop that comes meanwhile ends the reading: an earlier stop has shortened ``end`` already."""
        page, last = self._pages_of(self.shape.anchor), self._pages_of(end)
        return await self._read(self._pools.follow, page, last) * self.shape.page_size

    async def _read(self, specs: Sequence[PoolSpec], page: int, last: int) -> int:
        """Read pages ``page`` to ``last`` of each of ``specs``. Returns the first page that was not read."""
        if not specs:
            return last
        batch, wish = _batch(specs), self.wish
        while page < last and self.wish is wish:
            wanted = min(last, page + batch)
            page = await self._get_run(specs, range(page, wanted))
            if page < wanted:
                break
        return page

    async def _get_run(self, specs: Sequence[PoolSpec], pages: range) -> int:
        """Read ``pages`` of each of ``specs`` in one call. Returns the first page that failed in one of them, or their
        end."""
        first = self._pages_of(self.shape.anchor)
        slots = self._slots[(pages.start - first) * SLOT_BYTES : (pages.stop - first) * SLOT_BYTES]
        failed = await self._get([(spec, pages, slots) for spec in specs], run=True)
        return min((pages.stop, *(page for missing in failed for page in missing)))

    async def _fetch_aux(self, end: int, aux: dict[int, bytes]) -> bool:
        """Read the auxiliary pages that ``end`` needs, into the slots of ``aux``. Returns False if a page failed; it is
        noted in ``_present`` then."""
        wanted = {c: needed_pages(self.shape, c, end) for c in aux}
        reads = [(spec, wanted[c], slots) for c, slots in aux.items() for spec in self._pools.of[c]]
        return not any(await self._get(reads, run=False))

    async def _get(self, reads: Sequence[tuple[PoolSpec, Sequence[int], bytes]], *, run: bool) -> list[list[int]]:
        """Read pages of several pools into their slots, in one call. Returns for each pool the pages that failed.
        ``run``: see ``LocalWorker.read``."""
        orders = [
            ReadOrder(spec.name, self._hashes_of(pages), slots[: len(pages) * SLOT_BYTES])
            for spec, pages, slots in reads
        ]
        with self._lateness.call(StoreCall.READ):
            answers = await self._worker.read(orders, run=run)
        return [self._got(spec, pages, results)
                for (spec, pages, _), results in zip(reads, answers, strict=True)]  # fmt: skip

    def _got(self, spec: PoolSpec, pages: Sequence[int], results: bytes) -> list[int]:
        """Count what was read of one pool, and return the pages that failed. ``results``: one for each page that was
        read, which are the first of ``pages``."""
        self._look_at(results)
        failed = [page for page, result in zip(pages, results, strict=False) if result != Result.HIT]
        for page in failed:
            self._present[spec.name][page] = 0
        good = len(results) - len(failed)
        self._meter.count(0, good, good if self._pools.counts(spec.name) else 0, good * spec.bytes_per_page)
        self._meter.errors += len(failed)
        return failed

    # the core

    async def _take_full(self, pages: int, later: int) -> bytes:
        core = self._driver.core
        return (await self._take(lambda: core.prefetch_take_full(self.op, pages, later))).slots

    async def _take_aux(self, end: int) -> Taken:
        core = self._driver.core
        return await self._take(lambda: core.prefetch_take_aux(self.op, end))

    async def _take(self, call: Callable[[], Taken | More]) -> Taken:
        return await drive(self._driver, call, lambda taken: self._driver.perform(taken.plan))

    def _commit(self, end: int) -> Sequence[int]:
        """Under the lock: hang the pages up to ``end`` into the tree, and return no operations. If another operation
        must end first, nothing changes; returned are the operations of which one has to end before the next attempt.
        Nothing is done if the fetch was closed meanwhile. If the pages above its own have left the tree, since a batch
        of the engine failed, the core revokes it instead."""
        if self.over:
            return ()
        hashes = self._hashes[self._pages_of(self.shape.anchor) * HASH_BYTES : self._pages_of(end) * HASH_BYTES]
        holders = [sharer.ticket for sharer in self.sharers]
        answer = self._driver.locked(self._driver.core.prefetch_commit, self.op, end, hashes, holders)
        if isinstance(answer, Wait):
            self._driver.perform(answer.plan)
            return answer.ops
        self._driver.perform(answer)
        if (self.op, Status.FAILED) not in answer.ended:
            self.end = end
            for sharer in self.sharers:
                sharer.claimed()
                sharer.reach(self.shape.covered, min(end, self._common(sharer.key) * self.shape.page_size))
        self.close()
        return ()

    def _hashes_of(self, pages: Sequence[int]) -> bytes:
        if isinstance(pages, range):
            return self._hashes[pages.start * HASH_BYTES : pages.stop * HASH_BYTES]
        return b"".join(self._hashes[page * HASH_BYTES : (page + 1) * HASH_BYTES] for page in pages)

    def _pages_of(self, tokens: int) -> int:
        return tokens // self.shape.page_size


def _batch(specs: Sequence[PoolSpec]) -> int:
    """Return how many pages of each of ``specs`` are read before the fetch looks again whether it was told to stop."""
    return max(1, min(BATCH_PAGES, BATCH_BYTES // max(1, sum(spec.bytes_per_page for spec in specs))))
