"""Return codes that a real store gives only in the worst moments. The library is a stand-in that answers by the script;
everything that a real one can be made to answer is tested against it, in the other modules."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from asynccache_backends.mooncake import backend as module
from asynccache_backends.mooncake.backend import MooncakeBackend
from asynccache_backends.mooncake.client import MooncakeClient, settings_of

from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache.storage import Result, parse_url
from asynccache.testing.backend_suite import keys_of, record_of
from tests.stores.server import HOST, free_port

MISS, HIT, CORRUPT, FAILED = Result

Script = Callable[[Sequence[str]], list[int]]


class ReplicateConfig:
    """The library's, as far as it is used."""

    replica_num = 1


class Descriptor:
    """A replica of ``size`` bytes, as the library describes it."""

    def __init__(self, size: int) -> None:
        self.buffer_descriptor = self
        self.size = size

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> Descriptor:
        return self


class Scripted:
    """Answers each call by the next of ``answers``: codes, by the place of a key in the call."""

    def __init__(self, *answers: list[int], sizes: Sequence[int] = ()) -> None:
        self._answers = list(answers)
        self._sizes = sizes
        self.asked: list[list[str]] = []

    def setup(self, *args: object) -> int:
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0

    def _answer(self, names: Sequence[str], *args: object) -> list[int]:
        self.asked.append(list(names))
        return self._answers.pop(0)

    batch_put_from_multi_buffers = batch_get_into_multi_buffers = batch_is_exist = batch_remove = _answer

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        return self._answers.pop(0)[0]

    def batch_get_replica_desc(self, names: Sequence[str]) -> dict[str, list[Descriptor]]:
        return {name: [Descriptor(size)] for name, size in zip(names, self._sizes, strict=False)}


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FULL_WAITS", (0.0, 0.0, 0.0))


@asynccontextmanager
async def opened(library: Scripted) -> AsyncIterator[MooncakeBackend]:
    settings = settings_of(parse_url(f"mooncake://{HOST}:{free_port()}"))  # nobody listens there
    names = {"ReplicateConfig": ReplicateConfig, "MooncakeDistributedStore": staticmethod(lambda: library)}
    backend = MooncakeBackend(settings, MooncakeClient(settings, HOST, type("Module", (), names)))
    yield backend
    await backend.aclose()


async def put(backend: MooncakeBackend, count: int) -> list[Result]:
    keys = keys_of(count)
    return await backend.put(keys, [record_of(key) for key in keys])


async def get(backend: MooncakeBackend, count: int) -> list[Result]:
    keys = keys_of(count)
    return await backend.get(keys, [record_of(key) for key in keys])


async def test_each_page_of_a_put_has_its_own_fate() -> None:
    async with opened(Scripted([0, -600, -705, -1, -800])) as backend:
        assert await put(backend, 5) == [HIT, FAILED, HIT, FAILED, FAILED]
        assert backend.stats()["pages"] == 2


async def test_each_page_of_a_get_has_its_own_fate() -> None:
    async with opened(Scripted([16448, -704, 16447, -703, -901])) as backend:
        assert await get(backend, 5) == [HIT, MISS, CORRUPT, MISS, FAILED]


async def test_only_the_pages_that_found_no_room_are_put_again() -> None:
    library = Scripted([0, -200, 0, -200], [-200, 0], [0])
    async with opened(library) as backend:
        assert await put(backend, 4) == [HIT] * 4
        first, second, third = library.asked
        assert (second, third) == ([first[1], first[3]], [first[1]])
        assert (backend.stats()["full_waits"], backend.stats()["full_pages"]) == (2, 0)


async def test_a_store_that_stays_full_fails_the_pages_and_not_the_call() -> None:
    library = Scripted(*[[-200, -101]] * 4)
    async with opened(library) as backend:
        assert await put(backend, 2) == [FAILED] * 2
        assert len(library.asked) == 4
        assert (backend.stats()["full_waits"], backend.stats()["full_pages"]) == (3, 2)


async def test_a_page_that_is_kept_by_a_lease_is_not_deleted() -> None:
    async with opened(Scripted([0, -706, -704])) as backend:
        assert await backend.delete(keys_of(3)) == [HIT, FAILED, MISS]


@pytest.mark.parametrize(("code", "error"), [(-800, Unavailable), (-900, Unavailable), (-901, Timeout)])
async def test_a_call_that_reached_nobody_raises(code: int, error: type[BackendError]) -> None:
    async with opened(Scripted([code] * 2)) as backend:
        with pytest.raises(error):
            await get(backend, 2)
        assert (backend.stats()["errors"], backend.stats()["lost_calls"]) == (2, 1)


@pytest.mark.parametrize("code", [-900, -901])
async def test_presence_that_cannot_be_asked_raises(code: int) -> None:
    async with opened(Scripted([code] * 2)) as backend:
        with pytest.raises(BackendError):
            await backend.exists(keys_of(2))


async def test_after_the_master_is_lost_the_library_is_left_alone_until_it_answers() -> None:
    library = Scripted([-900])
    async with opened(library) as backend:
        with pytest.raises(Unavailable):
            await put(backend, 1)
        for _ in range(2):
            with pytest.raises(Unavailable, match="cannot be reached"):
                await put(backend, 1)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await backend.clear()
        assert len(library.asked) == 1


async def test_a_part_that_reached_nobody_spares_the_others_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_PAGES", 1)
    library = Scripted([-800])
    async with opened(library) as backend:
        with pytest.raises(Unavailable):
            await get(backend, 5)
        assert len(library.asked) == 1


async def test_a_failed_transfer_of_a_page_of_another_length_is_corrupt() -> None:
    async with opened(Scripted([-800, -600, -800], sizes=(16448, 5000, 70000))) as backend:
        assert await get(backend, 3) == [FAILED, CORRUPT, CORRUPT]


async def test_a_clear_that_fails_raises() -> None:
    async with opened(Scripted([-901])) as backend:
        with pytest.raises(Timeout):
            await backend.clear()


async def test_an_answer_of_the_wrong_length_is_no_answer() -> None:
    async with opened(Scripted([0])) as backend:
        with pytest.raises(BackendError, match="1 codes for 2"):
            await put(backend, 2)


async def test_parts_of_a_cancelled_call_that_have_not_begun_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_PAGES", 1)
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Scripted):
        def batch_is_exist(self, names: Sequence[str], *args: object) -> list[int]:
            begun.set()
            go_on.wait(10)
            return self._answer(names)

    library = Slow([1], [1], [1])
    async with opened(library) as backend:
        asking = asyncio.ensure_future(backend.exists(keys_of(3)))
        await asyncio.to_thread(begun.wait, 10)
        asking.cancel()
        await asyncio.sleep(0)
        assert not asking.done()
        go_on.set()
        await asyncio.wait([asking])
        assert asking.cancelled()
        assert len(library.asked) == 1
