"""Settings as Python values: copied, changed, compared, hashed and pickled as frozen values are, and always checked."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from asynccache import CacheConfig, ConfigError, Full, Replicated, Sidecar
from asynccache.storage import StoreOptions, parse_url, take_options

FULL = Full(bytes_per_token=16, device_tokens=256, host_tokens=256)
SIDE = Sidecar(name="s", indices_from="full", bytes_per_page=8, replicated=True)  # type: ignore[arg-type]
CONFIG = CacheConfig(model="m", components=[FULL], sidecars=[SIDE], storage="redis://me:hunter2@host",  # type: ignore
                     storage_options={"password": "hunter2"}, page_size=32)  # fmt: skip
VALUES: tuple[Any, ...] = (FULL, SIDE, CONFIG, StoreOptions("disk", write=False))


@pytest.mark.parametrize("value", VALUES)
def test_a_copy_is_equal_however_it_is_made(value: Any) -> None:
    for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value)), structs.replace(value)):
        assert same == value
        assert repr(same) == repr(value)


def test_settings_can_be_keys() -> None:
    assert len({FULL, copy.deepcopy(FULL), SIDE, StoreOptions(), StoreOptions()}) == 3


@pytest.mark.parametrize("value", VALUES)
def test_nothing_can_be_set(value: Any) -> None:
    for name in value.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(value, name, getattr(value, name))


def test_a_changed_copy_is_checked_as_a_new_one_is() -> None:
    assert structs.replace(CONFIG, page_size=64).page_size == 64
    with pytest.raises(ConfigError, match="page_size=0 must lie between 1 and 65536"):
        structs.replace(CONFIG, page_size=0)
    with pytest.raises(ConfigError, match="page_size=100"):
        structs.replace(CONFIG, page_size=100)


def test_what_is_given_in_other_words_is_kept_in_one() -> None:
    assert CONFIG.components == (FULL,)
    assert SIDE.replicated is Replicated.TP_CP
    for none in ("none", None, (), ("none",)):
        assert structs.replace(CONFIG, storage=none, storage_options={}).storage is None
    assert structs.replace(CONFIG, storage=["memory:"]).storage == "memory:"


def test_a_configuration_shows_its_settings_and_no_secrets() -> None:
    assert "hunter2" not in repr(CONFIG)
    assert "storage='redis://***@host'" in repr(CONFIG)
    assert "page_size=32" in repr(CONFIG)


@pytest.mark.parametrize("make", [
    lambda: Sidecar(name="s\n", indices_from="full", bytes_per_page=8), lambda: StoreOptions("disk\n"),
    lambda: take_options(parse_url("file:/kv?name=disk%0A")),
])  # fmt: skip
def test_a_name_has_no_line_break_at_its_end(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="matching regex"):
        make()
