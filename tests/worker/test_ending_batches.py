"""Batches are ended once, from any thread, and a worker that is closed says so, whatever it is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from asynccache import ConfigError, CopyFailed, RankFailure
from asynccache.core.plan import Move, Status
from asynccache.worker.messages import BatchOver, Died, Ended, Message
from asynccache.worker.pool_layout import FULL
from asynccache.worker.rank_server import ORDERS, EngineBatch, SentBatches
from asynccache.worker.work import CopyKind, Work
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import SimulatedLoop, simulate
from tests.worker.test_waiting_threads import Opened, opened, perform, send_batch


def overs(worker: Opened) -> list[Message]:
    return [message for message in worker.told if isinstance(message, BatchOver)]


async def test_a_batch_that_a_thread_ends_twice_is_over_once_and_the_second_end_is_refused() -> None:
    """Also before the loop has had a turn to take note of the first."""
    async with opened() as worker:
        batch = worker.loaded(1)
        told: list[BaseException] = []

        ends: list[Callable[[], None]] = [
            batch.end, batch.end, lambda: batch.fail("no"), lambda: worker.face.end_batch(1),
        ]  # fmt: skip

        def end_twice() -> None:
            for end in ends:
                try:
                    end()
                except ConfigError as error:
                    told.append(error)

        thread = threading.Thread(target=end_twice)
        thread.start()
        thread.join()  # the loop waits: no callback of it runs meanwhile
        assert [str(error) for error in told] == ["batch 1 was ended before"] * 3
        assert not overs(worker)
        await asyncio.sleep(0.01)
        assert overs(worker) == [BatchOver(1, "")]
        assert await worker.face.heard(1) is None


async def test_a_copy_waits_for_a_batch_that_is_ended_in_a_thread_until_the_loop_knows_its_event() -> None:
    """From when a thread has ended it, nobody may take it for over."""
    async with opened() as worker:
        batch = worker.loaded(1)
        thread = threading.Thread(target=batch.end)
        thread.start()
        thread.join()
        assert worker.server.batches.lacks_event((1,))
        await asyncio.sleep(0.01)
        assert not worker.server.batches.lacks_event((1,))


async def test_a_worker_that_is_closed_says_so_whatever_its_engine_asks() -> None:
    async with opened() as worker:
        batch = worker.loaded(1)
        await worker.server.aclose(1.0)
        with pytest.raises(RankFailure, match="the worker is closed"):
            worker.face.wait_layers(worker.stream, batch, 0)
        with pytest.raises(RankFailure, match="the worker is closed"):
            await worker.face.layer(batch, 0)
        with pytest.raises(RankFailure, match="the worker is closed"):
            batch.end(worker.stream.record())
        batch.end()


async def test_who_waits_for_a_load_that_is_held_is_told_when_the_worker_is_closed() -> None:
    async with opened() as worker:
        first = worker.loaded(1)
        second = worker.loaded(2, after=(1,))
        waiting = asyncio.create_task(worker.face.layer(second, 0))
        await asyncio.sleep(0.01)
        assert not waiting.done(), "the load stands behind a batch without an event"
        await worker.server.aclose(1.0)
        with pytest.raises(RankFailure, match="the worker is closed"):
            async with asyncio.timeout(10):
                await waiting
        first.end()


async def test_an_engine_is_told_of_a_load_that_failed_before_it_asked() -> None:
    """It computes nothing on pages that never came; also if the head has heard of it before the engine asks."""
    async with opened() as worker:
        server = worker.server
        asked = worker.loaded(1)
        server.batches.lose({1})
        with pytest.raises(CopyFailed, match="a load that batch 1 needs has failed on rank 0"):
            await worker.face.layer(asked, 0)
        server._failed.add(7)
        slots = bytes(4)
        server.take(send_batch(8, b"", (7,)))
        server.take(ORDERS["forget_load"].message(7))
        server.take(perform(Work(CopyKind.LOAD, (9,), (Move(FULL, slots, slots),))))
        with pytest.raises(CopyFailed):
            await worker.face.layer(server.batches.find(8), 0)
        server.take(send_batch(10, b"", (7,)))
        await worker.face.layer(server.batches.find(10), 0)
        assert all(message.status is Status.DONE for message in worker.told if isinstance(message, Ended))


@pytest.mark.parametrize("asked_at_once", [True, False])
async def test_loads_that_the_device_refuses_are_not_taken_for_loads_that_have_come(asked_at_once: bool) -> None:
    """A worker that cannot go on tells its engine, which does not wait for the head to hear of it and to answer."""
    async with opened() as worker:
        local = worker.server.local
        assert local is not None

        def refuse(*_: object) -> None:
            raise OSError("the driver is gone")

        local.mover.load = refuse  # type: ignore[method-assign, assignment]
        batch = worker.loaded(1)
        for turns in range(0 if asked_at_once else 5):
            await asyncio.sleep(0)
            with pytest.raises((RankFailure, OSError), match="the driver is gone"):
                await worker.face.layer(batch, turns % 2)
        with pytest.raises((RankFailure, OSError), match="the driver is gone"):
            worker.face.wait_layers(worker.stream, batch, 0)
        with pytest.raises(RankFailure, match="rank 0: OSError: the driver is gone"):
            await anext(worker.face)
        assert Died("OSError: the driver is gone") in worker.told


async def test_a_worker_whose_group_has_failed_says_why_whatever_its_engine_asks() -> None:
    """And hands out no batch, though one was not read: nobody wants it any more."""
    async with opened() as worker:
        batch = worker.loaded(1)
        assert await anext(worker.face) is batch
        worker.loaded(2)
        worker.server.finish(RankFailure("closed the connection", 3))
        asked: list[Callable[[], Awaitable[object]]] = [
            lambda: anext(worker.face), lambda: worker.face.heard(2), worker.face.ended,
        ]  # fmt: skip
        for ask in asked:
            with pytest.raises(RankFailure, match="rank 3: closed the connection"):
                await ask()
        await worker.server.aclose(1.0)
        for ask in (*asked, lambda: worker.face.layer(batch, 0)):
            with pytest.raises(RankFailure, match="rank 3: closed the connection"):
                await ask()
        calls: list[Callable[[], None]] = [
            lambda: worker.face.wait_layers(worker.stream, batch, 0), lambda: batch.end(worker.stream.record()),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(RankFailure, match="rank 3: closed the connection"):
                call()


async def test_who_waits_for_a_load_that_is_held_is_told_at_once_when_the_group_fails() -> None:
    """Not only when the worker has closed, which may take as long as a store does."""
    async with opened() as worker:
        first = worker.loaded(1)
        second = worker.loaded(2, after=(1,))
        waiting = asyncio.create_task(worker.face.layer(second, 0))
        await asyncio.sleep(0.01)
        worker.server.finish(RankFailure("closed the connection", 3))
        for asked in (waiting, worker.face.layer(second, 0)):
            with pytest.raises(RankFailure, match="rank 3: closed the connection"):
                async with asyncio.timeout(10):
                    await asked
        first.end()


@pytest.mark.parametrize("when", ["done", "wait"])
async def test_an_event_that_raises_is_the_end_of_the_group_and_its_batch_is_not_lost_in_silence(when: str) -> None:
    class Broken:
        def done(self) -> bool:
            if when == "done":
                raise OSError("an illegal memory access")
            return False

        async def wait(self) -> None:
            raise OSError("an illegal memory access")

    async with opened() as worker:
        batch = worker.loaded(1)
        assert worker.server.local is not None
        worker.server.local.engine_event = lambda event: event  # type: ignore[method-assign]
        batch.end(Broken())
        await asyncio.sleep(0.01)
        died = [one for one in worker.told if isinstance(one, Died)]
        assert died == [Died("OSError: an illegal memory access")]
        assert not overs(worker)


def test_a_load_that_fails_marks_the_batches_that_need_it_until_they_are_over() -> None:
    """Also those that the engine has ended by an event which has not fired: its stream may still ask for their layers,
    and was told that all had come."""

    async def main(loop: SimulatedLoop) -> None:
        over: list[int] = []
        sent = SentBatches(lambda number, _: over.append(number), lambda: None, lambda _: None)
        device = SimulatedDevice()
        gate = device.gate()
        batches = [EngineBatch(number, b"", (7,), lambda *_: None) for number in (1, 2, 3)]
        for batch in batches:
            sent.add(batch)
        sent.end(1, gate, "")
        sent.end(2, None, "")
        sent.lose({7})
        assert [batch.lost for batch in batches] == [True, False, True]
        gate.open()
        await asyncio.sleep(1.0)
        assert over == [2, 1]
        assert not sent._running
        await device.aclose()

    simulate(main, 1)
