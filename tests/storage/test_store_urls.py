"""URLs of stores: what they may say, and to whom their secrets are shown."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asynccache_backends.file.folder import FileSettings

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli.main import main
from asynccache.configuration import read_config
from asynccache.errors import ConfigError
from asynccache.metrics import CacheCollector
from asynccache.redaction import is_secret, redacted
from asynccache.storage import CheckedStore, ParsedUrl, open_store, parse_size, parse_url
from asynccache.storage.url import StoreOptions, take_options
from asynccache.testing.backend_suite import LAYOUT
from tests.storage.conftest import install

# URLs, sizes and the search for a backend.


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("4096B", 4096), ("1KB", 1000), ("1KiB", 1024), ("10GiB", 10 << 30),
     ("1.5 MiB", 3 << 19), ("2g", 2 * 10**9), ("3Ti", 3 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size("capacity", text) == size


@pytest.mark.parametrize("text", ["", "ten", "-1", "1 XB", "1iB", "GiB", "1e3"])
def test_what_is_no_size_is_refused_by_name_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match=f"capacity={text!r}"):
        parse_size("capacity", text)


@pytest.mark.parametrize(
    ("text", "scheme", "path", "options"),
    [
        ("none", "none", "", {}),
        ("memory:", "memory", "", {}),
        ("memory:?capacity=1GiB", "memory", "", {"capacity": "1GiB"}),
        ("file:/var/kv?capacity=10GiB&direct=off", "file", "/var/kv", {"capacity": "10GiB", "direct": "off"}),
        ("file:///var/kv", "file", "/var/kv", {}),
        ("file:relative/kv", "file", "relative/kv", {}),
    ],
)
def test_urls(text: str, scheme: str, path: str, options: dict[str, str]) -> None:
    parsed = parse_url(text)
    assert (parsed.scheme, parsed.path, parsed.options) == (scheme, path, options)


def test_options_given_apart_win() -> None:
    assert parse_url("file:/x?capacity=1", {"capacity": "2"}).options == {"capacity": "2"}


@pytest.mark.parametrize("text", ["", "/var/kv", ":x", "file:/x?capacity", "file:/x?capacity=1&capacity=2"])
def test_what_is_no_url_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="storage="):
        parse_url(text)


def test_unknown_options_and_choices_are_refused_by_name_and_value() -> None:
    with pytest.raises(ConfigError, match="'colour'"):
        parse_url("file:/x?colour=red").allow_only(("capacity",))
    with pytest.raises(ConfigError, match="unknown option 'colour'; it has none"):
        parse_url("dict:?colour=red").allow_only(())
    with pytest.raises(ConfigError, match="direct='maybe'"):
        parse_url("file:/x?direct=maybe").settings(FileSettings)


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_that_raises.py").write_text("raise RuntimeError('no shelf here')\n")
    shelf = "asynccache_backends.memory:MemoryBackend"
    install(tmp_path, monkeypatch, shelf=shelf, broken="plugin_that_raises:Nothing")


@pytest.mark.usefixtures("plug_in")
async def test_a_backend_is_found_by_its_entry_point() -> None:
    store = await open_store("shelf:?capacity=1MiB", LAYOUT)
    assert isinstance(store, CheckedStore)
    assert store.stats()["pages"] == 0
    await store.aclose()


@pytest.mark.usefixtures("plug_in")
async def test_an_unknown_scheme_is_refused_with_a_list_of_what_is_installed() -> None:
    with pytest.raises(ConfigError, match=r"unknown backend 'teapot'; installed: .*shelf"):
        await open_store("teapot:/x", LAYOUT)


@pytest.mark.usefixtures("plug_in")
async def test_a_plug_in_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'broken' cannot be imported from plugin_that_raises:.*no shelf"):
        await open_store("broken:", LAYOUT)


@pytest.mark.usefixtures("plug_in")
async def test_a_capacity_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match="capacity=4096"):
        await open_store("shelf:?capacity=4096", LAYOUT)


async def test_none_is_no_store() -> None:
    assert await open_store("none", LAYOUT) is None


# The options that every store URL may have, whatever its scheme.


def test_all_of_them_are_taken_out_and_the_rest_is_left_to_the_backend() -> None:
    url = parse_url("file:/kv?name=disk&write=no&promote=no&timeout=2.5&concurrency=4&slow=0.5&capacity=1GiB")
    options, rest = take_options(url)
    assert options == StoreOptions("disk", write=False, promote=False, timeout=2.5, concurrency=4, slow=0.5)
    assert str(rest) == "file:/kv?capacity=1GiB"


def test_without_any_the_scheme_is_the_name() -> None:
    options, rest = take_options(parse_url("memory:"))
    assert options == StoreOptions("memory")
    assert options.write
    assert options.promote
    assert rest == parse_url("memory:")


@pytest.mark.parametrize(
    "option",
    ["name=", "name=a/b", "name=..", "write=maybe", "promote=2", "timeout=0", "timeout=nan", "timeout=inf", "slow=-1",
     "timeout=soon", "concurrency=0", "concurrency=1.5", "concurrency=-1", "concurrency=²"],
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_refused_by_name(option: str) -> None:
    with pytest.raises(ConfigError, match=option.split("=", maxsplit=1)[0]):
        take_options(parse_url(f"memory:?{option}"))


# A password in a store's URL reaches its backend, and nobody else: every output is searched for a canary.


CANARY = "c4n4ry"
URLS = (
    f"vault://me:{CANARY}@host:6379/0",
    f"vault:me:{CANARY}@host",
    f"vault://:{CANARY}@host:1,host:2",
    f"vault://{CANARY}@host",
    f"vault://me:with/{CANARY}/slash@host?db=1",
    f"vault://me:with@{CANARY}@host",
    f"vault://host?password={CANARY}",
    f"vault://host?db=1&secret_access_key={CANARY}&x=2",
    f"vault://host?token={CANARY}&access_key_id={CANARY}&sas={CANARY}&sasl_pass={CANARY}",
    f"vault://host?endpoint=http://u:{CANARY}@proxy:80&x=1",
)

MODULE = '''
from asynccache_backends.memory import MemoryBackend
from asynccache.errors import Unavailable
from asynccache.storage import parse_url

GOT = []

class Vault(MemoryBackend):
    @classmethod
    async def open(cls, url, layout):
        GOT.append((url.path, dict(url.options)))
        if "down" in url.options:
            raise Unavailable(f"{url} does not answer")
        return await MemoryBackend.open(parse_url("memory:"), layout)
'''


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installed backend whose URL has secrets."""
    (tmp_path / "vault_backend_of_test.py").write_text(MODULE)
    install(tmp_path, monkeypatch, vault="vault_backend_of_test:Vault")
    monkeypatch.delitem(sys.modules, "vault_backend_of_test", raising=False)
    import vault_backend_of_test  # type: ignore[import-not-found]

    return vault_backend_of_test


