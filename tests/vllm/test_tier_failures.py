"""The tier under vLLM's real manager when stores die, hang, lie or are full, and when it cannot begin. No engine.

The law of all: a store costs a request ``lookup_timeout`` at most, and never a wrong byte (``serve`` looks at each).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.spec", reason="vLLM is not installed: make test-vllm")

from asynccache_vllm import tier as tiers
from asynccache_vllm.counts import LOADED, STORED
from asynccache_vllm.lookups import MISS_KEPT
from asynccache_vllm.transfers import ChunkTransfer
from vllm.v1.kv_offload.base import LookupResult

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import PageKey, Pages, Record, Result, StorageBackend
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.storage.pages_kit import Misbehaving, until
from tests.stores.redis_server import RedisServer
from tests.vllm.tier_kit import CHUNK, Scheduler, config, keys_of, left_in_shm, payload, scheduler

TIMEOUT = 0.3
SLACK = 0.6
"""Seconds that a machine with other work may add to a wait."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Neither a file in /dev/shm, nor a thread, nor an open file."""
    gc.collect()
    files, threads = open_files(), store_threads()
    yield
    gc.collect()
    assert left_in_shm() == []
    until(lambda: store_threads() == threads)
    assert open_files() == files


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def store_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("asynccache"))


@contextmanager
def over(
    monkeypatch: pytest.MonkeyPatch, *backends: StorageBackend, timeout: float = TIMEOUT, **more: Any
) -> Iterator[Scheduler]:
    """A manager over stores that no URL names."""
    opening = Pages.open
    with monkeypatch.context() as patch:
        patch.setattr(Pages, "open", lambda storage, *rest, **named: opening(list(backends), *rest, **named))
        playing = Scheduler(config({"storage": "memory:", "namespace": "n", "lookup_timeout": timeout}, **more))
    try:
        yield playing
    finally:
        playing.shutdown()


def timed(act: Callable[[], int]) -> tuple[int, float]:
    began = time.monotonic()
    return act(), time.monotonic() - began


def results(playing: Scheduler, metric: str) -> dict[str, int | float]:
    """By the result, what vLLM's metrics would get of one of ours."""
    return {name.split("'")[1]: count for name, count in playing.counted().items() if name.startswith(f"{metric}:")}


# stores that hang


def test_a_store_that_does_not_answer_costs_a_request_its_deadline_and_later_ones_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Misbehaving()
    with over(monkeypatch, store) as playing:
        playing.leave_stored(keys_of(8))
        store.how["exists"] = "hangs"
        for name in ("first", "second"):
            hits, seconds = timed(lambda name=name: playing.serve(keys_of(8, name)))  # type: ignore[misc]
            assert hits == 0
            assert TIMEOUT <= seconds < TIMEOUT + SLACK
        playing.settle(0.1)
        store.how["exists"] = "works"
        assert playing.serve(keys_of(8)) == 8


def test_the_lookup_and_the_load_have_one_deadline_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with over(monkeypatch, Misbehaving(), timeout=2.0) as playing:
        patience: list[float] = []
        load = playing.tier._transfers.load

        def watched(transfer: ChunkTransfer) -> None:
            patience.append(transfer.patience)
            load(transfer)

        monkeypatch.setattr(playing.tier._transfers, "load", watched)
        playing.leave_stored(keys_of(2))
        exists = playing.tier._pages.exists

        def slow(keys: Any, **more: Any) -> Any:
            time.sleep(0.5)  # the question is on its way
            return exists(keys, **more)

        monkeypatch.setattr(playing.tier._pages, "exists", slow)
        assert playing.serve(keys_of(2)) == 2
        assert len(patience) == 1
        assert 0.5 < patience[0] < 1.5


def test_what_waits_behind_a_load_that_stalls_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccache_vllm.transfers.PART", 2 * CHUNK)
    monkeypatch.setattr("asynccache_vllm.transfers.WINDOW", 2 * CHUNK)
    store = Misbehaving()
    with over(monkeypatch, store) as playing:
        playing.leave_stored(keys_of(12))
        store.how["get"] = "hangs"
        hits, seconds = timed(lambda: playing.serve(keys_of(12)))
        assert hits == 0
        assert seconds < TIMEOUT + SLACK, "six parts, one after the other, would take six deadlines"
        playing.settle(0.1)
        assert results(playing, LOADED) == {"failed": 12}


