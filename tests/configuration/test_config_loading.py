"""Settings: from files, the environment and Python, and as values; the schema takes what the loader takes and refuses
what it refuses, and the reference page says the same."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import structs

from asynccache import (
    CacheConfig,
    ConfigError,
    Full,
    Mamba,
    Replicated,
    Sidecar,
    SlidingWindow,
    WritePolicy,
    load_config,
)
from asynccache.config import COMPONENTS
from asynccache.configuration import CACHE, SIDECAR, TABLES, Loaded, as_toml, read_config, schema
from asynccache.core.eviction import Lru
from asynccache.core.policies import POLICIES
from asynccache.core.settings import CoreConfig
from asynccache.settings import Field, fields_of
from asynccache.storage import StoreOptions, parse_url, take_options
from tests.configuration.reference import renewed

# Loading: what wins over what, and that whatever is wrong is named with its value, its place and the nearest name.


FILE = """\
# a cache
model = "my-model"
page_size = 16
storage = "file:/var/kv?capacity=10GiB"
notes_are_refused = 0

[components.full]
bytes_per_token = 1024
layers = 4
device_tokens = 65_536
host_tokens = 262_144
"""
GOOD = FILE.replace("notes_are_refused = 0\n", "")


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    file = tmp_path / "kv.toml"
    file.write_text(GOOD)
    return file


def test_python_wins_over_the_environment_over_the_file_over_defaults(
    kv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment is the process's own where none is given, and may name the file."""
    assert load_config(kv, env={}).page_size == load_config(env={"ASYNCCACHE_CONFIG": str(kv)}).page_size == 16
    monkeypatch.setenv("ASYNCCACHE_PAGE_SIZE", "128")
    assert load_config(kv).page_size == 128
    env = {"ASYNCCACHE_PAGE_SIZE": "32", "ASYNCCACHE_COMPONENTS__FULL__LAYERS": "2", "ASYNCCACHE_STORAGE": "none"}
    config = load_config(kv, env=env, page_size=64)
    assert config.page_size == 64
    assert config.components == (Full(bytes_per_token=1024, layers=2, device_tokens=65536, host_tokens=262144),)
    assert config.storage is None
    assert config.prefetch_threshold == 256


def test_every_value_knows_where_it_came_from(kv: Path) -> None:
    loaded = read_config(kv, env={"ASYNCCACHE_CLOSE_TIMEOUT": "5"}, components={"full": {"layers": 2}})
    origins = {".".join(path): origin for path, _, origin in loaded.values}
    assert origins["model"] == origins["page_size"] == origins["components.full.host_tokens"] == str(kv)
    assert origins["close_timeout"] == "environment variable ASYNCCACHE_CLOSE_TIMEOUT"
    assert origins["components.full.layers"] == "Python"
    assert origins["eviction"] == "default"


def test_everything_there_is_can_be_said_in_a_file(kv: Path) -> None:
    kv.write_text(GOOD.replace("[components.full]", """write_policy = "write_back"
freeze_gc = true
prefetch_timeout_max = 3
[storage_options]
threads = "2"
[sidecars.scales]
indices_from = "full"
bytes_per_page = 512
hit_policy = "all_pages"
[sidecars."index.keys"]
indices_from = "scales"
bytes_per_page = 64
replicated = "tp,cp"
[components.mamba]
state_bytes = 4096
device_states = 8
host_states = 8
[components.swa]
window = 512
bytes_per_token = 256
device_tokens = 1024
host_tokens = 1024
[components.full]"""))
    config = load_config(kv, env={})
    assert config.write_policy is WritePolicy.WRITE_BACK
    assert (config.freeze_gc, config.prefetch_timeout_max) == (True, 3.0)
    assert config.storage_options == {"threads": "2"}
    assert [type(component) for component in config.components] == [Full, SlidingWindow, Mamba]
    assert [sidecar.name for sidecar in config.sidecars] == ["scales", "index.keys"]
    assert config.sidecars[1] == Sidecar(
        name="index.keys", indices_from="scales", bytes_per_page=64, replicated=Replicated.TP_CP
    )


