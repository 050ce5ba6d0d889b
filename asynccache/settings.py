"""Settings: groups of values that users choose, each declared once, as an annotated field of a msgspec struct.

The annotation has all that there is to know of a setting: its type, its bounds, its meaning (``msgspec.Meta``), and how
its text is read if that does not follow from the type. Files, the environment, URLs, options and Python are checked
against it, and the JSON Schema and the reference are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, inspect

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.redaction import shown

Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]

MOST_SIZE = 1 << 62
_SIZE = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([kmgtp]?)(i?)(b?)\s*", re.IGNORECASE)

SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def parse_size(name: str, text: str) -> int:
    """Return the bytes that ``text`` stands for: a number, and maybe a unit (``512``, ``10KB``, ``1.5GiB``, ``10G``). K
    is 1000 and Ki is 1024. ``name`` is what errors call the setting.

    Raises:
        ConfigError: ``text`` is no size, or more than ``MOST_SIZE``; the message names the setting and the value.
    """
    checks.text("name", name)
    match = _SIZE.fullmatch(checks.text(name, text))
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{name}={text!r} is no size; write for example 512MiB or 10GiB")
    power = " kmgtp".index(match[2].lower() or " ")
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    if size > MOST_SIZE:
        raise ConfigError(f"{name}={text!r} is more than {MOST_SIZE} bytes, and no store has as many")
    return size


Size = Annotated[int, Meta(ge=0, le=MOST_SIZE, extra={"parse": parse_size})]
"""A number of bytes, as the type of a setting. As text it may have a unit, see ``parse_size``."""

Room = Annotated[int, Meta(extra={"room": True})]
"""A number of tokens or states, or a size with a unit (``8GiB``) as text. The settings struct turns a size into a
number: it knows the bytes of a token."""


class Field(NamedTuple):
    """The declaration of a setting."""

    hint: Any
    """The setting's annotation."""
    kinds: tuple[Any, ...]
    """The types that the value may have, without None."""
    optional: bool
    """Whether the value may be None."""
    required: bool
    default: Any
    meaning: str
    extra: Mapping[str, Any]
    """The annotation's ``Meta.extra``: ``parse(name, text)`` reads the text where the type does not say how, and
    ``choices()`` returns the allowed texts where more may be added at run time."""

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that the value may be; none: it is not one of a few."""
        match self.kinds:
            case [inspect.LiteralType(values=values)]:
                return tuple(map(str, values))
            case [inspect.EnumType(cls=enum)]:
                return tuple(str(one.value) for one in enum)
        return self.extra["choices"]() if "choices" in self.extra else ()

    def check(self, name: str, value: Any) -> Any:
        """Return ``value`` in the declared type, as ``asynccache.checks`` does for arguments.

        Raises:
            ConfigError: the value has another type or is out of bounds; the message calls it ``name``.
        """
        if value is None and self.optional:
            return None
        match self.kinds:
            case [inspect.EnumType(cls=enum)]:
                return checks.member(name, value, enum)
            case _ if self.choices:
                return checks.choice(name, value, self.choices)
            case [inspect.IntType(ge=low, le=high)]:
                if isinstance(value, str) and self.extra.get("room") and not value.strip().isdecimal():
                    parse_size(name, value)
                    return value
                if isinstance(value, str) and "parse" in self.extra:
                    value = self.extra["parse"](name, value)
                return checks.integer(name, value, low, high)
            case [inspect.FloatType(ge=low, le=high, gt=above)]:
                return checks.number(name, value, low, high, above=above)
            case [inspect.BoolType()]:
                return checks.flag(name, value)
            case [inspect.StrType(min_length=least, pattern=None)]:
                return checks.text(name, value, empty=not least)
            case [inspect.StrType(pattern=str(pattern))]:
                value = checks.text(name, value)
                if re.fullmatch(pattern, value) is None:  # msgspec would take a line break behind it
                    raise ConfigError(f"{name}={checks.shown(value)}: Expected `str` matching regex {pattern!r}")
            case [inspect.DictType()]:
                return checks.texts(name, value)
            case [inspect.VarTupleType()]:             # msgspec would take a set, too, in any order
                checks.instance(name, value, (list, tuple))
            case [inspect.StrType(), inspect.VarTupleType()]:
                checks.instance(name, value, (str, list, tuple))
        try:
            return msgspec.convert(value, self.hint)
        except Exception as error:  # of msgspec's, or what somebody's object raises
            raise ConfigError(f"{name}={checks.shown(value)}: {error}") from None

    def read(self, name: str, text: str) -> Any:
        """Return what ``text`` stands for: the value of an environment variable or of an option in a URL, where all
        values are text. Raises ConfigError: as ``check``."""
        none = self.optional and "parse" not in self.extra and text in ("none", "")
        return self.check(name, text if none else self._read(name, text))

    def _read(self, name: str, text: str) -> Any:
        """Return the value that ``text`` stands for; else ``text`` itself, which ``check`` then refuses."""
        if (parse := self.extra.get("parse")) is not None:
            return parse(name, text)
        match self.kinds:
            case [inspect.BoolType()]:
                return SWITCH.get(text.lower(), text)
            case [inspect.IntType() | inspect.FloatType() as kind]:
                try:
                    return msgspec.convert(text, int if isinstance(kind, inspect.IntType) else float, strict=False)
                except ValueError:  # of msgspec's, or of a text that is not Unicode
                    return text
        return text


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen group of settings, checked whenever one is made, copies included. ``copy.replace``
    (``msgspec.structs.replace`` before Python 3.13) makes a changed copy. ``repr()`` shows no secrets.

    Raises:
        ConfigError: a value is unusable; the message names the setting, the value and what it must be.
    """

    def __post_init__(self) -> None:
        where = self._where()
        for name, field in fields_of(type(self)).items():
            self._set(name, field.check(where + name, getattr(self, name)))

    def _where(self) -> str:
        """Return the prefix of these settings' names in errors."""
        return ""

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)

    def __repr__(self) -> str:
        values = (f"{name}={shown(name, getattr(self, name))!r}" for name in self.__struct_fields__)
        return f"{type(self).__name__}({', '.join(values)})"


@cache
def fields_of(cls: type[Settings]) -> Mapping[str, Field]:
    """Return the declarations of the settings of ``cls`` by name, those that must be given first."""
    found = {}
    for one in sorted(msgspec.structs.fields(cls), key=lambda one: not one.required):
        kind, meaning, extra = inspect.type_info(one.type), "", dict[str, Any]()
        while isinstance(kind, inspect.Metadata):
            meaning = (kind.extra_json_schema or {}).get("description", meaning)
            extra, kind = {**(kind.extra or {}), **extra}, kind.type
        kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        some = tuple(kind for kind in kinds if not isinstance(kind, inspect.NoneType))
        default = one.default if one.default_factory is msgspec.NODEFAULT else one.default_factory()
        found[one.name] = Field(one.type, some, len(some) < len(kinds), one.required, default, meaning, extra)
    return found