class HangsLater(Misbehaving):
    """Reads once."""

    async def get(self, keys: Sequence[PageKey], records: Sequence[Record]) -> list[Result]:
        found = await super().get(keys, records)
        self.how["get"] = "hangs"
        return found


def test_of_a_load_that_stalls_the_parts_that_arrived_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccache_vllm.transfers.PART", 4 * CHUNK)
    monkeypatch.setattr("asynccache_vllm.transfers.WINDOW", 4 * CHUNK)
    with over(monkeypatch, HangsLater()) as playing:
        playing.leave_stored(keys_of(12))
        assert playing.serve(keys_of(12)) == 4
        assert results(playing, LOADED) == {"hit": 4, "failed": 8}


def test_a_store_that_keeps_memory_holds_up_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "LETTING_GO", 0.1)
    monkeypatch.setattr(tiers, "STORE_TIMEOUT", 0.1)
    monkeypatch.setattr(tiers, "CLOSE_TIMEOUT", 0.1)
    store = Misbehaving()
    with over(monkeypatch, store) as playing:
        playing.leave_stored(keys_of(8))
        store.how["get"] = "is stuck"
        request = playing.begin("stuck")
        for _ in range(200):
            if playing.manager.lookup(keys_of(1)[0], request) is LookupResult.HIT_PENDING:
                break
            playing.step()
            time.sleep(0.001)
        playing.step()
        until(lambda: playing.tier._transfers.stuck)
        hits, seconds = timed(lambda: playing.serve(keys_of(8)[1:]))
        assert hits == 0
        assert seconds < SLACK, "nothing is asked of a store that does not let go"
        with pytest.raises(RuntimeError, match="hangs and still uses the memory of 1 chunks, which cannot be reset"):
            playing.reset()
        assert playing.manager.lookup(keys_of(1)[0], request) is LookupResult.HIT_PENDING, "its chunk is no other's"
        store.gate.set()
        store.how["get"] = "works"
        playing.settle()
        playing.reset()
        time.sleep(MISS_KEPT)
        assert playing.serve(keys_of(8)[1:]) == 7


def test_a_store_that_is_slow_to_store_does_not_fill_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asynccache_vllm.transfers.BACKLOG", 0.05)
    store = Misbehaving(put="is stuck")
    with over(monkeypatch, store) as playing:
        playing.compute(keys_of(6, "a"))
        time.sleep(0.1)
        playing.compute(keys_of(6, "b"))
        playing.step()
        assert results(playing, STORED) == {"dropped": 6}
        store.gate.set()
        playing.settle()
        assert results(playing, STORED) == {"hit": 6}
        playing.reset()
        assert (playing.serve(keys_of(6, "a")), playing.serve(keys_of(6, "b"))) == (6, 0)


