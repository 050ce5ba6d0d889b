"""``Pages.clear`` forgets everything under the URL of each store, whoever put it, and says what could not."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import ConfigError
from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache.storage import Closed, Pages
from asynccache.storage.pages import LETTING_GO
from asynccache.testing.wrapped_backend import WrappedBackend
from tests.storage.pages_kit import HIT, MISS, PATIENCE, SIZE, keys, memory, open_pages, result


class Clearing(WrappedBackend):
    """``how``: what becomes of ``clear``."""

    def __init__(self, how: str) -> None:
        super().__init__(MemoryBackend())
        self.how = how
        self.inside = threading.Event()

    async def clear(self) -> None:
        self.inside.set()
        if self.how == "hangs":
            await asyncio.Event().wait()
        if self.how == "is slow":
            await asyncio.sleep(0.1)
        if self.how == "fails":
            raise Unavailable("the disk is gone")
        await super().clear()


def test_nothing_is_found_after_clear_and_what_is_put_then_is(tmp_path: Path) -> None:
    made = memory()
    with open_pages(("memory:", f"file:{tmp_path / 'kv'}?capacity=1MiB"), made) as pages:
        result(pages.put(keys(4), range(4)))
        assert pages.clear().result(PATIENCE) is None
        assert result(pages.exists(keys(4))) == [MISS] * 4
        assert result(pages.put(keys(2), range(2))) == [HIT] * 2
        assert result(pages.get(keys(4), range(4, 8))) == [HIT, HIT, MISS, MISS]


def test_pages_of_other_namespaces_go_too(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'kv'}?capacity=1MiB"
    for namespace in ("one", "other"):
        with open_pages(url, memory(), namespace=namespace) as pages:
            result(pages.put(keys(1, namespace), [0]))
    with open_pages(url, memory(), namespace="one") as pages:
        pages.clear().result(PATIENCE)
    with open_pages(url, memory(), namespace="other") as pages:
        assert result(pages.exists(keys(1, "other"))) == [MISS]


def test_a_store_that_cannot_is_told_and_the_others_are_cleared() -> None:
    whole = MemoryBackend()
    with open_pages((Clearing("fails"), whole), memory()) as pages:
        result(pages.put(keys(2), range(2)))
        with pytest.raises(BackendError, match="the disk is gone"):
            pages.clear().result(PATIENCE)
        assert whole.stats()["pages"] == 0


def test_a_store_that_hangs_costs_the_timeout_and_no_other_call() -> None:
    hanging = Clearing("hangs")
    with open_pages(hanging, memory()) as pages:
        clearing = pages.clear(timeout=0.2)
        assert hanging.inside.wait(PATIENCE)
        assert result(pages.put(keys(1), [0])) == [HIT]
        with pytest.raises(Timeout, match=r"not cleared within 0\.2 s"):
            clearing.result(PATIENCE)


def test_close_cuts_short_what_hangs_at_its_deadline() -> None:
    hanging, whole = Clearing("hangs"), MemoryBackend()
    pages = open_pages((hanging, whole), memory())
    result(pages.put(keys(2), range(2)))
    clearing = pages.clear()
    assert hanging.inside.wait(PATIENCE)
    began = time.monotonic()
    assert pages.close(0.2) == Closed(abandoned=0, held=0, over=True)
    assert 0.2 <= time.monotonic() - began < LETTING_GO
    with pytest.raises(Unavailable, match="closed before they were cleared"):
        clearing.result(0)
    assert whole.stats()["pages"] == 0


def test_close_lets_a_clear_end_before_its_deadline() -> None:
    slow = Clearing("is slow")
    pages = open_pages(slow, memory())
    clearing = pages.clear()
    assert pages.close(PATIENCE).over
    assert clearing.result(0) is None


def test_a_timeout_that_is_none_and_a_closed_store_are_refused() -> None:
    pages = Pages.open("memory:", memory(), SIZE, "model")
    for odd in (0, -1, float("nan"), "1"):
        with pytest.raises(ConfigError, match="timeout="):
            pages.clear(timeout=odd)  # type: ignore[arg-type]
    pages.close()
    with pytest.raises(Unavailable, match="the stores were closed"):
        pages.clear()
