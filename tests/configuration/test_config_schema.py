"""The schema takes what the loader takes and refuses what it refuses; the reference page says the same."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from asynccache import CacheConfig, ConfigError, Full, Mamba, Sidecar, SlidingWindow, WritePolicy
from asynccache.config import COMPONENTS
from asynccache.configuration import CACHE, SIDECAR, TABLES, as_toml, read_config, schema
from asynccache.core.eviction import Lru
from asynccache.core.policies import POLICIES
from asynccache.core.settings import CoreConfig
from asynccache.settings import Field, fields_of
from tests.configuration.reference import renewed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
SCHEMA = schema()
EXAMPLES = re.findall(r"```toml title=\"kv.toml\"\n(.*?)```", PAGE, re.DOTALL)
FULL: dict[str, Any] = {"bytes_per_token": 64, "device_tokens": 160}
SMALL: dict[str, Any] = {"model": "m", "components": {"full": FULL}}


def valid(content: Mapping[str, object]) -> bool:
    found: bool = jsonschema.Draft202012Validator(SCHEMA).is_valid(content)
    return found


GOOD: list[dict[str, Any]] = [
    {}, {"prefetch_timeout_max": 3}, {"write_policy": "write_back", "storage_options": {"a": "1"}},
    {"sidecars": {"s": {"indices_from": "full", "bytes_per_page": 8, "hit_policy": "all_pages"}}},
    {"components": {"full": FULL | {"device_tokens": "1MiB"}}},
]
BAD: list[dict[str, Any]] = [
    {"page_sise": 16}, {"page_size": 0}, {"page_size": "16"}, {"page_size": True}, {"kept_fraction": 1.5},
    {"eviction": "fifo"}, {"write_policy": "write_trough"}, {"sidecars": {"s": {"indices_from": "full"}}},
    {"storage_options": {"a": 1}}, {"stress": {"duration": 5}}, {"components": {}},
    {"components": {"full": {"bytes_per_token": 64}}}, {"components": {"full": FULL, "swaa": {}}},
    {"components": {"full": {**FULL, "layer": 3}}},
]  # fmt: skip


@pytest.mark.parametrize(("content", "good"), [
    *((SMALL | more, True) for more in GOOD), *((SMALL | more, False) for more in BAD),
    ({"model": "m"}, False), ({"components": {"full": FULL}}, False),
])  # fmt: skip
def test_the_schema_takes_what_the_loader_takes(content: dict[str, Any], good: bool) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert valid(content) == (read_config(env={}, **content).config is not None) == good


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_examples_are_valid_and_can_be_loaded(text: str, tmp_path: Path) -> None:
    content = tomllib.loads(text)
    jsonschema.Draft202012Validator(SCHEMA).validate(content)
    (tmp_path / "kv.toml").write_text(text)
    assert read_config(tmp_path / "kv.toml", env={}).problems == ()


def test_a_policy_of_ones_own_is_taken_as_soon_as_it_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {**SMALL, "eviction": "fifo"}
    monkeypatch.setitem(POLICIES, "fifo", lambda config: Lru())
    assert read_config(env={"ASYNCCACHE_EVICTION": "fifo"}, **SMALL).problems == ()
    assert read_config(env={}, **content).problems == ()
    assert jsonschema.Draft202012Validator(schema()).is_valid(content)


def test_lists_of_integers_in_every_way(tmp_path: Path) -> None:
    """Layers of the model that a pool's layers belong to."""
    table = {"covers": [0, 2], "layers": 2, **FULL}
    assert valid({"model": "m", "components": {"full": table}})
    assert not valid({"model": "m", "components": {"full": {**table, "covers": [0.5]}}})
    (tmp_path / "kv.toml").write_text(
        'model = "m"\n[components.full]\nbytes_per_token = 64\ndevice_tokens = 160\nlayers = 2\ncovers = [0, 2]\n')
    env = {"ASYNCCACHE_COMPONENTS__FULL__COVERS": "1,3"}
    wanted = CacheConfig(model="m", components=(Full(bytes_per_token=64, device_tokens=160, layers=2, covers=(1, 3)),))
    loaded = read_config(tmp_path / "kv.toml", env=env)
    assert loaded.config == wanted
    (tmp_path / "again.toml").write_text(as_toml(loaded.values))
    assert read_config(tmp_path / "again.toml", env={}).config == wanted
    for bad in ([True], ["0"], 3):
        (problem,) = read_config(tmp_path / "kv.toml", env={}, components={"full": {"covers": bad}}).problems
        assert "covers=" in problem
    (problem,) = read_config(tmp_path / "kv.toml", env={"ASYNCCACHE_COMPONENTS__FULL__COVERS": "a"}).problems
    assert "must be integers with commas between them" in problem


def rows() -> list[tuple[str, str, Field]]:
    tables = {"cache": CACHE, "sidecar": SIDECAR} | {name: fields_of(cls) for name, cls in COMPONENTS.items()}
    return [(table, name, field) for table, found in tables.items() for name, field in found.items()]


