"""``Pages``: pages go to the stores and come back, and what is wrong with a call is said before anything is begun."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind, HitPolicy
from asynccache.errors import BackendError, ConfigError, Timeout, Unavailable
from asynccache.events.announcer import block_hash
from asynccache.storage import KEY_BYTES, Closed, Pages, ParsedUrl, Result, StoreLayout
from asynccache.storage.checked import storage_key
from asynccache.storage.contract import block_in, named_key
from asynccache.storage.loop_thread import StoreThread
from asynccache.storage.pages import LETTING_GO
from asynccache.worker.pool_layout import PoolMap
from benchmarks.pages import main
from tests.storage.pages_kit import (
    FAILED,
    HIT,
    MISS,
    PATIENCE,
    SIZE,
    SLOTS,
    Misbehaving,
    keys,
    memory,
    open_pages,
    result,
    row,
    thread_names,
    until,
)

# Pages go to the stores and come back: from any thread, from several stores, in another life, and never as others.


URLS = ["memory:", "file:{}/kv?direct=off", "file:{}/kv"]


@pytest.mark.parametrize("size", [96, SIZE, 256 << 10])
@pytest.mark.parametrize("url", URLS)
def test_a_page_comes_back_as_it_went(url: str, size: int, tmp_path: Path) -> None:
    made = memory(size)
    before = made[: 3 * size]
    with open_pages(url.format(tmp_path), made, size) as pages:
        assert result(pages.exists(keys(4))) == [MISS] * 4
        assert result(pages.get(keys(1), [7])) == [MISS]
        assert result(pages.put(keys(3), [0, 1, 2])) == [HIT] * 3
        assert result(pages.exists(keys(4))) == [HIT, HIT, HIT, MISS]
        assert result(pages.get(keys(4)[::-1], [3, 4, 5, 6])) == [MISS, HIT, HIT, HIT]
        assert [row(made, slot, size) for slot in (6, 5, 4)] == [row(made, slot, size) for slot in (0, 1, 2)]
        assert made[: 3 * size] == before
        assert pages.stats()["get_pages"] == 3
        assert pages.stats()["calls_in_flight"] == 0
    made.close()


@pytest.mark.parametrize("other", ["another namespace", "another pool", "another page size"])
def test_a_page_is_found_by_nobody_whose_terms_differ(other: str) -> None:
    kept = MemoryBackend()
    with Pages.open(kept, {"full": memory()}, SIZE, "tp=1") as pages:
        assert result(pages.put(keys(1), [0])) == [HIT]
    namespace = "tp=2" if other == "another namespace" else "tp=1"
    pool = "swa" if other == "another pool" else "full"
    size = 2 * SIZE if other == "another page size" else SIZE
    with Pages.open(kept, {pool: memory()}, size, namespace) as pages:
        assert result(pages.exists(keys(1))) == [MISS]
        assert result(pages.get(keys(1), [0])) == [MISS]
    with Pages.open(kept, {"full": memory()}, {"full": SIZE}, b"tp=1") as pages:
        assert result(pages.get(keys(1), [0])) == [HIT]


def test_fields_that_run_together_are_not_the_same() -> None:
    """Where the namespace ends and the pool's name begins matters."""
    kept = MemoryBackend()
    with Pages.open(kept, {"bc": memory()}, SIZE, "a") as pages:
        assert result(pages.put([b"d"], [0])) == [HIT]
    for namespace, pool in (("ab", "c"), ("abc", "d")):
        with Pages.open(kept, {pool: memory()}, SIZE, namespace) as pages:
            assert result(pages.exists([b"d", b"cd"])) == [MISS] * 2


def test_pools_have_pages_of_their_own_sizes() -> None:
    made = {"full": memory(SIZE), "state": memory(512)}
    with Pages.open("memory:", made, {"full": SIZE, "state": 512}, "m") as pages:
        assert result(pages.put(keys(2), [0, 1], pool="full")) == [HIT] * 2
        assert result(pages.exists(keys(2), pool="state")) == [MISS] * 2
        assert result(pages.put(keys(2), [2, 3], pool="state")) == [HIT] * 2
        assert result(pages.get(keys(2), [6, 7], pool="state")) == [HIT] * 2
    assert made["state"][6 * 512 :] == made["state"][2 * 512 : 4 * 512]