def test_python_alone_is_enough_and_its_tuples_replace_what_a_file_has(kv: Path) -> None:
    full = Full(bytes_per_token=64, device_tokens=160)
    kv.write_text(GOOD + """[components.mamba]
state_bytes = 64
device_states = 2
[sidecars.s]
indices_from = "full"
bytes_per_page = 8
""")
    config = load_config(kv, env={}, components=(full,), storage=None, sidecars=[])
    assert config == CacheConfig(model="my-model", components=(full,))
    assert load_config(env={}, model="m", components=(full,)) == CacheConfig(model="m", components=(full,))


def test_the_environment_alone_is_enough() -> None:
    env = {
        "ASYNCCACHE_MODEL": "m", "ASYNCCACHE_COMPONENTS__FULL__BYTES_PER_TOKEN": "64",
        "ASYNCCACHE_COMPONENTS__FULL__DEVICE_TOKENS": "160", "ASYNCCACHE_FREEZE_GC": "yes",
        "ASYNCCACHE_WRITE_POLICY": "write_back", "ASYNCCACHE_STORAGE_OPTIONS__CAPACITY": "1GiB", "PATH": "/bin",
        "ASYNCCACHE_SIDECARS__SCALES__INDICES_FROM": "full", "ASYNCCACHE_SIDECARS__SCALES__BYTES_PER_PAGE": "8",
    }
    assert load_config(env=env) == CacheConfig(
        model="m", components=(Full(bytes_per_token=64, device_tokens=160),), freeze_gc=True,
        write_policy=WritePolicy.WRITE_BACK, storage_options={"capacity": "1GiB"},
        sidecars=(Sidecar(name="scales", indices_from="full", bytes_per_page=8),),
    )


