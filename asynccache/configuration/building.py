"""From the settings in all sources to a ``CacheConfig``, or to a list of everything that is wrong with them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from asynccache import checks
from asynccache.config import CacheConfig, Sidecar
from asynccache.configuration import settings
from asynccache.configuration.settings import REQUIRED, Path
from asynccache.configuration.sources import (
    PREFIX,
    SettingsTable,
    WrittenValue,
    from_environment,
    from_file,
    from_python,
    replaced,
)
from asynccache.errors import ConfigError
from asynccache.redaction import shown

DEFAULT = "default"


class Problem(NamedTuple):
    """One mistake in the settings. ``sentence`` names the setting, its value and where it came from; ``hint``, if there
    is one, says what to do."""

    sentence: str
    hint: str = ""

    def __str__(self) -> str:
        return self.sentence + (f"; {self.hint}" if self.hint else "")


class Effective(NamedTuple):
    """A setting with the value that is in effect, and the place where the value was set (``origin``)."""

    path: Path
    value: object
    origin: str


class Loaded(NamedTuple):
    """The outcome of reading all sources. ``config`` is None if, and only if, there are problems."""

    config: CacheConfig | None
    values: tuple[Effective, ...]
    problems: tuple[Problem, ...]


def load_config(
    path: str | os.PathLike[str] | None = None, *, env: Mapping[str, str] | None = None, **given: Any
) -> CacheConfig:
    """Return the configuration that a TOML file, the environment and the arguments make up together.

    Args:
        path: the file; None is the one that ``ASYNCCACHE_CONFIG`` names, if there is one.
        env: the environment variables; ``os.environ`` by default.
        given: settings by name, which win over the environment and the file. ``components`` and ``sidecars`` may be
            mappings such as ``{"full": {"device_tokens": 65536}}``, which are merged with the other sources; or tuples
            of the dataclasses, which replace what the other sources have.

    Raises:
        ConfigError: something is wrong. The message has a line for each problem, with the setting, its value and where
            it came from.
    """
    loaded = read_config(path, env=env, **given)
    if loaded.config is None:
        raise ConfigError("\n".join(map(str, loaded.problems)))
    return loaded.config


def read_config(
    path: str | os.PathLike[str] | None = None, *, env: Mapping[str, str] | None = None, **given: Any
) -> Loaded:
    """Do what ``load_config`` does, but return every value with its origin, and problems as a list instead of an error.

    Raises:
        ConfigError: ``path`` or ``env`` is an argument of the wrong type.
    """
    env = os.environ if env is None else checks.texts("env", env)
    if not isinstance(path, (str, os.PathLike, type(None))):
        raise ConfigError(f"path={checks.shown(path)} must be text or a path")
    if isinstance(path, str):
        checks.text("path", path)
    table = SettingsTable()
    path = path if path is not None else env.get(f"{PREFIX}CONFIG") or None
    if path is not None:
        try:
            table.lay(from_file(os.fspath(path)))
        except ConfigError as error:
            return Loaded(None, (), (Problem(str(error)),))
    table.lay(_matched(from_environment(env), table))
    for top in replaced(given):
        table.drop(top)
    table.lay(from_python(given))
    return _build(table)


def _matched(upper: SettingsTable, lower: SettingsTable) -> SettingsTable:
    """Return the settings of the environment, ``upper``, with the names of sidecars as ``lower`` writes them. Names of
    environment variables have neither lower case nor dashes, so the two spellings cannot be compared directly."""
    names = {_folded(group): group for group in lower.groups if group[0] == "sidecars"}

    def renamed(path: Path) -> Path:
        return (*names.get(_folded(path[:2]), path[:2]), *path[2:])

    return SettingsTable(
        {renamed(p): v for p, v in upper.values.items()}, {renamed(p): o for p, o in upper.groups.items()}
    )


def _folded(path: Path) -> Path:
    return tuple(re.sub(r"[-.]", "_", part).lower() for part in path)


def _build(table: SettingsTable) -> Loaded:
    problems = [Problem(f"{_told(one.path, one.value)} {one.what}") for one in table.misplaced]
    tree: dict[Path, Any] = {}
    for path, value in table.values.items():
        row = settings.setting(path)
        if row is None:
            problems += _unknown(path, value)
            continue
        try:
            tree[path] = row.accept(value.value, text=value.text)
        except ConfigError as error:
            hint = settings.nearest(str(value.value), choices) if (choices := row.choices()) else ""
            problems.append(Problem(f"{_told(path, value)} {error}", hint))
    problems += [*_unknown_groups(table), *_missing(table)]
    if problems:
        return Loaded(None, (), tuple(problems))
    values = tuple(
        Effective(path, tree.get(path, row.default), table.values[path].origin if path in tree else DEFAULT)
        for path, row, _ in _rows(table)
    )
    try:
        return Loaded(_assembled(values), values, ())
    except ConfigError as error:
        return Loaded(None, values, (_between(error, values),))


def _told(path: Path, value: WrittenValue) -> str:
    """Return the beginning of a sentence about a value: the setting, what it was set to, and where."""
    text = checks.shown(shown(path[-1], value.value))
    return f"{'.'.join(path)}={text if len(text) <= 60 else text[:57] + '...'} ({value.origin})"


def _unknown(path: Path, value: WrittenValue) -> Iterator[Problem]:
    """Yield the problem of a setting that does not exist. Settings in the table of an unknown component are left out:
    the table itself is reported, by ``_unknown_groups``."""
    if path[0] == "components" and len(path) == 3 and path[1] not in settings.COMPONENTS:
        return
    sentence = f"{_told(path, value)}: there is no such setting"
    beside = [*settings.table(path), *(settings.TABLES if len(path) == 1 else ())]
    if value.text:
        yield Problem(sentence, settings.nearest(value.origin.split()[-1], _variables()))
    else:
        yield Problem(sentence, settings.elsewhere(path[-1]) or settings.nearest(path[-1], beside))


def _variables() -> list[str]:
    paths = [(name,) for name in settings.CACHE]
    nested = [("components", c, name) for c, rows in settings.COMPONENTS.items() for name in rows]
    return [variable(path) for path in [*paths, *nested]]


def variable(path: Path) -> str:
    """Return the name of a setting's environment variable."""
    return PREFIX + "__".join(part.upper().replace("-", "_") for part in path)


