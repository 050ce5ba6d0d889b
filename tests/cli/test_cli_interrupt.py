"""A request can be cancelled at each of its awaits, and nothing else changes for it."""

from __future__ import annotations

import asyncio

import pytest

from asynccache.cli.service import CancelledAt


class Steps:
    """Awaits five things of three kinds and notes how far it came."""

    def __init__(self) -> None:
        self.reached = 0
        self.cleaned = False

    async def run(self) -> str:
        loop = asyncio.get_running_loop()
        try:
            for _ in range(3):
                await asyncio.sleep(0)
                self.reached += 1
            future = loop.create_future()
            loop.call_soon(future.set_result, None)
            await future
            self.reached += 1
            async with asyncio.timeout(60):
                await asyncio.sleep(0)
            self.reached += 1
        finally:
            self.cleaned = True
        return "done"


@pytest.mark.asyncio
async def test_it_passes_everything_through() -> None:
    steps = Steps()
    work = CancelledAt(steps.run(), None)
    assert await work == "done"
    assert (work.awaits, steps.reached) == (5, 5)


@pytest.mark.asyncio
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
async def test_it_cancels_at_exactly_that_await(at: int) -> None:
    steps = Steps()

    async def one() -> str:
        found: str = await CancelledAt(steps.run(), at)
        return found

    task = asyncio.create_task(one())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps.reached == at - 1
    assert steps.cleaned


@pytest.mark.asyncio
async def test_a_place_behind_the_end_never_comes() -> None:
    assert await CancelledAt(Steps().run(), 6) == "done"


@pytest.mark.asyncio
async def test_errors_come_out() -> None:
    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        await CancelledAt(fails(), None)
