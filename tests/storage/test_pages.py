"""``Pages``: pages go to the stores and come back, and what is wrong with a call is said before anything is begun."""

from __future__ import annotations

import asyncio
import hashlib
import math
import mmap
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
from asynccache.storage import KEY_BYTES, Closed, Pages
from asynccache.storage.checked import storage_key
from asynccache.storage.contract import block_in, named_key
from asynccache.storage.pages import LETTING_GO
from asynccache.worker.pool_layout import PoolMap
from benchmarks.pages import main
from tests.storage.pages_kit import (
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
    ("storage", 7, "storage=7: give a URL"),
    ("storage", [None], "storage=None: give a URL"),
    ("storage", "memory:?capacity=1KiB", "capacity=1024"),
    ("options", {"timeout": "never"}, "timeout='never'"),
    ("options", {"concurrency": 4}, "options={'concurrency': 4}: give names and texts"),
    ("options", "timeout=4", "options='timeout=4'"),
    ("memory", bytes(SIZE), "memory of pool 'pages' is read-only"),
    ("memory", "text", "memory of pool 'pages' is a str without bytes to use"),
    ("memory", None, "memory of pool 'pages' is a NoneType without bytes to use"),
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
    ("page_bytes", float(SIZE), "page_bytes=4096.0"),
    ("page_bytes", True, "page_bytes=True"),
    ("page_bytes", {"full": SIZE}, "page_bytes names the pools ['full'], and memory ['pages']"),
    ("namespace", "", "namespace=''"),
    ("namespace", b"", "namespace=b''"),
    ("namespace", None, "namespace=None"),
    ("namespace", {"model": "m"}, "namespace={'model': 'm'}"),
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
    ("exists", (7,), "keys=7: give a sequence"),
    ("put", ([b"a"], []), "slots: 0 for 1 keys"),
    ("get", ([b"a"], [0, 1]), "slots: 2 for 1 keys"),
    ("put", ([b"a"], [SLOTS]), f"slots: {SLOTS} is none of pool 'pages', which has the slots 0 to {SLOTS - 1}"),
    ("get", ([b"a", b"b"], [0, -1]), "slots: -1 is none"),
    ("get", ([b"a"], [1 << 70]), "is none of pool"),
    ("get", ([b"a"], [0.5]), "slots=[0.5]: give a whole number for each key"),
    ("get", ([b"a"], None), "slots=None"),
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


@pytest.mark.parametrize("timeout", [0, -1, math.nan, math.inf, "1", True])
def test_a_deadline_that_is_none_is_refused(timeout: Any) -> None:
    with open_pages("memory:", memory()) as pages:
        for verb in ("exists", "put", "get"):
            slots = [] if verb == "exists" else [[0]]
            with pytest.raises(ConfigError, match="timeout="):
                getattr(pages, verb)(keys(1), *slots, timeout=timeout)
        if timeout != 0:
            with pytest.raises(ConfigError, match="timeout="):
                pages.close(timeout)
        assert result(pages.exists(keys(1))) == [MISS]


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


def test_a_timeout_that_is_none_and_a_closed_store_are_refused() -> None:
    pages = Pages.open("memory:", memory(), SIZE, "model")
    for odd in (0, -1, float("nan"), "1"):
        with pytest.raises(ConfigError, match="timeout="):
            pages.clear(timeout=odd)  # type: ignore[arg-type]
    pages.close()
    with pytest.raises(Unavailable, match="the stores were closed"):
        pages.clear()


# The benchmark of ``Pages`` says what it measured.


def test_it_prints_what_both_ways_take(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--calls", "3", "--rounds", "2", "--pages", "8", "--page-bytes", "1KiB"])
    title, head, *lines = capsys.readouterr().out.splitlines()
    assert "8 pages of 1024 bytes in a call" in title
    assert head.split() == ["stores", "Pages", "own"]
    rows = [line.split() for line in lines]
    assert [row[0] for row in rows] == ["exists", "put", "get"]
    assert all(float(figure) > 0 for row in rows for figure in row[1:3])
