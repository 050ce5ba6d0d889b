"""Several stores as one, nearest first. This is what the runtime talks to, with one store, with many, with none.

Laws:
* A page goes to every store that is written, at once; it is stored if one of them took it.
* The nearest store is asked first, and each farther one only for what is missing still. What it had may be copied to
  the nearer ones (see ``promotion``).
* A store that was detached is asked nothing more. Whoever is inside finishes; only then is it closed.
* What one store fails at is its own affair: its breaker hears of it, its counters show it, the others are asked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.storage.breaker import BreakerState, best_off
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import PageKey, Result, is_shared
from asynccache.storage.options import StoreOptions, check_name
from asynccache.storage.promotion import PROMOTION_POOL, ROOM_BYTES, Promotions, Wanted

Call = Callable[[CheckedStore], Awaitable[list[Result]]]

# By result: how much it tells. What one store is sure not to have, another may have failed to look for.
_TELLS = tuple({Result.MISS: 0, Result.HIT: 3, Result.CORRUPT: 2, Result.FAILED: 1}[result] for result in Result)


class Attached:
    """A store among others: ``options`` say how it is used. ``owned``: it is closed when it leaves. ``shared``: see
    ``is_shared``. ``there``: false once it was detached."""

    def __init__(self, store: CheckedStore, options: StoreOptions, *, owned: bool = True) -> None:
        self.store = store
        self.options = options
        self.owned = owned
        self.shared = is_shared(store.backend)
        self.there = True
        self.told = False
        self._calls = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def __repr__(self) -> str:
        return f"Attached({self.options.name!r}, {self._calls} inside, {'there' if self.there else 'detached'})"

    async def ask(self, count: int, call: Call, absent: Result) -> list[Result]:
        """``call`` it, if it is still there; else ``absent`` for each of ``count`` keys. Cancelling it is cancelling
        the call."""
        if not self.there:
            return [absent] * count
        self._calls += 1
        self._empty.clear()
        try:
            return await call(self.store)
        finally:
            self._calls -= 1
            if not self._calls:
                self._empty.set()

    async def put(self, keys: Sequence[PageKey], payloads: Sequence[memoryview]) -> list[Result]:
        """As ``CheckedStore.put``."""
        return await self.ask(len(keys), lambda store: store.put(keys, payloads), Result.FAILED)

    async def act(self, call: Callable[[CheckedStore], Awaitable[None]]) -> None:
        """The same for a call without keys; nothing, if it is not there any more."""

        async def acted(store: CheckedStore) -> list[Result]:
            await call(store)
            return []

        await self.ask(0, acted, Result.MISS)

    async def left(self) -> None:
        """Return when nobody is inside. Cancelling it stops the waiting."""
        await self._empty.wait()


class TieredStore:
    """The face of ``CheckedStore`` over those that are attached. Belongs to one event loop.

    ``threads`` 0: nothing is copied in threads, for simulations. ``room``: bytes for pages that are being promoted.
    """

    def __init__(self, *, threads: int = 1, room: int = ROOM_BYTES) -> None:
        self.promotions = Promotions(room=room, threads=threads)
        self._stores: tuple[Attached, ...] = ()
        self._leaving: dict[Attached, None] = {}

    def __repr__(self) -> str:
        return f"TieredStore({', '.join(self.names)})"

    # who is there

    @property
    def attached(self) -> tuple[Attached, ...]:
        """The stores, nearest first."""
        return self._stores

    @property
    def names(self) -> tuple[str, ...]:
        """What they are called, nearest first."""
        return tuple(attached.options.name for attached in self._stores)

    @property
    def writes(self) -> bool:
        """Whether any of them is written."""
        return any(attached.options.write for attached in self._stores)

    def __bool__(self) -> bool:
        return bool(self._stores)

    def find(self, name: str | None) -> Attached:
        """The store of this name; None: the only one.

        Raises:
            ConfigError: there is none of this name; or several, and no name was given.
        """
        if name is not None:
            name = checks.text("name", name)
        found = [attached for attached in self._stores if name in (None, attached.options.name)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(self.names) or "none"
        raise ConfigError(f"storage: {'name the store' if name is None else f'no store {name!r}'}; attached: {there}")

    def check(self, options: StoreOptions, position: int | None = None) -> None:
        """Whether such a store may be attached there.

        Raises:
            ConfigError: the name is taken, or there is no such position.
        """
        check_name(options.name, self.names)
        if position is not None:
            checks.integer("position", position, 0, len(self._stores))

    def attach(self, attached: Attached, position: int | None = None) -> None:
        """From now on it is asked, at ``position`` (0: the nearest; None: the farthest).

        Raises:
            ConfigError: as ``check``; then nothing was changed.
        """
        self.check(attached.options, position)
        position = None if position is None else checks.integer("position", position)
        self._stores = self.introduce(attached, position)

    def introduce(self, attached: Attached, position: int | None = None) -> tuple[Attached, ...]:
        """Tell those that would be nearer than another one, with ``attached`` there, where promoted pages will lie.
        Returns who would be there. ``attach`` does it, too; what may fail has been done then."""
        at = len(self._stores) if position is None else position
        stores = (*self._stores[:at], attached, *self._stores[at:])
        for nearer in stores[:-1]:
            if nearer.options.promote and not nearer.told:
                nearer.store.register(PROMOTION_POOL, self.promotions.ring.memory)
                nearer.told = True
        return stores

    def detach(self, attached: Attached) -> None:
        """From now on it is asked nothing more; ``aclose_detached`` must follow. Twice is once."""
        if attached.there:
            attached.there = False
            self._stores = tuple(other for other in self._stores if other is not attached)
            self._leaving[attached] = None

    async def aclose_detached(self, attached: Attached) -> None:
        """Close a detached store, if it is ours, once everybody has left it. Cancelling it leaves that to ``aclose``.

        Raises:
            BackendError: the backend could not close cleanly.
        """
        await attached.left()
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

    def writers(self, *, shared: bool = True) -> list[Attached]:
        """Those that are written; ``shared`` false: without those that other workers write to, too."""
        return [one for one in self._stores if one.options.write and (shared or not one.shared)]

    async def put(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], *, shared: bool = True
    ) -> list[Result]:
        """Store each payload; HIT where at least one store has it now. FAILED, if none is written. ``shared``: as for
        ``writers``.

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
        """Fill each payload from the nearest store that has it. Where none has, the most telling answer.

        ``known``: a MISS for each key, which is what is returned. It takes up each store's answers as they come, so
        that who cancels the call still has those of the nearer stores.
        Cancelling it returns after the stores have let go of the payloads.
        """
        stores = self._stores
        if len(stores) == 1:
            return await stores[0].ask(len(keys), lambda store: store.get(keys, payloads), Result.MISS)
        results = [Result.MISS] * len(keys) if known is None else known
        era = self.promotions.era
        asked: list[tuple[Attached, Sequence[int], list[Result]]] = []
        for attached in stores:
            part = _missing(results)
            if not part:
                break
            answers = await _get_part(attached, keys, payloads, part)
            _take_over(results, part, answers)
            found = [at for at in part if results[at] is Result.HIT]
            if found and asked:
                await self._promote(keys, payloads, found, asked, era)
            asked.append((attached, part, answers))
        return results

    def is_away(self, key: PageKey) -> bool:
        """Whether each of them refuses calls now. Probes may be begun, for ``key``."""
        away = [attached.store.is_away(key) for attached in self._stores]
        return bool(away) and all(away)

    @property
    def shut(self) -> bool:
        """The same, and nothing is begun. Not so without a store."""
        return bool(self._stores) and all(
            attached.store.breaker.state is not BreakerState.CLOSED for attached in self._stores
        )

    async def exists(self, keys: Sequence[PageKey], known: list[Result] | None = None) -> list[Result]:
        """HIT where any store says so, FAILED where that cannot be known. ``known``: as for ``get``. Cancelling it
        changes nothing."""
        stores = self._stores
        if len(stores) == 1:
            return await stores[0].ask(len(keys), lambda store: store.exists(keys), Result.MISS)
        results = [Result.MISS] * len(keys) if known is None else known
        for attached in stores:
            part = _missing(results)
            if not part:
                break
            asked = [keys[at] for at in part]
            _take_over(results, part, await attached.ask(len(asked), _exists(asked), Result.MISS))
        return results

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """Forget each key everywhere; FAILED where a store could not. Cancelling it may leave any of them deleted."""
        async with self.promotions.forgetting(keys):
            answers = await _all([
                attached.ask(len(keys), lambda store: store.delete(keys), Result.MISS) for attached in self._stores
            ])  # fmt: skip
        failed = [Result.FAILED in found for found in zip(*answers, strict=True)] or [False] * len(keys)
        found = _best(answers) if answers else [Result.MISS] * len(keys)
        return [Result.FAILED if bad else best for bad, best in zip(failed, found, strict=True)]

    async def _promote(
        self, keys: Sequence[PageKey], payloads: Sequence[memoryview], found: Sequence[int],
        asked: Sequence[tuple[Attached, Sequence[int], list[Result]]], era: int,
    ) -> None:
        """Offer what was just found to those who were asked before and know that they lack it."""
        place = {at: i for i, at in enumerate(found)}
        wanted = []
        for attached, part, answers in asked:
            lacks = [place[at] for at, answer in zip(part, answers, strict=True)
                     if at in place and answer is not Result.FAILED]  # fmt: skip
            if lacks and attached.options.promote:
                wanted.append(Wanted(attached, lacks))
        if wanted:
            await self.promotions.offer([keys[at] for at in found], [payloads[at] for at in found], wanted, era)

    # the whole

    async def clear(self) -> None:
        """Forget everything, in every store. Cancelling it may leave any of them cleared.

        Raises:
            BackendError: one of them could not; the others were cleared.
        """
        async with self.promotions.forgetting():
            await _all([attached.act(lambda store: store.clear()) for attached in self._stores])

    async def flush(self) -> None:
        """Return once everything put so far would survive a power loss, as far as the stores promise that. Cancelling
        it leaves some of it volatile.

        Raises:
            BackendError: one of them could not; the others were asked.
        """
        await _all([attached.act(lambda store: store.flush()) for attached in self._stores if attached.options.write])

    def stats(self) -> Mapping[str, int | float]:
        """The sums of what the stores count; ``breaker``: as that of the one that is best off. {} without a store."""
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
        """What each store counts, by its name, nearest first."""
        return {attached.options.name: dict(attached.store.stats()) for attached in self._stores}

    async def aclose(self) -> None:
        """Detach every store, and close those that are ours once everybody has left them. Twice is fine; cancelling it
        may leave some of them open.

        Raises:
            BackendError: one of them could not close cleanly; the others were closed.
        """
        for attached in self._stores:
            self.detach(attached)
        await self.promotions.aclose()
        await _all([self.aclose_detached(attached) for attached in tuple(self._leaving)])


