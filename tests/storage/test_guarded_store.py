"""What stands before a store: how many calls at a time, in which order, how slow is too slow, the breaker, threads."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Executor
from itertools import permutations
from typing import Any

import pytest

from asynccache.errors import BackendError, Timeout, Unavailable
from asynccache.settle import ThreadPool
from asynccache.storage import REFUSED, Breaker, BreakerState, CheckedStore, Permit, Result, checked, settled
from asynccache.storage.call_guard import best_off
from asynccache.testing.backend_suite import LAYOUT, keys_of
from tests.simulated.loop import SimulatedLoop, simulate
from tests.storage import pages_kit
from tests.storage.pages_kit import Misbehaving, in_world
from tests.waiting import turns

# How many calls at a time, in which order, how slow is too slow, and who is the probe. In virtual time.


KEYS = keys_of(2, "odd")


def store_on(backend: Any, **options: Any) -> CheckedStore:
    return CheckedStore(backend, LAYOUT, threads=0, **options)


def put(store: CheckedStore) -> asyncio.Future[list[Result]]:
    return asyncio.ensure_future(pages_kit.put(store, KEYS))


def get(store: CheckedStore) -> asyncio.Future[list[Result]]:
    return asyncio.ensure_future(pages_kit.get(store, KEYS))


@in_world
async def test_a_backend_that_cancels_a_call_by_itself_has_failed_it(loop: SimulatedLoop) -> None:
    """Its own task, or its own pool of threads, was ended."""
    store = store_on(Misbehaving(get="cancels itself", put="cancels itself", flush="cancels itself"))
    assert await put(store) == [Result.FAILED] * 2
    assert await get(store) == [Result.FAILED] * 2
    with pytest.raises(BackendError, match="by itself"):
        await store.flush()
    assert store.stats()["failed_calls"] == 3


@in_world
async def test_no_more_reads_and_writes_at_a_time_than_that(loop: SimulatedLoop) -> None:
    backend = Misbehaving(get=1.0, put=1.0, exists=1.0)
    store = store_on(backend, concurrency=3)
    calls = [make(store) for _ in range(8) for make in (put, get)]
    calls += [asyncio.ensure_future(store.exists(KEYS)) for _ in range(8)]
    for answer in await asyncio.gather(*calls):
        assert Result.FAILED not in answer
    assert backend.most == 6
    assert free(store) == (3, 3)


def free(store: CheckedStore) -> tuple[int, int]:
    """How many places are free for reads and for writes."""
    return store._guard.reads._value, store._guard.writes._value


@in_world
async def test_a_read_does_not_stand_behind_slow_writes_nor_a_write_behind_any_number_of_reads(
    loop: SimulatedLoop
) -> None:
    store = store_on(Misbehaving(put=20.0), concurrency=16)
    puts = [put(store) for _ in range(40)]
    await asyncio.sleep(1.0)
    began = loop.time()
    await get(store)
    await store.exists(KEYS)
    assert loop.time() - began < 0.1
    await asyncio.gather(*puts)
    store = store_on(Misbehaving(get=1.0, put=1.0), concurrency=8, timeout=100.0)
    gets = [get(store) for _ in range(80)]
    await asyncio.sleep(0.5)
    began = loop.time()
    await put(store)
    assert loop.time() - began < 1.5
    await asyncio.gather(*gets)


@pytest.mark.parametrize("seed", range(10))
def test_a_place_is_not_lost_whenever_its_taker_is_cancelled(seed: int) -> None:
    async def world(loop: SimulatedLoop) -> None:
        store = store_on(Misbehaving(get=1.0, put=1.0), concurrency=1)
        calls = [make(store) for _ in range(5) for make in (get, put)]
        for number, call in enumerate(calls):
            loop.call_later(0.25 * number * (seed + 1), call.cancel)
        await asyncio.wait(calls)
        assert free(store) == (1, 1)
        assert Result.FAILED not in await get(store)

    simulate(world, seed)


@in_world
async def test_who_finds_no_place_in_time_fails_and_the_breaker_does_not_hear_of_it(loop: SimulatedLoop) -> None:
    backend = Misbehaving(get=5.0)
    store = store_on(backend, concurrency=1, timeout=6.0, breaker=Breaker(threshold=1))
    answers = await asyncio.gather(get(store), get(store), get(store))
    assert sorted(answer[0] for answer in answers) == [Result.MISS, Result.MISS, Result.FAILED]
    assert store.stats()["crowded_calls"] == 1
    assert store.breaker.state is BreakerState.CLOSED


@in_world
async def test_a_cancelled_caller_in_line_leaves_it_at_once(loop: SimulatedLoop) -> None:
    backend = Misbehaving(get=5.0)
    store = store_on(backend, concurrency=1)
    first, second = get(store), get(store)
    await asyncio.sleep(1.0)
    waits = second if backend.began == ["get"] and not first.done() else first
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert loop.time() < 5.5
    await asyncio.wait([first, second])
    assert free(store) == (1, 1)


@in_world
async def test_a_named_call_says_that_there_was_no_place(loop: SimulatedLoop) -> None:
    store = store_on(Misbehaving(put=20.0), concurrency=1, timeout=5.0)
    calls = [put(store)]
    await asyncio.sleep(3.0)
    calls += [put(store)]  # from 5 to 10
    await asyncio.sleep(0.1)
    with pytest.raises(Timeout, match="flush: the store is busy"):
        await store.flush()
    await asyncio.gather(*calls)


# slow


@in_world
async def test_slow_calls_are_used_and_open_the_breaker_like_failures(loop: SimulatedLoop) -> None:
    backend = Misbehaving(get=2.0)
    store = store_on(backend, slow=1.0, breaker=Breaker(threshold=3, backoff=5.0))
    for _ in range(3):
        assert store.breaker.state is BreakerState.CLOSED
        assert await get(store) == [Result.MISS] * 2
        assert await store.exists(KEYS) == [Result.FAILED if store.breaker.opened else Result.MISS] * 2
    assert store.breaker.state is BreakerState.OPEN
    assert (store.stats()["slow_calls"], store.stats()["failed_calls"]) == (3, 0)


@in_world
async def test_a_store_that_hangs_is_left_alone_before_its_deadline(loop: SimulatedLoop) -> None:
    store = store_on(Misbehaving(get=1e6), slow=1.0, timeout=30.0, breaker=Breaker(threshold=4, backoff=60.0))
    calls = [get(store) for _ in range(4)]
    await asyncio.sleep(1.5)
    began = loop.time()
    assert await get(store) == [Result.FAILED] * 2
    assert loop.time() == pytest.approx(began, abs=0.01)
    await asyncio.gather(*calls)
    stats = store.stats()
    assert (stats["slow_calls"], stats["timeouts"], stats["breaker_opened"]) == (4, 4, 1)


@in_world
async def test_a_slow_call_is_one_failure_however_it_ends(loop: SimulatedLoop) -> None:
    for seconds in (2.0, 1e6):
        store = store_on(Misbehaving(get=seconds), slow=1.0, timeout=5.0, breaker=Breaker(threshold=2, backoff=60.0))
        await get(store)
        assert (store.breaker.state, store.stats()["slow_calls"]) == (BreakerState.CLOSED, 1)
        await get(store)
        assert store.breaker.opened == 1


# probes


@in_world
async def test_a_store_that_stays_away_holds_up_nobody_and_is_asked_ever_less_often(loop: SimulatedLoop) -> None:
    backend = Misbehaving(get=1e6, exists=1e6)
    store = store_on(backend, slow=1.0, timeout=30.0, breaker=Breaker(threshold=1, backoff=2.0, max_backoff=16.0))
    await get(store)
    began, longest = loop.time(), 0.0
    for _ in range(1000):
        at = loop.time()
        assert await store.exists(KEYS) == [Result.FAILED] * 2
        longest = max(longest, loop.time() - at)
        await asyncio.sleep(0.1)
    assert longest < 0.01
    assert loop.time() - began == pytest.approx(100, abs=1)
    assert 6 <= backend.began.count("exists") <= 10, "2, 4, 8 and then 16 seconds apart"
    await store.aclose()
    assert backend.now.total() == 0


@in_world
async def test_a_store_that_has_an_index_is_asked_for_a_sign_of_life(loop: SimulatedLoop) -> None:
    """Its ``exists`` is none."""
    class Index(Misbehaving):
        async def probe(self) -> None:
            await self._suffer("probe", (), lambda: asyncio.sleep(0))

    backend = Index(get=1e6, probe="is unavailable")
    store = store_on(backend, slow=1.0, timeout=2.0, breaker=Breaker(threshold=1, backoff=2.0))
    await get(store)
    for _ in range(20):
        await asyncio.sleep(1.0)
        assert await store.exists(KEYS) == [Result.FAILED] * 2
    assert 3 <= backend.began.count("probe") <= 4
    backend.how = {}
    await asyncio.sleep(20.0)
    await store.exists(KEYS)
    await asyncio.sleep(0.1)
    assert await store.exists(KEYS) == [Result.MISS] * 2
    await store.aclose()


AWAY: dict[str, str | float] = {"get": "is unavailable", "exists": "is unavailable"}


async def backed_off(backend: Misbehaving) -> CheckedStore:
    """A store on ``backend``, which is away: its breaker is open, and its back-off is over."""
    store = store_on(backend, slow=1.0, timeout=30.0, breaker=Breaker(threshold=1, backoff=2.0))
    await get(store)
    assert store.breaker.state is BreakerState.OPEN
    await asyncio.sleep(2.5)
    return store


@in_world
async def test_a_flush_that_hangs_keeps_no_reads_from_a_store_that_came_back(loop: SimulatedLoop) -> None:
    backend = Misbehaving(**AWAY, flush=1e6)
    store = await backed_off(backend)
    flushing = asyncio.ensure_future(store.flush())
    await asyncio.sleep(0.1)
    backend.how = {}
    await get(store)
    await asyncio.sleep(0.1)
    assert await get(store) == [Result.MISS] * 2
    with pytest.raises(Timeout):
        await flushing
    await store.aclose()


@in_world
async def test_a_flush_that_has_nothing_to_do_is_no_sign_of_life(loop: SimulatedLoop) -> None:
    store = await backed_off(Misbehaving(**AWAY))
    await store.flush()
    assert store.breaker.state is BreakerState.OPEN
    await store.aclose()


@in_world
async def test_while_it_is_open_no_work_is_done_for_a_call(loop: SimulatedLoop) -> None:
    store = store_on(Misbehaving(), breaker=Breaker(threshold=1, backoff=60.0))
    permit = store.breaker.allow(0.0)
    store.breaker.failure(permit, loop.time())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checked, "seal", lambda keys, records: pytest.fail("it was sealed for nothing"))
        assert await put(store) == [Result.FAILED] * 2


def test_the_log_says_once_when_a_store_is_left_alone_and_once_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = Misbehaving()

    async def world(loop: SimulatedLoop) -> None:
        store = store_on(backend, breaker=Breaker(threshold=2))
        for second in range(40):
            backend.how = AWAY if second <= 20 else {}
            await get(store)
            await asyncio.sleep(1)

    simulate(world, 1)
    assert [(record.name, record.levelname) for record in caplog.records] == [("asynccache", "WARNING")] * 2
    why = "Unavailable('redis://***@host has no answer about 2 pages')"
    assert caplog.messages == [
        f"store {backend} is left alone until it answers a probe: {why}", f"store {backend} answers again",
    ]  # fmt: skip


def test_the_log_says_that_a_store_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    async def world(loop: SimulatedLoop) -> None:
        await get(store_on(Misbehaving(get=3.0), slow=1.0, breaker=Breaker(threshold=1)))

    simulate(world, 1)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].endswith("is left alone until it answers a probe: a call takes longer than 1 s")


# The breaker, step by step, with a clock of its own.


def given(breaker: Breaker, now: float) -> Permit:
    """A permit that must be had."""
    permit = breaker.allow(now)
    assert permit != REFUSED
    return permit


SCRIPTS = {
    "it opens after that many failures in a row": "-read -read +read -read -read closed -read open",
    "failures of several kinds add up": "-ask -read closed -write open",
    "answered questions do not hide reads that fail": "+ask -read +ask -read closed +ask -read open",
    "it refuses until the back-off is over and then lets one probe through":
        "-read -read -read @1.9 refused @2 probe half refused",
    "a good probe closes it": "-read -read -read @2 +ask closed +read",
    "an abandoned probe leaves room for the next": "-read -read -read @2 ~ask open probe half",
    "bad probes double the back-off up to its limit":
        "-read -read -read @2 -ask @5.9 refused @6 -ask @10.9 refused @11 -ask @15.9 refused @16 probe",
    "after a recovery the back-off starts small again":
        "-read -read -read @2 -ask @6 +ask @7 +read @10 -read -read closed -read open @11.9 refused @12 probe",
    "on probation one more failure of that kind opens it for longer":  # an answer of another kind proves nothing
        "-read -read -read @2 -ask @6 +ask closed @7 +ask @10 -read open @14.9 refused @15 probe",
    "on probation failures of other kinds count as ever":
        "-read -read -read @2 -ask @6 +ask @7 -write -write closed -write open @8.9 refused @9 probe",
    **{f"a call from before it opened that is {how} changes nothing ever after":
       f"1 2 3 -read -read -read open {sign}1 open @2 4 half {sign}2 half refused +4 closed {sign}3 closed +read"
       for sign, how in (("+", "answered"), ("-", "failed"), ("~", "abandoned"))},
    "a late abandoned probe is not the next probe": "-read -read -read @2 1 ~1 2 +1 half +2 closed",
}  # fmt: skip
STATES = {"closed": BreakerState.CLOSED, "open": BreakerState.OPEN, "half": BreakerState.HALF_OPEN}


@pytest.mark.parametrize("law", SCRIPTS)
def test_the_breaker_step_by_step(law: str) -> None:
    """``+kind``, ``-kind`` and ``~kind``: a call is let through, and is answered, fails or is abandoned; ``@seconds``
    is the time from then on; ``probe``: a call is let through, ``refused``: none is; a number: a call that is let
    through, and of which more is said later; else the state it must have."""
    breaker, now, early = Breaker(threshold=3, backoff=2.0, max_backoff=5.0), 0.0, dict[str, Permit]()
    for step in SCRIPTS[law].split():
        if step in STATES:
            assert breaker.state is STATES[step]
        elif step == "refused":
            assert breaker.allow(now) == REFUSED
        elif step[0] == "@":
            now = float(step[1:])
        elif step.isdigit():
            early[step] = given(breaker, now)
        elif (permit := early.get(step[1:]) or given(breaker, now)) and step[0] in "+-":
            kind = "read" if step[1:] in early else step[1:]
            (breaker.success if step[0] == "+" else breaker.failure)(permit, now, kind)
        elif step[0] == "~":
            breaker.abandon(permit)


def test_backoffs_are_spread_by_the_jitter_that_is_handed_in() -> None:
    factors = iter((1.5, 0.5))
    breaker = Breaker(threshold=1, backoff=2.0, jitter=lambda: next(factors))
    breaker.failure(given(breaker, 0.0), 0.0)
    assert breaker.allow(2.9) == REFUSED
    breaker.failure(given(breaker, 3.0), 3.0)
    assert breaker.allow(4.9) == REFUSED
    given(breaker, 5.0)


def test_it_knows_how_often_and_how_long_it_was_not_closed() -> None:
    breaker = Breaker(threshold=1, backoff=2.0)
    breaker.failure(given(breaker, 10.0), 10.0)
    assert (breaker.opened, breaker.shut_for(11.0)) == (1, 1.0)
    breaker.failure(given(breaker, 12.0), 12.0)
    breaker.success(given(breaker, 17.0), 17.0)
    assert (breaker.opened, breaker.shut_for(30.0)) == (1, 7.0)
    breaker.failure(given(breaker, 40.0), 40.0)
    assert (breaker.opened, breaker.shut_for(41.0)) == (2, 8.0)


@pytest.mark.parametrize("states", list(permutations(BreakerState)))
def test_of_several_the_one_that_lets_most_through(states: tuple[BreakerState, ...]) -> None:
    assert best_off(states) is BreakerState.CLOSED
    assert best_off(map(int, states)) is BreakerState.CLOSED
    assert best_off(state for state in states if state) is BreakerState.HALF_OPEN
    assert best_off([BreakerState.OPEN]) is BreakerState.OPEN


# The threads that do blocking work: answers, errors, cancellation, the end.


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


async def test_threads_run_so_many_calls_at_a_time_and_end_with_close() -> None:
    """The threads start with the first call. Libraries use them as an executor."""
    workers, barrier, loop = ThreadPool(3, "test-workers"), threading.Barrier(3), asyncio.get_running_loop()
    assert isinstance(workers, Executor)
    assert names() == []
    assert sorted(await asyncio.gather(*(workers.call(barrier.wait, timeout=30) for _ in range(3)))) == [0, 1, 2]
    assert names() == ["test-workers-0", "test-workers-1", "test-workers-2"]
    assert (await loop.run_in_executor(workers, lambda: threading.current_thread().name)) in names()
    for attempt in (loop.run_in_executor(workers, divmod, 1, 0), workers.run(divmod, 7, 0)):
        with pytest.raises(ZeroDivisionError):
            await attempt
    assert await workers.run(divmod, 7, 2) == (3, 1)
    workers.shutdown()
    workers.close()
    assert names() == []
    for hand_in in (workers.call, workers.submit):
        with pytest.raises(Unavailable, match="test-workers"):
            hand_in(int)


@pytest.mark.parametrize("sizes", [[5 << 20, 0, 0], [0, 5 << 20, 0], [0, 0, 1 << 20], [3 << 20, 3 << 20, 0], [0, 0]])
async def test_work_that_is_spread_leaves_nothing_out_not_even_what_has_no_bytes(sizes: list[int]) -> None:
    workers, things = ThreadPool(2, "test-workers"), [f"thing {i}" for i in range(len(sizes))]
    parts = await workers.spread(lambda part: part, sizes, things)
    assert [thing for part in parts for thing in part] == things
    workers.close()


async def test_a_cancelled_run_ends_only_after_its_function() -> None:
    """And asyncio does not complain of that one's error."""
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
    await turns(10)
    assert not task.done()
    leave.set()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    gc.collect()
    assert complaints == []
    workers.close()


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


async def test_a_call_that_raises_stop_iteration_ends() -> None:
    """A future does not take that error, so who waits for it would wait for ever."""
    pool = ThreadPool(1, "pool")
    done, _ = await asyncio.wait([call := pool.call(next, iter(()))], timeout=5)
    assert done
    with pytest.raises(RuntimeError, match="StopIteration"):
        await call
    assert await pool.run(sum, [1, 2]) == 3
    pool.close()
