"""A digest of weights changes with every byte of them, and with nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from asynccache import ConfigError
from asynccache.storage import weights, weights_digest


@pytest.fixture(autouse=True)
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/asynccache/weights.json"


def model(folder: Path, **more: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": b"{}", "a.safetensors": b"a" * 3_000_000, "b.safetensors": b"b" * 10} | more
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_the_same_files_have_the_same_digest_wherever_they_lie(tmp_path: Path) -> None:
    here = weights_digest(model(tmp_path / "here"))
    assert weights_digest(str(model(tmp_path / "there"))) == here
    assert len(bytes.fromhex(here)) == 16


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json", "a.safetensors", "b.safetensors"])
@pytest.mark.parametrize("again", [False, True], ids=["another folder", "changed in place"])
def test_a_byte_that_differs_gives_another_digest(tmp_path: Path, name: str, again: bool) -> None:
    scaling = {"adapter_config.json": b'{"lora_alpha": 16}'}
    folder = model(tmp_path / "one", **scaling)
    before = weights_digest(folder)
    changed = folder if again else model(tmp_path / "other", **scaling)
    content = bytearray((changed / name).read_bytes())
    content[len(content) // 2] ^= 1
    times = (changed / name).stat()
    (changed / name).write_bytes(content)
    os.utime(changed / name, ns=(times.st_atime_ns, times.st_mtime_ns))  # also if somebody sets the times back
    assert weights_digest(changed) != before


def test_a_file_more_or_renamed_gives_another_digest(tmp_path: Path) -> None:
    folder = model(tmp_path / "one")
    before = weights_digest(folder)
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    renamed = weights_digest(folder)
    (folder / "d.gguf").write_bytes(b"")
    assert len({before, renamed, weights_digest(folder)}) == 3


def test_what_is_neither_weights_nor_config_is_left_out(tmp_path: Path) -> None:
    folder = model(tmp_path / "one")
    before = weights_digest(folder)
    (folder / "README.md").write_text("read me")
    (folder / "tokenizer.json").write_text("{}")
    assert weights_digest(folder) == before


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    folder = model(tmp_path / "one", **{"q.gguf": b"q"})
    assert weights_digest(folder / "q.gguf") != weights_digest(folder)


def test_files_that_did_not_change_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "one")
    first = weights_digest(folder)
    read: list[str] = []
    original = weights._read

    def reading(file: Path) -> str:
        read.append(file.name)
        return original(file)

    monkeypatch.setattr(weights, "_read", reading)
    assert weights_digest(folder) == first
    assert read == []
    (folder / "b.safetensors").write_bytes(b"c" * 10)
    assert weights_digest(folder) != first
    assert read == ["b.safetensors"]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1}', b"[" * 100_000, b"\xff\xfe", None])
def test_what_is_remembered_may_be_damaged_and_need_not_be(
    tmp_path: Path, remembered: Path, content: bytes | None
) -> None:
    folder = model(tmp_path / "one")
    before = weights_digest(folder)
    if content is None:
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("no folder")
    else:
        remembered.write_bytes(content)
    assert weights_digest(folder) == before


@pytest.mark.parametrize("broken", ["no weights", "nothing there", "a link to nowhere"])
def test_what_has_no_weights_is_refused_by_name(tmp_path: Path, broken: str) -> None:
    folder = tmp_path / "one"
    if broken != "nothing there":
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    if broken == "a link to nowhere":
        (folder / "a.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="one"):
        weights_digest(folder)


def hub_cache(folder: Path, name: str, **more: bytes) -> Path:
    """A Hugging Face cache with one model: its snapshot has links to blobs, as the hub's own client makes them."""
    repo = folder / ("models--" + name.replace("/", "--"))
    (repo / "refs").mkdir(parents=True)
    (repo / "refs/main").write_text("c" * 40)
    blobs, snapshot = repo / "blobs", repo / "snapshots" / ("c" * 40)
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for file, content in ({"config.json": b"{}", "a.safetensors": b"a" * 3_000_000} | more).items():
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / file).symlink_to(blob)
    return folder


def test_a_blob_of_a_hub_cache_has_the_digest_that_it_is_named_by(tmp_path: Path) -> None:
    cache = hub_cache(tmp_path / "hub", "m", **{"b.safetensors": b"b" * 10})
    assert weights_digest(cache / "models--m/snapshots" / ("c" * 40)) == weights_digest(model(tmp_path / "plain"))


def test_a_model_of_the_hub_is_its_snapshot_in_the_local_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    cache = hub_cache(tmp_path / "hub", "some/model")
    snapshot = cache / "models--some--model/snapshots" / ("c" * 40)
    assert weights_digest("some/model", cache=cache) == weights_digest(snapshot)
    assert weights_digest("some/model", cache=cache, revision="main") == weights_digest(snapshot)
    assert weights_digest("some/model", cache=cache, revision="c" * 40) == weights_digest(snapshot)
    other = hub_cache(tmp_path / "other", "some/model", **{"a.safetensors": b"b"})
    assert weights_digest("some/model", cache=other) != weights_digest("some/model", cache=cache)


@pytest.mark.parametrize("named", [{"model": "some/other"}, {"model": "some/model", "revision": "v2"}])
def test_what_is_not_in_the_local_cache_is_refused_by_name_and_not_fetched(
    tmp_path: Path, named: dict[str, str]
) -> None:
    pytest.importorskip("huggingface_hub")
    cache = hub_cache(tmp_path / "hub", "some/model")
    with pytest.raises(ConfigError, match=f"model='{named['model']}' is no path, and is not in the Hugging Face cache"):
        weights_digest(named["model"], revision=named.get("revision"), cache=cache)


def test_without_the_hubs_client_a_name_is_refused_and_a_path_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="needs huggingface_hub: install it, or give the folder"):
        weights_digest("some/model")
    assert weights_digest(model(tmp_path / "here"))


def test_a_folder_that_has_the_name_of_a_model_is_that_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(tmp_path / "some/model")
    monkeypatch.chdir(tmp_path)
    assert weights_digest("some/model") == weights_digest(tmp_path / "some/model")