def test_the_end_comes_though_a_store_hangs(monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(tiers, "CLOSE_TIMEOUT", 0.2)
    store = Misbehaving(put="hangs", exists="hangs")
    with over(monkeypatch, store) as playing:
        playing.compute(keys_of(8))
        request = playing.begin()
        assert playing.manager.lookup(keys_of(9)[8], request) is LookupResult.RETRY
        playing.step()
        began = time.monotonic()
        playing.shutdown()
        assert time.monotonic() - began < 0.2 + SLACK
        assert playing.tier.lookup(keys_of(9)[8], request) is LookupResult.MISS
        monkeypatch.setattr(playing, "shutdown", lambda: None)
    assert "8 chunks were not stored before the shutdown" in told.text
    assert store.closed == 0, "somebody else's store is not closed"


def test_the_end_comes_though_a_store_keeps_memory(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tiers, "CLOSE_TIMEOUT", 0.1)
    monkeypatch.setattr("asynccache.storage.pages.LETTING_GO", 0.1)
    store = Misbehaving(put="is stuck")
    with over(monkeypatch, store) as playing:
        playing.compute(keys_of(8))
        until(store.inside.is_set)
    assert left_in_shm() == [], "the region's file is gone; the memory lives until the store lets go"
    assert "hangs and uses the memory of 8 chunks" in told.text
    store.gate.set()
    until(lambda: not store_threads())
    del playing


# stores that die, lie or are full


def test_redis_dies_and_comes_back(told: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server:
        entry = {"storage": f"{server.url}?timeout=2", "namespace": "n", "lookup_timeout": TIMEOUT}
        with scheduler(config(entry)) as playing:
            playing.leave_stored(keys_of(8))
            assert playing.serve(keys_of(8)) == 8
            playing.reset()
            server.kill()
            hits, seconds = timed(lambda: playing.serve(keys_of(8)))
            assert hits == 0
            assert seconds < TIMEOUT + SLACK
            playing.compute(keys_of(4, "while it is dead"))
            playing.settle()
            assert results(playing, STORED)["failed"] == 4
            server.restart()
            playing.compute(keys_of(4, "later"))
            deadline = time.monotonic() + 30
            while playing.serve(keys_of(4, "later")) < 4 or results(playing, LOADED).get("hit", 0) < 4:
                assert time.monotonic() < deadline, "it is not used again"
                time.sleep(0.1)
                playing.settle()
                playing.leave_stored(keys_of(4, "later"))
    assert "failed (redis: " in told.text


def test_redis_dies_between_the_answer_and_the_load() -> None:
    with RedisServer() as server:
        with scheduler(config({"storage": server.url, "namespace": "n", "lookup_timeout": TIMEOUT})) as playing:
            playing.leave_stored(keys_of(8))
            request = playing.begin()
            while playing.manager.lookup(keys_of(8)[7], request) is LookupResult.RETRY:
                playing.step()
            server.kill()
            hits, seconds = timed(lambda: playing.prefix(keys_of(8), request))
            assert hits == 0
            assert seconds < TIMEOUT + SLACK
            playing.settle()


def flip(folder: Path, keys: list[Any]) -> None:
    """One bit of each chunk, where it lies on disk."""
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = bytearray(file.read_bytes())
        at = [data.find(payload(key)) for key in keys]
        for found in at:
            if found >= 0:
                data[found + 100] ^= 1
        if max(at) >= 0:
            file.write_bytes(data)


def test_flipped_bits_are_a_miss_for_exactly_their_chunks(
    tmp_path: Path, told: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"storage": f"file:{tmp_path}/kv?capacity=1GiB", "namespace": "n", "enable_kv_events": True}
    keys = keys_of(8)
    with scheduler(config(entry)) as playing:
        playing.compute(keys)
        playing.settle()
    flip(tmp_path / "kv", [keys[3], keys[6]])
    with scheduler(config(entry, enable_kv_cache_events=True)) as playing:
        assert playing.serve(keys) == 3
        assert results(playing, LOADED) == {"hit": 6, "corrupt": 2}
        ours = [event for event in playing.manager.take_events() if event.medium is playing.tier.medium]
        removed = [event for event in ours if event.removed]
        assert [sorted(event.keys) for event in removed] == [sorted([keys[3], keys[6]])]
        request = playing.begin()
        there = [playing.manager.primary_tier.lookup(key, request) is LookupResult.HIT for key in keys]
        assert there == [True, True, True, False, True, True, False, True], "what verified is kept"
        playing.leave_stored(keys)
        assert playing.serve(keys) == 8, "what was computed again is stored again"
    assert "loaded 2 corrupt" in told.text


@pytest.mark.parametrize("seed", range(3))
def test_a_hostile_store_gives_no_wrong_byte(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    lies = Hostility(unavailable=0.1, failed=0.1, wrong=0.1, short=0.1, empty=0.1, vanished=0.1)
    store = SimulatedBackend(Random(seed), lies)
    draw = Random(seed)
    with over(monkeypatch, store) as playing:
        hits = 0
        for _ in range(60):
            keys = keys_of(draw.randint(1, 12), f"prefix {draw.randrange(4)}")
            hits += playing.serve(keys)
            playing.settle()
            playing.compute(keys)
            if draw.random() < 0.3:
                playing.reset()
        playing.settle()
        assert hits > 20
        assert results(playing, LOADED).get("corrupt", 0) > 0


def test_on_a_full_disk_nothing_is_stored_and_what_is_there_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    import resource

    folder = f"file:{tmp_path}/kv?capacity=64MiB&segment=1MiB"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with scheduler(config({"storage": folder, "namespace": "n"})) as playing:
        playing.compute(keys_of(12, "before"))
        playing.settle()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * CHUNK, limits[1]))
        try:
            for i in range(6):
                playing.compute(keys_of(12, f"full {i}"))
                playing.settle()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        stored = results(playing, STORED)
        assert stored["failed"] > 12
        playing.reset()
        assert playing.serve(keys_of(12, "before")) == 12
        assert playing.serve(keys_of(12, "full 5")) < 12
    assert "asynccache: stored 12 failed" in told.text


# no beginning


def refused(made: Any) -> Exception:
    with pytest.raises((ConfigError, Unavailable)) as error:
        Scheduler(made)
    found = error.value
    del error
    gc.collect()
    return found


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({}, "storage: no store is named"),
        ({"storage": "memory:", "root_dir": "/x"}, "unknown key 'root_dir'"),
        ({"storage": "nosuch:x", "namespace": "n"}, "nosuch"),
        ({"storage": "memory:?capacity=lots", "namespace": "n"}, "capacity"),
        ({"storage": "memory:", "namespace": "n", "store_options": {"timeout": "soon"}}, "timeout='soon'"),
        ({"storage": ["memory:", "memory:"], "namespace": "n"}, "attached already"),
        ({"storage": "memory:"}, "namespace: vLLM's configuration of the model cannot be found"),
        ({"storage": ["memory:", "file:/proc/nothing/kv?capacity=1GiB"], "namespace": "n"}, "/proc/nothing"),
    ],
)
def test_a_constructor_that_fails_leaves_nothing(entry: dict[str, Any], said: str) -> None:
    error = refused(config(entry))  # kept, with whatever it refers to
    assert said in str(error)
    assert left_in_shm() == []


