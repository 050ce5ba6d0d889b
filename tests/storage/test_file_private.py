"""A store in a folder is for its owner alone, whatever the umask says and whatever was there before, unless its URL
says otherwise."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from asynccache_backends.file import FileBackend

from asynccache.errors import ConfigError
from asynccache.storage import RECORD_SCHEMA, CheckedStore, Result, StoreLayout, parse_url
from asynccache.testing.backend_suite import LAYOUT, keys_of, page_key
from tests.storage.page_kit import fill, get

SMALL = "capacity=16MiB&segment=1MiB"


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """What the process may not give while this lasts."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


async def open_at(folder: Path, options: str = "", layout: StoreLayout = LAYOUT) -> CheckedStore:
    url = parse_url(f"file:{folder}?{SMALL}{options}")
    return CheckedStore(await FileBackend.open(url, layout), layout)


async def used(folder: Path, options: str = "") -> None:
    """A store with pages and deletions."""
    store = await open_at(folder, options)
    await fill(store, keys_of(100))
    await store.delete(keys_of(5))
    await store.flush()
    await store.aclose()


def modes(folder: Path) -> dict[str, int]:
    """The permissions of the folder, by ``.``, and of what is in it."""
    found = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.iterdir()}
    return {".": stat.S_IMODE(folder.stat().st_mode), **found}


def expected(folder: Path, mode: int) -> dict[str, int]:
    assert {"lock", "manifest.json"} < set(os.listdir(folder))
    assert any(name.startswith("segment-") for name in os.listdir(folder))
    return {".": mode, **dict.fromkeys(os.listdir(folder), mode & 0o666)}


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
async def test_folder_and_files_are_private_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    folder = tmp_path / "above" / "store"
    with umask(mask):
        await used(folder)
    assert modes(folder) == expected(folder, 0o700)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mask", [0o000, 0o077])
async def test_an_option_lets_others_in(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        await used(tmp_path / "store", "&mode=0750")
    assert modes(tmp_path / "store") == expected(tmp_path / "store", 0o750)


async def test_what_was_open_to_others_is_closed_to_them_by_opening_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    await used(folder)
    folder.chmod(0o2777)
    for path in folder.iterdir():
        path.chmod(0o666)
    store = await open_at(folder)
    assert modes(folder) == expected(folder, 0o700) | {".": 0o2700}
    assert await get(store, keys_of(100)[5:]) == [Result.HIT] * 95
    await store.aclose()
    store = await open_at(folder, "&mode=770")
    assert modes(folder) == expected(folder, 0o770) | {".": 0o2770}
    await store.aclose()


async def test_who_only_looks_changes_no_permissions_and_adds_to_none(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    await used(folder, "&mode=0750")
    store = await open_at(folder, layout=StoreLayout({}, RECORD_SCHEMA))
    assert isinstance(store.backend, FileBackend)
    with umask(0):
        await store.backend.collect(older_than=-1.0)
        await store.aclose()
    assert modes(folder) == {".": 0o750, **dict.fromkeys(os.listdir(folder), 0o640)}


async def test_a_folder_with_other_things_in_it_keeps_its_permissions(tmp_path: Path) -> None:
    """It may be ``/tmp``. The store's own files are private there, too."""
    (tmp_path / "letter").write_text("mine")
    (tmp_path / "letter").chmod(0o644)
    os.chmod(tmp_path, 0o755)
    await used(tmp_path)
    assert modes(tmp_path) == expected(tmp_path, 0o700) | {".": 0o755, "letter": 0o644}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_what_belongs_to_another_user_keeps_its_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    await used(folder, "&mode=0755")
    os.chown(folder, 12345, -1)
    os.chown(folder / "lock", 12345, -1)
    store = await open_at(folder)
    assert modes(folder) == expected(folder, 0o700) | {".": 0o755, "lock": 0o644}
    await fill(store, [page_key("more")])
    await store.aclose()


@pytest.mark.parametrize("text", ["", "0", "0600", "private", "u=rwx", "7777", "0o700", "-700", "0788"])
async def test_permissions_that_are_none_are_refused_by_name_and_value(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=f"storage option mode={text!r}: expected .* as in mode=0750"):
        await FileBackend.open(parse_url(f"file:{tmp_path}/s?{SMALL}", {"mode": text}), LAYOUT)
    assert os.listdir(tmp_path) == []
