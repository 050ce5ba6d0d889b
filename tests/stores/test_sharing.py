"""Every store alike: two processes on one store, pools of every shape, names that users choose."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from asynccache import CacheConfig, Full, Sidecar
from asynccache.cli.main import main
from asynccache.errors import ConfigError
from asynccache.storage import Listable, open_store
from asynccache.storage.checked import store_layout
from tests import warm
from tests.sidecars.sidecar_kit import deepseek, everything, opened, serve, stack, text
from tests.stores.kinds import ATTACHED, fresh_seed, store_url
from tests.stores.server import ROOT, ours

# Two processes on one store, with the replay tool: what one has stored, the other hits; and both at the same time are
# harmless. Every page that either reads is verified.


SHARED = tuple(kind for kind in ATTACHED if kind != "file")  # a folder is one process's at a time
BLOCK = 512
WITHIN = 120.0


@pytest.fixture(params=ATTACHED)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest) -> str:
    return store_url(kind, request)


def trace(path: Path, seed: int) -> Path:
    """Conversations that grow by a block, in the Mooncake format; blocks of different seeds never meet."""
    rng, rows = random.Random(seed), []
    known = {who: [seed * 10_000 + who] for who in range(8)}
    for at in range(40):
        who = rng.randrange(8)
        known[who] = [*known[who], seed * 10_000 + 100 + at]
        rows.append({"timestamp": at * 50, "input_length": len(known[who]) * BLOCK, "output_length": 8,
                     "hash_ids": known[who]})  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(made: Path, url: str, out: str) -> list[str]:
    """A replay whose tiers hold a fraction of the trace."""
    return ["replay", str(made), "--storage", url, "--json", out, "--quiet", "--components", "full",
            "--page-size", "64", "--bytes-per-token", "32", "--device-tokens", "24576",
            "--host-tokens", "32768", "--concurrency", "4", "--decode-tokens", "4"]  # fmt: skip


def here(kind: str, made: Path, url: str) -> dict[str, Any]:
    """What a replay by this process says at its end. Of Mooncake a process has one client to its end, so that has a
    process of its own."""
    if kind == "mooncake":
        return report(replay(made, url))
    out = made.with_suffix(".json")
    assert main(words(made, url, str(out))) == 0
    return checked(out.read_text())


def replay(made: Path, url: str) -> subprocess.Popen[str]:
    """A replay by another process."""
    command = [sys.executable, "-m", "asynccache", *words(made, url, "-")]
    return warm.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=ours())


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it says at its end."""
    try:
        out, _ = process.communicate(timeout=WITHIN)
    finally:
        process.kill()
    assert process.returncode == 0, f"status {process.returncode}"
    return checked(out)


def checked(text: str) -> dict[str, Any]:
    """A report: every page right, nothing left."""
    found: dict[str, Any] = json.loads(text)
    assert found["problems"] == []
    assert found["verify"]["mismatches"] == 0 < found["verify"]["pages"]
    assert found["leaks"] == {"device_pages": 0, "host_pages": 0, "pins": 0, "tasks": 0}
    assert (found["requests"], found["served"], found["failed"]) == (40, 40, 0)
    return found


def of_storage(found: dict[str, Any]) -> int:
    return int(found["tokens"]["hit"]["storage"])


@pytest.mark.slow
def test_the_second_hits_what_the_first_has_stored(kind: str, url: str, tmp_path: Path) -> None:
    made = trace(tmp_path / "trace.jsonl", fresh_seed())
    first = here(kind, made, url)
    second = report(replay(made, url))
    assert second["hit_ratio"] > first["hit_ratio"]
    assert of_storage(second) > of_storage(first)
    assert second["hit_ratio"] > 0.9, "all but each prompt's last page, which is computed in any case"


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARED)
def test_both_at_the_same_time(kind: str, url: str, tmp_path: Path) -> None:
    """They write the same pages at the same time, and read what the other is writing."""
    made = trace(tmp_path / "trace.jsonl", fresh_seed())
    for found in [report(process) for process in [replay(made, url), replay(made, url)]]:
        assert found["storage"]["corrupt_pages"] == 0
    third = here(kind, made, url)
    assert third["hit_ratio"] > 0.9


