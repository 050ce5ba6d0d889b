"""Calls of the object store that are cancelled at the worst moment end, and leave nothing running."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from asynccache.storage import Result
from tests.storage.page_kit import fill, put
from tests.stores.object_store_kit import bare, folder_url, open_at, opened, some_keys

HIT = Result.HIT


async def test_a_put_cancelled_as_its_pack_is_about_to_begin_ends(tmp_path: Path) -> None:
    async with opened(folder_url(tmp_path, "refresh=0&parallel=1")) as store:
        uploads = bare(store)._uploads

        class Away(set[Any]):
            def discard(self, load: Any) -> None:
                super().discard(load)
                second.cancel()  # it hears of that before the task that is to send its pack begins

        uploads._sending = Away()
        first = asyncio.ensure_future(put(store, some_keys("first", 2)))
        second = asyncio.ensure_future(put(store, some_keys("second", 2)))
        assert await first == [HIT, HIT]
        done, _ = await asyncio.wait([second], timeout=5)
        assert done
        assert second.cancelled()
        await fill(store, some_keys("third", 2))


async def test_closing_that_is_cancelled_leaves_nothing_running(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    backend = bare(await open_at(folder_url(tmp_path, "refresh=1")))
    with backend._open_calls:
        closing = asyncio.ensure_future(backend.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([closing])
    assert closing.cancelled()
    await backend.aclose()
    assert asyncio.all_tasks() == before


async def test_a_cancellation_is_not_lost_while_the_keeper_stops(tmp_path: Path) -> None:
    backend = bare(await open_at(folder_url(tmp_path, "refresh=1")))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(backend._keeper.stop())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    await backend.aclose()