async def _get_part(
    attached: Attached, keys: Sequence[PageKey], payloads: Sequence[memoryview], part: Sequence[int]
) -> list[Result]:
    wanted, buffers = [keys[at] for at in part], [payloads[at] for at in part]
    return await attached.ask(len(part), lambda store: store.get(wanted, buffers), Result.MISS)


def _exists(keys: Sequence[PageKey]) -> Call:
    return lambda store: store.exists(keys)


def _missing(results: Sequence[Result]) -> list[int]:
    hit = Result.HIT
    return [at for at, result in enumerate(results) if result is not hit]


def _take_over(results: list[Result], part: Sequence[int], answers: Sequence[Result]) -> None:
    """Keep the more telling of what was known and what was answered."""
    for at, answer in zip(part, answers, strict=True):
        if _TELLS[answer] > _TELLS[results[at]]:
            results[at] = answer


def _best(answers: Sequence[Sequence[Result]]) -> list[Result]:
    """By key, the most telling answer."""
    return [max(results, key=_TELLS.__getitem__) for results in zip(*answers, strict=True)]


async def _all(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Every call to its end, at once; then the first error is raised. Cancelling it cancels them all and returns when
    they have ended."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    error = next((answer for answer in answers if isinstance(answer, BaseException)), None)
    if error is None:
        return answers
    try:
        raise error
    finally:
        del answers, error  # else they and this frame would keep each other, and the caller's buffers