def test_slots_are_rows_of_whatever_has_bytes() -> None:
    array = np.arange(6 * 16, dtype=np.uint8).reshape(6, 16)
    flat = bytearray(array.tobytes())
    for given in (array, bytearray(flat), memoryview(bytearray(flat)), memoryview(bytearray(flat)).cast("B", (6, 16))):
        with Pages.open("memory:", given, 16, "m") as pages:
            assert result(pages.put(keys(2), np.array([1, 4], np.int32))) == [HIT] * 2
            assert result(pages.get(keys(2), iter([0, 2]))) == [HIT] * 2
            found = given.tobytes() if isinstance(given, np.ndarray | memoryview) else bytes(given)
            assert found[:16] == found[16:32]
            assert found[32:48] == found[64:80]


def test_nothing_is_asked_of_nobody() -> None:
    store = Misbehaving()
    with open_pages(store, memory()) as pages:
        assert result(pages.exists([])) == result(pages.put([], [])) == result(pages.get([], [])) == []
    assert store.began == []


def test_a_key_that_is_there_keeps_its_page_and_may_be_named_twice() -> None:
    made = memory()
    with open_pages("memory:", made) as pages:
        assert result(pages.put([b"a"], [0])) == [HIT]
        assert result(pages.put([b"a", b"a"], [1, 2])) == [HIT] * 2
        assert result(pages.put([b"b"], [0])) == [HIT], "two keys may be put from one slot"
        assert result(pages.get([b"a", b"a", b"b"], [5, 6, 7])) == [HIT] * 3
    assert row(made, 5) == row(made, 6) == row(made, 7) == row(made, 0)


# several stores


class _Own(MemoryBackend):
    """A backend whose class's name cannot be a store's."""


def test_backends_of_one_class_have_names_of_their_own() -> None:
    odd = type("_größe" + 70 * "x", (MemoryBackend,), {})
    given = [MemoryBackend(), MemoryBackend(), _Own(), "memory:?name=Own-2", _Own(), odd(), type("_", (_Own,), {})()]
    with open_pages(given, memory()) as pages:
        expected = ["MemoryBackend", "MemoryBackend-2", "Own", "Own-2", "Own-3", "gre" + 47 * "x", "store"]
        assert list(pages.stores) == list(pages.store_stats()) == expected
        assert result(pages.put(keys(1), [0])) == [HIT]
        assert result(pages.get(keys(1), [1])) == [HIT]


# threads


def test_any_number_of_threads_may_ask_at_a_time(tmp_path: Path) -> None:
    threads, rounds, each = 8, 12, 4
    made = memory(slots=threads * each * 2)
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        mine = range(number * each * 2, number * each * 2 + each)
        back = range(mine.stop, mine.stop + each)
        start.wait()
        for round_ in range(rounds):
            names = keys(each, f"{number}.{round_}")
            stored = pages.put(names, mine)
            assert result(stored) == [HIT] * each
            found, asked = pages.get(names, back), pages.exists(names)
            assert result(found) == result(asked) == [HIT] * each
            for one, other in zip(mine, back, strict=True):
                assert row(made, one) == row(made, other)

    with open_pages(f"file:{tmp_path}/kv", made) as pages, ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, number) for number in range(threads)]:
            done.result()
        assert pages.stats()["put_pages"] == threads * rounds * each
    made.close()


def test_calls_that_wait_together_are_taken_up_in_one_turn_of_the_loop() -> None:
    """So that they cost one wake-up, and with a thread that keeps the GIL 5 ms, all together."""
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        go.wait()

    with open_pages("memory:", memory()) as pages, ThreadPoolExecutor(1) as other:
        loop = pages._serving._loop
        wakeups, call_soon = [], loop.call_soon_threadsafe

        def counting(*args: object, **more: object) -> asyncio.Handle:
            wakeups.append(args[0])
            return call_soon(*args, **more)  # type: ignore[arg-type]

        setattr(loop, "call_soon_threadsafe", counting)  # noqa: B010
        other.submit(pages._serving.ask, hold)
        held.wait()
        wakeups.clear()
        futures = [pages.exists(keys(2)) for _ in range(50)]
        go.set()
        assert [result(future) for future in futures] == [[MISS] * 2] * 50
        assert len(wakeups) == 1


