"""``cache.explain``: over all tiers, with what the store says, and nothing changed by asking."""

from __future__ import annotations

import json

from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache
from asynccache.runtime.explain import Where
from asynccache.storage import Result
from tests.runtime.runtime_kit import PAGE, opened, parts, serve, settings, settled, text


async def tiers(cache: AsyncCache) -> list[tuple[int, int, Where]]:
    return [span[:3] for span in (await cache.explain(text(8))).spans]


async def test_a_prompt_over_three_tiers() -> None:
    backend = MemoryBackend()
    async with opened(settings(device=6, host=6, prefetch_quota=1.0), storage=backend) as cache:
        await serve(cache, text(4))
        await settled(cache)
        assert await tiers(cache) == [(0, 16, Where.DEVICE), (16, 32, Where.NOWHERE)]
        async with cache.lease(text(6, seed=1)):
            pass
        assert await tiers(cache) == [(0, 16, Where.HOST), (16, 32, Where.NOWHERE)]
        found = await cache.explain(text(8))
        assert (found.device, found.host, found.storage, found.ends) == (0, 16, 16, "full")
        assert found.loads == {"full": 4}
        for seed in (2, 3):
            await serve(cache, text(6, seed=seed))
            await settled(cache)
        assert await tiers(cache) == [(0, 16, Where.STORAGE), (16, 32, Where.NOWHERE)]
        found = await cache.explain(text(8))
        assert (found.host, found.storage, found.fetch) == (0, 16, "up to 16")
        assert "was in storage then" in found.why
    await backend.aclose()


async def test_what_storage_has_is_not_fetched_where_it_is_less_than_the_threshold() -> None:
    backend = MemoryBackend()
    config = settings(device=12, host=12, prefetch_quota=1.0, prefetch_threshold=20)
    async with opened(config, storage=backend) as cache:
        await serve(cache, text(4))
        await cache.flush()
    async with opened(config, storage=backend) as cache:
        found = (await cache.explain(text(8))).fetch
        assert found == "nothing: storage has 16 tokens of what is missing, less than prefetch_threshold=20"
        assert (await cache.prefetch(text(8))).tokens == 0
    await backend.aclose()


async def test_what_a_prefetch_is_said_to_fetch_is_what_it_fetches() -> None:
    """Where there are windows, a prefetch leaves out the last page of a prompt that has whole pages alone."""
    backend = MemoryBackend()
    config = settings(device=6, host=6, swa=6, prefetch_quota=1.0)
    async with opened(config, storage=backend) as cache:
        await serve(cache, text(4), pools=("full", "swa"))
        await cache.flush()
    async with opened(config, storage=backend) as cache:
        assert (await cache.explain(text(1))).fetch.startswith("nothing: what is missing is shorter")
        assert (await cache.explain(text(4, extra=1))).fetch == "up to 16"
        found = await cache.explain(text(4))
        assert (found.fetch, found.storage) == ("up to 12", 16)
        assert (await cache.prefetch(text(4))).tokens == 12
    await backend.aclose()


async def test_asking_keeps_nothing_warm() -> None:
    async with opened(settings(device=8)) as cache:
        await serve(cache, text(4))
        await serve(cache, text(4, seed=1))
        for _ in range(3):
            await cache.explain(text(4))
        await serve(cache, text(4, seed=2))
        assert (await cache.match(text(4))).device == 0
        assert (await cache.match(text(4, seed=1))).device == 4 * PAGE


async def test_components_that_end_a_match_are_named() -> None:
    async with opened(settings(swa=8, mamba=8)) as cache:
        await serve(cache, text(4), pools=("full", "swa"))
        found = await cache.explain(text(4))
        assert (found.device, found.ends) == (0, "mamba")
        assert found.spans[0].states["full"] == ("present", "absent")
        assert found.spans[0].states["mamba"] == ("absent", "absent")


async def test_a_store_that_does_not_answer_leaves_it_unknown() -> None:
    class Down(MemoryBackend):
        async def exists(self, keys: object) -> list[Result]:
            raise OSError("gone")

    backend = Down()
    async with opened(settings(host=8), storage=backend, idle=False) as cache:
        found = await cache.explain(text(4))
        assert [span.where for span in found.spans] == [Where.UNKNOWN]
        assert found.fetch == "storage does not answer"
    await backend.aclose()


async def test_it_can_be_read_and_sent() -> None:
    async with opened(settings(host=8, eviction="lru")) as cache:
        await serve(cache, text(4))
        found = await cache.explain(text(4, extra=2))
        assert json.loads(json.dumps(found.plain()))["spans"][0]["where"] == "device"
        lines = found.lines()
        assert lines[0] == "18 tokens, 16 of them in whole pages"
        assert "0 .. 16" in lines[1]
        assert lines[-2] == "the whole prompt is there"
        assert (await cache.explain([1])).spans == ()


async def taught(cache: AsyncCache) -> None:
    """A hundred requests, most of which come twice."""
    for seed in range(50):
        await serve(cache, text(8, seed=seed))
        await serve(cache, text(8, seed=seed if seed % 5 else seed + 1000))


async def test_what_the_eviction_policy_has_learned_is_told() -> None:
    async with opened(settings(device=64, eviction="p2c")) as cache:
        await serve(cache, text(8, seed=2000))
        early = (await cache.explain(text(8))).lines()
        assert early[-1] == "p2c has learned from 1 requests, which is too few to choose by"
        await taught(cache)
        found = await cache.explain(text(8, seed=49))
        (span,) = found.spans
        assert span.judged is not None
        assert (span.judged.kind, span.judged.worth > 0) == ("used twice", True)
        lines = found.lines()
        assert ", worth " in lines[1]
        start = next(i for i, line in enumerate(lines) if line.startswith("p2c has learned from 101 requests"))
        assert lines[start + 1].split()[:2] == ["used", "once"]
        assert len(lines[start + 1].split("%")) == 6
        plain = json.loads(json.dumps(found.plain()))
        assert plain["spans"][0]["judged"]["kind"] == "used twice"
        assert [len(kind["again"]) for kind in plain["learned"]["kinds"]] == [len(plain["learned"]["ages_s"])] * 8
        learned = cache.learned()
        assert learned is not None
        assert (learned.requests, learned.lessons) == (101, 1)


async def test_under_lru_nothing_of_it_appears() -> None:
    async with opened(settings(device=64, eviction="lru")) as cache:
        await serve(cache, text(8))
        found = await cache.explain(text(8))
        assert cache.learned() is None
        assert not {"learned", "policy", "judged"} & {*found.plain(), *found.plain()["spans"][0]}
        assert not any("worth" in line or "learned" in line for line in found.lines())


async def test_a_question_tells_ages_as_of_now() -> None:
    async with opened(settings(device=64, eviction="p2c")) as cache:
        now = 100.0
        parts(cache).driver.clock = lambda: now
        await serve(cache, text(4))
        now = 160.0
        (span,) = (await cache.explain(text(4))).spans
        assert span.judged is not None
        assert span.judged.age == 60.0
        assert "used once, 60.0 s ago" in (await cache.explain(text(4))).lines()[1]
        once = next(curve for curve in cache.learned().curves if curve.name == "used once")  # type: ignore[union-attr]
        assert once.reached[-20] > 0, "it is known to have been unused for a minute"
