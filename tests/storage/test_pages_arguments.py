"""Absurd arguments are refused by name before anything is begun or changed."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asynccache.errors import ConfigError
from asynccache.storage import Pages
from tests.storage.pages_kit import (
    HIT,
    MISS,
    SIZE,
    SLOTS,
    Misbehaving,
    keys,
    memory,
    open_pages,
    result,
    row,
    thread_names,
)

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
    assert store.calls == 0
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


def test_two_keys_may_be_put_from_one_slot() -> None:
    made = memory()
    with open_pages("memory:", made) as pages:
        assert result(pages.put(keys(2), [0, 0])) == [HIT] * 2
        assert result(pages.get(keys(2), [1, 2])) == [HIT] * 2
    assert row(made, 0) == row(made, 1) == row(made, 2)
