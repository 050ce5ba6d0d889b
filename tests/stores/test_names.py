"""Names that users choose (models, tenants, pools) never become part of a store's key, path or command. Two caches
share pages in a store if they would have the same bytes, and otherwise never."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asynccache import CacheConfig, Full, Sidecar
from asynccache.errors import ConfigError
from asynccache.storage import Listable, open_store
from asynccache.storage.checked import store_layout
from tests.sidecars.sidecar_kit import opened, serve, stack, text
from tests.stores.each import KINDS, fresh_seed, store_url

PAGES = 4
ODD = (
    "../../../etc/passwd", "/", ".", "..", "~", "a\0b", "x\r\nSET pwned 1\r\n", "\n", "*", "{tag}", "a{b}c}",
    "?x=1&y=2", "#", "%2e%2e%2f", "$(id)", "`id`", "; DROP TABLE pages", "<!ENTITY x>", " ", "моделі/模型",
    "m" * 10_240, "\x7f\x1b[2J",
)  # fmt: skip
ODD_KEYS = (*ODD, "", b"", b"\xff\xfe\x00\x80", bytes(range(256)), b"\r\nFLUSHALL\r\n")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return store_url(kind, request, tmp_path, monkeypatch)


def base(url: str, page: int = 4, **more: Any) -> CacheConfig:
    usual = {"bytes_per_token": 8, "layers": 2, "dtype": "uint8", "covers": ()}
    own: dict[str, Any] = {name: more.pop(name, value) for name, value in usual.items()}
    full = Full(**own, device_tokens=512, host_tokens=2048)
    more.setdefault("sidecars", ())
    return stack(full, page_size=page, storage=url, prefetch_policy="wait_complete", **more)


def prompt(config: CacheConfig, seed: int) -> list[int]:
    return text(config, PAGES, seed=seed, extra=1)


async def stored_keys(url: str) -> list[bytes]:
    """Everything in the store."""
    store = await open_store(url, store_layout(base(url).pools()))
    assert store is not None
    try:
        assert isinstance(store.backend, Listable)
        return [page.key async for batch in store.backend.listing() for page in batch]
    finally:
        await store.aclose()


@pytest.mark.slow
async def test_odd_names_of_models_and_tenants_are_harmless(kind: str, url: str, tmp_path: Path, request: Any) -> None:
    """Each is stored and found again, and all that is in the store is under keys of 32 bytes that are digests."""
    seed = fresh_seed()
    for model in ODD:
        config = replace(base(url), model=model)
        async with opened(config) as cache:
            assert await serve(cache, prompt(config, seed)) == 0
            for namespace in ODD_KEYS if model == ODD[0] else ODD_KEYS[-3:-2]:
                assert await serve(cache, prompt(config, seed), namespace=namespace) == 0
            await cache.flush()
        if model == ODD[0]:
            async with opened(config) as cache:
                assert await serve(cache, prompt(config, seed)) == PAGES * 4
                for namespace in ODD_KEYS:
                    assert await serve(cache, prompt(config, seed), namespace=namespace) == PAGES * 4
    keys = await stored_keys(url)
    assert len(keys) >= PAGES * (2 * len(ODD) + len(ODD_KEYS) - 1)
    assert {len(key) for key in keys} == {32}
    assert len(set(keys)) == len(keys)
    check_names(kind, tmp_path, request)


def check_names(kind: str, folder: Path, request: Any) -> None:
    """The store's own names are made of what is printed and of nothing that a user said."""
    if kind == "file":
        assert [path.name for path in folder.iterdir()] == ["kv"]
        assert all(re.fullmatch(r"[\w.-]+", path.name) for path in (folder / "kv").rglob("*"))
    elif kind == "redis":
        names = request.getfixturevalue("redis_server").say("KEYS", "*")
        assert names.startswith("*")
        for user_text in ("pwned", "passwd", "mmmm", "{tag}"):
            assert user_text not in names


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\nb", "a\r\nb", "a\0b", "*", "{a}", "a:b", "../x", "a" + "/" * 3])
def test_names_of_pools_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        base("memory:", sidecars=[Sidecar(name=name, indices_from="full", bytes_per_page=8)])


@pytest.mark.parametrize("model", ["\ud800", "a\udcffb"])
def test_a_model_that_is_no_text_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        replace(base("memory:"), model=model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["..", ".", "-rf", "__class__", "насос", "x" * 200])
async def test_odd_names_of_pools_are_harmless_or_refused(name: str, url: str) -> None:
    with suppress(ConfigError):
        config = base(url, sidecars=[Sidecar(name=name, indices_from="full", bytes_per_page=8)])
        tokens = prompt(config, fresh_seed())
        for expected in (0, PAGES * 4):
            async with opened(config) as cache:
                assert await serve(cache, tokens) == expected
                await cache.flush()


VARIANTS: Mapping[str, Callable[[str], CacheConfig]] = {
    "model": lambda url: replace(base(url), model="another"),
    "dtype": lambda url: base(url, dtype="float16"),
    "page size": lambda url: base(url, page=8, bytes_per_token=4),
    "layers": lambda url: base(url, layers=4),
    "layers of the model": lambda url: base(url, covers=(3, 4)),
    "bytes per token": lambda url: base(url, bytes_per_token=16),
    "one more pool": lambda url: base(url, sidecars=[Sidecar(name="more", indices_from="full", bytes_per_page=8)]),
}


@pytest.mark.slow
async def test_what_is_not_the_same_never_meets(url: str) -> None:
    """Models, dtypes, page sizes, layers and tenants: each finds its own, and nobody else's."""
    tokens = prompt(base(url), fresh_seed())
    async with opened(base(url)) as cache:
        assert await serve(cache, tokens) == 0
        await cache.flush()
    for what, variant in VARIANTS.items():
        config = variant(url)
        async with opened(config) as cache:
            assert await serve(cache, tokens) == 0, f"another {what}, and it was a hit"
            await cache.flush()
    async with opened(base(url)) as cache:
        for tenant in ("a", "b", b"a\0", "a\0"):
            assert await serve(cache, tokens, namespace=tenant) == 0, tenant
        await cache.flush()
    for what, variant in {"nothing": base, **VARIANTS}.items():
        config = variant(url)
        async with opened(config) as cache:
            assert await serve(cache, tokens) == 16, f"its own pages, with another {what}"
    async with opened(base(url)) as cache:
        for tenant in ("b", "a", b"a\0", "a\0", "c"):
            assert await serve(cache, tokens, namespace=tenant) == (0 if tenant == "c" else 16)