# A storage key says by its last bytes which block it is about, in the words of the engine's own KV events.


DIGEST = hashlib.sha256(b"a page").digest()
ENDS = (0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -(1 << 63))


@pytest.mark.parametrize("block", ENDS)
def test_a_key_says_its_block(block: int) -> None:
    key = named_key(DIGEST, block)
    assert len(key) == KEY_BYTES
    assert block_in(key) == block
    assert key[:23] == DIGEST[:23]


def test_keys_of_all_blocks_and_digests_differ() -> None:
    random = Random(5)
    digests = [random.randbytes(32) for _ in range(20)]
    blocks = [*ENDS, *(random.getrandbits(64) for _ in range(20)), None]
    assert len({named_key(digest, block) for digest in digests for block in blocks}) == 20 * len(blocks)


def test_a_key_without_a_block_says_none_whatever_its_digest_is() -> None:
    random = Random(6)
    for _ in range(1000):
        assert block_in(named_key(random.randbytes(32), None)) is None


def test_of_a_caches_pools_the_one_that_is_stored_last_names_the_block() -> None:
    specs = [
        PoolSpec(name=name, component=kind, dtype="uint8", layers=1, bytes_per_page=64, device_pages=1, host_pages=1,
                 hit_policy=HitPolicy.ALL_PAGES)
        for name, kind in (("full", ComponentKind.FULL), ("swa", ComponentKind.SWA))
    ]  # fmt: skip
    pools, page = PoolMap(specs, 16, {}), hashlib.sha256(b"chain").digest()
    assert pools.key("full", page).key == storage_key(page, pools.digest) == pools.keys("full", page)[0].key
    assert block_in(pools.key("full", page).key) == block_hash(page)
    assert block_in(pools.key("swa", page).key) is None
    assert pools.key("swa", page) == pools.keys("swa", page)[0]


def opened_naming(blocks: Any) -> tuple[Pages, MemoryBackend]:
    backend = MemoryBackend()
    return Pages.open(backend, bytearray(2 * 64), 64, "model", blocks=blocks), backend


def test_pages_name_blocks_as_the_caller_says() -> None:
    pages, backend = opened_naming(lambda pool, key: -5 if key == b"one" and pool == "pages" else None)
    with pages:
        pages.put([b"one", b"two"], [0, 1]).result()
        assert [block_in(key) for key in backend._stored] == [-5, None]
        assert [int(result) for result in pages.get([b"one", b"two"], [1, 0]).result()] == [1, 1]


@pytest.mark.parametrize("wrong", [1 << 64, -(1 << 63) - 1, "7", 1.0, True])
def test_a_name_that_is_none_is_refused(wrong: Any) -> None:
    pages, _ = opened_naming(lambda pool, key: wrong)
    with pages, pytest.raises(ConfigError, match="is no hash of 64 bits"):
        pages.exists([b"key"])


