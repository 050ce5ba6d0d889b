"""A lease after its door: dropped, handed over, taken with a handle, or without its loads awaited."""

from __future__ import annotations

import asyncio
import copy
import gc
import sys
import threading
import warnings
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from asynccache_backends.memory import MemoryBackend

from asynccache import (
    AsyncCache,
    CacheClosed,
    CacheFull,
    ConfigError,
    Lease,
    PrefetchHandle,
)
from asynccache.hashes import namespace_digest
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.host_copies import Faults
from asynccache.runtime.core_calls import acquire, holding
from asynccache.runtime.tokens import Chain, as_key
from tests.runtime.runtime_kit import (
    LAYERS,
    PAGE,
    compute,
    fence_all,
    free,
    gate,
    local,
    on_the_host,
    opened,
    page_hashes,
    parts,
    serve,
    settings,
    settled,
    text,
    turns,
    until,
)

# A lease that is dropped without its ``async with`` ending gives its pages back, and says where it was taken.


def line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _drop(things: list[asyncio.Task[None]]) -> None:
    things.clear()
    gc.collect()


async def test_a_dropped_lease_gives_its_pages_back_and_names_its_place() -> None:
    async with opened(settings(device=8)) as cache:
        frame = sys._getframe()
        lease = await cache.lease(text(6)).__aenter__(); place = line_of(frame)  # noqa: E702  on one line
        with pytest.warns(ResourceWarning, match=r"^Lease\(0 cached, .*taken at .*without being released") as told:
            del lease
        assert place in str(told[0].message)
        assert free(cache) == 2, "it is given back by the loop, not wherever garbage is found"
        await turns()
        assert free(cache) == 8
        assert cache.statistics().leases == 0


async def test_a_task_that_failed_with_its_lease_keeps_nothing_alive() -> None:
    """Its traceback does, as long as somebody has it: the cache itself has neither the lease nor the task."""
    async with opened(settings(device=8)) as cache:

        async def careless() -> None:
            lease = await cache.lease(text(8)).__aenter__()
            raise ValueError(lease)

        tasks = [asyncio.create_task(careless())]
        await asyncio.wait(tasks)
        assert isinstance(tasks[0].exception(), ValueError)
        assert free(cache) == 0
        with pytest.warns(ResourceWarning):
            _drop(tasks)
        await turns()
        assert free(cache) == 8


async def test_dropped_pages_wait_for_the_events_that_the_lease_has_been_told() -> None:
    async with opened(settings(device=8)) as cache:
        ready = gate(cache)
        lease = await cache.lease(text(2), new_tokens=6 * PAGE).__aenter__()
        compute(cache, lease, text(2))
        await lease.commit(text(2), after=ready)
        with pytest.warns(ResourceWarning):
            del lease
        await turns()
        assert cache.statistics().leases == 0
        assert free(cache) == 0
        ready.open()
        await until(lambda: free(cache) == 6)
        assert await serve(cache, [*text(2), 1]) == 2 * PAGE


@pytest.mark.source
async def test_garbage_that_another_thread_finds_is_given_back_by_the_loop() -> None:
    async with opened(settings(device=8)) as cache:
        leases = [await cache.lease(text(8)).__aenter__()]
        threads: list[int] = []
        release = parts(cache).core.release

        def watched(*args: object, **more: object) -> object:
            threads.append(threading.get_ident())
            return release(*args, **more)  # type: ignore[arg-type]

        parts(cache).core.release = watched  # type: ignore[method-assign, assignment]
        with pytest.warns(ResourceWarning):
            await asyncio.to_thread(leases.clear)
        await until(lambda: free(cache) == 8)
        assert threads == [threading.get_ident()]


async def test_a_warning_that_is_an_error_keeps_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(settings(device=8)) as cache:
        lease = await cache.lease(text(8)).__aenter__()
        heard: list[object] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda args: heard.append(args.exc_type))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del lease
            gc.collect()
        monkeypatch.undo()
        assert heard == [ResourceWarning]
        await turns()
        assert free(cache) == 8


