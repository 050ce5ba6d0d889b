"""The head takes numbers of batches that were sent, in place of events. All else is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asynccache import BatchFailed, ConfigError
from asynccache.worker import Topology
from tests.edge.odd_values import ODD
from tests.group.group_kit import GroupWorld, play, random_of, settings, text
from tests.simulated.backend import SimulatedBackend
from tests.simulated.loop import SimulatedLoop


def test_an_event_or_a_number_that_was_not_sent_is_refused_by_name_and_the_lease_holds_what_it_held() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        async with world.opened() as cache:
            async with cache.lease(text(2)) as lease:
                gate = world.devices[0].gate()
                for odd, why in ((gate, "is no number of a batch"), (7, "batch 7 was not sent"), (0, "is no number")):
                    calls: list[Any] = [
                        lambda odd=odd: lease.release(after=odd), lambda odd=odd: lease.advance(1, after=odd),
                        lambda odd=odd: lease.truncate(8, after=odd), lambda odd=odd: lease.adopt(after=odd),
                    ]  # fmt: skip
                    for call in calls:
                        with pytest.raises(ConfigError, match=why):
                            call()
                    with pytest.raises(ConfigError, match=f"commit: after: .*{why}"):
                        await lease.commit(text(2), after=odd)
                    with pytest.raises(ConfigError, match=why):
                        await cache.batch_ended(odd)  # type: ignore[arg-type]
                assert len(lease.pages) == 2
                gate.open()
                number = world.compute(lease, text(2))
                lease.adopt(after=number)
                lease.advance(8, after=number)
                lease.truncate(8, after=number)
                await lease.commit(text(2), after=number)
                lease.release(after=number)
            world.idle()
        await world.aclose()

    play(main)


def test_a_batch_takes_bytes_and_leases_that_are_held_and_nothing_else() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        async with world.opened() as cache:
            with pytest.raises(ConfigError, match=r"payload: .* bytes are more than"):
                cache.send_batch(bytes((8 << 20) + 1))
            lease = cache.lease(text(2))
            with pytest.raises(RuntimeError, match="the lease is new"):
                cache.send_batch(b"", [lease])
            for odd in ODD:
                value = odd.make()
                if not isinstance(value, bytes):
                    with pytest.raises(ConfigError, match="payload"):
                        cache.send_batch(value)
                if odd.integer is None or odd.integer > 0:
                    with pytest.raises(ConfigError, match="batch"):
                        await cache.batch_ended(value)
            assert cache.worker is not None
            assert cache.worker._server.batches.last == 0, "nothing was sent"
            await world.serve(text(2))
        await world.aclose()

    play(main)


def test_a_batch_that_an_engine_cannot_run_fails_alone_and_says_where_and_why() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        world.begin()
        async with world.cache as cache:
            own, other = cache.worker, world.process(1).face
            assert own is not None
            async with cache.lease(text(2)) as lease:
                number = cache.send_batch(b"run", [lease])
                (await anext(own)).end()
                (await anext(other)).fail("out of memory")
                with pytest.raises(BatchFailed, match="batch 1: rank 1: out of memory") as raised:
                    await cache.batch_ended(number)
                assert raised.value.reasons == {1: "out of memory"}
                lease.release(after=number)
            again = cache.send_batch()
            for face in (own, other):
                batch = await face.heard(again)
                assert batch is not None
                face.end_batch(again)
                with pytest.raises(ConfigError, match="batch 2 was ended before"):
                    batch.end()
            await cache.batch_ended(again)
            world.idle()
        await world.group.ended()
        await world.aclose()

    play(main)


def test_pages_are_given_to_nobody_before_their_batch_is_over_on_every_worker() -> None:
    """A worker that lags, as a later pipeline stage does, must not find its pages in other hands."""

    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(pp=2), settings(4))
        world.begin()
        async with world.cache as cache:
            own, other = cache.worker, world.process(1).face
            assert own is not None
            async with cache.lease(text(4)) as lease:
                number = cache.send_batch(b"", [lease])
                lease.release(after=number)
            gates = [world.devices[rank].gate() for rank in (0, 1)]
            for face, gate in zip((own, other), gates, strict=True):
                (await anext(face)).end(gate)
            waiting = loop.create_task(world.cache.lease(text(4, seed=1)).__aenter__())
            gates[0].open()
            await asyncio.sleep(1.0)
            assert not waiting.done(), "pages were given away while a worker may still read them"
            gates[1].open()
            (await waiting).release()
        await world.group.ended()
        await world.aclose()

    play(main)


def test_a_copy_waits_for_a_batch_that_has_no_event_yet_and_others_go_on() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        world.begin()
        async with world.cache as cache:
            own, other = cache.worker, world.process(1).face
            assert own is not None
            numbers = []
            for seed in (0, 1):
                async with cache.lease(text(2, seed=seed)) as lease:
                    numbers.append(cache.send_batch(b"", [lease]))
                    await lease.commit(text(2, seed=seed), after=numbers[-1])
                    lease.release(after=numbers[-1])
            own.end_batch(1)
            own.end_batch(2)
            for number in numbers:
                await other.heard(number)
            await asyncio.sleep(1.0)
            server = world.process(1).server
            operations = cache.statistics().core.operations
            assert len(server._held) == sum(operations.values()) - operations["retire"] - operations["compute"]
            other.end_batch(1)
            await asyncio.sleep(1.0)
            assert server._held, "the second backup waits for both"
            other.end_batch(2)
            await cache.flush()
            assert not server._held
            world.idle()
        await world.group.ended()
        await world.aclose()

    play(main)


def test_stores_are_urls_and_a_group_serves_one_cache() -> None:
    async def main(loop: SimulatedLoop) -> None:
        world = GroupWorld(loop, Topology(tp=2), settings(16, 40))
        async with world.opened() as cache:
            with pytest.raises(ConfigError, match="workers of other processes take URLs"):
                await cache.attach_storage(SimulatedBackend(random_of(0)))
            from asynccache import AsyncCache

            with pytest.raises(ConfigError, match="a group serves one cache"):
                await AsyncCache(world.config, workers=world.group.workers).__aenter__()
        with pytest.raises(ConfigError, match="workers"):
            AsyncCache(world.config, workers=3)  # type: ignore[arg-type]
        await world.aclose()

    play(main)
