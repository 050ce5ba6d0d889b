"""Settings from a TOML file, the environment and Python: one ``CacheConfig``, and where each of its values came from.

Python wins over the environment, the environment over the file, and the file over the defaults. Unknown settings and
unusable values are refused; the error has the setting's name, its value, where it came from, and the nearest name that
exists. This module does not import torch.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asynccache import checks
from asynccache.config import COMPONENTS, CacheConfig, Sidecar, eviction_policies
from asynccache.errors import ConfigError
from asynccache.redaction import shown
from asynccache.settings import Field, fields_of

PREFIX = "ASYNCCACHE_"
BACKENDS = "asynccache.backends"
NOT_SETTINGS = ("CONFIG", "DEBUG", "SEED", "WORLDS", "TRACE", "EXAMPLES", "STORES", "VLLM", "PURE", "COMPILE")
TABLES = {"components": "components.full", "sidecars": "sidecars.NAME", "storage_options": "storage_options"}
"""The settings that are tables in a file, and how the head of such a table is written."""
CACHE = {name: field for name, field in fields_of(CacheConfig).items() if name not in TABLES}
SIDECAR = {name: field for name, field in fields_of(Sidecar).items() if name != "name"}

OPTION = Field(str, (msgspec.inspect.StrType(),), optional=False, required=False, default="", meaning="", extra={})
At = tuple[str, ...]
"""The place of a setting: its name, and before it the names of the tables in which it stands."""


EVERY: dict[At, Mapping[str, Field]] = {(): CACHE}
EVERY |= {("components", name): fields_of(cls) for name, cls in COMPONENTS.items()}


class Given(NamedTuple):
    """A value as a source has it."""

    value: Any
    origin: str
    text: bool = False
    """Whether the source knows only text, as the environment does."""


class Effective(NamedTuple):
    """A setting with the value that is in effect, and the place where the value was set."""

    path: At
    value: Any
    origin: str


class Loaded(NamedTuple):
    """The settings that all sources give together. ``config`` is None if there are ``problems``, sentences that each
    name a setting, its value and where it came from."""

    config: CacheConfig | None
    values: tuple[Effective, ...]
    problems: tuple[str, ...]


def load_config(
    path: str | os.PathLike[str] | None = None, *, env: Mapping[str, str] | None = None, **given: Any
) -> CacheConfig:
    """Return the configuration that a TOML file, the environment and the arguments make up together.

    Args:
        path: the file; None is the one that ``ASYNCCACHE_CONFIG`` names, if there is one.
        env: the environment variables; ``os.environ`` by default.
        given: settings by name, which win over the environment and the file. ``components`` and ``sidecars`` may be
            mappings such as ``{"full": {"device_tokens": 65536}}``, which are merged with the other sources; or tuples
            of ``Full``, ``Sidecar`` and so on, which replace what the other sources have.

    Raises:
        ConfigError: something is wrong. The message has a line for each problem, with the setting, its value and where
            it came from.
    """
    loaded = read_config(path, env=env, **given)
    if loaded.config is None:
        raise ConfigError("\n".join(loaded.problems))
    return loaded.config


def read_config(
    path: str | os.PathLike[str] | None = None, *, env: Mapping[str, str] | None = None, **given: Any
) -> Loaded:
    """Do what ``load_config`` does, but return every value with its origin, and problems as a list instead of an error.

    Raises:
        ConfigError: ``path`` or ``env`` is an argument of the wrong type.
    """
    env = os.environ if env is None else checks.texts("env", env)
    path = checks.instance("path", env.get(f"{PREFIX}CONFIG") or None if path is None else path,
                           (str, os.PathLike, type(None)))
    whole = {name: given.pop(name) for name in ("components", "sidecars") if isinstance(given.get(name), (tuple, list))}
    try:
        found = {} if path is None else dict(_flat(_content(checks.text("path", os.fspath(path))), str(path)))
    except ConfigError as error:
        return Loaded(None, (), (str(error),))
    found |= dict(_variables(env, [at[1] for at in found if at[0] == "sidecars" and len(at) == 2]))
    found |= dict(_flat(given, "Python"))
    return _build({at: value for at, value in found.items() if at[0] not in whole}, whole)


def _content(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:      # not UTF-8, not TOML, or lists in lists without end
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _flat(content: Mapping[str, Any], origin: str, above: At = ()) -> Iterator[tuple[At, Given]]:
    """Yield every value of nested tables by its place. A component or sidecar has an entry, too, in case it is
    empty."""
    for name, value in content.items():
        at = (*above, str(name))
        inner = isinstance(value, Mapping) and len(at) < (2 if at[0] == "storage_options" else 3) and at[0] in TABLES
        if not inner or len(at) == 2:
            yield at, Given(value, origin)
        if inner:
            yield from _flat(value, origin, at)


def _variables(env: Mapping[str, str], sidecars: list[str]) -> Iterator[tuple[At, Given]]:
    """Yield the settings in the environment. ``ASYNCCACHE_PAGE_SIZE`` is ``page_size``; two underscores lead into a
    table. What begins with the name of a backend, such as ``ASYNCCACHE_REDIS_PASSWORD``, is read by that backend.
    ``sidecars``: names of sidecars as the file writes them, since a variable has neither lower case nor dashes."""
    backends = {entry.name for entry in entry_points(group=BACKENDS)}
    written = {re.sub(r"[-.]", "_", name).lower(): name for name in sidecars}
    for variable, text in env.items():
        own = variable.removeprefix(PREFIX)
        if own == variable or own in NOT_SETTINGS or own.partition("_")[0].lower() in backends:
            continue
        at, origin = tuple(own.lower().split("__")), f"environment variable {variable}"
        if at[0] == "sidecars" and len(at) > 1:
            at = (at[0], written.get(at[1], at[1]), *at[2:])
        if len(at) == 3:
            yield at[:2], Given({}, origin)
        yield at, Given(text, origin, text=True)


def fields_at(at: At) -> Mapping[str, Field]:
    """Return all settings of the table that the setting at ``at`` stands in, by name."""
    match at:
        case [_]:
            return CACHE
        case ["components", kind, _] if kind in COMPONENTS:
            return fields_of(COMPONENTS[kind])
        case ["sidecars", _, _]:
            return SIDECAR
        case ["storage_options", name]:
            return {name: OPTION}
    return {}


def _build(found: Mapping[At, Given], whole: Mapping[str, Any]) -> Loaded:
    """``found``: the settings of all sources. ``whole``: the components or sidecars, where Python has all of them."""
    problems: list[str] = []
    tables: dict[At, dict[str, Any]] = {(): {}}
    for at, given in found.items():
        name, siblings = ".".join(at), fields_at(at)
        if (field := siblings.get(at[-1])) is not None:
            try:
                value = field.read(name, given.value) if given.text else field.check(name, given.value)
                tables.setdefault(at[:-1], {})[at[-1]] = value
            except ConfigError as error:
                problems.append(f"{error} ({given.origin})")
        elif at[0] == "components" and len(at) > 1 and at[1] not in COMPONENTS:
            if len(at) == 2:
                problems.append(f"{name} ({given.origin}) is no component: one of {', '.join(COMPONENTS)}"
                                f"{checks.nearest(at[1], COMPONENTS)}")
        elif at[0] in ("components", "sidecars") and len(at) == 2 and isinstance(given.value, Mapping):
            tables.setdefault(at, {})
        elif at[0] in TABLES and len(at) < 3:
            problems.append(f"{_told(at, given)} must be a table, as in [{TABLES[at[0]] if len(at) == 1 else name}]")
        else:
            others = [".".join((*table, at[-1])) for table, fields in EVERY.items() if at[-1] in fields]
            hint = f"; did you mean {' or '.join(others)}?" if others else checks.nearest(at[-1], [*siblings, *TABLES])
            problems.append(f"{_told(at, given)}: there is no such setting{hint}")
    problems += _missing(found, tables, whole)
    if problems:
        return Loaded(None, (), tuple(problems))
    try:
        parts: dict[str, Any] = {
            "components": [cls(**tables["components", name]) for name, cls in COMPONENTS.items()
                           if ("components", name) in tables],
            "sidecars": [Sidecar(name=at[1], **own) for at, own in tables.items() if at[:1] == ("sidecars",)],
            "storage_options": tables.get(("storage_options",), {}),
        }
        config = CacheConfig(**tables[()], **{**parts, **whole})
    except ConfigError as error:
        words = set(re.findall(r"([\w.-]+)'?[=:]", str(error)))
        named = [f"{'.'.join(at)}: {given.origin}" for at, given in found.items()
                 if at[-1] in words and at[-1] in fields_at(at) and (len(at) < 3 or at[1] in words)]
        return Loaded(None, (), (str(error) + (f" ({', '.join(named)})" if named else ""),))
    return Loaded(config, tuple(_effective(config, found)), ())


def _told(at: At, given: Given) -> str:
    """Return how a message about this value begins: its place, origin and value, without secrets."""
    value = "" if isinstance(given.value, Mapping) else f"={checks.shown(shown(at[-1], given.value))}"
    return f"{'.'.join(at)}{value} ({given.origin})"


def _missing(found: Mapping[At, Given], tables: Mapping[At, Any], whole: Mapping[str, Any]) -> Iterator[str]:
    if "components" not in whole and ("components",) not in found and ("components", "full") not in found:
        yield "components.full is not given; every cache has full attention: add a table [components.full]"
    for table in tables:
        for name, field in fields_at((*table, "")).items():
            if field.required and (*table, name) not in found:
                yield f"{'.'.join((*table, name))} is not given: {field.meaning}"


def _effective(config: CacheConfig, found: Mapping[At, Given]) -> Iterator[Effective]:
    tables: list[tuple[At, Any, Mapping[str, Field]]] = [((), config, CACHE)]
    tables += [(("components", one.pool), one, fields_of(type(one))) for one in config.components]
    tables += [(("sidecars", one.name), one, SIDECAR) for one in config.sidecars]
    every = [((*table, name), getattr(one, name)) for table, one, fields in tables for name in fields]
    for at, value in [*every, *((("storage_options", name), text) for name, text in config.storage_options.items())]:
        yield Effective(at, msgspec.to_builtins(value), found[at].origin if at in found else "default")


def as_toml(values: tuple[Effective, ...]) -> str:
    """Return a file with these settings, one a line, and behind each where it came from. Secrets are not written. A
    setting that is None is a comment, since TOML has no such value."""
    lines: list[str] = []
    table: At = ()
    for at, value, origin in values:
        if at[:-1] != table:
            table = at[:-1]
            lines += ["", f"[{'.'.join(map(_key, table))}]"]
        text = json.dumps(shown(at[-1], value), ensure_ascii=False).replace("\x7f", r"\u007f")  # as TOML wants it
        written = f"{_key(at[-1])} = {text}"
        lines.append(f"# {_key(at[-1])}: none" if value is None else f"{written:<48} # {origin}")
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def schema() -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of settings files, for editors and for programs that write such files."""
    _, found = msgspec.json.schema_components([CacheConfig], ref_template="#/$defs/{name}")
    cache = found.pop(CacheConfig.__name__)
    for cls, name in (*((cls, "pool") for cls in COMPONENTS.values()), (Sidecar, "name")):
        del found[cls.__name__]["properties"][name]    # the name of the table
        for setting, field in fields_of(cls).items():
            if field.extra.get("room"):                # msgspec knows of the number only
                found[cls.__name__]["properties"][setting]["type"] = ["integer", "string"]
        found[cls.__name__]["required"].remove(name)
    refs = {name: {"$ref": f"#/$defs/{cls.__name__}"} for name, cls in COMPONENTS.items()}
    cache["properties"] |= {
        "components": {"type": "object", "properties": refs, "required": ["full"], "additionalProperties": False},
        "sidecars": {"type": "object", "propertyNames": {"pattern": r"^[\w.-]+$"},
                     "additionalProperties": {"$ref": f"#/$defs/{Sidecar.__name__}"}},
        "eviction": {**cache["properties"]["eviction"], "enum": list(eviction_policies())},
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **cache, "title": "asynccache", "$defs": found}