@pytest.mark.parametrize("how", ["released", "left", "never entered", "entered in vain", "of a closed cache"])
async def test_a_lease_that_holds_nothing_says_nothing(how: str) -> None:
    lease: Lease | None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with opened(settings(device=8), idle=how != "of a closed cache") as cache:
            lease = cache.lease(text(2), wait=how != "entered in vain")
            if how == "left":
                async with lease:
                    pass
            elif how in ("released", "of a closed cache"):
                await lease.__aenter__()
                if how == "released":
                    lease.release()
            elif how == "entered in vain":
                async with cache.lease(text(8, 1)):
                    with pytest.raises(CacheFull):
                        await lease.__aenter__()
            if how != "of a closed cache":
                del lease
                gc.collect()
                await turns()
        lease = None
        gc.collect()


async def test_a_lease_that_outlives_its_loop_is_garbage_like_any_other() -> None:
    """Nobody is there to give anything back, and nothing is said."""
    ended = asyncio.new_event_loop()
    ended.close()
    async with opened(settings(device=8), idle=False) as cache:
        lease = await cache.lease(text(8)).__aenter__()
        lease._head = copy.copy(lease._head)
        lease._head.loop = ended
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del lease
            gc.collect()


# A handle of ``prefetch`` serves one lease of the same tokens. One of other tokens, or of another namespace, is
# refused by name; one that has had its lease, or was cancelled, counts as none.


PAGES = 63
PROMPT = text(PAGES, extra=1)


@asynccontextmanager
async def stored(folder: Path, namespace: str | None = None) -> AsyncIterator[AsyncCache]:
    """A new cache over a file store that has the prompt's pages."""
    config = settings(
        device=2 * PAGES, host=2 * PAGES, storage=f"file:{folder}/kv?capacity=16MiB", prefetch_policy="wait_complete"
    )
    async with opened(config) as cache:
        async with cache.lease(PROMPT, namespace=namespace) as lease:
            await lease.loaded()
            compute(cache, lease, PROMPT)
            await lease.commit(PROMPT)
        await cache.flush()
    async with opened(config) as cache:
        yield cache


async def _found(cache: AsyncCache, handle: PrefetchHandle | None, namespace: str | None = None) -> int:
    async with cache.lease(PROMPT, prefetch=handle, namespace=namespace) as lease:
        await lease.loaded()
        return lease.cached


@pytest.mark.parametrize(
    ("what", "make"),
    [("other tokens", lambda cache: cache.prefetch(text(PAGES, seed=1))),
     ("other tokens", lambda cache: cache.prefetch(text(0, seed=1, extra=2))),
     ("other tokens", lambda cache: cache.prefetch([*PROMPT[:-5], 7, 7, 7])),
     ("another namespace", lambda cache: cache.prefetch(PROMPT, namespace="a")),
     ("another namespace", lambda cache: cache.prefetch(PROMPT, namespace=b""))],
    ids=["another prompt", "a short one", "a fork", "of a", "of bytes"],
)  # fmt: skip
async def test_a_handle_that_cannot_be_of_use_is_refused_by_name(
    what: str, make: Callable[[AsyncCache], PrefetchHandle]
) -> None:
    async with opened(settings(2 * PAGES, host=2 * PAGES, swa=2 * PAGES, storage="memory:")) as cache:
        handle = make(cache)
        with pytest.raises(ConfigError, match=f"^prefetch=PrefetchHandle.* is a handle of {what}"):
            cache.lease(PROMPT, prefetch=handle)
        assert cache.statistics().leases == 0
        await handle
        async with cache.lease(PROMPT) as lease:
            assert lease.cached == 0


@pytest.mark.parametrize("awaited", [False, True])
async def test_a_handle_that_was_cancelled_counts_as_none(awaited: bool, tmp_path: Path) -> None:
    async with stored(tmp_path) as cache:
        handle = cache.prefetch(PROMPT)
        if awaited:
            await handle
        handle.cancel()
        assert await _found(cache, handle) == PAGES * PAGE


async def test_a_handle_that_has_had_its_lease_counts_as_none(tmp_path: Path) -> None:
    async with stored(tmp_path) as cache:
        handle = cache.prefetch(PROMPT)
        assert await _found(cache, handle) == PAGES * PAGE
        for _ in range(2):  # everything leaves the device and the host, but not storage
            async with cache.lease(text(2 * PAGES, seed=9)) as lease:
                compute(cache, lease, text(2 * PAGES, seed=9))
                await lease.commit(text(2 * PAGES, seed=9))
            await cache.flush()
        assert (await cache.match(PROMPT)).host < PAGES * PAGE
        assert await _found(cache, handle) == PAGES * PAGE