def test_a_second_tier_that_fails_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    first = {"storage": f"file:{tmp_path}/kv?capacity=1GiB", "namespace": "n"}
    error = refused(config(first, {"storage": "memory:", "namespace": ""}))
    assert "namespace='' must not be empty" in str(error)
    with scheduler(config(first)) as playing:
        assert playing.serve(keys_of(1)) == 0, "the folder is free again"


def test_a_failure_after_the_stores_are_open_closes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise Unavailable("the base class says no")

    monkeypatch.setattr("asynccache_vllm.tier.SecondaryTierManager.__init__", fail)
    assert "says no" in str(refused(config({"storage": "memory:", "namespace": "n"})))


# the end


def test_a_shutdown_waits_for_what_is_being_stored(tmp_path: Path) -> None:
    entry = {"storage": f"file:{tmp_path}/kv?capacity=1GiB", "namespace": "n"}
    with scheduler(config(entry)) as playing:
        playing.compute(keys_of(16))
    with scheduler(config(entry)) as playing:
        assert playing.serve(keys_of(16)) == 16


def test_many_beginnings_and_ends_leave_nothing(tmp_path: Path) -> None:
    entry = {"storage": f"file:{tmp_path}/kv?capacity=1GiB", "namespace": "n"}
    for _ in range(5):
        with scheduler(config(entry)) as playing:
            playing.compute(keys_of(4))
            playing.tier.shutdown()
            playing.tier.shutdown()


def test_in_a_forked_process_the_stores_are_refused_by_name(told: pytest.LogCaptureFixture) -> None:
    with scheduler(config({"storage": "memory:", "namespace": "n"})) as playing:
        reading, writing = multiprocessing.Pipe(duplex=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *_, **__: None)
            child = os.fork()
        if not child:
            request = playing.begin("child")
            first = playing.tier.lookup(keys_of(1)[0], request)
            playing.tier.on_schedule_end(_Step())
            writing.send([first.name, playing.tier.lookup(keys_of(1)[0], request).name, told.text])
            os._exit(0)
        os.waitpid(child, 0)
        assert reading.poll(10)
        first, second, text = reading.recv()
        assert (first, second) == ("RETRY", "MISS")
        assert "the stores are not used any more: these Pages were opened in process" in text
        reading.close()
        writing.close()
        assert playing.serve(keys_of(1)) == 0


class _Step:
    preempted_req_ids: tuple[str, ...] = ()