@pytest.mark.parametrize("url", URLS)
def test_a_url_as_text_has_no_secret_in_it(url: str) -> None:
    parsed = parse_url(url)
    for text in (str(parsed), repr(parsed), f"{parsed}", redacted(url), repr(replace(parsed, options={}))):
        assert CANARY not in text
        assert "vault:" in text
        assert "host" in text or "options={}" in text
    told = parsed.path + "".join(parsed.options.values())
    assert CANARY in told, "the backend is told"


@pytest.mark.parametrize("url", ["file:/var/kv?capacity=10GiB", "file:/var/user@home:1/kv", "memory:", "s3://bucket/prefix",
                                 "redis://host:6379/0?db=1"])  # fmt: skip
def test_what_is_no_secret_is_shown(url: str) -> None:
    assert redacted(url) == url
    assert str(parse_url(url)).replace("//", "") == url.replace("//", "")


@pytest.mark.parametrize("name", ["password", "passwd", "secret_key", "aws_secret_access_key", "token", "session_token",
                                  "api_key", "sas_key", "credentials", "AWS_ACCESS_KEY_ID", "auth"])  # fmt: skip
def test_names_that_say_secret(name: str) -> None:
    assert is_secret(name)
    assert CANARY not in repr(ParsedUrl("s3", "bucket", {name: CANARY}))