async def test_a_handle_of_a_namespace_that_was_invalidated_counts_as_none(tmp_path: Path) -> None:
    async with stored(tmp_path, "a") as cache:
        handle = cache.prefetch(PROMPT, namespace="a")
        lease = cache.lease(PROMPT, namespace="a", prefetch=handle)
        await cache.invalidate("a")
        for one in (lease, cache.lease(PROMPT, namespace="a", prefetch=handle)):
            async with one:
                assert one.cached == 0
        assert await serve(cache, PROMPT) == 0


@pytest.mark.parametrize("tokens", [PROMPT[: 8 * PAGE], [*PROMPT, *text(4, seed=3)]], ids=["shorter", "longer"])
async def test_a_handle_of_the_prompts_beginning_or_of_what_begins_with_it_is_taken(
    tokens: list[int], tmp_path: Path
) -> None:
    async with stored(tmp_path) as cache:
        handle = cache.prefetch(tokens)
        await handle
        assert await _found(cache, handle) == min(len(tokens), len(PROMPT)) // PAGE * PAGE


# Calls of a lease that are handed over keep their order and are told how they ended: commits at once, a cache that is
# closed meanwhile, a device that refuses a batch.


async def test_two_commits_handed_over_at_once_hash_every_page_right() -> None:
    store, pages = MemoryBackend(), 1200
    async with opened(settings(2048, host=2048), storage=store) as cache:
        tokens, loop = text(pages), asyncio.get_running_loop()
        async with cache.lease(tokens, wait=False) as lease:
            compute(cache, lease, tokens)

            def engine() -> None:
                ends = (PAGE * (pages - 100), PAGE * pages)
                futures = [asyncio.run_coroutine_threadsafe(lease.commit(tokens[:end]), loop) for end in ends]
                for future in futures:
                    future.result(10)

            await asyncio.to_thread(engine)
            key, space = as_key(tokens), lease._ask.space
            assert parts(cache).core.known_hashes(space, key) == b"".join(page_hashes(tokens))


async def test_a_release_that_overtakes_a_commit_waits_for_the_commits_event() -> None:
    """Both are handed over, as by a thread. The commit has not begun when the release runs: it publishes nothing, and
    nobody gets the pages that the engine still writes."""
    async with opened(settings(8)) as cache:
        tokens, loop, event = text(4), asyncio.get_running_loop(), gate(cache)
        lease = await cache.lease(tokens).__aenter__()
        future = asyncio.run_coroutine_threadsafe(lease.commit(tokens, after=event), loop)
        loop.call_soon_threadsafe(lease.release)  # it runs before the first step of the commit's task
        with pytest.raises(RuntimeError, match="the lease is released"):
            await asyncio.wrap_future(future)
        await turns()
        assert cache.statistics().leases == 0
        assert cache.statistics().device["full"].free == 4, "the engine still writes into the pages of the lease"
        assert (await cache.match(tokens)).device == 0
        event.open()
        await until(lambda: cache.statistics().device["full"].free == 8)


async def test_an_engine_that_gives_up_a_commit_does_not_close_the_cache() -> None:
    async with opened(settings()) as cache:
        tokens, loop = text(2), asyncio.get_running_loop()
        async with cache.lease(tokens) as lease:
            compute(cache, lease, tokens)
            await acquire(parts(cache).driver.lock)
            before, after = (asyncio.run_coroutine_threadsafe(lease.commit(tokens), loop) for _ in range(2))
            await turns(5)
            assert before.cancel()
            parts(cache).driver.lock.release()
            await asyncio.wrap_future(after)
        assert await serve(cache, [*tokens, 1]) == 2 * PAGE


