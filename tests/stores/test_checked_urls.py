"""``asynccache config check`` says of a storage URL what opening it would say, to the letter, and opens nothing: no
folder is made, no server is asked, no client is set up."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
from asynccache_backends.memory import MemoryBackend

from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli.main import main
from asynccache.configuration import read_config
from asynccache.errors import ConfigError, Unavailable
from asynccache.extras import install as how_to_install
from asynccache.metrics import CacheCollector
from asynccache.redaction import is_secret, redacted
from asynccache.storage import (
    CheckedStore,
    ParsedUrl,
    StoreLayout,
    attachment,
    check_store,
    check_stores,
    open_store,
    parse_host_port,
    parse_size,
    parse_url,
)
from asynccache.storage.checked import store_layout
from asynccache.storage.url import StoreOptions, take_options
from tests import bare
from tests.stores.mooncake_server import MooncakeMaster

PAGE = 4
FULL = Full(bytes_per_token=1024, device_tokens=256, host_tokens=256)
ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "ASYNCCACHE_")

BAD = {
    "any": [
        "teapot:/x", "file", ":x", "", "file:{tmp}/s?capacity", "file:{tmp}/s?capacity=1GiB&capacity=2GiB",
        "file:{tmp}/s?name=", "file:{tmp}/s?name=a+b", "file:{tmp}/s?write=maybe", "file:{tmp}/s?promote=2",
        "file:{tmp}/s?timeout=0", "file:{tmp}/s?timeout=nan", "file:{tmp}/s?timeout=soon", "file:{tmp}/s?slow=-1",
        "file:{tmp}/s?concurrency=0", "file:{tmp}/s?concurrency=1.5", "file:{tmp}/s?concurrency=" + "9" * 5000,
        "file:{tmp}/s?concurrency=-1", "file:{tmp}/s?concurrency=²", "file:{tmp}/s?name=a/b", "file:{tmp}/s?name=..",
        "file:{tmp}/s?timeout=inf", "/var/kv",
    ],
    "file": [
        "file:", "file:?capacity=1GiB", "file:{tmp}/s?colour=red", "file:{tmp}/s?capacity=lots",
        "file:{tmp}/s?capacity=" + "9" * 400, "file:{tmp}/s?capacity=8KiB",
        "file:{tmp}/s?capacity=9000000P", "file:{tmp}/s?segment=5000",
        "file:{tmp}/s?segment=4KiB", "file:{tmp}/s?capacity=1MiB&segment=1MiB", "file:{tmp}/s?direct=maybe",
        "file:{tmp}/s?segment=8KiB", "file:{tmp}/s?capacity=1MiB&segment=512KiB", "file:{tmp}/a\0b",
        *(f"file:{{tmp}}/s?mode={mode}" for mode in ("", "0", "0600", "rwx", "u=rwx", "7777", "0o700", "-700", "0788")),
    ],
    "host": ["host:", "host:relative/path", "host:/" + "a" * 107, "host:/s?label=a%20b", "host:/s?owner=me",
             "host:/s?owner=-2", "host:/s?capacity=1GiB", "host:/s?timeout=0", "host:/a\0b"],
    "memory": ["memory:?capacity=4096", "memory:?capacity=9000000PiB", "memory:?capacity=", "memory:?size=1GiB",
               "memory:?capacity=lots"],
    "redis": [
        "redis:", "redis://h:0", "redis://h:65536", "redis://h:x", "redis://h,", "redis://a..b", "redis://-?ttl=x",
        "redis://[::1", "redis://[::::]", "redis://[1.2.3.4]", "redis://1.2.3", "redis://1.2.3.400:6379",
        "redis://" + "a" * 64, "redis://h/x", "redis://h/-1", "redis://h?prefix=", "redis://h?prefix={{a}}",
        "redis://h?ttl=-1", "redis://h?ttl=" + "9" * 400, "redis://h?stall=0", "redis://h?connections=0",
        "redis://h?cluster=maybe", "redis://a,b?cluster=off", "redis://u:hunter2@h:x", "redis://h?password=hunter2",
        "redis://h?prefix=a%20b", "redis://h?prefix=a%0d%0a", "redis://h?prefix=a%0A",
        "redis://h?ttl=1w", "redis://h?ttl=none", "redis://h?ttl=0.0001", "redis://h?stall=0.0001s",
        "redis://h?connections=1.5", "redis://h/1000000", "redis://u:hunter2@h?color=red", "redis://u:hunter2@h/x",
        "rediss://h?ca=/nowhere.pem", "rediss://h:0", "redis://h?timeout=0",
    ],
    "mooncake": [
        "mooncake:", "mooncake://", "mooncake://a b:1", "mooncake://a..b:1", "mooncake://h:0", "mooncake://h:65536", "mooncake://h:1/path",
        "mooncake://[::1:5", "mooncake://user:hunter2@h:1", "mooncake://h:1?replicas=0", "mooncake://h:1?replicas=many",
        "mooncake://h:1?threads=17", "mooncake://h:1?namespace=", "mooncake://h:1?namespace=" + "x" * 65,
        "mooncake://h:1?metadata=http://u:hunter2@h/", "mooncake://h?threads=٣",
        "mooncake://h?replicas=" + "1" * 5000, "mooncake://h?protocol=udp", "mooncake://h?segment=big",
        "mooncake://h?namespace=a*", "mooncake://h?metadata=file:///etc/passwd", "mooncake://h?admin=h",
        "mooncake://h?admin=h:0", "mooncake://h?size=1",
    ],
    "object": [
        "s3:", "s3:///prefix", "s3://b?colour=red", "gs://b?region=x", "s3://a b/c",
        "gs:///prefix", "s3://b/./c", "s3://b?refresh=nan", "s3://b?request_timeout=1e300",
        "s3://b?access_key_id=hunter2", "s3://b?session_token=hunter2", "az://c?sas=hunter2", "az://c?account_key=hunter2",
        "s3://u:hunter2@b/kv", "s3://u:hunter2/more@b", "s3://b/u:hunter2@h/..",
        "s3://b/a//c", "s3://b/../c", "s3://b/a\tb", "s3://b?pack=1", "s3://b?pack=1TiB", "s3://b?capacity=5MiB",
        "s3://b?refresh=often", "s3://b?refresh=-1", "s3://b?parallel=0", "s3://b?parallel=1.5",
        "s3://b?request_timeout=0", "s3://b?endpoint=127.0.0.1:9000", "s3://b?endpoint=ftp://h",
        "s3://b?endpoint=http://h:99999", "s3://b?endpoint=http://h:0", "s3://b?endpoint=http://", "s3://b?region=",
        "s3://b?region=eu%20west", "s3://b?secret_access_key=hunter2", "s3://b?endpoint=http://u:hunter2@h:1",
        "az://c?account=x%20y",
    ],
}  # fmt: skip

GOOD = [
    "memory:", "memory:?capacity=1GiB&name=near&write=no", "file:{tmp}/s", "file:{tmp}/a/b/c?capacity=1GiB&direct=off",
    "host:{tmp}/s", "host:///run/kv.sock?label=llama/3&owner=1001&name=near",
    "file:{tmp}/s?mode=0750&timeout=2.5&concurrency=4&slow=0", "redis://127.0.0.1:{port}/3?ttl=7d&prefix=kv:",
    "redis://u:secret@127.0.0.1:{port}", "redis://a.b,c.d:7000,[::1]:7001?cluster=on", "rediss://localhost:{port}",
    "mooncake://127.0.0.1:{port}?admin=127.0.0.1:{port}", "mooncake://[::1]?segment=1GiB&replicas=2",
    "s3://bucket/a/b?endpoint=http://127.0.0.1:{port}&region=eu-west-1", "gs://bucket", "az://container/x?account=kv",
    "s3://bucket?pack=1MiB&refresh=0&parallel=4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def nobody_knows_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials, and no settings, from outside."""
    for name in list(os.environ):
        if name.startswith(ENVIRONMENT):
            monkeypatch.delenv(name)