def test_a_caller_that_raises_is_told_so() -> None:
    pages, _ = opened_naming(lambda pool, key: 1 // 0)
    with pages, pytest.raises(ConfigError, match="blocks: it raises"):
        pages.exists([b"key"])
    with pytest.raises(ConfigError, match="cannot be called"):
        opened_naming(7)


# Absurd arguments are refused by name before anything is begun or changed.


GOOD: Mapping[str, Any] = {"memory": bytearray(SLOTS * SIZE), "page_bytes": SIZE, "namespace": "m"}


@pytest.mark.parametrize(("name", "value", "said"), [
    ("storage", [], "storage: no store is named"),
    ("storage", "none", "storage='none': there is nothing to attach"),
    ("storage", "nonsense", "storage='nonsense': expected scheme:path"),
    ("storage", "nothing:", "unknown backend 'nothing'"),
    ("storage", ["memory:", "memory:"], "a store 'memory' is attached already"),
    ("storage", [None], "storage=None: give a URL"),
    ("storage", "memory:?capacity=1KiB", "capacity=1024"),
    ("options", {"timeout": "never"}, "timeout='never'"),
    ("options", {"concurrency": 4}, "options={'concurrency': 4}: give names and texts"),
    ("options", "timeout=4", "options='timeout=4'"),
    ("memory", bytes(SIZE), "memory of pool 'pages' is read-only"),
    ("memory", "text", "memory of pool 'pages' is a str without bytes to use"),
    ("memory", bytearray(), "has 0 bytes"),
    ("memory", bytearray(SIZE + 1), f"has {SIZE + 1} bytes, which is not one or more whole pages"),
    ("memory", bytearray(SIZE - 1), f"has {SIZE - 1} bytes"),
    ("memory", np.zeros((8, 2 * SIZE), np.uint8)[:, :SIZE], "give a C-contiguous buffer of uint8"),
    ("memory", {}, "memory: no pool is named"),
    ("memory", {"": bytearray(SIZE)}, "a pool cannot be called ''"),
    ("memory", {"#headers": bytearray(SIZE)}, "a pool cannot be called '#headers'"),
    ("memory", {7: bytearray(SIZE)}, "a pool cannot be called 7"),
    ("page_bytes", 0, "page_bytes=0 of pool 'pages'"),
    ("page_bytes", -SIZE, f"page_bytes=-{SIZE}"),
    ("page_bytes", {"full": SIZE}, "page_bytes names the pools ['full'], and memory ['pages']"),
    ("namespace", "", "namespace=''"),
    ("namespace", b"", "namespace=b''"),
])  # fmt: skip
def test_open_refuses(name: str, value: object, said: str, tmp_path: Path) -> None:
    before = thread_names()
    terms: dict[str, Any] = {"storage": f"file:{tmp_path}/kv", **GOOD, name: value}
    with pytest.raises(ConfigError) as caught:
        Pages.open(**terms)
    assert said in str(caught.value)
    assert thread_names() == before
    assert list(tmp_path.iterdir()) == []


def test_open_refuses_a_mapping_that_is_closed() -> None:
    made = mmap.mmap(-1, SIZE)
    made.close()
    with pytest.raises(ConfigError, match="memory of pool 'pages' is a mmap without bytes to use"):
        Pages.open("memory:", made, SIZE, "m")


@pytest.mark.parametrize(("verb", "arguments", "said"), [
    ("exists", (["text"],), "keys[0]='text': a key is one or more bytes"),
    ("exists", ([b"a", b""],), "keys[1]=b''"),
    ("exists", ([b"a", None],), "keys[1]=None"),
    ("exists", ("text",), "keys[0]='t'"),
    ("exists", (b"text",), "keys[0]=116"),
    ("put", ([b"a"], []), "slots: 0 for 1 keys"),
    ("get", ([b"a"], [0, 1]), "slots: 2 for 1 keys"),
    ("put", ([b"a"], [SLOTS]), f"slots: {SLOTS} is none of pool 'pages', which has the slots 0 to {SLOTS - 1}"),
    ("get", ([b"a", b"b"], [0, -1]), "slots: -1 is none"),
    ("get", ([b"a"], [1 << 70]), "is none of pool"),
    ("get", ([b"a"], [0.5]), "slots=[0.5]: give a whole number for each key"),
    ("get", ([b"a", b"b", b"c"], [3, 0, 3]), "slots: 3 is named more than once"),
])  # fmt: skip
def test_calls_refuse(verb: str, arguments: tuple[Any, ...], said: str) -> None:
    store, made = Misbehaving(), memory()
    with open_pages(store, made) as pages:
        with pytest.raises(ConfigError) as caught:
            getattr(pages, verb)(*arguments)
        assert said in str(caught.value)
        assert pages.stats()["calls_in_flight"] == 0
    assert store.began == []
    made.close()


def test_a_pool_must_be_named_where_there_are_several() -> None:
    made = {"full": memory(), "state": memory(512)}
    with Pages.open("memory:", made, {"full": SIZE, "state": 512}, "m") as pages:
        for pool in (None, "other", 7):
            with pytest.raises(ConfigError, match="name one of 'full', 'state'"):
                pages.exists(keys(1), pool=pool)  # type: ignore[arg-type]
        assert result(pages.exists(keys(1), pool="state")) == [MISS]


# ``Pages.clear`` forgets everything under the URL of each store, whoever put it, and says what could not.


def test_nothing_is_found_after_clear_and_what_is_put_then_is(tmp_path: Path) -> None:
    """Nor is what another namespace had stored."""
    made, url = memory(), f"file:{tmp_path / 'kv'}?capacity=1MiB"
    with open_pages(url, made, namespace="other") as pages:
        assert result(pages.put(keys(1), [0])) == [HIT]
    with open_pages(("memory:", url), made) as pages:
        result(pages.put(keys(4), range(4)))
        assert pages.clear().result(PATIENCE) is None
        assert result(pages.exists(keys(4))) == [MISS] * 4
        assert result(pages.put(keys(2), range(2))) == [HIT] * 2
        assert result(pages.get(keys(4), range(4, 8))) == [HIT, HIT, MISS, MISS]
    with open_pages(url, made, namespace="other") as pages:
        assert result(pages.exists(keys(1))) == [MISS]


def test_a_store_that_cannot_is_told_and_the_others_are_cleared() -> None:
    whole = MemoryBackend()
    with open_pages((Misbehaving(clear="is unavailable"), whole), memory()) as pages:
        result(pages.put(keys(2), range(2)))
        with pytest.raises(BackendError, match="no answer"):
            pages.clear().result(PATIENCE)
        assert whole.stats()["pages"] == 0


def test_a_store_that_hangs_costs_the_timeout_and_no_other_call() -> None:
    hanging = Misbehaving(clear="hangs")
    with open_pages(hanging, memory()) as pages:
        clearing = pages.clear(timeout=0.2)
        assert hanging.inside.wait(PATIENCE)
        assert result(pages.put(keys(1), [0])) == [HIT]
        with pytest.raises(Timeout, match=r"not cleared within 0\.2 s"):
            clearing.result(PATIENCE)


def test_close_cuts_short_what_hangs_at_its_deadline() -> None:
    hanging, whole = Misbehaving(clear="hangs"), MemoryBackend()
    pages = open_pages((hanging, whole), memory())
    result(pages.put(keys(2), range(2)))
    clearing = pages.clear()
    until(lambda: "clear" in hanging.began)
    began = time.monotonic()
    assert pages.close(0.2) == Closed(abandoned=0, held=0, over=True)
    assert 0.2 <= time.monotonic() - began < LETTING_GO
    with pytest.raises(Unavailable, match="closed before they were cleared"):
        clearing.result(0)
    assert whole.stats()["pages"] == 0


def test_close_lets_a_clear_end_before_its_deadline() -> None:
    slow = Misbehaving(clear=0.1)
    pages = open_pages(slow, memory())
    clearing = pages.clear()
    assert slow.inside.wait(PATIENCE)
    assert pages.close(PATIENCE).over
    assert clearing.result(0) is None


# The benchmark of ``Pages`` says what it measured.


def test_it_prints_what_both_ways_take(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--calls", "3", "--rounds", "2", "--pages", "8", "--page-bytes", "1KiB"])
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert "8 pages of 1024 bytes in a call" in title
    assert head.split() == ["stores", "Pages", "own"]
    rows = [line.split() for line in lines]
    assert [row[0] for row in rows] == ["exists", "put", "get"]
    assert all(float(figure) > 0 for row in rows for figure in row[1:3])


# Calls that fail or are given up, and the end of ``Pages``: deadlines, cancelled futures, ``close``, forks,
# callbacks.


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
    near, made = MemoryBackend(), memory()
    with open_pages(near, made) as pages:
        assert result(pages.put(keys(2), [0, 1])) == [HIT] * 2
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
    for call in [*calls, pages.store_stats, pages.clear]:
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
