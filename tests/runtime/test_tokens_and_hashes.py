"""The edge: tokens in whatever form, and the hash chain that names pages."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import torch

from asynccache import AsyncCache, CacheConfig, ConfigError, Full
from asynccache.hashes import extend_chain, namespace_digest
from asynccache.runtime import tokens as tokens_module
from asynccache.runtime.tokens import Chain, as_key

KEY = np.array([1, 2, 3, 70_000], "<i4").tobytes()


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3, 70_000], (1, 2, 3, 70_000), array("i", [1, 2, 3, 70_000]), np.array([1, 2, 3, 70_000], np.int32),
        np.array([1, 2, 3, 70_000], np.int64), np.array([1, 2, 3, 70_000], np.uint32), torch.tensor([1, 2, 3, 70_000]),
        torch.tensor([1, 2, 3, 70_000], dtype=torch.int32), KEY, bytearray(KEY), memoryview(KEY),
        array("q", [1, 2, 3, 70_000]), np.array([1, 0, 2, 0, 3, 0, 70_000], np.int32)[::2],
        np.array([70_000, 3, 2, 1], np.int32)[::-1], np.array([1, 2, 3, 70_000], ">i4"),
        np.ma.masked_array(np.array([1, 2, 3, 70_000], np.int32)), np.frombuffer(b"x" + KEY, np.int32, offset=1),
    ],
    ids=lambda tokens: type(tokens).__name__,
)  # fmt: skip
def test_tokens_of_every_kind_make_the_same_key(tokens: Any) -> None:
    assert as_key(tokens) == KEY


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, -2], r"tokens\[1\]=-2 is negative"),
        ([1, 2, 1 << 31], r"tokens\[2\]=2147483648 is beyond int32"),
        ([1, "a"], r"tokens\[1\]='a' is no integer"),
        ([1.5], r"tokens\[0\]=1.5 is no integer"),
        (np.array([3, -1]), r"tokens\[1\]=-1 is negative"),
        (np.array([3, 1 << 40]), r"tokens\[1\]=1099511627776 is beyond int32"),
        (np.array([3, -7], np.int32), r"tokens\[1\]=-7 is negative"),
        (np.array([3, -7], ">i4"), r"tokens\[1\]=-7 is negative"),
        (np.array([-9, -7, 4, 5], np.int32)[::-2], r"tokens\[1\]=-7 is negative"),
        (np.ma.masked_array(np.array([3, -7], np.int32)), r"tokens\[1\]=-7 is negative"),
        (np.array([[1, 2]], np.int32), "2 dimensions"),
        (np.array([0.5]), "float64"),
        (b"abc", "3 bytes"),
        (np.array([7, -1], np.int32).tobytes(), r"tokens\[1\]=-1"),
        (object(), "object"),
    ],
)
def test_unusable_tokens_are_named_with_their_position(tokens: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_key(tokens)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 500, 2560])
def test_the_first_of_the_negative_tokens_is_named_wherever_it_stands(length: int) -> None:
    tokens = np.arange(length, dtype=np.int32)
    assert as_key(tokens) == tokens.tobytes()
    for position in {0, length // 3, length - 1}:
        worse = tokens.copy()
        worse[position], worse[length - 1] = -5, -(1 << 31)
        found = worse[position]
        for given in (worse, worse.tobytes(), worse.tolist()):
            with pytest.raises(ConfigError, match=rf"tokens\[{position}\]={found} is negative"):
                as_key(given)


def test_no_tokens_are_an_empty_key() -> None:
    nothing: tuple[Any, ...] = [], b"", np.array([], np.int32), np.array([], np.int64)
    assert [as_key(tokens) for tokens in nothing] == [b""] * 4


def test_namespaces_differ_in_everything_that_matters() -> None:
    spaces = {
        namespace_digest("m", 16), namespace_digest("n", 16), namespace_digest("m", 32), namespace_digest("m", 16, ""),
        namespace_digest("m", 16, "a"), namespace_digest("m", 16, b"a"), namespace_digest("m", 16, b""),
        namespace_digest("m", 16, "a", 1), namespace_digest("ma", 16), namespace_digest("m", 16, None, 1),
    }  # fmt: skip
    assert len(spaces) == 10
    assert namespace_digest("m", 16, "a", 0) == namespace_digest("m", 16, "a")


def by_hand(space: bytes, key: bytes, page_bytes: int) -> bytes:
    hashes, parent = b"", space
    for at in range(0, len(key) // page_bytes * page_bytes, page_bytes):
        parent = sha256(parent + key[at : at + page_bytes]).digest()
        hashes += parent
    return hashes


@pytest.mark.parametrize("page_size", [4, 16, 512], ids=["4", "16", "512 in a thread"])
async def test_a_chain_grows_from_what_it_knows(page_size: int) -> None:
    space, key = namespace_digest("m", page_size), np.arange(page_size * 40 + 3, dtype=np.int32).tobytes()
    expected = by_hand(space, key, page_size * 4)
    chain = Chain(space, page_size)
    assert await chain.extend(key[: page_size * 4 * 7]) == expected[: 7 * 32]
    chain.known(key, expected[: 20 * 32])
    assert await chain.copy().extend(key) == expected
    assert await chain.extend(key) == expected
    other = key[: page_size * 4] + bytes(page_size * 4 * 3)
    chain.known(other, expected[:32])
    assert await chain.extend(other) == by_hand(space, other, page_size * 4)


async def test_long_keys_are_hashed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    key = np.arange(16 * 1000, dtype=np.int32).tobytes()
    sizes: list[int] = []

    def spy(parent: bytes, key: bytes, start: int, stop: int, page_bytes: int) -> bytes:
        sizes.append((stop - start) // page_bytes)
        return extend_chain(parent, key, start, stop, page_bytes)

    monkeypatch.setattr(tokens_module, "extend_chain", spy)
    turns, done = 0, False

    async def count() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await Chain(namespace_digest("m", 16), 16).extend(key)
    done = True
    await counting
    assert sum(sizes) == 1000
    assert max(sizes) <= 64
    assert turns >= len(sizes) - 1


@pytest.mark.parametrize("namespace", [5, True, 1.5, ("a",), "\ud800"])
def test_a_namespace_that_is_neither_text_nor_bytes_is_refused(namespace: object) -> None:
    with pytest.raises(ConfigError, match=r"namespace=.* (must be text, bytes or None|is no text that has UTF-8)"):
        namespace_digest("m", 16, namespace)


async def test_a_bad_namespace_is_told_at_every_door_and_nothing_is_left() -> None:
    config = CacheConfig(model="m", components=(Full(bytes_per_token=1, device_tokens=64),))
    bad: Any = 5
    async with AsyncCache(config) as cache:
        for door in (cache.match, cache.keep, cache.invalidate, cache.prefetch, _leased(cache)):
            with pytest.raises(ConfigError, match="namespace=5"):
                await _through(door, bad)
        assert cache.statistics().leases == 0


def _leased(cache: AsyncCache) -> Callable[..., Awaitable[object]]:
    async def lease(tokens: list[int], namespace: Any) -> None:
        async with cache.lease(tokens, namespace=namespace):
            pass

    return lease


async def _through(door: Callable[..., Any], bad: Any) -> None:
    if door.__name__ == "invalidate":
        await door(bad)
    elif door.__name__ == "keep":
        await door([1] * 32, ttl=1.0, namespace=bad)
    else:
        await door([1] * 32, namespace=bad)
