"""The end of ``Pages``: calls that fail or are given up, and ``close``."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.storage import Closed, Pages, ParsedUrl, Result, StoreLayout
from asynccache.storage.loop_thread import StoreThread
from tests.storage.pages_kit import (
    FAILED,
    HIT,
    MISS,
    PATIENCE,
    SIZE,
    Misbehaving,
    keys,
    memory,
    open_pages,
    result,
    row,
    thread_names,
    until,
)

# Calls that fail or are given up, and the end of ``Pages``: deadlines, cancelled futures, ``close``, forks,
# callbacks.


def stored(backend: MemoryBackend, count: int) -> None:
    """Have ``backend`` hold the first pages."""
    with open_pages(backend, memory()) as pages:
        assert result(pages.put(keys(count), range(count))) == [HIT] * count


# deadlines


def test_a_question_is_answered_at_its_deadline_whatever_the_store_does() -> None:
    store = Misbehaving(exists="is stuck")
    with open_pages(store, memory()) as pages:
        assert result(pages.exists(keys(3), timeout=0.01)) == [FAILED] * 3
        assert pages.stats()["late_calls"] == 1
        assert pages.stats()["calls_in_flight"] == 1  # in silence
        store.gate.set()
        until(lambda: pages.stats()["calls_in_flight"] == 0)


def test_what_the_nearer_store_said_by_the_deadline_counts() -> None:
    near = MemoryBackend()
    stored(near, 2)
    made = memory()
    with open_pages([near, Misbehaving(get="hangs", exists="hangs")], made) as pages:
        assert result(pages.exists(keys(4), timeout=0.2)) == [HIT, HIT, FAILED, FAILED]
        assert result(pages.get(keys(4), [4, 5, 6, 7], timeout=0.2)) == [HIT, HIT, FAILED, FAILED]
    assert row(made, 4) == row(memory(), 0)
    assert row(made, 5) == row(memory(), 1)


def test_a_call_that_is_taken_up_too_late_is_not_begun() -> None:
    store = Misbehaving()
    with open_pages(store, memory()) as pages:

        def too_late() -> list[Future[list[Result]]]:  # on the loop, which takes up nothing meanwhile
            return [pages.exists(keys(1), timeout=1e-9), pages.put(keys(1), [0], timeout=1e-9)]

        for future in pages._serving.ask(too_late):
            assert result(future) == [FAILED]
        assert store.began == []
        assert pages.stats()["late_calls"] == 2


def test_the_breaker_hears_of_a_store_that_hangs_though_every_question_has_a_deadline() -> None:
    """Later questions are refused at once, and cost their askers nothing."""
    store = Misbehaving(exists="hangs")
    with Pages.open(store, memory(), SIZE, "m", options={"slow": "0.02"}) as pages:
        while not pages.stats()["breaker"]:
            assert result(pages.exists(keys(1), timeout=0.005)) == [FAILED]
        assert pages.stats()["slow_calls"]
        assert result(pages.exists(keys(1))) == [FAILED]
        assert pages.stats()["refused_calls"]


def test_a_dead_store_is_a_result_and_not_an_error() -> None:
    store = Misbehaving(exists="is unavailable", get="has a bug", put="has two")
    with open_pages(store, memory()) as pages:
        assert result(pages.exists(keys(2))) == [FAILED] * 2
        assert result(pages.put(keys(2), [0, 1])) == [FAILED] * 2
        assert result(pages.get(keys(2), [0, 1])) == [FAILED] * 2
        assert "a bug" in str(pages.last_errors["Misbehaving"])


# cancelling


def test_a_call_that_has_begun_cannot_be_cancelled() -> None:
    store = Misbehaving(get="is stuck")
    with open_pages(store, memory()) as pages:
        future = pages.get(keys(1), [0])
        store.inside.wait(PATIENCE)
        assert not future.cancel()
        store.gate.set()
        assert result(future) == [MISS]


# closing


def test_close_lets_calls_in_flight_end() -> None:
    store, made = Misbehaving(put="is stuck"), memory()
    pages = open_pages(store, made)
    future = pages.put(keys(2), [0, 1])
    store.inside.wait(PATIENCE)
    threading.Timer(0.02, store.gate.set).start()
    assert pages.close(PATIENCE) == Closed(abandoned=0, held=0, over=True)
    assert future.result(0) == [HIT] * 2


def test_close_says_what_it_cut_short_and_refuses_what_comes_after() -> None:
    store, made = Misbehaving(put="hangs", exists="hangs"), memory()
    pages = open_pages(store, made)
    futures = [pages.put(keys(3), [0, 1, 2]), pages.exists(keys(2))]
    until(lambda: len(store.began) == 2)
    assert pages.close(0.01) == Closed(abandoned=5, held=0, over=True)
    assert [future.result(0) for future in futures] == [[FAILED] * 3, [FAILED] * 2]
    calls: list[Callable[[], object]] = [lambda: pages.exists(keys(1)), lambda: pages.put(keys(1), [0]), pages.stats]
    for call in [*calls, pages.store_stats]:
        with pytest.raises(Unavailable, match="the stores were closed"):
            call()
    assert pages.close() == Closed(abandoned=5, held=0, over=True)
    assert pages.stores == ()


def test_close_does_not_wait_for_a_question_that_was_answered_at_its_deadline() -> None:
    pages = open_pages(Misbehaving(exists="hangs"), memory())
    assert result(pages.exists(keys(1), timeout=0.01)) == [FAILED]
    closing = threading.Thread(target=pages.close, args=(PATIENCE * 10,))
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_of_several_deadlines_the_one_that_is_over_first_counts() -> None:
    store = Misbehaving(get="hangs")
    pages = open_pages(store, memory())
    future = pages.get(keys(1), [0])
    store.inside.wait(PATIENCE)
    closings = [threading.Thread(target=pages.close, args=(deadline,)) for deadline in (PATIENCE * 10, 0.01)]
    for closing in closings:
        closing.start()
    for closing in closings:
        closing.join(PATIENCE)
    assert not any(closing.is_alive() for closing in closings)
    assert future.result(0) == [FAILED]


@pytest.mark.slow(1)
def test_calls_that_race_with_close_are_answered_or_refused() -> None:
    for _ in range(20):
        pages = open_pages("memory:", memory())
        futures: list[Future[list[Result]]] = []
        begun = threading.Event()

        def ask(pages: Pages = pages, futures: list[Future[list[Result]]] = futures,
                begun: threading.Event = begun) -> None:  # fmt: skip
            try:
                while True:
                    futures.append(pages.exists(keys(2)))
                    begun.set()
            except Unavailable:
                pass

        asking = threading.Thread(target=ask)
        asking.start()
        begun.wait(PATIENCE)
        assert pages.close().over
        asking.join(PATIENCE)
        assert {tuple(future.result(0)) for future in futures} <= {(MISS, MISS), (FAILED, FAILED)}


def test_a_store_that_cannot_close_cleanly_is_told_when_all_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Misbehaving(aclose="is unavailable"), Misbehaving()

    class Opening:
        async def open(self, url: ParsedUrl, layout: StoreLayout) -> Misbehaving:
            return {"one:": one, "two:": two}[f"{url.scheme}:"]

    monkeypatch.setattr("asynccache.storage.attachment.backend_class", lambda scheme: Opening())
    before = thread_names()
    pages = open_pages(["one:", "two:"], memory())
    with pytest.raises(BackendError, match="no answer"):
        pages.close()
    assert (one.closed, two.closed) == (1, 1)
    assert thread_names() == before


# callbacks


def test_a_callback_may_call_but_not_close() -> None:
    told: list[object] = []
    done = threading.Event()

    def called(_: Future[list[Result]]) -> None:
        told.append(pages.exists(keys(1)))
        told.append(pages.stats()["calls_in_flight"])
        try:
            pages.close()
        except ConfigError as error:
            told.append(str(error))
        done.set()

    store = Misbehaving(get="is stuck")
    with open_pages(store, memory()) as pages:
        future = pages.get(keys(1), [0])
        future.add_done_callback(called)
        store.gate.set()
        assert done.wait(PATIENCE)
        assert isinstance(told[0], Future)
        assert result(told[0]) == [MISS]
    assert "close() was called in a callback" in str(told[2])


@pytest.mark.filterwarnings("ignore")
def test_a_callback_that_raises_ends_nothing() -> None:
    def leaves(_: Future[list[Result]]) -> None:
        sys.exit("of a callback")

    store = Misbehaving(get="is stuck")
    with open_pages(store, memory()) as pages:
        future = pages.get(keys(1), [0])
        future.add_done_callback(leaves)
        store.gate.set()
        assert result(future) == [MISS]
        assert result(pages.exists(keys(1))) == [MISS]


# what nobody expects


def test_an_interrupt_while_the_stores_open_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, main = threading.Event(), threading.get_ident()

    class Opening:
        async def open(self, url: ParsedUrl, layout: StoreLayout) -> Misbehaving:
            try:
                while True:
                    signal.pthread_kill(main, signal.SIGINT)
                    await asyncio.sleep(5)  # once more: Python swallows what is raised in a callback of its own
            finally:
                ended.set()

    monkeypatch.setattr("asynccache.storage.attachment.backend_class", lambda scheme: Opening())
    before, made = thread_names(), memory()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            open_pages("slow:", made)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended.is_set()
    assert thread_names() == before
    made.close()


def test_so_does_a_system_that_has_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    made = memory()
    try:
        Pages.open("memory:", memoryview(made), SIZE, "m")
        pytest.fail("it was opened")
    except Unavailable as error:
        kept = error
        made.close()
    assert str(kept) == "no thread can be started to serve the stores: can't start new thread"


def test_so_does_an_interrupt_in_the_moment_when_they_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(StoreThread):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            opened = self._opened.result

            def interrupted() -> None:
                opened()
                raise KeyboardInterrupt

            monkeypatch.setattr(self._opened, "result", interrupted)

    monkeypatch.setattr("asynccache.storage.pages.StoreThread", Interrupted)
    before, made, raised = thread_names(), memory(), list[BaseException]()

    def opening() -> None:
        try:
            open_pages("memory:", made)
        except KeyboardInterrupt as error:
            raised.append(error)

    waiting = threading.Thread(target=opening, daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    assert len(raised) == 1
    assert thread_names() == before
    made.close()


def test_a_plug_in_that_exits_is_answered_for() -> None:
    with open_pages(Misbehaving(get="exits"), memory()) as pages:
        assert result(pages.get(keys(2), [0, 1])) == [FAILED] * 2
        assert result(pages.exists(keys(1))) == [MISS]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_plug_in_that_ends_the_loop_leaves_no_future_open() -> None:
    """Two stores are written in two tasks, and asyncio ends its loop when a task exits."""
    before = thread_names()
    pages = open_pages([Misbehaving(put="exits"), "memory:"], memory())
    futures: list[Future[list[Result]]] = []

    def at_once() -> None:
        futures.append(pages.put(keys(2), [0, 1]))
        futures.append(pages.exists(keys(2)))

    pages._serving.ask(at_once)
    assert result(futures[0]) == [FAILED] * 2
    assert result(futures[1]) in ([MISS] * 2, [FAILED] * 2)
    until(lambda: thread_names() == before)
    with pytest.raises(Unavailable, match="closed because of SystemExit"):
        pages.exists(keys(1))
    with pytest.raises(BackendError, match="of a plug-in"):
        pages.close(1e300)


# forks


def test_a_fork_is_refused_by_name_and_does_no_harm(tmp_path: Path) -> None:
    """In a process of its own: the one that the tests run in has threads of others."""
    program = textwrap.dedent(f"""
        import mmap, os
        from asynccache.errors import Unavailable
        from asynccache.storage import Pages

        memory = mmap.mmap(-1, 8 * 4096)
        pages = Pages.open("file:{tmp_path}/kv", memory, 4096, "m")
        assert pages.put([b"a"], [0]).result() == [1]
        pid = os.fork()
        if not pid:
            said = []
            for call in (lambda: pages.exists([b"a"]), lambda: pages.get([b"a"], [1]), pages.stats, pages.close):
                try:
                    call()
                except Unavailable as error:
                    said.append(str(error))
            os._exit(len(said) if len(set(said)) == 1 and str(os.getpid()) in said[0] else 9)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert pages.get([b"a"], [1]).result() == [1]
        print(pages.close())
    """)
    silent = ("-W", "ignore:This process:DeprecationWarning")  # Python 3.12 and later warn of a fork beside threads
    done = subprocess.run([sys.executable, *silent, "-c", program],
                          capture_output=True, text=True, timeout=PATIENCE,
                          cwd=Path(__file__).parents[2])  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == "4\nClosed(abandoned=0, held=0, over=True)\n"


def test_a_program_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        from asynccache.storage import Pages
        pages = Pages.open("file:{tmp_path}/kv", bytearray(8 * 4096), 4096, "m")
        print(pages.put([b"a"], [0]).result())
    """)
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE,
                              cwd=Path(__file__).parents[2])  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "[<Result.HIT: 1>]\n")