def _unknown_groups(table: SettingsTable) -> Iterator[Problem]:
    for (top, name), origin in table.groups.items():
        if top == "components" and name not in settings.COMPONENTS:
            yield Problem(f"components.{name} ({origin}) is no component: one of {', '.join(settings.COMPONENTS)}",
                          settings.nearest(name, settings.COMPONENTS))


def _missing(table: SettingsTable) -> Iterator[Problem]:
    if ("components", "full") not in table.groups and not any(one.path == ("components",) for one in table.misplaced):
        yield Problem("components.full is not given", "every cache has full attention: add a table [components.full]")
    for path, row, where in _rows(table):
        if row.default is REQUIRED and path not in table.values:
            text = row.text.rstrip(".").replace("`", "")
            yield Problem(f"{'.'.join(path)} is not given{where}", f"{path[-1]}: {text[:1].lower()}{text[1:]}")


def _rows(table: SettingsTable) -> Iterator[tuple[Path, settings.Setting, str]]:
    """Yield every setting that a cache with the given components and sidecars has: its path, its row, and the origin of
    its table in brackets. A class's own fields come before those that it inherits."""
    for name, row in settings.CACHE.items():
        yield (name,), row, ""
    for kind, rows in settings.COMPONENTS.items():
        if ("components", kind) in table.groups:
            for name, row in rows.items():
                yield ("components", kind, name), row, f" ({table.groups['components', kind]})"
    for top, own in table.groups:
        if top == "sidecars":
            for name, row in settings.SIDECAR.items():
                yield (top, own, name), row, f" ({table.groups[top, own]})"
    for path in table.values:
        if path[0] == "storage_options":
            yield path, settings.OPTION, ""


def _assembled(values: tuple[Effective, ...]) -> CacheConfig:
    tables: dict[Path, dict[str, Any]] = {("storage_options",): {}}
    for path, value, _ in values:
        tables.setdefault(path[:-1], {})[path[-1]] = value
    pairs = [(table, own) for table, own in tables.items() if len(table) == 2]
    return CacheConfig(
        **tables[()], storage_options=tables[("storage_options",)],
        components=tuple(settings.COMPONENT_CLASSES[kind](**own) for (top, kind), own in pairs if top == "components"),
        sidecars=tuple(Sidecar(name=name, **own) for (top, name), own in pairs if top == "sidecars"),
    )


def _between(error: ConfigError, values: tuple[Effective, ...]) -> Problem:
    """Return the problem for an error that concerns several settings at once. The origin of each setting that the
    message names is added to it."""
    words = set(re.findall(r"[\w.-]+", str(error)))
    tables = {path[1] for path, _, _ in values if len(path) == 3 and path[1] in words}
    named = [
        f"{'.'.join(path)}: {origin}" for path, _, origin in values
        if path[-1] in words and (len(path) == 1 or path[1] in tables or not tables)
    ]
    return Problem(str(error) + (f" ({', '.join(named)})" if named else ""))
