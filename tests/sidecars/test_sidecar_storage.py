"""Between host and storage: in which order pools are written and read, and what one page that is missing, corrupt or
failing, in any pool and at any place, does to a prefix: it becomes the longest one that is complete in every pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheConfig, PrefetchHandle
from asynccache.core.settings import ComponentKind
from asynccache.runtime import prefetch as prefetch_module
from asynccache.runtime.prefetch import Wish
from asynccache.storage import PageKey, Record, Result, StorageBackend
from asynccache.testing.wrapped_backend import WrappedBackend
from asynccache.worker.pool_layout import PoolMap
from tests.runtime.runtime_kit import settled
from tests.sidecars.sidecar_kit import (
    STACKS,
    deepseek,
    needed,
    of,
    opened,
    page_hashes,
    serve,
    solid,
    spoil_device,
    text,
    verify,
)

pytestmark = pytest.mark.slow(0.4)

PAGES = 6
Place = tuple[str, int]


@dataclass
class Call:
    """One call of the backend. ``began``, ``ended``: how many calls had begun before it, and when it was over."""

    name: str
    keys: tuple[PageKey, ...]
    began: int
    ended: int = 0


class Trouble(WrappedBackend):
    """``bad``: what is wrong with a page. ``missing``: it is not there; ``vanished``: it goes after it was seen;
    ``corrupt``: a bit is wrong; ``failed``: it cannot be read; ``unknown``: nor can it be known whether it is there;
    ``refused``: it cannot be written. ``hold``: called before a ``get``."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.bad: dict[PageKey, str] = {}
        self.calls: list[Call] = []
        self.hold: Callable[[Sequence[PageKey]], Awaitable[None]] | None = None

    async def exists(self, keys: Sequence[PageKey]) -> list[Result]:
        answers = {"missing": Result.MISS, "unknown": Result.FAILED}
        return self._say(keys, await self.inner.exists(keys), answers)

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        if self.hold is not None:
            await self.hold(keys)
        results = await self._log("get", keys, self.inner.get(keys, records))
        for key, record in zip(keys, records, strict=True):
            if self.bad.get(key) == "corrupt":
                record.payload[record.payload.nbytes - 1] ^= 0x40
        return self._say(keys, results, {"vanished": Result.MISS, "failed": Result.FAILED})

    async def put(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        good = [i for i, key in enumerate(keys) if self.bad.get(key) != "refused"]
        call = self.inner.put([keys[i] for i in good], [records[i] for i in good])
        stored = dict(zip(good, await self._log("put", keys, call), strict=True))
        return [stored.get(i, Result.FAILED) for i in range(len(keys))]

    async def delete(self, keys: Sequence[PageKey]) -> list[Result]:
        """What is corrupt here is not so in ``inner``."""
        return [Result.HIT] * len(keys)

    def _say(self, keys: Sequence[PageKey], results: list[Result], answers: dict[str, Result]) -> list[Result]:
        return [answers.get(self.bad.get(key, ""), result) for key, result in zip(keys, results, strict=True)]

    async def _log(self, name: str, keys: Sequence[PageKey], call: Awaitable[list[Result]]) -> list[Result]:
        made = Call(name, tuple(keys), len(self.calls))
        self.calls.append(made)
        await asyncio.sleep(0)  # whoever does not wait for the end of a call is seen
        results = await call
        made.ended = len(self.calls)
        return results

    def places(self, config: CacheConfig, tokens: Sequence[int], name: str) -> list[tuple[Call, list[Place]]]:
        """The calls of this name, with the pages of ``tokens`` that each was about."""
        where = {key: place for place, key in keys_of(config, tokens).items()}
        return [(call, [where[key] for key in call.keys if key in where]) for call in self.calls if call.name == name]


def keys_of(config: CacheConfig, tokens: Sequence[int]) -> dict[Place, PageKey]:
    pools = PoolMap(config.pools(), config.page_size, {})
    hashes = page_hashes(config, tokens)
    return {(spec.name, i): pools.key(spec.name, h) for spec in solid(config) for i, h in enumerate(hashes)}


def longest(config: CacheConfig, pages: int, bad: Collection[Place]) -> int:
    """The longest end (pages) at which no pool needs a bad page."""
    ends = range(pages, 0, -1)
    size = config.page_size
    return next((e for e in ends if not any((s.name, i) in bad for s, i in needed(config, e * size))), 0)


@asynccontextmanager
async def stored(config: CacheConfig, prompts: Sequence[list[int]], chunk: int = 1) -> AsyncIterator[Trouble]:
    """A backend that has every page of every pool of ``prompts``, and the states of every second page."""
    backend = Trouble(MemoryBackend())
    async with opened(config, storage=backend) as cache:
        for prompt in prompts:
            for pages in (2, 4, PAGES):
                await serve(cache, prompt[: pages * config.page_size], chunk)
                await settled(cache)
        assert await cache.flush() == (0, 0)
    yield backend
    await backend.aclose()


# order


def classes(config: CacheConfig) -> dict[str, int]:
    """In which order pools are read: FULL, what follows it, the auxiliary components."""
    pools = PoolMap(config.pools(), config.page_size, {})
    order = {spec.name: 2 for spec in solid(config)}
    order.update({spec.name: 1 for spec in pools.follow})
    order.update({spec.name: 0 for spec in pools.lead})
    return order


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("stack", STACKS)
async def test_full_is_written_when_everything_else_of_its_pages_is_stored(stack: str, chunk: int) -> None:
    config = STACKS[stack](device=32, host=64)
    prompt = text(config, PAGES)
    async with stored(config, [prompt], chunk) as backend:
        order = classes(config)
        puts = backend.places(config, prompt, "put")
        first = {place: call for call, places in reversed(puts) for place in places}
        assert {name for name, _ in first} == set(order)
        for (name, page), call in first.items():
            for (lead, same), then in first.items():
                if order[lead] == 0 and same == page and order[name] > 0:
                    assert call.ended <= then.began, f"{lead} page {page} began to be stored before {name} was"


@pytest.mark.parametrize("stack", STACKS)
async def test_sidecars_are_read_when_all_of_full_is_there_and_windows_last(stack: str) -> None:
    config = STACKS[stack]()
    prompt = text(config, PAGES, extra=1)
    async with stored(config, [prompt]) as backend:
        backend.calls.clear()
        async with opened(config, storage=backend) as cache, cache.lease(prompt) as lease:
            await lease.loaded()
            verify(cache, lease, prompt[:-1])
        order = classes(config)
        reads = backend.places(config, prompt, "get")
        ranks = [order[name] for _, places in reads for name, _ in places]
        assert ranks == sorted(ranks)
        assert all(call.ended == call.began + 1 for call, _ in reads), "each read ends before the next begins"
        read = [place for _, places in reads for place in places]
        assert sorted(read) == sorted((s.name, i) for s, i in needed(config, PAGES * config.page_size))


async def cached(cache: AsyncCache, prompt: Sequence[int]) -> int:
    """How many pages a lease gets, every byte of every pool verified."""
    async with cache.lease(prompt) as lease:
        await lease.loaded()
        verify(cache, lease, prompt)
        return lease.cached // cache.config.page_size


# one bad page


@pytest.mark.parametrize("stack", ["indexed", "everything", "deepseek"])
async def test_one_bad_page_in_any_pool_shortens_to_the_longest_end_that_is_complete_in_every_pool(stack: str) -> None:
    places = [(spec.name, page) for spec in solid(STACKS[stack]()) for page in range(PAGES)]
    config = STACKS[stack](device=24, host=PAGES * (len(places) + 2))
    prompts = [text(config, PAGES, seed, extra=1) for seed in range(len(places))]
    async with stored(config, prompts) as backend:
        for kind in ("missing", "vanished", "corrupt", "failed", "unknown"):
            ends = set()
            async with opened(config, storage=backend) as cache:
                for place, prompt in zip(places, prompts, strict=True):
                    backend.bad = {keys_of(config, prompt)[place]: kind}
                    end = longest(config, PAGES, [place, *never_stored(config)])
                    assert await cached(cache, prompt) == end, (kind, place)
                    spoil_device(cache)
                    ends.add(end)
            backend.bad.clear()
            assert len(ends) > 2


def never_stored(config: CacheConfig) -> list[Place]:
    """Only every second page has a state."""
    return [(name, page) for name in of(config, ComponentKind.MAMBA) for page in range(0, PAGES, 2)]


@pytest.mark.parametrize("pool", ["swa", "c4_state", "c4_indexer_state", "c128_state"])
async def test_a_window_is_there_in_all_of_its_pools_or_not_at_all_and_is_read_again_where_the_prefix_ends(
    pool: str,
) -> None:
    """The last page of one pool fails: the prefix ends a page earlier, and the keys that are read then are those of its
    own window. Nothing of the window that failed stays on the host."""
    config = deepseek()
    prompt = text(config, PAGES, extra=1)
    async with stored(config, [prompt]) as backend:
        backend.bad = {keys_of(config, prompt)[pool, PAGES - 1]: "failed"}
        backend.calls.clear()
        async with opened(config, storage=backend) as cache:
            assert (await cache.prefetch(prompt)).tokens == (PAGES - 1) * config.page_size
            await settled(cache)
            used = {name: shelf.capacity - shelf.free for name, shelf in cache.statistics().host.items()}
            assert used == {"full": PAGES - 1, "swa": 2}
            hanging = of(config, ComponentKind.SWA)
            reads = [[p for p in places if p[0] in hanging] for _, places in backend.places(config, prompt, "get")]
            reads = [places for places in reads if places]
            assert reads == [
                *([(name, PAGES - 2), (name, PAGES - 1)] for name in hanging),
                *([(name, PAGES - 3), (name, PAGES - 2)] for name in hanging),
            ]
            assert await cached(cache, prompt) == PAGES - 1


@pytest.mark.parametrize("stack", ["indexed", "everything", "deepseek"])
async def test_full_is_not_written_where_another_pool_could_not_be(stack: str) -> None:
    """Any pool, any page: a reader never finds FULL's page where one beside it is missing. Later all of it is saved."""
    config = STACKS[stack](device=32, host=64)
    prompt = text(config, PAGES, extra=1)
    keys, order = keys_of(config, prompt), classes(config)
    states = of(config, ComponentKind.MAMBA)
    for refused in keys:
        pool, page = refused
        if page not in ((PAGES - 1,) if pool in states else (0, 3, PAGES - 1)):
            continue
        backend = Trouble(MemoryBackend())
        backend.bad = {keys[refused]: "refused"}
        async with opened(config, storage=backend) as cache:
            await serve(cache, prompt, chunk=1)
            unsaved = await cache.flush()
            there = await present(backend.inner, keys)
            assert refused not in there
            assert unsaved.storage > 0
            if order[pool]:
                assert not {name for name, i in there if i == page and order[name] == 0}
        async with opened(config, storage=backend) as cache:
            assert await cached(cache, prompt) == longest(config, PAGES, [p for p in keys if p not in there]), refused
            backend.bad.clear()
            await serve(cache, prompt, chunk=1)
            assert await cache.flush() == (0, 0)
        async with opened(config, storage=backend) as cache:
            assert await cached(cache, prompt) == PAGES, refused
        await backend.aclose()


async def present(backend: StorageBackend, keys: dict[Place, PageKey]) -> set[Place]:
    results = await backend.exists(list(keys.values()))
    return {place for place, result in zip(keys, results, strict=True) if result is Result.HIT}


# stops and cancellations


class Held:
    """Stops before the ``at``-th read of a pool, until it is let go."""

    def __init__(self, pool: str, at: int) -> None:
        self.pool = pool
        self.left = at
        self.reached = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, keys: Sequence[PageKey]) -> None:
        if keys[0].pool == self.pool:
            self.left -= 1
            if self.left == 0:
                self.reached.set()
                await self.go.wait()


