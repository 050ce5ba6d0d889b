"""The mistakes that ``debug=True`` names, each made by a program as a user would write it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest
import torch

from asynccache import AsyncCache, CacheConfig, Full, WrongPages
from tests.sanitizer.kit import DIM, HEADS, LAYERS, PAGE, WIDTH, Model, config, serve, text

Program = Callable[[AsyncCache, Model], Awaitable[object]]
MISTAKES: list[tuple[str, Program]] = []


def says(mistake: str) -> Callable[[Program], Program]:
    """Enter a program, which is to end with this mistake."""

    def enter(program: Program) -> Program:
        MISTAKES.append((mistake, program))
        return program

    return enter


@says("committed without computing")
async def commits_what_nobody_computed(cache: AsyncCache, model: Model) -> None:
    async with cache.lease(text(1)) as lease:
        await lease.loaded()
        await lease.commit(text(1))


@says("committed without computing")
async def forgets_the_last_layer(cache: AsyncCache, model: Model) -> None:
    async with cache.lease(text(1)) as lease:
        await lease.loaded()
        model.kv.pop()
        model.weights = model.weights[:-1]
        model.compute(text(1), lease.cached, 100, lease.pages)
        await lease.commit(text(1))


@says("computed from cached + 1")
async def begins_behind_the_first_token(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1, 64), 0)
    async with cache.lease(text(1)) as lease:
        await lease.loaded()
        model.compute(text(1), lease.cached + 1, 100, lease.pages)
        await lease.commit(text(1))


@says("committed tokens that were not computed")
async def commits_the_last_sampled_token(cache: AsyncCache, model: Model) -> None:
    tokens = text(1, 90)
    async with cache.lease(tokens, new_tokens=6) as lease:
        await lease.loaded()
        model.compute(tokens, lease.cached, 90, lease.pages)
        pages = await lease.commit(tokens)
        for token in range(6):
            tokens.append(token)
            if len(tokens) < 96:
                model.compute(tokens, len(tokens) - 1, len(tokens), pages)
        await lease.commit(tokens)


@says("committed tokens that were not computed")
async def commits_a_second_chunk_too_early(cache: AsyncCache, model: Model) -> None:
    async with cache.lease(text(1, 128)) as lease:
        await lease.loaded()
        model.compute(text(1, 128), 0, 100, lease.pages)
        await lease.commit(text(1, 128))


@says("computed too early")
async def computes_before_it_waits(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    for seed in range(2, 9):
        await serve(cache, model, text(seed), 0)
    async with cache.lease(text(1)) as lease:
        assert lease.loading
        model.compute(text(1), lease.cached, 100, lease.pages)
        await lease.loaded()
        await lease.commit(text(1))


@says("wrote after the lease's end")
async def writes_when_the_lease_has_ended(cache: AsyncCache, model: Model) -> None:
    async with cache.lease(text(1)) as lease:
        await lease.loaded()
        pages = lease.pages
    model.compute(text(1), 0, 100, pages)
    await serve(cache, model, text(2))


@says("wrote after the lease's end")
async def leaves_while_a_thread_writes(cache: AsyncCache, model: Model) -> None:
    go, thread = threading.Event(), None
    async with cache.lease(text(1)) as lease:
        await lease.loaded()
        pages = lease.pages

        def step() -> None:
            go.wait()
            model.compute(text(1), 0, 100, pages)

        thread = threading.Thread(target=step)
        thread.start()
    go.set()
    thread.join()
    await serve(cache, model, text(2))


@says("used an old page table")
async def keeps_writing_by_the_old_table(cache: AsyncCache, model: Model) -> None:
    async with cache.lease(text(1)) as lease:
        await lease.loaded()
        old = lease.pages
        await serve(cache, model, text(1), 0)
        model.compute(text(1), 0, 100, old)
        await lease.commit(text(1))
        lease.adopt()
        await asyncio.sleep(0.01)
        model.compute(text(1), 0, 100, old)
        await serve(cache, model, text(2))


@says("used an old page table")
async def reads_by_the_old_table(cache: AsyncCache, model: Model) -> None:
    async with cache.lease(text(1, 96), new_tokens=40) as lease:
        await lease.loaded()
        old, tokens = lease.pages, text(1, 96)
        await serve(cache, model, tokens, 0)
        model.compute(tokens, 0, 96, old)
        await lease.commit(tokens)
        lease.adopt()
        await asyncio.sleep(0.01)
        for token in range(32):
            tokens.append(token)
            model.compute(tokens, len(tokens) - 1, len(tokens), old)
        await lease.commit(tokens)


@says("two tasks on one lease")
async def shares_a_lease_between_two_requests(cache: AsyncCache, model: Model) -> None:
    async with cache.lease(text(1), new_tokens=40) as lease:
        await lease.loaded()
        model.compute(text(1), 0, 100, lease.pages)

        async def answer(first: int) -> None:
            tokens = text(1)
            for i in range(30):
                tokens.append(first + i)
                model.compute(tokens, len(tokens) - 1, len(tokens), lease.pages)
                await asyncio.sleep(0)
            await lease.commit(tokens)
            await asyncio.sleep(0.05)

        await asyncio.gather(answer(1), answer(500))


@says("wrote published pages")
async def pads_its_table_with_page_0(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    async with cache.lease(text(2)) as lease:
        await lease.loaded()
        pages = lease.pages.copy()
        model.compute(text(2), 0, 100, pages)
        await lease.commit(text(2))
    for kv in model.kv:  # a step for a batch of fixed size: rows without a request write to page 0
        kv[0, 3] = 1.0
    await serve(cache, model, text(1))


@says("wrote pages of somebody else")
async def pads_its_table_with_a_free_page(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    async with cache.lease(text(1)):
        pass
    for kv in model.kv:
        kv[20, 3] = 1.0
    for seed in range(2, 6):
        await serve(cache, model, text(seed))


@says("wrote published pages")
async def writes_into_its_prefix(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    async with cache.lease(text(1)) as lease:
        await lease.loaded()
        model.compute(text(2), 0, 100, lease.pages)
        await lease.commit(text(1))


@says("computed from pages that are not the lease's")
async def reads_a_page_of_nobody(cache: AsyncCache, model: Model) -> None:
    await serve(cache, model, text(1), 0)
    async with cache.lease(text(2)) as lease:
        free = lease.pages[:1].copy()
    async with cache.lease(text(1, 64), namespace="other") as lease:
        await lease.loaded()
        taken = set(lease.pages.tolist())
        pages = lease.pages.copy()
        model.compute(text(1, 64), 0, 32, pages)
        wrong = pages.copy()
        wrong[0] = next(page for page in [*free.tolist(), *range(6, 16)] if page not in taken)
        model.compute(text(1, 64), 32, 64, wrong)
        await lease.commit(text(1, 64))


@pytest.mark.parametrize(("mistake", "program"), MISTAKES, ids=[one.__name__ for _, one in MISTAKES])
def test_a_mistake_is_named(mistake: str, program: Program) -> None:
    async def main() -> None:
        async with AsyncCache(config(), debug=True) as cache:
            await program(cache, Model(cache))

    with pytest.raises(WrongPages) as caught:
        asyncio.run(main())
    assert caught.value.mistake == mistake, caught.value
    assert str(caught.value).startswith(mistake)
    places = ("test_mistakes.py", "kit.py", "no lease has had it")
    assert any(place in str(caught.value) for place in places), caught.value


def test_bytes_a_token_and_a_view_that_do_not_fit() -> None:
    full = Full(bytes_per_token=2 * LAYERS * 2 * WIDTH * 4, layers=LAYERS, dtype="float32", device_tokens=512)

    async def main() -> None:
        async with AsyncCache(CacheConfig(model="twice", components=(full,)), debug=True) as cache:
            layers = [cache.pools["full"].layer(i) for i in range(LAYERS)]
            kv = [layer.view(torch.float32).view(-1, PAGE, 2, HEADS, DIM) for layer in layers]
            async with cache.lease(text(1, 64)) as lease:
                await lease.loaded()
                for layer in kv:
                    layer[lease.pages.tolist()] = torch.randn(4, PAGE, 2, HEADS, DIM)
                await lease.commit(text(1, 64))

    with pytest.raises(WrongPages) as caught:
        asyncio.run(main())
    assert caught.value.mistake == "bytes and view do not fit"


def test_a_right_program_is_not_accused() -> None:
    async def main() -> int:
        async with AsyncCache(config(), debug=True) as cache:
            model, hits = Model(cache), 0
            for _ in range(3):
                for seed in range(6):
                    hits += await serve(cache, model, text(seed))
            hits += sum(await asyncio.gather(*(serve(cache, model, text(seed)) for seed in range(12))))
            assert cache.statistics().lookups.hits["host"] > 0
            return hits

    assert asyncio.run(main()) > 1000