async def test_loaded_does_not_say_yes_when_the_cache_died_under_it() -> None:
    device = CpuDevice(faults=Faults(delayed=1.0, delay=(0.3, 0.3)))

    async def die_under_a_lease() -> None:
        async with opened(settings(host=64), device=device, idle=False) as cache:
            await on_the_host(cache, text(4))
            async with cache.lease(text(4, extra=1)) as lease:
                assert lease.cached == 4 * PAGE
                parts(cache).supervisor.fail(RuntimeError("a copy engine burnt"))
                with pytest.raises(CacheClosed):
                    await lease.loaded()
                with pytest.raises(CacheClosed):
                    await lease.layer(1)

    with pytest.raises(CacheClosed, match="a task of the cache died"):
        await die_under_a_lease()
    await device.aclose()


async def test_two_extends_at_once_both_count() -> None:
    async with opened(settings()) as cache, cache.lease(text(2)) as lease:
        async with holding(parts(cache).driver.lock):
            both = [asyncio.ensure_future(lease.extend(PAGE)) for _ in range(2)]
            await turns(3)
        await asyncio.gather(*both)
        assert len(lease.pages) == 4


# A lease with loads publishes nothing before somebody has waited for all of them: what an engine computes from pages
# that have not arrived is wrong for everybody. It counts who asked, and not whether the loads have arrived by chance.


SIX_PAGES = text(6, extra=1)
REFUSAL = r"^commit: nobody has waited for the pages .* await loaded\(\)"


async def _refused(cache: AsyncCache, lease: Lease) -> None:
    """A commit of ``lease`` is refused, and has changed nothing."""
    before = repr(lease), lease.pages.tolist(), (await cache.match(SIX_PAGES)).host
    with pytest.raises(RuntimeError, match=REFUSAL):
        await lease.commit(SIX_PAGES)
    assert (repr(lease), lease.pages.tolist(), (await cache.match(SIX_PAGES)).host) == before


@asynccontextmanager
async def loading(faults: Faults | None = None) -> AsyncIterator[AsyncCache]:
    """A cache that has four pages of the prompt, on the host alone."""
    device = CpuDevice(faults=faults) if faults else None
    async with opened(settings(host=64), device=device) as cache:
        await on_the_host(cache, text(4))
        yield cache
    if device is not None:
        await device.aclose()


@pytest.mark.parametrize("arrived", [False, True], ids=["under way", "arrived"])
async def test_a_commit_before_anybody_has_waited_is_refused_whether_the_loads_have_arrived_or_not(
    arrived: bool,
) -> None:
    async with loading() as cache:
        event = gate(cache)
        fence_all(cache, event)
        async with cache.lease(SIX_PAGES) as lease:
            if arrived:
                event.open()
                await settled(cache)
            assert lease.loading is not arrived
            await _refused(cache, lease)
            event.open()
            await lease.loaded()
            compute(cache, lease, SIX_PAGES)
            await lease.commit(SIX_PAGES)
        assert await serve(cache, [*SIX_PAGES, 1]) == 6 * PAGE


async def test_a_lease_whose_states_are_copied_for_it_has_loads_too() -> None:
    async with opened(settings(mamba=8)) as cache:
        async with cache.lease(text(2)) as lease:
            compute(cache, lease, text(2))
            await lease.commit(text(2), checkpoint=(2 * PAGE, int(lease.states[1])))
        async with cache.lease(text(3)) as lease:
            assert lease.cached == 2 * PAGE
            with pytest.raises(RuntimeError, match=REFUSAL):
                await lease.commit(text(3))
            await lease.loaded()
            compute(cache, lease, text(3))
            await lease.commit(text(3))


def engine_stream(cache: AsyncCache) -> Any:
    return cache.device.stream("engine")  # type: ignore[union-attr]


async def _layers(cache: AsyncCache, lease: Lease) -> None:
    for i in range(LAYERS):
        await lease.layer(i)


async def _stream(cache: AsyncCache, lease: Lease) -> None:
    stream = engine_stream(cache)
    for i in range(LAYERS):
        lease.wait_layer(stream, i)


async def _loaded(cache: AsyncCache, lease: Lease) -> None:
    await lease.loaded()


async def _in_a_task(cache: AsyncCache, lease: Lease) -> None:
    task = asyncio.create_task(lease.loaded())
    await asyncio.sleep(0)
    assert not task.done(), "the commit waits for it"


Wait = Callable[[AsyncCache, Lease], Awaitable[None]]