def test_a_sidecar_that_the_file_names_keeps_its_name(kv: Path) -> None:
    kv.write_text(GOOD + '[sidecars.Index-Keys]\nindices_from = "full"\nbytes_per_page = 64\n')
    config = load_config(kv, env={"ASYNCCACHE_SIDECARS__INDEX_KEYS__LAYERS": "2"})
    assert config.sidecars == (Sidecar(name="Index-Keys", indices_from="full", bytes_per_page=64, layers=2),)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("page_size = 16", "page_sise = 16",
     "page_sise=16 (FILE): there is no such setting; did you mean 'page_size'?"),
    ("page_size = 16", "window = 16",
     "window=16 (FILE): there is no such setting; did you mean components.swa.window?"),
    ("page_size = 16", "page_size = 16.5", "page_size=16.5 must be an integer"),
    ("page_size = 16", "page_size = true", "page_size=True must be an integer"),
    ("page_size = 16", "page_size = 0", "page_size=0 must lie between 1 and 65536"),
    ("page_size = 16", 'freeze_gc = "yes"', "freeze_gc='yes' must be True or False"),
    ("page_size = 16", "kept_fraction = 1.5", "kept_fraction=1.5 must lie between 0 and 1"),
    ("page_size = 16", "kept_fraction = nan", "kept_fraction=nan must be a finite number"),
    ("page_size = 16", "load_back_threshold = -1", "load_back_threshold=-1 must be at least 0"),
    ("page_size = 16", 'write_policy = "write_trough"',
     "write_policy='write_trough' must be one of write_through, write_through_selective, write_back; "
     "did you mean 'write_through'?"),
    ("page_size = 16", "sidecars = 3", "sidecars=3 (FILE) must be a table, as in [sidecars.NAME]"),
    ("page_size = 16", "storage_options = {a = 1}", "storage_options.a=1 must be text (FILE)"),
    ('model = "my-model"', "", "model is not given"),
    ("layers = 4", "layer = 4",
     "components.full.layer=4 (FILE): there is no such setting; did you mean 'layers'?"),
    ("page_size = 16", "publish_events = true",  # AsyncCache(on_event=...) is how they are asked for
     "publish_events=True (FILE): there is no such setting"),
    ("layers = 4", "windows = 4", "components.full.windows=4 (FILE): there is no such setting"),
    ("layers = 4", "[components.swaa]\nwindow = 3",
     "components.swaa (FILE) is no component: one of full, swa, mamba; did you mean 'swa'?"),
    ("[components.full]", "[component.full]", "(FILE): there is no such setting; did you mean 'components'?"),
    ("bytes_per_token = 1024\n", "", "components.full.bytes_per_token is not given: Bytes of KV of one token"),
    ("device_tokens = 65_536", "device_tokens = 65_537",
     "full: device_tokens=65537 is not a multiple of page_size=16 "
     "(page_size: FILE, components.full.device_tokens: FILE)"),
    ("layers = 4", "covers = [3, 1]\nlayers = 2", "full: covers=(3, 1) must name a layer of the model for each of "
     "layers=2, never falling (components.full.covers: FILE, components.full.layers: FILE)"),
    ("host_tokens = 262_144", "", "needs a host tier: host_tokens is 0 (storage: FILE"),
])
def test_what_is_wrong_is_named_with_its_file(kv: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    kv.write_text(GOOD.replace(old, new))
    problems = read_config(kv, env={}).problems
    assert any(message.replace("FILE", str(kv)) in problem for problem in problems), problems


VARIABLE = "(environment variable ASYNCCACHE_"


@pytest.mark.parametrize(("env", "given", "message"), [
    ({"PAGE_SISE": "32"}, {}, f"page_sise='32' {VARIABLE}PAGE_SISE): there is no such setting; did you mean 'page_"),
    ({"COMPONENTS__FULL__LAYER": "2"}, {}, "did you mean 'layers'?"),
    ({"COMPONENTS__FUL__LAYERS": "2"}, {}, f"components.ful {VARIABLE}COMPONENTS__FUL__LAYERS) is no component"),
    ({"PAGE_SIZE": "\u0663"}, {}, "page_size='\u0663' must be an integer"),
    ({"PAGE_SIZE": "many"}, {}, f"page_size='many' must be an integer {VARIABLE}PAGE_SIZE)"),
    ({"FREEZE_GC": "maybe"}, {}, f"must be True or False {VARIABLE}FREEZE_GC)"),
    ({"PAGE_SIZE": "12"}, {}, "page_size: environment variable ASYNCCACHE_PAGE_SIZE"),
    ({}, {"page_sise": 3}, "page_sise=3 (Python): there is no such setting; did you mean 'page_size'?"),
    ({}, {"components": {"full": {"layers": "4"}}}, "components.full.layers='4' must be an integer (Python)"),
])  # fmt: skip
def test_what_is_wrong_elsewhere_is_named_with_its_place(
    kv: Path, env: dict[str, str], given: dict[str, Any], message: str
) -> None:
    found = read_config(kv, env={f"ASYNCCACHE_{name}": value for name, value in env.items()}, **given)
    assert found.config is None
    (problem,) = found.problems
    assert message in problem


@pytest.mark.parametrize(("text", "message"), [
    (b"= 3", "not TOML"), (b"\xff", "not TOML"), (None, "cannot be read: No such file"),
    (b"x = " + b"[" * 5000 + b"]" * 5000, "not TOML: maximum recursion depth exceeded"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path, text: bytes | None, message: str) -> None:
    file = tmp_path / "bad.toml"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(ConfigError, match=rf"bad\.toml: {message}") as caught:
        load_config(file, env={})
    assert "\n" not in str(caught.value)


def test_all_that_is_wrong_is_named_at_once(kv: Path) -> None:
    kv.write_text(FILE.replace("layers = 4", "layers = -4"))
    problems = list(read_config(kv, env={"ASYNCCACHE_KEPT_FRACTION": "2"}).problems)
    assert len(problems) == 3
    with pytest.raises(ConfigError) as caught:
        load_config(kv, env={"ASYNCCACHE_KEPT_FRACTION": "2"})
    assert str(caught.value).split("\n") == problems


def test_two_components_or_sidecars_of_one_name_are_refused_and_not_dropped() -> None:
    full = Full(bytes_per_token=64, device_tokens=160)
    with pytest.raises(ConfigError, match="components must be one Full, then"):
        load_config(env={}, model="m", components=(full, full))
    side = Sidecar(name="s", indices_from="full", bytes_per_page=8)
    with pytest.raises(ConfigError, match="sidecars: pool names must be unique"):
        load_config(env={}, model="m", components=(full,), sidecars=(side, side))


def shown_again(loaded: Loaded, folder: Path) -> str:
    """What is shown of it, which can be loaded again."""
    again = folder / "again.toml"
    again.write_text(as_toml(loaded.values))
    assert read_config(again, env={}).config == loaded.config
    return again.read_text()


def test_what_is_shown_can_be_loaded_again(kv: Path, tmp_path: Path) -> None:
    loaded = read_config(kv, env={"ASYNCCACHE_CLOSE_TIMEOUT": "5"}, storage_options={"a b": 'q"\\'},
                         sidecars={"k.v": {"indices_from": "full", "bytes_per_page": 8}})
    assert "# environment variable ASYNCCACHE_CLOSE_TIMEOUT" in shown_again(loaded, tmp_path)


def test_secrets_are_not_shown(kv: Path) -> None:
    loaded = read_config(kv, env={}, storage="redis://me:hunter2@host/0?password=hunter2&db=1",
                         storage_options={"secret_key": "hunter2", "region": "x"})
    shown = as_toml(loaded.values)
    assert "hunter2" not in shown
    assert '"redis://***@host/0?password=***&db=1"' in shown
    assert 'region = "x"' in shown


def test_what_backends_and_tests_read_of_the_environment_is_no_setting(kv: Path) -> None:
    env = {"ASYNCCACHE_REDIS_PASSWORD": "secret", "ASYNCCACHE_STORES": "required", "ASYNCCACHE_VLLM": "/tmp"}
    assert load_config(kv, env={**env, "ASYNCCACHE_PAGE_SIZE": "32"}).page_size == 32
    with pytest.raises(ConfigError, match="ASYNCCACHE_REDISES_PASSWORD"):
        load_config(kv, env={"ASYNCCACHE_REDISES_PASSWORD": "x"})


# Settings as Python values: copied, changed, compared, hashed and pickled as frozen values are, and always checked.


FULL = Full(bytes_per_token=16, device_tokens=256, host_tokens=256)
SIDE = Sidecar(name="s", indices_from="full", bytes_per_page=8, replicated=True)  # type: ignore[arg-type]
CONFIG = CacheConfig(model="m", components=[FULL], sidecars=[SIDE], storage="redis://me:hunter2@host",  # type: ignore
                     storage_options={"password": "hunter2"}, page_size=32)  # fmt: skip
VALUES: tuple[Any, ...] = (FULL, SIDE, CONFIG, StoreOptions("disk", write=False))


@pytest.mark.parametrize("value", VALUES)
def test_a_copy_is_equal_however_it_is_made(value: Any) -> None:
    for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value)), structs.replace(value)):
        assert (same, repr(same), "hunter2" in repr(same)) == (value, repr(value), False)
        assert isinstance(value, CacheConfig) or hash(same) == hash(value)


