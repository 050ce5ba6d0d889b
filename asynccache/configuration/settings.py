"""All settings as rows: name, type, default, bounds, meaning. The rows are made from the fields of ``config.py``.

The dataclasses there are the only place where a setting is declared. Files, the environment, the options of commands,
the schema and the reference are read from these rows.
"""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import partial
from math import isfinite
from typing import Any, Union, get_args, get_origin, get_type_hints

from asynccache import checks
from asynccache.checks import ANY, Bounds
from asynccache.config import CacheConfig, Full, Mamba, Sidecar, SlidingWindow, split_urls
from asynccache.errors import ConfigError

Path = tuple[str, ...]

COMPONENT_CLASSES: Mapping[str, type[Any]] = {cls.pool: cls for cls in (Full, SlidingWindow, Mamba)}
TABLES = ("components", "sidecars", "storage_options")
REQUIRED = object()

_SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_WANTED = {int: "an integer", float: "a number", bool: "true or false", str: "text (in quotes)",
           tuple: "a list of integers"}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting.

    ``kind``: the type of its value. ``optional``: whether the value may be None. ``default``: ``REQUIRED`` if there is
    none. ``text``: what the setting means. ``choices``: returns the values that are allowed now, or nothing if they
    cannot be listed. ``several``: whether the value may also be a list; in the environment a list is written as URLs
    with spaces between them. ``bounds``: those of a number.
    """

    name: str
    kind: type[Any]
    optional: bool
    default: object
    text: str
    choices: Callable[[], tuple[str, ...]] = tuple
    several: bool = False
    bounds: Bounds = ANY

    def accept(self, value: object, *, text: bool) -> object:
        """Return ``value`` in the setting's type. ``text``: whether it comes from the environment, where all values are
        written as text.

        Raises:
            ConfigError: the value is unusable. The message says only what the value must be; the caller adds the
            setting's name.
        """
        if self.optional and (value is None or (isinstance(value, str) and value in ("none", ""))):
            return None
        if self.several:
            return _one_or_more(split_urls(str(value)) if text else value)
        found = _typed(self.kind, _read(self.kind, str(value)) if text else value)
        if (choices := self.choices()) and found not in choices:
            raise ConfigError(f"must be one of {', '.join(choices)}")
        if self.kind in (int, float) and (unmet := self.bounds.unmet(found) or _infinite(found)):
            raise ConfigError(unmet)
        return found


def _read(kind: type[Any], text: str) -> object:
    """Return the value that ``text``, from the environment, stands for."""
    try:
        if kind is bool:
            return _SWITCH[text.lower()]
        if kind is tuple:
            return tuple(map(int, text.split(",")))
        return kind(text) if kind in (int, float) else text
    except (ValueError, KeyError):
        wanted = "integers with commas between them" if kind is tuple else _WANTED[kind]
        raise ConfigError(f"must be {wanted}") from None


def _typed(kind: type[Any], value: Any) -> Any:
    """Return ``value`` as Python's own type, or as the value of an ``Enum``'s member. A number of numpy or torch is
    allowed. A float is returned even if it is not finite, because the error about the setting's bounds is the better
    one."""
    try:
        if kind is float:
            return float(value) if isinstance(value, float) else checks.number("", value)
        if kind is int:
            return checks.integer("", value)
    except ConfigError:
        raise ConfigError(f"must be {_WANTED[kind]}") from None
    if issubclass(kind, Enum):
        return value.value if isinstance(value, kind) else _typed(str, value)
    if kind is tuple and isinstance(value, (list, tuple)) and all(type(one) is int for one in value):
        return tuple(value)
    if kind is tuple or not isinstance(value, kind):
        raise ConfigError(f"must be {_WANTED[kind]}")
    return value


def _infinite(value: float) -> str:
    return "" if isfinite(value) else "must be a finite number"


def _one_or_more(value: object) -> str | tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not values or not all(isinstance(one, str) for one in values):
        raise ConfigError("must be text (in quotes), or a list of texts")
    return values[0] if len(values) == 1 else tuple(values)


def _rows(cls: type[Any]) -> dict[str, Setting]:
    """Return a row for each field of ``cls`` that has a meaning, those of the class itself before inherited ones."""
    hints, found = get_type_hints(cls), {field.name: field for field in fields(cls) if "text" in field.metadata}
    names = [name for base in cls.__mro__ for name in inspect.get_annotations(base) if name in found]
    return {name: _row(found[name], hints[name]) for name in names if name not in TABLES}


def _row(field: Field[Any], hint: Any) -> Setting:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [get_origin(part) or part for part in parts]
    kind, optional = kinds[0], type(None) in kinds
    choices = partial(_values, kind) if issubclass(kind, Enum) else field.metadata["choices"]
    default = field.default.value if isinstance(field.default, Enum) else field.default
    return Setting(field.name, kind, optional, REQUIRED if default is MISSING else default, field.metadata["text"],
                   choices, tuple in kinds[1:], field.metadata["bounds"])


def _values(kind: type[Enum]) -> tuple[str, ...]:
    return tuple(one.value for one in kind)


def meaning(cls: type[Any]) -> str:
    """Return what a table of settings is for: the first paragraph of its dataclass's docstring."""
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].replace("``", "`").split())


CACHE = _rows(CacheConfig)
COMPONENTS = {name: _rows(cls) for name, cls in COMPONENT_CLASSES.items()}
SIDECAR = _rows(Sidecar)
OPTION = Setting("option", str, False, REQUIRED,
                 CacheConfig.__dataclass_fields__["storage_options"].metadata["text"])


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