@pytest.fixture
def port() -> Iterator[int]:
    """Somebody listens there, and whoever knocks is noticed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()


def config(*urls: str, **more: Any) -> CacheConfig:
    return CacheConfig(model="m", components=(FULL,), page_size=PAGE, storage=urls, **more)


LAYOUT = store_layout(config("memory:").pools())


def written(folder: Path, *urls: str, options: Mapping[str, str] | None = None) -> str:
    """A file that describes a cache with these stores."""
    lines = [
        'model = "m"', f"page_size = {PAGE}", f"storage = [{', '.join(map(json.dumps, urls))}]", "[components.full]",
        "bytes_per_token = 1024", "device_tokens = 256", "host_tokens = 256", "[storage_options]",
        *(f"{name} = {json.dumps(value)}" for name, value in (options or {}).items()),
    ]  # fmt: skip
    file = folder / "kv.toml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def opened(config: CacheConfig) -> str:
    """What opening a cache says."""

    async def open_it() -> None:
        async with AsyncCache(config):
            pass

    with pytest.raises(ConfigError) as refused:
        asyncio.run(open_it())
    return str(refused.value)


@pytest.mark.parametrize(("kind", "url"), [(kind, url) for kind, urls in BAD.items() for url in urls])
def test_what_opening_refuses_the_check_refuses_in_the_same_words(
    kind: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url.format(tmp=tmp_path / "stores")
    said = opened(config(url))
    assert main(["config", "check", file := written(tmp_path, url)]) == 1
    told = capsys.readouterr().err
    assert told == f"asynccache: {said} (storage: {file})\n"
    assert "hunter2" not in said
    assert "=" not in url or url.partition("?")[2].partition("=")[0] in said, "what is wrong is named"
    assert os.listdir(tmp_path) == ["kv.toml"]


@pytest.mark.parametrize(("url", "said"), [
    ("file:x?capacity=12KiB", "capacity=12288"), ("file:x?capacity=1MiB&segment=512KiB", "three segments"),
    ("file:x?segment=5000", "segment=5000"), ("file:x?segment=8KiB", "segment=8192"),
    ("file:x?capacity=lots", "capacity='lots'"), ("file:x?direct=perhaps", "direct='perhaps'"),
    ("file:x?sync=yes", "'sync'"), ("file:x?mode=0788", "mode='0788': expected .* as in mode=0750"),
    ("memory:?capacity=1024", "capacity=1024"), ("memory:?colour=red", "unknown option 'colour'"),
    ("/var/kv", "storage="),
])  # fmt: skip
def test_what_is_refused_is_said_by_name_and_value(url: str, said: str) -> None:
    (error,) = check_stores([url], LAYOUT)
    assert re.search(said, str(error))


@pytest.mark.parametrize("url", GOOD)
def test_what_can_be_used_is_said_to_be_and_nothing_is_opened(
    url: str, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if url.startswith("mooncake:"):
        MooncakeMaster.installed()
    url = url.format(tmp=tmp_path / "stores", port=port)
    file = written(tmp_path, url)
    new = {"not checked yet"}
    for _ in range(20):  # a library opens what it likes for itself when it is imported, and a thread of it soon after
        before = opened_files(tmp_path)
        assert main(["config", "check", file]) == 0, capsys.readouterr().err
        captured = capsys.readouterr()
        assert captured.out == (
            f"{file}: can be used\n"
            "  full: 1 layer, 1 KiB a token; device 256 KiB for 256 tokens, host 256 KiB for 256 tokens\n"
        )
        assert ("model='m' names no weights" in captured.err) == (not url.startswith("memory:"))
        if not (new := opened_files(tmp_path) - before):
            break
    assert not new, "the check opens this each time"
    assert os.listdir(tmp_path) == ["kv.toml"]


def opened_files(folder: Path) -> set[str]:
    """The sockets of this process, and its open files in ``folder``. Descriptors of other kinds come and go with the
    threads of libraries."""
    links = set[str]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of the listing itself, at least
            links.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in links if link.startswith(("socket:", str(folder)))}


def test_every_url_is_looked_at_and_every_error_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urls = ["file:x?mode=7", "memory:", "memory:?capacity=1", "teapot:", "memory:", "memory:?name=other", "none:"]
    assert main(["config", "check", written(tmp_path, *urls)]) == 1
    lines = capsys.readouterr().err.splitlines()
    expected = ["option mode='7'", "capacity=1 is less", "unknown backend 'teapot'", "a store 'memory' is attached",
                "there is nothing to attach"]
    assert len(lines) == len(expected)
    assert all(part in line for part, line in zip(expected, lines, strict=True))
    assert opened(config(*urls)) in lines[0]


def test_stores_of_one_name_are_refused_in_the_same_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    urls = ["memory:?name=kv", f"file:{tmp_path}/s?name=kv"]
    said = opened(config(*urls))
    assert said == "storage: a store 'kv' is attached already; call this one otherwise (name=)"
    assert main(["config", "check", written(tmp_path, *urls)]) == 1
    assert capsys.readouterr().err.startswith(f"asynccache: {said} (storage: ")
    assert os.listdir(tmp_path) == ["kv.toml"], "opening has refused it before it made the folder"


def test_options_beside_the_url_count_and_are_named_by_their_own_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"capacity": "1GiB", "direct": "perhaps"}
    url = f"file:{tmp_path}/s?direct=on"
    said = opened(config(url, storage_options=options))
    assert main(["config", "check", file := written(tmp_path, url, options=options)]) == 1
    assert capsys.readouterr().err == f"asynccache: {said} (storage_options.direct: {file})\n"


@pytest.mark.parametrize(("url", "module", "sentence"), [
    ("s3://bucket", "obstore.store", "pip install 'obstore>=0.6'"),
    ("mooncake://127.0.0.1:1", "mooncake", "pip install 'mooncake-transfer-engine-non-cuda>=0.3.13'"),
    ("redis://127.0.0.1:1", "redis", f"redis-py: {how_to_install('redis')}"),
])  # fmt: skip
def test_a_client_that_is_not_installed_is_a_sentence(
    url: str, module: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith("asynccache_backends.redis")]:
        monkeypatch.delitem(sys.modules, name)         # imports its client at once
    url = url.format(tmp=tmp_path)
    said = opened(config(url))
    assert sentence in said
    assert main(["config", "check", written(tmp_path, url)]) == 1
    assert capsys.readouterr().err.startswith(f"asynccache: {said} (storage: ")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("config", "check"), ("store", "stat")])
def test_a_library_of_the_system_that_a_client_lacks_is_one_line_that_says_what_to_install(
    words: Sequence[str], tmp_path: Path
) -> None:
    url = "mooncake://127.0.0.1:1"
    told = written(tmp_path, url) if words == ("config", "check") else url
    done = subprocess.run(
        [sys.executable, "-m", "asynccache", *words, told], env=bare.environment(tmp_path), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    [line] = done.stderr.splitlines()
    assert line.startswith("asynccache: storage mooncake: the client cannot be loaded: ")
    assert "libibverbs.so.1: " in line
    assert "; apt-get install libibverbs1 libnuma1" in line


# plug-ins


class Plain:
    """A plug-in that knows of no check."""

    opened = 0

    @classmethod
    async def open(cls, url: Any, layout: StoreLayout) -> MemoryBackend:
        cls.opened += 1
        url.allow_only(("own",))
        return MemoryBackend()


class Inheriting(MemoryBackend):
    """One that is made of ours and has options of its own."""

    @classmethod
    async def open(cls, url: Any, layout: StoreLayout) -> Any:
        url.allow_only(("own",))
        return cls()


class Careful(Inheriting):
    """One that checks them, too."""

    @classmethod
    def check(cls, url: Any, layout: StoreLayout) -> None:
        url.allow_only(("own",))


@pytest.mark.parametrize("kind", [Plain, Inheriting, Careful])
def test_a_plug_in_is_checked_as_far_as_it_lets_itself_be(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "backend_class", lambda scheme: kind)
    Plain.opened = 0
    assert check_stores(["mine:?own=1&name=a"], LAYOUT) == []
    assert [str(error) for error in check_stores(["mine:?timeout=0"], LAYOUT)] != []
    assert len(check_stores(["mine:?other=1"], LAYOUT)) == (kind is Careful)
    assert Plain.opened == 0


def test_all_backends_of_ours_check() -> None:
    for entry in importlib.metadata.entry_points(group=attachment.GROUP):
        if entry.value.startswith("asynccache_backends."):
            kind = entry.load()
            assert isinstance(kind, attachment.CheckableClass)
            assert isinstance(kind.check, types.MethodType)


def test_none_is_no_store_and_no_error() -> None:
    assert check_store("none", LAYOUT) is None
    assert asyncio.run(open_store("none", LAYOUT)) is None


@pytest.mark.parametrize(("text", "host", "port"), [
    ("kv", "kv", 99), ("kv.example.org.", "kv.example.org.", 99), ("kv_1:7", "kv_1", 7),
    ("10.0.0.1:65535", "10.0.0.1", 65535), ("[::1]", "::1", 99), ("[::ffff:10.0.0.1]:1", "::ffff:10.0.0.1", 1),
])  # fmt: skip
def test_hosts_and_ports(text: str, host: str, port: int) -> None:
    assert parse_host_port(text, 99) == (host, port)
    assert parse_host_port(text) == (None if port == 99 else (host, port))


@pytest.mark.parametrize("text", [
    "", ":1", "kv:", "kv:0", "kv:65536", "kv:+1", "kv:1:2", "::1", "[::1", "[kv]", "[]", "a..b", ".", "a b", "a/b",
    "u@h", "1.2.3", "256.1.1.1", "a" * 64, ".".join(["a" * 60] * 5), "kv\n", "ü",
])  # fmt: skip
def test_what_is_no_host(text: str) -> None:
    assert parse_host_port(text, 99) is None


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


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **backends: str) -> None:
    """``backends`` as an installed distribution offers them. What else lies in ``folder`` can be imported."""
    info = folder / "plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1\n")
    offered = "".join(f"{name} = {where}\n" for name, where in backends.items())
    (info / "entry_points.txt").write_text(f"[asynccache.backends]\n{offered}")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


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

class Vault(MemoryBackend):
    """Its URLs have secrets."""

    got: ClassVar[list[ParsedUrl]] = []

    @classmethod
    async def open(cls, url: ParsedUrl, layout: StoreLayout) -> Self:
        cls.got.append(url)
        if "down" in url.options:
            raise Unavailable(f"{url} does not answer")
        return cls()


@pytest.fixture
def vault(monkeypatch: pytest.MonkeyPatch) -> type[Vault]:
    others = attachment.backend_class
    monkeypatch.setattr(attachment, "backend_class", lambda scheme: Vault if scheme == "vault" else others(scheme))
    Vault.got.clear()
    return Vault


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


@pytest.mark.parametrize(("text", "said"), [
    (f":me:{CANARY}@host", "storage="), (f"://{CANARY}@host", "storage="), (f"vault://h?x=1&{CANARY}", "storage="),
    (f"vault://me:{CANARY}@host?x&y=1", "storage="),
    (f"vault://h?pasword={CANARY}", "unknown option 'pasword'; it has none"),
])  # fmt: skip
def test_what_is_wrong_with_a_url_is_said_without_it(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as told:
        parse_url(text).allow_only(())
    assert CANARY not in str(told.value)


async def test_a_cache_says_nothing(vault: type[Vault]) -> None:
    settings = config(URLS[0], storage_options={"password": CANARY})
    async with AsyncCache(settings) as cache:
        await cache.flush()
        metrics = [(m.name, s.labels, s.value) for m in CacheCollector(cache).collect() for s in m.samples]
        explained = await cache.explain([1])
        for shown in (cache, settings, cache._worker, cache._head, cache.statistics(), metrics, explained):
            assert CANARY not in repr(shown)
    assert (vault.got[0].path, vault.got[0].options) == (f"me:{CANARY}@host:6379/0", {"password": CANARY})


async def test_a_store_that_cannot_be_opened_is_named_without_it(vault: type[Vault]) -> None:
    for settings in (config(URLS[0] + "?down=1"), config(URLS[6] + "&down=1"), config("memory:?password=" + CANARY)):
        with pytest.raises(Exception) as told:
            async with AsyncCache(settings):
                pass
        assert CANARY not in f"{told.value!r} {told.value}"


SMALL = ["--rate", "0", "--requests", "8", "--concurrency", "4", "--bytes-per-token", "16", "--components", "full",
         "--device-tokens", "16384", "--host-tokens", "16384"]  # fmt: skip


@pytest.mark.parametrize("url", [URLS[0], URLS[8]])
def test_a_run_and_its_reports_say_nothing(
    url: str, vault: type[Vault], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page, report = tmp_path / "report.html", tmp_path / "report.json"
    assert main(["stress", *SMALL, "--storage", url, "--json", str(report), "--report", str(page)]) == 0
    assert vault.got, "the backend was opened"
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