# Pools of every shape on every store: DeepSeek-V4's (FULL without bytes, compressed KV on it, compressor states on
# SWA), and all three components with sidecars. What becomes of a prefix that lacks a page: ``tests/sidecars``.


PAGES = 6


@pytest.mark.slow
@pytest.mark.parametrize("shape", [deepseek, everything])
async def test_pages_of_every_pool_come_back_from_every_store(shape: Callable[..., CacheConfig], url: str) -> None:
    config = shape(host=256, storage=url, prefetch_policy="wait_complete")
    tokens = text(config, PAGES, seed=fresh_seed(), extra=1)
    async with opened(config) as cache:
        for pages in (2, 4, PAGES):                    # states at three checkpoints
            await serve(cache, tokens[: pages * config.page_size])
        assert await cache.flush() == (0, 0)
    async with opened(config) as cache:
        assert await serve(cache, tokens) == PAGES * config.page_size


# Names that users choose (models, tenants, pools) never become part of a store's key, path or command. Two caches
# share pages in a store if they would have the same bytes, and otherwise never.


NAMED_PAGES = 4
ODD = (
    "../../../etc/passwd", "/", ".", "..", "~", "a\0b", "x\r\nSET pwned 1\r\n", "\n", "*", "{tag}", "a{b}c}",
    "?x=1&y=2", "#", "%2e%2e%2f", "$(id)", "`id`", "; DROP TABLE pages", "<!ENTITY x>", " ", "моделі/模型",
    "m" * 10_240, "\x7f\x1b[2J",
)  # fmt: skip
ODD_KEYS = (*ODD, "", b"", b"\xff\xfe\x00\x80", bytes(range(256)), b"\r\nFLUSHALL\r\n")


def base(url: str, page: int = 4, **more: Any) -> CacheConfig:
    usual = {"bytes_per_token": 8, "layers": 2, "dtype": "uint8", "covers": ()}
    own: dict[str, Any] = {name: more.pop(name, value) for name, value in usual.items()}
    full = Full(**own, device_tokens=512, host_tokens=2048)
    more.setdefault("sidecars", ())
    return stack(full, page_size=page, storage=url, prefetch_policy="wait_complete", **more)


def prompt(config: CacheConfig, seed: int) -> list[int]:
    return text(config, NAMED_PAGES, seed=seed, extra=1)


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
                assert await serve(cache, prompt(config, seed)) == NAMED_PAGES * 4
                for namespace in ODD_KEYS:
                    assert await serve(cache, prompt(config, seed), namespace=namespace) == NAMED_PAGES * 4
    keys = await stored_keys(url)
    assert len(keys) >= NAMED_PAGES * (2 * len(ODD) + len(ODD_KEYS) - 1)
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


@pytest.mark.parametrize("model", ["\ud800", "a\udcffb"])
def test_a_model_that_is_no_text_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        replace(base("memory:"), model=model)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "a\nb", "a\r\nb", "a\0b", "*", "{a}", "a:b", "../x", "a" + "/" * 3])
def test_names_of_pools_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        base("memory:", sidecars=[Sidecar(name=name, indices_from="full", bytes_per_page=8)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["..", ".", "-rf", "__class__", "насос", "x" * 200])
async def test_odd_names_of_pools_are_harmless_or_refused(name: str, url: str) -> None:
    with suppress(ConfigError):
        config = base(url, sidecars=[Sidecar(name=name, indices_from="full", bytes_per_page=8)])
        tokens = prompt(config, fresh_seed())
        for expected in (0, NAMED_PAGES * 4):
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
