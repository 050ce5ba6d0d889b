"""The threads that do blocking work: answers, errors, cancellation, the end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Executor

import pytest

from asynccache.errors import Unavailable
from asynccache.settle import ThreadPool
from asynccache.storage import settled


def names() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("test-workers"))


async def test_every_call_is_answered_by_its_own_result_or_error() -> None:
    workers = ThreadPool(3, "test-workers")

    def divide(a: int, *, by: int) -> float:
        return a / by

    futures = [workers.call(divide, 10, by=i % 5) for i in range(200)]
    await settled(futures)
    for i, future in enumerate(futures):
        if i % 5:
            assert future.result() == 10 / (i % 5)
        else:
            with pytest.raises(ZeroDivisionError):
                future.result()
    workers.close()


async def test_so_many_calls_run_at_a_time_and_not_on_the_loop() -> None:
    workers, barrier = ThreadPool(3, "test-workers"), threading.Barrier(3)
    futures = [workers.call(barrier.wait, timeout=30) for _ in range(3)]
    await settled(futures)
    assert sorted(future.result() for future in futures) == [0, 1, 2]
    assert threading.current_thread().name not in {await workers.call(lambda: threading.current_thread().name)}
    workers.close()


async def test_run_returns_what_the_function_returns_and_raises_what_it_raises() -> None:
    workers = ThreadPool(1, "test-workers")
    assert await workers.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await workers.run(divmod, 7, 0)
    workers.close()


@pytest.mark.parametrize("sizes", [[5 << 20, 0, 0], [0, 5 << 20, 0], [0, 0, 1 << 20], [3 << 20, 3 << 20, 0], [0, 0]])
async def test_work_that_is_spread_leaves_nothing_out_not_even_what_has_no_bytes(sizes: list[int]) -> None:
    workers, things = ThreadPool(2, "test-workers"), [f"thing {i}" for i in range(len(sizes))]
    parts = await workers.spread(lambda part: part, sizes, things)
    assert [thing for part in parts for thing in part] == things
    workers.close()


async def test_a_cancelled_run_ends_only_after_its_function() -> None:
    workers, begun, leave = ThreadPool(1, "test-workers"), threading.Event(), threading.Event()
    ended: list[bool] = []

    def work() -> None:
        begun.set()
        ended.append(leave.wait(30))

    task = asyncio.ensure_future(workers.run(work))
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    leave.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert ended == [True]
    workers.close()


async def test_asyncio_does_not_complain_of_the_error_of_a_cancelled_run() -> None:
    workers, begun, leave = ThreadPool(1, "test-workers"), threading.Event(), threading.Event()
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    def work() -> None:
        begun.set()
        leave.wait(30)
        raise KeyError("work")

    task = asyncio.ensure_future(workers.run(work))
    assert await asyncio.to_thread(begun.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    leave.set()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    gc.collect()
    assert complaints == []
    workers.close()


async def test_threads_start_with_the_first_call_and_end_with_close() -> None:
    workers = ThreadPool(2, "test-workers")
    assert names() == []
    await workers.call(int)
    assert names() == ["test-workers-0", "test-workers-1"]
    workers.close()
    workers.close()
    assert names() == []
    with pytest.raises(Unavailable, match="test-workers"):
        workers.call(int)


async def test_what_was_handed_in_is_done_before_close_returns() -> None:
    workers = ThreadPool(1, "test-workers")
    done: list[int] = []
    for i in range(50):
        workers.call(done.append, i)
    workers.close()
    assert done == list(range(50))


async def test_a_cancelled_future_is_no_harm_to_the_others() -> None:
    workers, gate = ThreadPool(1, "test-workers"), threading.Event()
    first, second = workers.call(gate.wait, 30), workers.call(int, "7")
    first.cancel()
    gate.set()
    assert await second == 7
    workers.close()


async def test_libraries_use_the_same_threads_as_an_executor() -> None:
    workers, loop = ThreadPool(2, "test-workers"), asyncio.get_running_loop()
    assert isinstance(workers, Executor)
    assert await loop.run_in_executor(workers, int, "7") == 7
    with pytest.raises(ZeroDivisionError):
        await loop.run_in_executor(workers, divmod, 1, 0)
    name = await loop.run_in_executor(workers, lambda: threading.current_thread().name)
    assert name.startswith("test-workers")
    workers.shutdown()
    assert names() == []
    with pytest.raises(Unavailable, match="test-workers"):
        workers.submit(int)


class Buffer:
    """Something that can be seen to be gone."""


async def test_an_idle_thread_keeps_nothing_of_its_last_call() -> None:
    workers, buffer = ThreadPool(1, "test-workers"), Buffer()
    seen = weakref.ref(buffer)
    await workers.call(id, buffer)
    del buffer
    await workers.call(int)
    gc.collect()
    assert seen() is None
    workers.close()


def test_a_call_that_hangs_does_not_keep_the_process_from_ending() -> None:
    """Neither one of its own kind nor one that was handed in as to an executor; the loop's own executor would."""
    code = (
        "import asyncio, threading\nfrom asynccache.settle import ThreadPool\n"
        "async def main():\n    workers = ThreadPool(2, 'x')\n    workers.call(threading.Event().wait)\n"
        "    workers.submit(threading.Event().wait)\n    await asyncio.sleep(0.1)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_who_forgets_to_close_can_still_end() -> None:
    code = (
        "import asyncio\nfrom asynccache.settle import ThreadPool\n"
        "async def main():\n    workers = ThreadPool(2, 'x')\n    print(await workers.call(int, '5'))\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "5\n", "")


async def test_a_call_that_raises_stop_iteration_ends() -> None:
    """A future does not take that error, so who waits for it would wait for ever."""
    pool = ThreadPool(1, "pool")
    done, _ = await asyncio.wait([call := pool.call(next, iter(()))], timeout=5)
    assert done
    with pytest.raises(RuntimeError, match="StopIteration"):
        await call
    assert await pool.run(sum, [1, 2]) == 3
    pool.close()