@pytest.mark.parametrize("name", ["capacity", "bytes_per_token", "device_tokens", "region", "prefix", "storage"])
def test_names_that_do_not(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("text", [f":me:{CANARY}@host", f"://{CANARY}@host", f"vault://me:{CANARY}@host?x&y=1",
                                  f"vault://h?x=1&{CANARY}"])  # fmt: skip
def test_what_is_wrong_with_a_url_is_said_without_it(text: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse_url(text).allow_only(())
    assert CANARY not in str(told.value)


def test_a_misspelt_secret_is_not_shown_either() -> None:
    with pytest.raises(ConfigError) as told:
        parse_url(f"vault://host?pasword={CANARY}").allow_only({"password"})
    assert "pasword" in str(told.value)
    assert CANARY not in str(told.value)


def config(url: str, **more: Any) -> CacheConfig:
    full = Full(bytes_per_token=16, device_tokens=256, host_tokens=256)
    return CacheConfig(model="m", components=(full,), page_size=4, storage=url, **more)


async def test_a_cache_says_nothing(vault: Any) -> None:
    settings = config(URLS[0], storage_options={"password": CANARY})
    async with AsyncCache(settings) as cache:
        await cache.flush()
        metrics = [(m.name, s.labels, s.value) for m in CacheCollector(cache).collect() for s in m.samples]
        explained = await cache.explain([1])
        for shown in (cache, settings, cache._worker, cache._head, cache.statistics(), metrics, explained):
            assert CANARY not in repr(shown)
    path, options = vault.GOT[0]
    assert (path, options) == (f"me:{CANARY}@host:6379/0", {"password": CANARY})


async def test_a_store_that_cannot_be_opened_is_named_without_it(vault: Any) -> None:
    for settings in (config(URLS[0] + "?down=1"), config(URLS[6] + "&down=1"), config("memory:?password=" + CANARY)):
        with pytest.raises(Exception) as told:
            async with AsyncCache(settings):
                pass
        assert CANARY not in f"{told.value!r} {told.value}"


SMALL = ["--rate", "0", "--requests", "8", "--concurrency", "4", "--bytes-per-token", "16", "--components", "full",
         "--device-tokens", "16384", "--host-tokens", "16384"]  # fmt: skip


@pytest.mark.parametrize("url", [URLS[0], URLS[8]])
def test_a_run_and_its_reports_say_nothing(
    url: str, vault: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page, report = tmp_path / "report.html", tmp_path / "report.json"
    assert main(["stress", *SMALL, "--storage", url, "--json", str(report), "--report", str(page)]) == 0
    assert vault.GOT, "the backend was opened"
    out = "".join(capfd.readouterr())
    assert json.loads(report.read_text())["settings"]["storage"].startswith("vault:")
    for text in (out, report.read_text(), page.read_text()):
        assert CANARY not in text


@pytest.mark.parametrize("words", [
    ["--storage", URLS[0], "--host-tokens", "0"],
    ["--storage", f"vault:{CANARY}@h?down=1"],
    ["--storage", f"memory:?password={CANARY}"],
])  # fmt: skip
@pytest.mark.usefixtures("vault")
def test_a_run_that_cannot_begin_says_why_and_not_more(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", *SMALL, *words]) != 0
    told = "".join(capfd.readouterr())
    assert told
    assert CANARY not in told


def test_config_show_and_check_say_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = tmp_path / "good.toml"
    good.write_text(f'model = "m"\nstorage = "{URLS[0]}"\n[storage_options]\npassword = "{CANARY}"\n'
                    "[components.full]\nbytes_per_token = 16\ndevice_tokens = 256\nhost_tokens = 256\n")  # fmt: skip
    bad = tmp_path / "bad.toml"
    bad.write_text(f'model = "m"\nstorag = "{URLS[0]}"\nstorage = ["{URLS[0]}", 7]\nwrite_policy = 3\n')
    assert main(["config", "show", str(good)]) == 0
    assert main(["config", "show", str(good), "--json"]) == 0
    assert main(["config", "check", str(bad)]) != 0
    told = "".join(capfd.readouterr())
    assert "storag" in told
    assert CANARY not in told
    loaded = read_config(good, env={"ASYNCCACHE_STORAGE": URLS[1], "ASYNCCACHE_NONSENSE": URLS[1]})
    assert CANARY not in repr(loaded.config) + "".join(map(str, loaded.problems))