@pytest.mark.parametrize("value", VALUES)
def test_nothing_can_be_set(value: Any) -> None:
    for name in value.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(value, name, getattr(value, name))


def test_what_is_given_in_other_words_is_kept_in_one() -> None:
    with pytest.raises(ConfigError, match="page_size=0 must lie between 1 and 65536"):
        structs.replace(CONFIG, page_size=0)
    assert "storage='redis://***@host'" in repr(CONFIG)
    assert CONFIG.components == (FULL,)
    assert SIDE.replicated is Replicated.TP_CP
    for none in ("none", None, (), ("none",)):
        assert structs.replace(CONFIG, storage=none, storage_options={}).storage is None
    assert structs.replace(CONFIG, storage=["memory:"]).storage == "memory:"


@pytest.mark.parametrize("make", [
    lambda: Sidecar(name="s\n", indices_from="full", bytes_per_page=8), lambda: StoreOptions("disk\n"),
    lambda: take_options(parse_url("file:/kv?name=disk%0A")),
])  # fmt: skip
def test_a_name_has_no_line_break_at_its_end(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match="matching regex"):
        make()


# The schema and the reference page.


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
SCHEMA = schema()
EXAMPLES = re.findall(r"```toml title=\"kv.toml\"\n(.*?)```", PAGE, re.DOTALL)
TABLE: dict[str, Any] = {"bytes_per_token": 64, "device_tokens": 160}
SMALL: dict[str, Any] = {"model": "m", "components": {"full": TABLE}}