@pytest.mark.parametrize("wait", [_loaded, _layers, _stream, _in_a_task], ids=lambda wait: wait.__name__[1:])
async def test_each_way_of_waiting_for_all_layers_counts(wait: Wait) -> None:
    async with loading() as cache, cache.lease(SIX_PAGES) as lease:
        assert lease.loading
        await wait(cache, lease)
        compute(cache, lease, SIX_PAGES)
        await lease.commit(SIX_PAGES)
        assert (await cache.match(SIX_PAGES)).device == 6 * PAGE


async def _first_layer(cache: AsyncCache, lease: Lease) -> None:
    await lease.layer(0)
    lease.wait_layer(engine_stream(cache), 0)


async def _cancelled(cache: AsyncCache, lease: Lease) -> None:
    event = gate(cache)
    fence_all(cache, event)
    for waiting in (lease.loaded(), lease.layer(LAYERS - 1)):
        task = asyncio.create_task(waiting)
        await turns(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    event.open()


async def _refused_call(cache: AsyncCache, lease: Lease) -> None:
    with pytest.raises(Exception, match="stream"):
        lease.wait_layer("no stream", LAYERS - 1)


@pytest.mark.parametrize("wait", [_first_layer, _cancelled, _refused_call], ids=lambda wait: wait.__name__[1:])
async def test_who_has_waited_for_some_layers_or_was_cancelled_has_not_waited(wait: Wait) -> None:
    async with loading(Faults(delayed=1.0, delay=(0.02, 0.02))) as cache, cache.lease(SIX_PAGES) as lease:
        await wait(cache, lease)
        await _refused(cache, lease)


# The edge: tokens in whatever form, and the hash chain that names pages.


KEY = np.array([1, 2, 3, 70_000], "<i4").tobytes()


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, 70_000], (1, 2, 3, 70_000), array("i", [1, 2, 3, 70_000]), np.array([1, 2, 3, 70_000], np.int32),
        np.array([1, 2, 3, 70_000], np.int64), np.array([1, 2, 3, 70_000], np.uint32), torch.tensor([1, 2, 3, 70_000]),
        torch.tensor([1, 2, 3, 70_000], dtype=torch.int32), KEY, bytearray(KEY), memoryview(KEY),
        array("q", [1, 2, 3, 70_000]), np.array([1, 0, 2, 0, 3, 0, 70_000], np.int32)[::2],
        np.array([70_000, 3, 2, 1], np.int32)[::-1], np.array([1, 2, 3, 70_000], ">i4"),
        np.ma.masked_array(np.array([1, 2, 3, 70_000], np.int32)), np.frombuffer(b"x" + KEY, np.int32, offset=1),
    ],
    ids=lambda tokens: type(tokens).__name__,
)  # fmt: skip
def test_tokens_of_every_kind_make_the_same_key(tokens: Any) -> None:
    assert as_key(tokens) == KEY


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -2], r"tokens\[1\]=-2 is negative"),
        ([1, 2, 1 << 31], r"tokens\[2\]=2147483648 is beyond int32"),
        ([1, "a"], r"tokens\[1\]='a' is no integer"),
        ([1.5], r"tokens\[0\]=1.5 is no integer"),
        (np.array([3, -1]), r"tokens\[1\]=-1 is negative"),
        (np.array([3, 1 << 40]), r"tokens\[1\]=1099511627776 is beyond int32"),
        (np.array([3, -7], np.int32), r"tokens\[1\]=-7 is negative"),
        (np.array([3, -7], ">i4"), r"tokens\[1\]=-7 is negative"),
        (np.array([-9, -7, 4, 5], np.int32)[::-2], r"tokens\[1\]=-7 is negative"),
        (np.ma.masked_array(np.array([3, -7], np.int32)), r"tokens\[1\]=-7 is negative"),
        (np.array([[1, 2]], np.int32), "2 dimensions"),
        (np.array([0.5]), "float64"),
        (b"abc", "3 bytes"),
        (np.array([7, -1], np.int32).tobytes(), r"tokens\[1\]=-1"),
        (object(), "object"),
    ],
)
def test_unusable_tokens_are_named_with_their_position(tokens: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_key(tokens)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 500, 2560])
def test_the_first_of_the_negative_tokens_is_named_wherever_it_stands(length: int) -> None:
    tokens = np.arange(length, dtype=np.int32)
    assert as_key(tokens) == tokens.tobytes()
    for position in {0, length // 3, length - 1}:
        worse = tokens.copy()
        worse[position], worse[length - 1] = -5, -(1 << 31)
        found = worse[position]
        for given in (worse, worse.tobytes(), worse.tolist()):
            with pytest.raises(ConfigError, match=rf"tokens\[{position}\]={found} is negative"):
                as_key(given)


def test_namespaces_differ_in_everything_that_matters() -> None:
    spaces = {
        namespace_digest("m", 16), namespace_digest("n", 16), namespace_digest("m", 32), namespace_digest("m", 16, ""),
        namespace_digest("m", 16, "a"), namespace_digest("m", 16, b"a"), namespace_digest("m", 16, b""),
        namespace_digest("m", 16, "a", 1), namespace_digest("ma", 16), namespace_digest("m", 16, None, 1),
    }  # fmt: skip
    assert len(spaces) == 10
    assert namespace_digest("m", 16, "a", 0) == namespace_digest("m", 16, "a")


def by_hand(space: bytes, key: bytes, page_bytes: int) -> bytes:
    hashes, parent = b"", space
    for at in range(0, len(key) // page_bytes * page_bytes, page_bytes):
        parent = sha256(parent + key[at : at + page_bytes]).digest()
        hashes += parent
    return hashes


@pytest.mark.parametrize("page_size", [4, 16, 512], ids=["4", "16", "512 in a thread"])
async def test_a_chain_grows_from_what_it_knows(page_size: int) -> None:
    space, key = namespace_digest("m", page_size), np.arange(page_size * 40 + 3, dtype=np.int32).tobytes()
    expected = by_hand(space, key, page_size * 4)
    chain = Chain(space, page_size)
    assert await chain.extend(key[: page_size * 4 * 7]) == expected[: 7 * 32]
    chain.known(key, expected[: 20 * 32])
    assert await chain.copy().extend(key) == expected
    assert await chain.extend(key) == expected
    other = key[: page_size * 4] + bytes(page_size * 4 * 3)
    chain.known(other, expected[:32])
    assert await chain.extend(other) == by_hand(space, other, page_size * 4)


@pytest.mark.parametrize("namespace", [5, True, 1.5, ("a",), "\ud800"])
def test_a_namespace_that_is_neither_text_nor_bytes_is_refused(namespace: object) -> None:
    with pytest.raises(ConfigError, match=r"namespace=.* (must be text, bytes or None|is no text that has UTF-8)"):
        namespace_digest("m", 16, namespace)


async def test_a_commit_that_nobody_awaits_does_not_free_the_pages_that_its_event_guards() -> None:
    async with opened(settings(8)) as cache:
        event = gate(cache)
        async with cache.lease(text(4)) as lease:
            lease.commit(text(4), after=event).close()
        await turns()
        assert free(cache) == 4
        event.open()
        await until(lambda: free(cache) == 8)


async def test_a_release_during_a_commit_lets_it_publish_nothing() -> None:
    async with opened(settings()) as cache:
        tokens = text(2)
        lease = await cache.lease(tokens).__aenter__()
        compute(cache, lease, tokens)
        async with holding(parts(cache).driver.lock):
            committing = asyncio.ensure_future(lease.commit(tokens))
            await turns()
            lease.release()
        with pytest.raises(RuntimeError, match="the lease is released"):
            await committing
        assert (await cache.match(tokens)).device == 0


async def test_a_batch_that_the_device_refuses_hangs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    async def refuse_a_load() -> None:
        async with opened(settings(host=64), idle=False) as cache:
            await on_the_host(cache, text(4))
            monkeypatch.setattr(local(cache).mover, "load", refuse)
            async with cache.lease(text(4, extra=1)) as lease:
                with pytest.raises(RuntimeError, match="the device is gone"):
                    lease.wait_layer(engine_stream(cache), 0)
                with pytest.raises(CacheClosed):
                    await lease.loaded()

    with pytest.raises(CacheClosed, match="a task of the cache died"):
        await refuse_a_load()
