"""URLs, sizes and the search for a backend."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from asynccache_backends.file.folder import FileSettings

from asynccache.errors import ConfigError
from asynccache.storage import CheckedStore, open_store, parse_size, parse_url
from asynccache.testing.backend_suite import LAYOUT


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


@pytest.mark.parametrize("text", ["", "/var/kv", ":x", "file:/x?capacity"])
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
    """An installed distribution that offers one backend."""
    info = tmp_path / "plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[asynccache.backends]\nshelf = asynccache_backends.memory:MemoryBackend\nbroken = plugin_that_raises:Nothing\n"
    )
    (tmp_path / "plugin_that_raises.py").write_text("raise RuntimeError('no shelf here')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])


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