def valid(content: Mapping[str, object]) -> bool:
    found: bool = jsonschema.Draft202012Validator(SCHEMA).is_valid(content)
    return found


TAKEN: list[dict[str, Any]] = [
    {}, {"prefetch_timeout_max": 3}, {"write_policy": "write_back", "storage_options": {"a": "1"}},
    {"sidecars": {"s": {"indices_from": "full", "bytes_per_page": 8, "hit_policy": "all_pages"}}},
    {"components": {"full": TABLE | {"device_tokens": "1MiB"}}},
]
REFUSED: list[dict[str, Any]] = [
    {"page_sise": 16}, {"page_size": 0}, {"page_size": "16"}, {"page_size": True}, {"kept_fraction": 1.5},
    {"eviction": "fifo"}, {"write_policy": "write_trough"}, {"sidecars": {"s": {"indices_from": "full"}}},
    {"storage_options": {"a": 1}}, {"stress": {"duration": 5}}, {"components": {}},
    {"components": {"full": {"bytes_per_token": 64}}}, {"components": {"full": TABLE, "swaa": {}}},
    {"components": {"full": {**TABLE, "layer": 3}}},
]  # fmt: skip


@pytest.mark.parametrize(("content", "good"), [
    *((SMALL | more, True) for more in TAKEN), *((SMALL | more, False) for more in REFUSED),
    ({"model": "m"}, False), ({"components": {"full": TABLE}}, False),
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
    table = {"covers": [0, 2], "layers": 2, **TABLE}
    assert valid({"model": "m", "components": {"full": table}})
    assert not valid({"model": "m", "components": {"full": {**table, "covers": [0.5]}}})
    (tmp_path / "kv.toml").write_text(
        'model = "m"\n[components.full]\nbytes_per_token = 64\ndevice_tokens = 160\nlayers = 2\ncovers = [0, 2]\n')
    env = {"ASYNCCACHE_COMPONENTS__FULL__COVERS": "1,3"}
    wanted = CacheConfig(model="m", components=(Full(bytes_per_token=64, device_tokens=160, layers=2, covers=(1, 3)),))
    loaded = read_config(tmp_path / "kv.toml", env=env)
    assert loaded.config == wanted
    shown_again(loaded, tmp_path)
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
    full, sidecars, others = Full(**TABLE), (), ()  # type: tuple[Any, tuple[Any, ...], tuple[Any, ...]]
    if table == "full":
        full = structs.replace(full, **{name: value})
    if table == "swa":
        swa: Any = {"window": 16, **TABLE, name: value}
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
    urls, full = ("file:/var/k v?capacity=1GiB", "memory:"), {**TABLE, "host_tokens": 160}
    assert valid({"model": "m", "storage": list(urls), "components": {"full": full}})
    file = tmp_path / "kv.toml"
    file.write_text(f'model = "m"\nstorage = ["{urls[0]}", "{urls[1]}"]\n[components.full]\nbytes_per_token = 64\n'
                    "device_tokens = 160\nhost_tokens = 160\n")
    loaded = read_config(file, env={})
    assert loaded.config is not None
    assert loaded.config.stores == urls
    shown_again(loaded, tmp_path)
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
    loaded = read_config(env={}, model=text, components={"full": TABLE})
    assert tomllib.loads(as_toml(loaded.values))["model"] == text
