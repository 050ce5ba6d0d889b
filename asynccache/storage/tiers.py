"""Any number of stores used as one, nearest first; also one, or none.

What always holds:
* A page is written to all stores with the option ``write`` at the same time. It is stored if at least one took it.
* Pages are read from the nearest store first. Each farther one is asked only for those that are still missing, and what
  it had may be copied to the nearer ones (see ``promotion``).
* A store that was detached gets no new calls. It is closed when the calls under way in it have ended.
* A store's failure concerns that store alone: its breaker and its counters note it, and the other stores are asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from asynccache import checks
from asynccache.errors import Timeout
from asynccache.settle import OpenCalls
from asynccache.storage.call_guard import BreakerState, best_off
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import Hint, PageKey, Result, is_shared
from asynccache.storage.promotion import ROOM_BYTES, Promotions
from asynccache.storage.url import StoreOptions, check_name, place_of

_T = TypeVar("_T")

# If stores disagree about a page, the most informative answer wins: HIT > CORRUPT > FAILED > MISS. A MISS tells least:
# another store that FAILED may have the page.
_TELLS = tuple({Result.MISS: 0, Result.HIT: 3, Result.CORRUPT: 2, Result.FAILED: 1}[result] for result in Result)


class AttachedStore:
    """One of the stores, and how it is used (``options``)."""

    def __init__(self, store: CheckedStore, options: StoreOptions, *, owned: bool = True) -> None:
        self.store = store
        self.options = options
        self.owned = owned
        """Whether to close the store when it is detached."""
        self.shared = is_shared(store.backend)
        """Whether other processes find the store's pages (``contract.is_shared``)."""
        self.calls = OpenCalls(options.name)
        """The calls under way in the store; closed when it is detached."""
        self.promoted_to = False
        """True once pages of a farther store were to be copied to this one."""

    def __repr__(self) -> str:
        there = "detached" if self.calls.closed else "there"
        return f"AttachedStore({self.options.name!r}, {self.calls.running} calls, {there})"

    async def ask(self, call: Callable[[CheckedStore], Awaitable[_T]], absent: _T) -> _T:
        """Make ``call`` with this store and return what it returns; ``absent`` if the store was detached."""
        if self.calls.closed:
            return absent
        with self.calls:
            return await call(self.store)

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        """The same as ``CheckedStore.put``; FAILED for each key if the store was detached."""
        return await self.ask(lambda store: store.put(keys, payloads), [Result.FAILED] * len(keys))

    async def get(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        """The same as ``CheckedStore.get``; MISS for each key if the store was detached."""
        return await self.ask(lambda store: store.get(keys, payloads), [Result.MISS] * len(keys))

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        """The same as ``CheckedStore.exists``; MISS for each key if the store was detached."""
        return await self.ask(lambda store: store.exists(keys), [Result.MISS] * len(keys))


class TieredStore:
    """The attached stores, with the methods of one ``CheckedStore``. Belongs to one event loop.

    ``room``: bytes of memory for pages that are being promoted. ``threads``: how many threads copy those pages; with 0
    the loop does, for simulations.
    """

    def __init__(self, *, threads: int = 1, room: int = ROOM_BYTES) -> None:
        self.promotions = Promotions(room=room, threads=threads)
        self._stores: tuple[AttachedStore, ...] = ()
        self._leaving: dict[AttachedStore, None] = {}

    def __repr__(self) -> str:
        return f"TieredStore({', '.join(self.names)})"

    # which stores there are

    @property
    def attached(self) -> tuple[AttachedStore, ...]:
        """The stores, nearest first."""
        return self._stores

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stores, nearest first."""
        return tuple(attached.options.name for attached in self._stores)

    @property
    def writes(self) -> bool:
        """True if pages are written to at least one store."""
        return any(attached.options.write for attached in self._stores)

    @property
    def busy(self) -> list[str]:
        """The names of the stores, attached or leaving, that have calls under way."""
        return [one.options.name for one in (*self._stores, *self._leaving) if one.calls.running]

    def __bool__(self) -> bool:
        return bool(self._stores)

    def find(self, name: str | None) -> AttachedStore:
        """Return the store of this name, or the only store if ``name`` is None. Raises ConfigError: as ``place_of``."""
        return self._stores[place_of(name, self.names)]

    def check(self, options: StoreOptions, position: int | None = None) -> None:
        """Check that a store with these options can be attached at ``position``.

        Raises:
            ConfigError: another store has this name, or there is no such position.
        """
        check_name(options.name, self.names)
        if position is not None:
            checks.integer("position", position, 0, len(self._stores))

    def attach(self, attached: AttachedStore, position: int | None = None) -> None:
        """Use this store from now on, at ``position`` (0: the nearest; None: the farthest).

        Raises:
            ConfigError: as ``check`` does; then nothing has changed.
        """
        self.check(attached.options, position)
        position = None if position is None else checks.integer("position", position)
        at = len(self._stores) if position is None else position
        self._stores = (*self._stores[:at], attached, *self._stores[at:])

    def detach(self, attached: AttachedStore) -> None:
        """Give this store no more calls from now on. ``aclose_detached`` must follow. Calling it twice is fine."""
        if not attached.calls.closed:
            attached.calls.closed = True
            self._stores = tuple(other for other in self._stores if other is not attached)
            self._leaving[attached] = None

    async def aclose_detached(self, attached: AttachedStore) -> None:
        """Wait until no call is under way in a detached store, then close it if it is owned. If it is cancelled,
        ``aclose`` will close that store.

        Raises:
            BackendError: the backend could not close cleanly.
        """
        await attached.calls.ended.wait()
        try:
            if attached.owned:
                await attached.store.aclose()
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._leaving.pop(attached, None)
            raise
        self._leaving.pop(attached, None)

    # pages

    def writers(self, *, shared: bool = True) -> list[AttachedStore]:
        """Return the stores that pages are written to. With ``shared=False`` shared stores are left out, because
        another worker writes these pages to them."""
        return [one for one in self._stores if one.options.write and (shared or not one.shared)]

    async def put(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], *, shared: bool = True
    ) -> list[Result]:
        """Write each payload to all of ``writers(shared=shared)``. Returns a result for each key: HIT where at least
        one store has the page now; FAILED for all keys if there is no such store.

        Cancelling it returns after every store has let go of the payloads.
        """
        writers = self.writers(shared=shared)
        if len(writers) == 1:
            return await writers[0].put(keys, payloads)
        answers = await _all([attached.put(keys, payloads) for attached in writers])
        return _best(answers) if answers else [Result.FAILED] * len(keys)

    async def get(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], known: list[Result] | None = None
    ) -> list[Result]:
        """Read each page from the nearest store that has it into its payload. Returns a result for each key; where no
        store has the page, it is CORRUPT or FAILED if a store answered that, else MISS.

        ``known``, if given, is a list with a MISS for each key. If there are several stores, their answers are written
        into it as they come, and it is returned. So a caller who cancels the call still has the answers of the nearer
        stores. Cancelling it returns after the stores have let go of the payloads.
        """
        stores = self._stores
        if len(stores) == 1:
            return await stores[0].get(keys, payloads)
        results = [Result.MISS] * len(keys) if known is None else known
        deletions = self.promotions.deletions
        asked: list[tuple[AttachedStore, Sequence[int], list[Result]]] = []
        for attached in stores:
            part = _missing(results)
            if not part:
                break
            wanted, buffers = [keys[at] for at in part], [payloads[at] for at in part]
            answers = await attached.get(wanted, buffers)
            _take_over(results, part, answers)
            found = {at: i for i, at in enumerate(at for at in part if results[at] is Result.HIT)}
            lacking = []  # the stores before this one that have said that they lack some of these pages
            for nearer, its_part, its_answers in asked if found else ():
                lacks = [found[at] for at, answer in zip(its_part, its_answers, strict=True)
                         if at in found and answer is not Result.FAILED]  # fmt: skip
                if lacks and nearer.options.promote:
                    nearer.promoted_to = True
                    lacking.append((nearer, lacks))
            if lacking:
                pages, read = [keys[at] for at in found], [payloads[at] for at in found]
                await self.promotions.offer(pages, read, lacking, deletions)
            asked.append((attached, part, answers))
        return results

    def is_away(self, key: PageKey) -> bool:
        """Return True if there are stores and all of them refuse calls now. Probes with ``key`` are begun where they
        are due."""
        away = [attached.store.is_away(key) for attached in self._stores]
        return bool(away) and all(away)

    @property
    def shut(self) -> bool:
        """True if there are stores and all of them refuse calls now. Unlike ``is_away``, reading it begins no probe."""
        return bool(self._stores) and all(
            attached.store.breaker.state is not BreakerState.CLOSED for attached in self._stores
        )

    async def exists(self, keys: Sequence[PageKey], known: list[Result] | None = None) -> list[Result]:
        """Return for each page whether any store has it: HIT where one says so, else FAILED where one could not tell,
        else MISS. ``known``: as for ``get``. Cancelling it changes nothing."""
        stores = self._stores
        if len(stores) == 1:
            return await stores[0].exists(keys)
        results = [Result.MISS] * len(keys) if known is None else known
        for attached in stores:
            part = _missing(results)
            if not part:
                break
            _take_over(results, part, await attached.exists([keys[at] for at in part]))
        return results

    async def hint(self, verb: Hint, keys: Sequence[PageKey], seconds: float = 0.0) -> list[Result]:
        """Pass on a hint to all stores: HIT for each page that is as the hint wants it in one of them, else FAILED
        where one could not tell, else MISS. Cancelling it may leave any of it done."""
        absent = [Result.MISS] * len(keys)
        calls = [one.ask(lambda store: store.hint(verb, keys, seconds), absent) for one in self._stores]
        return _best(await _all(calls)) if calls else absent

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Delete the page of each key from all stores: FAILED where one of them could not, HIT where one had the page,
        else MISS. Cancelling it may leave any of them deleted."""
        try:
            async with self.promotions.paused(self._patience, keys):
                absent = [Result.MISS] * len(keys)
                answers = await _all([one.ask(lambda store: store.delete(keys), absent) for one in self._stores])
        except Timeout:
            return [Result.FAILED] * len(keys)
        failed = [Result.FAILED in found for found in zip(*answers, strict=True)] or [False] * len(keys)
        found = _best(answers) if answers else [Result.MISS] * len(keys)
        return [Result.FAILED if bad else best for bad, best in zip(failed, found, strict=True)]

    @property
    def _patience(self) -> float:
        """For how many seconds promotions that were cancelled are waited for."""
        return max((attached.options.timeout for attached in self._stores), default=0.0)

    # the whole

    async def clear(self) -> None:
        """Delete all pages from every store. Cancelling it may leave any of them cleared.

        Raises:
            BackendError: one of them failed; the others were cleared.
        """
        async with self.promotions.paused(self._patience):
            await _all([attached.ask(CheckedStore.clear, None) for attached in self._stores])

    async def flush(self) -> None:
        """Return once all pages stored so far would survive a power loss, as far as the stores promise that. If it is
        cancelled, some of them may not survive one.

        Raises:
            BackendError: one of them failed; the others were asked all the same.
        """
        written = [one for one in self._stores if one.options.write or one.promoted_to]
        await _all([attached.ask(CheckedStore.flush, None) for attached in written])

    def stats(self) -> Mapping[str, int | float]:
        """Return the sums of the stores' counters. ``breaker`` is the best state among them (see ``best_off``). The
        mapping is empty if there is no store."""
        stores = self.store_stats().values()
        if not stores:
            return {}
        sums: Counter[str] = Counter()
        for figures in stores:
            sums.update(figures)
        counts = self.promotions.counts
        promotions = {f"{name}_pages": counts[name] for name in ("promoted", "unpromoted")} if len(stores) > 1 else {}
        return {**sums, **promotions, "breaker": int(best_off(figures["breaker"] for figures in stores))}

    def store_stats(self) -> Mapping[str, Mapping[str, int | float]]:
        """Return each store's counters by the store's name, nearest first."""
        return {attached.options.name: dict(attached.store.stats()) for attached in self._stores}

    async def aclose(self) -> None:
        """Detach every store, and close each owned one when no call is under way in it. Calling it twice is fine;
        cancelling it may leave some of them open.

        Raises:
            BackendError: one of them could not close cleanly; the others were closed.
        """
        for attached in self._stores:
            self.detach(attached)
        await self.promotions.aclose()
        await _all([self.aclose_detached(attached) for attached in tuple(self._leaving)])


def _missing(results: Sequence[Result]) -> list[int]:
    hit = Result.HIT
    return [at for at, result in enumerate(results) if result is not hit]


def _take_over(results: list[Result], part: Sequence[int], answers: Sequence[Result]) -> None:
    """Put ``answers`` into ``results`` at the positions ``part``, where they are more informative."""
    for at, answer in zip(part, answers, strict=True):
        if _TELLS[answer] > _TELLS[results[at]]:
            results[at] = answer


def _best(answers: Sequence[Sequence[Result]]) -> list[Result]:
    """Return the most informative of the stores' answers for each key."""
    return [max(results, key=_TELLS.__getitem__) for results in zip(*answers, strict=True)]


async def _all(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all calls at the same time and to their ends. Returns what they return, in their order, or raises the first
    of their errors. Cancelling it cancels them all and returns when they have ended."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    error = next((answer for answer in answers if isinstance(answer, BaseException)), None)
    if error is None:
        return answers
    try:
        raise error
    finally:
        del answers, error  # else they and this frame would keep each other and the caller's buffers alive
