"""All settings as rows (name, type, default, bounds, meaning), which are made from the dataclasses of ``config.py``."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from math import isfinite
from typing import Any, Union, get_args, get_origin, get_type_hints

from asynccache import checks
from asynccache.checks import ANY, Bounds
from asynccache.config import EVICTION_POLICIES, CacheConfig, Full, Mamba, Sidecar, SlidingWindow, split_urls
from asynccache.configuration import meanings
from asynccache.errors import ConfigError

Path = tuple[str, ...]

COMPONENT_CLASSES: Mapping[str, type[Any]] = {"full": Full, "swa": SlidingWindow, "mamba": Mamba}
TABLES = ("components", "sidecars", "storage_options")
REQUIRED = object()

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting.

    ``kind``: the type of its value. ``optional``: whether the value may be None. ``default``: ``REQUIRED`` if there is
    none. ``text``: what the setting means. ``choices``: the allowed values, if they can be listed. ``several``: whether
    the value may also be a list; in the environment that is written as URLs with spaces between them.
    """

    name: str
    kind: type[Any]
    optional: bool
    default: object
    text: str
    choices: tuple[str, ...] = ()
    several: bool = False
    bounds: Bounds = ANY

    def accept(self, value: object, *, text: bool) -> object:
        """Return ``value`` in the setting's type. ``text``: whether it comes from the environment, where all values are
        written as text.

        Raises:
            ConfigError: the value is unusable; the message says only what it must be.
        """
        if self.optional and (value is None or (isinstance(value, str) and value in ("none", ""))):
            return None
        if self.several:
            return _one_or_more(split_urls(str(value)) if text else value)
        found = _from_text(self.kind, str(value)) if text else _typed(self.kind, value)
        if self.choices and _plain(found) not in self.choices:
            raise ConfigError(f"must be one of {', '.join(self.choices)}")
        self._check_bounds(found)
        return found

    def _check_bounds(self, value: object) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return
        infinite = isinstance(value, float) and not isfinite(value)
        unmet = self.bounds.unmet(value) or ("must be a finite number" if infinite else "")
        if unmet:
            raise ConfigError(unmet)


def _typed(kind: type[Any], value: object) -> object:
    if kind is tuple:
        return _numbers(value)
    if kind in (int, float):
        return _number(kind, value)
    if issubclass(kind, Enum):
        return value.value if isinstance(value, kind) else _typed(str, value)
    if not isinstance(value, kind):
        raise ConfigError(f"must be {_WANTED[kind]}")
    return value


def _number(kind: type[Any], value: object) -> object:
    """Return ``value`` as Python's own number; it may be one of numpy or torch. A float is returned even if it is not
    finite, because the error about the setting's bounds is the better one."""
    if kind is float and isinstance(value, float):
        return float(value)
    try:
        return checks.integer("", value) if kind is int else checks.number("", value)
    except ConfigError:
        raise ConfigError(f"must be {_WANTED[kind]}") from None


def _one_or_more(value: object) -> str | tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not values or not all(isinstance(one, str) for one in values):
        raise ConfigError("must be text (in quotes), or a list of texts")
    return values[0] if len(values) == 1 else tuple(values)


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or any(type(one) is not int for one in value):
        raise ConfigError("must be a list of integers")
    return tuple(value)


def _from_text(kind: type[Any], value: str) -> object:
    if kind is bool:
        if value.lower() not in _TRUE + _FALSE:
            raise ConfigError("must be true or false")
        return value.lower() in _TRUE
    if kind in (int, float, tuple):
        try:
            return tuple(map(int, value.split(","))) if kind is tuple else kind(value)
        except ValueError:
            raise ConfigError(f"must be {_WANTED[kind]}") from None
    return value


_WANTED = {int: "an integer", float: "a number", bool: "true or false", str: "text (in quotes)",
           tuple: "integers with commas between them"}


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _rows(cls: type[Any], meanings: Mapping[str, str], without: Iterable[str] = ()) -> dict[str, Setting]:
    hints = get_type_hints(cls)
    return {f.name: _row(f, hints[f.name], meanings) for f in fields(cls) if f.name not in without}


def _row(field: Field[Any], hint: Any, meanings: Mapping[str, str]) -> Setting:
    if get_origin(hint) is tuple:
        hint = tuple
    optional = get_origin(hint) in (Union, types.UnionType)
    several = optional and any(get_origin(t) is tuple for t in get_args(hint))
    kind = next(t for t in get_args(hint) if t is not type(None)) if optional else hint
    choices = tuple(m.value for m in kind) if issubclass(kind, Enum) else ()
    if field.name == "eviction":
        choices = EVICTION_POLICIES
    default = REQUIRED if field.default is MISSING else _plain(field.default)
    bounds = field.metadata.get("bounds", ANY)
    return Setting(field.name, kind, optional, default, meanings.get(field.name, ""), choices, several, bounds)


CACHE = _rows(CacheConfig, meanings.CACHE, TABLES)
COMPONENTS = {name: _rows(cls, meanings.COMPONENTS[name]) for name, cls in COMPONENT_CLASSES.items()}
SIDECAR = _rows(Sidecar, meanings.SIDECAR, ("name",))
OPTION = Setting("option", str, False, REQUIRED, meanings.OPTIONS_TEXT)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint such as ``did you mean 'window'?`` with the most similar of ``names``; "" if none is similar."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.65)
    return f"did you mean {near[0]!r}?" if near else ""


def table(path: Path) -> Mapping[str, Setting]:
    """Return the settings of the table in which ``path`` stands. For an unknown component these are the settings of
    full attention."""
    if path[0] == "components" and len(path) == 3:
        return COMPONENTS.get(path[1], COMPONENTS["full"])
    return SIDECAR if path[0] == "sidecars" else CACHE


def setting(path: Path) -> Setting | None:
    """Return the setting at ``path``; None if there is no such setting."""
    if len(path) == 2 and path[0] == "storage_options":
        return OPTION
    if len(path) == 3 and (path[0] == "sidecars" or (path[0] == "components" and path[1] in COMPONENTS)):
        return table(path).get(path[2])
    return CACHE.get(path[0]) if len(path) == 1 else None


def elsewhere(name: str) -> str:
    """Return a hint that names the tables with a setting of this name, for one in the wrong table; "" if there is
    none."""
    found = [f"components.{c}.{name}" for c, rows in COMPONENTS.items() if name in rows]
    found += [f"sidecars.NAME.{name}"] if name in SIDECAR and not found else []
    found += [name] if name in CACHE else []
    return f"did you mean {' or '.join(found)}?" if found else ""
