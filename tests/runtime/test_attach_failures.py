"""Attaching and detaching when a store fails as a whole: what was opened is closed, what cannot be kept is not."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from string import ascii_letters
from typing import Any

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.core.plan import BackupHost, BackupStorage
from asynccache.errors import BackendError, Unavailable
from asynccache.storage import attachment
from tests.runtime.runtime_kit import opened, serve, settings, text
from tests.simulated.synchronous import SynchronousRuntime, core_config


class Kept(MemoryBackend):
    """It knows whether it was closed, and may refuse to be cleared."""

    def __init__(self) -> None:
        super().__init__()
        self.closed_times = 0
        self.stubborn = False
        self.refused = ""

    def register(self, pool: str, memory: memoryview) -> None:
        if pool == self.refused:
            raise BackendError(f"no {pool}")
        super().register(pool, memory)

    async def clear(self) -> None:
        if self.stubborn:
            raise Unavailable("stubborn")
        await super().clear()

    async def aclose(self) -> None:
        self.closed_times += 1
        self.stubborn = False
        await super().aclose()


class Scheme:
    """``kept:``; ``error``: what opening raises."""

    def __init__(self) -> None:
        self.opened: list[Kept] = []
        self.error: Exception | None = None
        self.refused = ""

    async def open(self, url: Any, layout: Any) -> Kept:
        if self.error is not None:
            raise self.error
        self.opened.append(Kept())
        self.opened[-1].refused = self.refused
        return self.opened[-1]


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheme]:
    found = Scheme()
    monkeypatch.setattr(attachment, "backend_class", lambda name: found)
    yield found
    assert [backend.closed_times for backend in found.opened] == [1] * len(found.opened)


def pages_of(backend: Any) -> int:
    return int(backend.stats()["pages"])


async def test_a_store_that_refuses_the_memory_of_the_pages_is_closed_again(scheme: Scheme) -> None:
    scheme.refused = "full"
    with pytest.raises(BackendError, match="no full"):
        async with opened(settings(host=16, storage=["kept:?name=a", "kept:?name=b"])):
            pytest.fail("it was opened")
    assert [backend.closed_times for backend in scheme.opened] == [1, 1]
    scheme.refused = ""
    async with opened(settings(host=16, storage="kept:?name=a")) as cache:
        scheme.refused = "full"
        with pytest.raises(BackendError, match="no full"):
            await cache.attach_storage("kept:?name=b")
        assert list(cache.stores) == ["a"]


@pytest.mark.parametrize("stubborn", [0, 1])
async def test_of_two_stores_the_one_that_can_is_cleared(scheme: Scheme, stubborn: int) -> None:
    async with opened(settings(device=8, host=16)) as cache:
        await cache.attach_storage("kept:?name=a")
        await cache.attach_storage("kept:?name=b")
        await serve(cache, text(4, extra=1))
        await cache.flush()
        assert [pages_of(backend) for backend in scheme.opened] == [4, 4]
        scheme.opened[stubborn].stubborn = True
        with pytest.raises(BackendError, match="stubborn"):
            await cache.reset()
        assert [pages_of(backend) for backend in scheme.opened] == ([4, 0] if stubborn == 0 else [0, 4])
        assert (await cache.match(text(4))).device == 0
        await serve(cache, text(4, 1, extra=1))
        await cache.flush()
        assert [pages_of(backend) for backend in scheme.opened] == ([8, 4] if stubborn == 0 else [4, 8])


@pytest.mark.slow(4)
def test_what_has_left_the_tree_while_the_store_was_away_is_not_kept() -> None:
    run, random = SynchronousRuntime(core_config(device=32, host=64)), Random(1)
    unstored = run.core._transfers.unstored
    for _ in range(500):
        run.insert("".join(random.choices(ascii_letters, k=4)))
        run.complete(*run.in_flight(BackupHost))
        run.fail(*run.in_flight(BackupStorage))
    assert len(unstored) > 10, "it was never put to the test"
    assert len(unstored) < 2 * run.core.world.counters.nodes