def test_every_setting_has_words() -> None:
    assert [name for _, name, field in rows() if not field.meaning.endswith(".")] == []


def build(table: str, name: str, value: object) -> CacheConfig:
    """A cache with one field set, past the loader: what the classes themselves check."""
    full, sidecars, others = Full(**FULL), (), ()  # type: tuple[Any, tuple[Any, ...], tuple[Any, ...]]
    if table == "full":
        full = structs.replace(full, **{name: value})
    if table == "swa":
        swa: Any = {"window": 16, **FULL, name: value}
        others = (SlidingWindow(**swa),)
    if table == "mamba":
        mamba: Any = {"state_bytes": 64, "device_states": 2, name: value}
        others = (Mamba(**mamba),)
    if table == "sidecar":
        sidecar: Any = {"name": "s", "indices_from": "full", "bytes_per_page": 64, name: value}
        sidecars = (Sidecar(**sidecar),)
    top: Any = {name: value} if table == "cache" else {}
    return CacheConfig(**{"model": "m", "components": (full, *others), "sidecars": sidecars, **top})


BOUNDS = [(t, n, [getattr(field.kinds[0], one, None) for one in ("ge", "le", "gt")]) for t, n, field in rows()]
BOUNDED = [(table, name, bounds) for table, name, bounds in BOUNDS if any(one is not None for one in bounds)]


@pytest.mark.parametrize(("table", "name", "bounds"), BOUNDED, ids=[f"{t}.{n}" for t, n, _ in BOUNDED])
def test_bounds_are_those_that_the_classes_check(table: str, name: str, bounds: list[float | None]) -> None:
    low, high, above = bounds
    for bad in (above, None if low is None else low - 1, high and high + 1):
        if bad is not None:
            with pytest.raises(ConfigError, match=name):
                build(table, name, int(bad))
    for good in (low, high):
        if good in (0, 1) and name not in ("device_tokens", "host_tokens", "host_states"):
            build(table, name, good)


def test_the_core_gets_each_setting_of_its_own_and_has_the_same_defaults() -> None:
    other: dict[str, Any] = {
        "page_size": 32, "write_policy": WritePolicy.WRITE_BACK, "prefetch_threshold": 5, "load_back_threshold": 7,
        "max_backup_ops": 3, "write_back_watermark": 0.5, "eviction": "lru",
    }
    defaults = {name: field.default for name, field in fields_of(CacheConfig).items()}
    assert all(value != defaults[name] for name, value in other.items())
    core = CacheConfig(model="m", components=(Full(bytes_per_token=64, device_tokens=160),), **other).core()
    for one in dataclasses.fields(CoreConfig):
        if one.name in defaults and one.name not in (*TABLES, "storage"):
            assert getattr(core, one.name) == other[one.name]
            assert one.default in (defaults[one.name], dataclasses.MISSING)


def test_the_reference_page_is_current() -> None:
    """Red? python -m tests.configuration.reference"""
    assert renewed(PAGE) == PAGE
    for _, name, _row in rows():
        assert f"`{name}`" in PAGE


def test_several_stores_in_every_way(tmp_path: Path) -> None:
    urls, full = ("file:/var/k v?capacity=1GiB", "memory:"), {**FULL, "host_tokens": 160}
    assert valid({"model": "m", "storage": list(urls), "components": {"full": full}})
    file = tmp_path / "kv.toml"
    file.write_text(f'model = "m"\nstorage = ["{urls[0]}", "{urls[1]}"]\n[components.full]\nbytes_per_token = 64\n'
                    "device_tokens = 160\nhost_tokens = 160\n")
    loaded = read_config(file, env={})
    assert loaded.config is not None
    assert loaded.config.stores == urls
    (tmp_path / "again.toml").write_text(as_toml(loaded.values))
    assert read_config(tmp_path / "again.toml", env={}).config == loaded.config
    for env, given in (({"ASYNCCACHE_STORAGE": " ".join(urls)}, {}), ({}, {"storage": list(urls)})):
        assert read_config(file, env=env, **given).config == loaded.config
    one = read_config(file, env={"ASYNCCACHE_STORAGE": urls[0]}).config
    assert one is not None
    assert one.storage == urls[0]
    for bad in ([1], 3):
        assert not valid({"model": "m", "storage": bad, "components": {"full": full}})
        (problem,) = read_config(file, env={}, storage=bad).problems
        assert problem.startswith("storage=")
    (problem,) = read_config(file, env={}, storage_options={"a": "1"}).problems
    assert "options belong in their URLs" in problem


def test_a_printed_file_is_toml_whatever_characters_its_texts_have() -> None:
    text = "".join(map(chr, range(1, 0x100))) + "\u2028"
    full = {"bytes_per_token": 64, "device_tokens": 160}
    loaded = read_config(env={}, model=text, components={"full": full})
    assert tomllib.loads(as_toml(loaded.values))["model"] == text
