"""The options of every command, each declared once, as a field of a ``Settings`` struct.

A field that has a meaning is an option: its annotation has its type, its bounds, its help and how it is written (see
``option``), and its default is the option's. The command line's parser is made from that, and what is given is read and
checked by the same declaration as files, the environment and Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta

from asynccache.errors import ConfigError
from asynccache.memory.device import parse_device
from asynccache.settings import Field, Settings, fields_of

MOST = 1e15
Rate = Annotated[float, Meta(gt=0, le=MOST)]
"""A number above 0, such as a rate or a time."""
NotNegative = Annotated[float, Meta(ge=0, le=MOST)]
Concurrency = Annotated[int, Meta(ge=1, le=1 << 16)]
"""How many at the same time: each takes memory from the beginning."""


def option(metavar: str, text: str, **extra: Any) -> Meta:
    """Declare an option. ``text``: its help.

    ``extra``: ``argument``, it is an argument, True, or one that may be left out, False; ``const``, the value of the
    option alone; ``several``, it may be given more than once, and its text has a line for each; ``only``, the command
    that has it; ``written``, the default as the help shows it; ``parse`` and ``choices`` as in ``Field``.
    """
    return Meta(description=text, extra={"metavar": metavar, **extra})


Json = Annotated[str | None, option("PATH|-", "write the report as JSON to a file, or to standard output (-), where it "
                                              "takes the place of the text", const="-")]
Quiet = Annotated[bool, option("", "print neither progress nor a summary", const=True)]
AsJson = Annotated[bool, option("", "print JSON instead of text", const=True)]


def parsed_device(name: str, text: str) -> str:
    """Return ``text``, if it can be the name of a device; whether there is such a device is not looked at.

    Raises:
        ConfigError: it cannot be one.
    """
    try:
        parse_device(text)
    except ConfigError as error:
        raise ConfigError(f"{name}={text}: {error}") from None
    return text


class CommandOptions(Settings, frozen=True, kw_only=True):
    """The options of one command, or of several that differ in a few. ``changed``: by command, the defaults that are
    not those of the fields."""

    changed: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    @classmethod
    def fields(cls, command: str = "") -> dict[str, Field]:
        """Return the options of ``command`` by name."""
        return {name: field for name, field in fields_of(cls).items()
                if field.meaning and field.extra.get("only", command) == command}  # fmt: skip

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, command: str = "") -> None:
        """Add the options of ``command`` to ``parser``. What is given stays text until ``read``."""
        defaults = cls.changed.get(command, {})
        for name, field in cls.fields(command).items():
            flag, default, extra = f"--{name.replace('_', '-')}", defaults.get(name, field.default), field.extra
            text, choices = field.meaning.replace("%", "%%"), ", ".join(field.choices)
            if "argument" in extra:
                parser.add_argument(name, metavar=extra["metavar"], help=text, choices=field.choices or None,
                                    nargs=None if extra["argument"] else "?")
                continue
            if isinstance(default, bool):
                action: Any = "store_true" if "const" in extra else argparse.BooleanOptionalAction
                text += "" if "const" in extra else f" (default: {'yes' if default else 'no'})"
                parser.add_argument(flag, action=action, default=None, help=text)
                continue
            many = default if isinstance(default, tuple) else () if field.required or default is None else (default,)
            texts = [f"{one:g}" if isinstance(one, float) else str(getattr(one, "value", one)) for one in many]
            written = extra.get("written", ",".join(texts))
            text += (f": {choices}" if choices else "") + (f" (default: {written})" if written else "")
            kind = {"nargs": "?", "const": extra["const"]} if "const" in extra else {
                "action": "append" if "several" in extra else "store"}
            parser.add_argument(flag, metavar=extra["metavar"], help=text, required=field.required, **kind)

    @classmethod
    def values(cls, command: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the options of ``command`` that were given, and its own defaults. ``given``: the text of
        each, or None.

        Raises:
            ConfigError: a text cannot be used; the message names the option, the text and what it must be.
        """
        found = dict(cls.changed.get(command, {}))
        for name, field in cls.fields(command).items():
            if (text := given.get(name)) is not None:
                label = field.extra["metavar"] if "argument" in field.extra else f"--{name.replace('_', '-')}"
                text = "\n".join(text) if isinstance(text, list) else text
                found[name] = text if isinstance(text, bool) else field.read(label, text)
        return found

    @classmethod
    def read(cls, command: str, given: Mapping[str, Any]) -> Self:
        """Return the options of ``command``. Raises ConfigError: as ``values``, or they do not fit together."""
        return cls(**cls.values(command, given))
