"""The simulated loop itself: time, order, deadlocks, executors and cancellation come out of the seed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated.loop import Deadlock, Livelock, Order, SimulatedLoop, Strike, simulate


async def _sleepers(loop: SimulatedLoop) -> list[tuple[float, int]]:
    seen: list[tuple[float, int]] = []

    async def sleeper(n: int) -> None:
        for _ in range(3):
            await asyncio.sleep(loop.random.random() * 1000)
            seen.append((loop.time(), n))

    async with asyncio.TaskGroup() as group:
        for n in range(5):
            group.create_task(sleeper(n))
    return seen


def test_time_is_virtual_and_moves_forward() -> None:
    seen = simulate(_sleepers, 1)
    assert [when for when, _ in seen] == sorted(when for when, _ in seen)
    assert seen[-1][0] > 100


def test_one_seed_is_one_world() -> None:
    assert simulate(_sleepers, 3) == simulate(_sleepers, 3)
    assert simulate(_sleepers, 3) != simulate(_sleepers, 4)


def test_a_seed_means_the_same_in_every_process() -> None:
    script = Path(__file__).read_text() + "\nprint(simulate(_order, 7), simulate(_set_of_tasks, 7))\n"
    runs = {
        subprocess.run([sys.executable, "-c", script], env={"PYTHONHASHSEED": hashseed, "PYTHONPATH": "."},
                       check=True, capture_output=True, text=True).stdout
        for hashseed in ("1", "2")
    }
    assert len(runs) == 1
    assert runs.pop().strip()


async def _order(loop: SimulatedLoop) -> list[int]:
    seen: list[int] = []
    for n in range(8):
        loop.call_soon(seen.append, n)
    await asyncio.sleep(1)
    return seen


async def _set_of_tasks(loop: SimulatedLoop) -> list[str]:
    async def nothing() -> None:
        await asyncio.sleep(1)

    done, _ = await asyncio.wait({loop.create_task(nothing(), name=str(n)) for n in range(20)})
    return [task.get_name() for task in done]


def test_fifo_keeps_asyncios_promise_and_shuffled_breaks_it() -> None:
    assert simulate(_order, 7, order=Order.FIFO) == list(range(8))
    assert len({tuple(simulate(_order, seed)) for seed in range(20)}) > 10


def test_a_deadlock_names_what_everyone_waits_for() -> None:
    async def waits(loop: SimulatedLoop) -> None:
        lock = asyncio.Lock()
        await lock.acquire()
        await asyncio.create_task(lock.acquire(), name="second")

    with pytest.raises(Deadlock, match=r"(?s)2 tasks wait.*second: Lock.acquire") as caught:
        simulate(waits, 5)
    assert "seed 5" in caught.value.__notes__[0]


def test_a_world_that_spins_is_stopped() -> None:
    async def spins(loop: SimulatedLoop) -> None:
        for _ in range(10_000):
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        simulate(spins, 1, step_limit=1000)


def test_a_task_left_behind_fails_the_world() -> None:
    async def leaves(loop: SimulatedLoop) -> None:
        kept.append(loop.create_task(asyncio.sleep(1), name="orphan"))

    kept: list[asyncio.Task[None]] = []
    with pytest.raises(RuntimeError, match="orphan"):
        simulate(leaves, 1)


def test_an_error_where_nobody_looks_fails_the_world() -> None:
    async def careless(loop: SimulatedLoop) -> None:
        loop.call_soon(int, "x")
        await asyncio.sleep(1)

    with pytest.raises(ValueError, match="invalid literal"):
        simulate(careless, 1)


def test_an_executor_call_happens_later_or_not_at_all_if_it_was_cancelled_before_it_began() -> None:
    async def calls(loop: SimulatedLoop) -> tuple[bool, bool]:
        ran: list[str] = []
        future = loop.run_in_executor(None, ran.append, "call")
        assert not ran
        await asyncio.sleep(loop.random.random() * 1e-4)
        future.cancel()
        before = bool(ran)
        await asyncio.sleep(1)
        return before, bool(ran)

    ends = {simulate(calls, seed) for seed in range(60)}
    assert ends == {(False, False), (False, True), (True, True)}


@pytest.mark.parametrize("strike", Strike)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_cancel_at_hits_the_nth_await(n: int, strike: Strike) -> None:
    reached: list[int] = []

    async def victim() -> None:
        for step in (1, 2, 3):
            reached.append(step)
            await asyncio.sleep(step)

    async def world(loop: SimulatedLoop) -> bool:
        task = loop.create_task(victim())
        loop.cancel_at(task, n, strike)
        await asyncio.wait({task})
        assert loop.time() == pytest.approx(sum(range(1, n + (strike is Strike.RACING))), abs=0.01)
        return task.cancelled()

    assert simulate(world, 1, order=Order.FIFO)
    assert reached == list(range(1, n + 1))


def test_a_racing_cancellation_loses_a_result_that_was_there() -> None:
    async def world(loop: SimulatedLoop) -> tuple[bool, bool]:
        future = loop.create_future()
        task = loop.create_task(_wait_for(future))
        loop.cancel_at(task, 1, Strike.RACING)
        loop.call_later(1, future.set_result, None)
        await asyncio.wait({task})
        return future.cancelled(), task.cancelled()

    assert simulate(world, 1, order=Order.FIFO) == (False, True)


async def _wait_for(future: asyncio.Future[None]) -> None:
    await future


def test_a_second_thread_is_an_error() -> None:
    import threading

    async def world(loop: SimulatedLoop) -> list[str]:
        errors: list[str] = []

        def other() -> None:
            try:
                loop.call_soon_threadsafe(errors.append, "ran")
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return errors

    assert "second thread" in simulate(world, 1)[0]
