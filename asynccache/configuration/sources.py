"""The sources of settings, and how each is read: a TOML file, the environment, Python.

Each source becomes a flat ``SettingsTable`` from paths to values with their origins. This module only checks that
tables are where tables must be. ``building`` checks names and values.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path as FilePath
from typing import NamedTuple

from asynccache.config import Sidecar
from asynccache.configuration.line_numbers import line_numbers, line_of
from asynccache.configuration.settings import COMPONENT_CLASSES, Path
from asynccache.errors import ConfigError

Origin = Callable[[Path], str]
"""Returns where a path stands in a source, for messages."""
PREFIX = "ASYNCCACHE_"
BACKENDS = "asynccache.backends"
_DEPTH = {"components": 3, "sidecars": 3, "storage_options": 2}
"""The length of the paths of settings in tables."""
_EXAMPLES = {"components": "components.full", "sidecars": "sidecars.NAME", "storage_options": "storage_options"}
DEEPEST = 16
"""How deep a file's lists and tables may be nested. Settings need 3; a deeper value would only be shown in an error."""
NOT_SETTINGS = ("CONFIG", "DEBUG", "SEED", "WORLDS", "TRACE", "EXAMPLES", "STORES", "VLLM", "PURE", "COMPILE")


class WrittenValue(NamedTuple):
    """A value as it was written. ``text``: whether its source can only write text, as the environment does."""

    value: object
    origin: str
    text: bool = False


class Misplaced(NamedTuple):
    """A value where a table must be. ``what`` is the end of a sentence that says so."""

    path: Path
    value: WrittenValue
    what: str


@dataclass(slots=True)
class SettingsTable:
    """The settings of one source, or of several that were laid over each other.

    ``values``: by path. ``groups``: the tables of components and sidecars that exist, maybe without any setting, with
    their origins. ``misplaced``: values where a table must be.
    """

    values: dict[Path, WrittenValue] = field(default_factory=dict)
    groups: dict[Path, str] = field(default_factory=dict)
    misplaced: list[Misplaced] = field(default_factory=list)

    def lay(self, upper: SettingsTable) -> None:
        """Add the settings of ``upper``, which win over those that are here."""
        self.values |= upper.values
        self.groups |= upper.groups
        self.misplaced += upper.misplaced

    def drop(self, top: str) -> None:
        """Remove all settings and tables below ``top``."""
        self.values = {path: value for path, value in self.values.items() if path[0] != top}
        self.groups = {path: origin for path, origin in self.groups.items() if path[0] != top}


def from_file(name: str) -> SettingsTable:
    """Return the settings in the TOML file ``name``. The origin of each is the file's name and the line.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        text = FilePath(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from None
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from None
    except RecursionError:
        content = None
    if content is None or _is_deeper(content, DEEPEST):
        raise ConfigError(f"{name}: values are nested more than {DEEPEST} deep; no setting is")
    lines = line_numbers(text.replace("\r\n", "\n"))

    def origin(path: Path) -> str:
        line = line_of(path, lines)
        return name if line is None else f"{name} line {line}"

    return _from_tree(content, origin)


def _is_deeper(content: object, depth: int) -> bool:
    """Return True if lists and tables of ``content`` are nested more than ``depth`` deep."""
    level = [content]
    for _ in range(depth + 1):
        level = [inner for one in level if isinstance(one, (dict, list))
                 for inner in (one.values() if isinstance(one, dict) else one)]  # fmt: skip
    return bool(level)


def from_environment(env: Mapping[str, str]) -> SettingsTable:
    """Return the settings in the environment. ``ASYNCCACHE_PAGE_SIZE`` is ``page_size``; two underscores lead into a
    table. Variables that begin with the name of a backend, such as ``ASYNCCACHE_REDIS_PASSWORD``, are left out: that
    backend reads them."""
    table = SettingsTable()
    backends = {entry.name for entry in entry_points(group=BACKENDS)}
    for name, text in env.items():
        own = name.removeprefix(PREFIX)
        if own == name or own in NOT_SETTINGS:
            continue
        if own.partition("_")[0].lower() in backends:
            continue
        path = tuple(own.lower().split("__"))
        table.values[path] = WrittenValue(text, f"environment variable {name}", text=True)
        if len(path) == 3:
            table.groups[path[:2]] = f"environment variable {name}"
    return table


def from_python(given: Mapping[str, object]) -> SettingsTable:
    """Return the settings in keyword arguments: plain values, mappings, or dataclasses of ``asynccache.config``.

    Raises:
        ConfigError: two components or two sidecars have one name.
    """
    content = {name: _as_mapping(name, value) for name, value in given.items()}
    return _from_tree(content, lambda path: "Python")


def replaced(given: Mapping[str, object]) -> list[str]:
    """Return the names of the tables that ``given`` replaces as a whole, because they are tuples and not mappings."""
    return [name for name in ("components", "sidecars") if isinstance(given.get(name), (tuple, list))]


def _as_mapping(name: str, value: object) -> object:
    pools = (*COMPONENT_CLASSES.values(), Sidecar)
    if not isinstance(value, (tuple, list)) or not all(isinstance(one, pools) for one in value):
        return value
    names = [one.pool or one.name for one in value]
    if twice := [one for one in names if names.count(one) > 1]:
        raise ConfigError(f"{name}: there are {names.count(twice[0])} of {twice[0]!r}; each can be there once")
    return {known: {f.name: getattr(one, f.name) for f in fields(one) if f.name != "name"}
            for known, one in zip(names, value, strict=True)}


def _from_tree(content: Mapping[str, object], origin: Origin) -> SettingsTable:
    table = SettingsTable()
    _fill(table, (), (), content, origin)
    return table


def _fill(table: SettingsTable, above: Path, keys: Path, content: Mapping[str, object], origin: Origin) -> None:
    """Add the settings of ``content``, the table at the path ``above``. ``keys`` is that path as the source writes it.
    Names of settings may be written with dashes; names of components, sidecars and options of a store are taken as they
    are written."""
    for key, value in content.items():
        path, written = (*above, key if len(above) == 1 else key.replace("-", "_")), (*keys, key)
        if len(path) == _DEPTH.get(path[0], 1):
            table.values[path] = WrittenValue(value, origin(written))
        elif isinstance(value, Mapping):
            if len(path) == 2:
                table.groups[path] = origin(written)
            _fill(table, path, written, value, origin)
        else:
            what = f"must be a table, as in [{_EXAMPLES[path[0]] if len(path) == 1 else '.'.join(path)}]"
            table.misplaced.append(Misplaced(path, WrittenValue(value, origin(written)), what))
