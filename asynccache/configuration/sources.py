"""Reads settings from their sources: a TOML file, the environment, Python.

Each source becomes a flat ``Table`` from paths to values with their origins. Here it is only checked that tables are
where tables must be. ``building`` checks names and values.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.metadata import entry_points
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from asynccache.configuration.line_numbers import line_numbers, line_of
from asynccache.configuration.settings import COMPONENT_CLASSES, TABLES, Path
from asynccache.errors import ConfigError

PREFIX = "ASYNCCACHE_"
SECTIONS = ("stress", "replay")
BACKENDS = "asynccache.backends"
NOT_SETTINGS = ("CONFIG", "DEBUG", "SEED", "WORLDS", "TRACE", "EXAMPLES", "STORES", "VLLM", "PURE", "COMPILE")


class Value(NamedTuple):
    """A value as it was written. ``text``: whether its source can only write text, as the environment does."""

    value: object
    origin: str
    text: bool = False


class Misplaced(NamedTuple):
    """A value where a table must be. ``what`` says so, as the end of a sentence."""

    path: Path
    value: Value
    what: str


@dataclass(slots=True)
class Table:
    """The settings of one source, or of several that were laid over each other.

    ``values``: by path. ``groups``: the tables of components and sidecars that exist, maybe without any setting, with
    their origins. ``misplaced``: values where a table must be.
    """

    values: dict[Path, Value] = field(default_factory=dict)
    groups: dict[Path, str] = field(default_factory=dict)
    misplaced: list[Misplaced] = field(default_factory=list)

    def lay(self, upper: Table) -> None:
        """Add the settings of ``upper``, which win over those that are here."""
        self.values |= upper.values
        self.groups |= upper.groups
        self.misplaced += upper.misplaced

    def drop(self, top: str) -> None:
        """Remove all settings and tables below ``top``."""
        self.values = {path: value for path, value in self.values.items() if path[0] != top}
        self.groups = {path: origin for path, origin in self.groups.items() if path[0] != top}


@dataclass(frozen=True, slots=True)
class File:
    """A TOML file that was read. ``table`` is its content; ``lines`` has the line of each key by its path."""

    name: str
    table: dict[str, Any]
    lines: dict[Path, int]

    def origin(self, path: Path) -> str:
        """Return where ``path`` stands in the file, for messages: ``kv.toml line 7``."""
        line = line_of(path, self.lines)
        return self.name if line is None else f"{self.name} line {line}"


def read_file(name: str, shown: str = "") -> File:
    """Read and parse a TOML file. ``shown`` is what errors call it; by default its name.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    shown = shown or name
    try:
        text = FilePath(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: not TOML: {error}") from None
    try:
        return File(name, tomllib.loads(text), line_numbers(text.replace("\r\n", "\n")))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{shown}: not TOML: {error}") from None


def describes_cache(table: Mapping[str, Any]) -> bool:
    """Whether a file with this content describes a cache, and not only runs of ``stress`` and ``replay``."""
    return isinstance(table.get("components"), dict) or "model" in table


def from_file(file: File) -> Table:
    """Return the file's settings of the cache. The sections of ``stress`` and ``replay`` are left out."""
    content = {key: value for key, value in file.table.items() if key not in SECTIONS}
    return _from_tree(content, lambda path: file.origin(path))


def from_environment(env: Mapping[str, str]) -> Table:
    """Return the settings in the environment. ``ASYNCCACHE_PAGE_SIZE`` is ``page_size``; two underscores lead into a
    table. Variables that begin with the name of a backend, such as ``ASYNCCACHE_REDIS_PASSWORD``, are left out: that
    backend reads them."""
    table = Table()
    backends = {entry.name for entry in entry_points(group=BACKENDS)}
    for name, text in env.items():
        own = name.removeprefix(PREFIX)
        if own == name or own in NOT_SETTINGS or own.split("__")[0].lower() in SECTIONS:
            continue
        if own.partition("_")[0].lower() in backends:
            continue
        path = tuple(own.lower().split("__"))
        table.values[path] = Value(text, f"environment variable {name}", text=True)
        if len(path) == 3:
            table.groups[path[:2]] = f"environment variable {name}"
    return table


def from_python(given: Mapping[str, object]) -> Table:
    """Return the settings in keyword arguments: plain values, mappings, or dataclasses of ``asynccache.config``."""
    content = {name: _as_mapping(name, value) for name, value in given.items()}
    return _from_tree(content, lambda path: "Python")


def replaced(given: Mapping[str, object]) -> list[str]:
    """Return the names of the tables that ``given`` replaces as a whole, because they are tuples and not mappings."""
    return [name for name in ("components", "sidecars") if isinstance(given.get(name), (tuple, list))]


def _as_mapping(name: str, value: object) -> object:
    if not isinstance(value, (tuple, list)) or not all(is_dataclass(one) for one in value):
        return value
    kinds = {cls: kind for kind, cls in COMPONENT_CLASSES.items()}
    return {
        kinds.get(type(one)) or one.name: {f.name: getattr(one, f.name) for f in fields(one) if f.name != "name"}
        for one in value
    }


def _from_tree(content: Mapping[str, object], origin: Any) -> Table:
    table = Table()
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in TABLES:
            _fill(table, name, key, value, origin)
        else:
            table.values[(name,)] = Value(value, origin((key,)))
    return table


def _fill(table: Table, name: str, key: str, value: object, origin: Any) -> None:
    if not isinstance(value, Mapping):
        example = f"[{name}.full]" if name == "components" else f"[{name}.NAME]" if name == "sidecars" else f"[{name}]"
        table.misplaced.append(Misplaced((name,), Value(value, origin((key,))), f"must be a table, as in {example}"))
    elif name == "storage_options":
        for option, text in value.items():
            table.values[(name, option)] = Value(text, origin((key, option)))
    else:
        for path, found in _groups(table, name, key, value, origin):
            table.values[path] = found


def _groups(
    table: Table, name: str, key: str, value: Mapping[str, object], origin: Any
) -> Iterator[tuple[Path, Value]]:
    for group, content in value.items():
        if not isinstance(content, Mapping):
            what = f"must be a table, as in [{name}.{group}]"
            table.misplaced.append(Misplaced((name, group), Value(content, origin((key, group))), what))
            continue
        table.groups[name, group] = origin((key, group))
        for field_name, found in content.items():
            own = Value(found, origin((key, group, field_name)))
            yield (name, group, field_name.replace("-", "_")), own