@asynccontextmanager
async def held_fetch(stack: str, pool: str, at: int) -> AsyncIterator[tuple[AsyncCache, PrefetchHandle, Held]]:
    """A fetch that stops before the ``at``-th read of a pool; at the end all of its prompt can be fetched."""
    config = STACKS[stack]()
    prompt = text(config, PAGES, extra=1)
    async with stored(config, [prompt]) as backend:
        backend.hold = held = Held(pool, at)
        async with opened(config, storage=backend) as cache:
            handle = cache.prefetch(prompt)
            await held.reached.wait()
            yield cache, handle, held
            backend.hold = None
            assert await cached(cache, prompt) == PAGES


@pytest.mark.parametrize(
    ("stack", "pool", "at", "pages"),
    [
        ("indexed", "full", 2, 4),  # FULL ends with the batch that is read; the sidecar follows it that far
        ("indexed", "indexer", 1, 2),  # the sidecar ends with the batch that is read, and FULL is too long for it
        ("indexed", "indexer", 2, 4),
        ("indexed", "indexer", 3, 6),
        ("deepseek", "c128", 1, 2),  # FULL is logical: what derives from it is FULL
        ("deepseek", "c4", 3, 6),
        ("deepseek", "c4_state", 1, 6),  # windows are read to their end
    ],
)
async def test_a_stop_leaves_a_prefix_that_is_complete_in_every_pool(
    stack: str, pool: str, at: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch_module, "BATCH_PAGES", 2)
    async with held_fetch(stack, pool, at) as (cache, handle, held):
        handle._prefetch.tell(Wish.STOP)
        held.go.set()
        end = pages * cache.config.page_size
        assert (await handle).tokens == (await cache.match(text(cache.config, PAGES, extra=1))).host == end


@pytest.mark.parametrize("pool", [spec.name for spec in solid(deepseek())])
async def test_a_fetch_that_is_cancelled_in_the_middle_of_any_pool_leaves_nothing(pool: str) -> None:
    async with held_fetch("deepseek", pool, 1) as (cache, handle, held):
        handle.cancel()
        held.go.set()
        await handle
        await settled(cache)
        assert all(shelf.free == shelf.capacity for shelf in cache.statistics().host.values())


@pytest.mark.parametrize("pool", ["c4", "c4_indexer", "c128", "draft"])
async def test_a_page_of_a_logical_full_is_in_storage_if_each_of_its_pools_has_it(pool: str) -> None:
    config = deepseek()
    prompt = text(config, PAGES, extra=1)
    async with stored(config, [prompt]) as backend:
        backend.bad = {keys_of(config, prompt)[pool, 3]: "missing"}
        async with opened(config, storage=backend) as cache:
            explained = await cache.explain(prompt)
            assert [(s.start // 4, s.stop // 4, s.where.value) for s in explained.spans] == [
                (0, 3, "storage"), (3, 4, "nowhere"), (4, 6, "storage"),
            ]  # fmt: skip
            assert explained.storage == 3 * config.page_size
