"""Turns the text of an option into its value, for all commands.

A parser takes the text and returns the value. It refuses what cannot be used with a ConfigError that says only what the
value must be; whoever called it puts the option and the text before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from asynccache.checks import nearest, unmet
from asynccache.errors import ConfigError
from asynccache.memory.device import parse_device

_T = TypeVar("_T")

Parse = Callable[[str], Any]


def integer(low: float | None, high: float | None = None) -> Callable[[str], int]:
    """Return the parser of an integer, at least ``low`` and at most ``high``."""
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ConfigError("must be an integer") from None
        if why := unmet(value, low, high):
            raise ConfigError(why)
        return value
    return parse


def port(text: str) -> int:
    """Parse the number of a TCP port; 0 stands for any free one."""
    number = integer(0)(text)
    if number > 65535:
        raise ConfigError("must be a port: 0 to 65535")
    return number


def number(wanted: str, low: float, high: float) -> Callable[[str], float]:
    """Return the parser of a number from ``low`` to ``high``, which errors call ``wanted``."""
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"must be {wanted}") from None
        if not low <= value <= high:
            raise ConfigError(f"must be {wanted}")
        return value
    return parse


SHARE = number("a share between 0 and 1", 0.0, 1.0)
NOT_NEGATIVE = number("a number, 0 or more", 0.0, 1e15)
POSITIVE = number("a number above 0", 1e-9, 1e15)


def choice(*names: str) -> Callable[[str], str]:
    """Return the parser of one of ``names``."""
    def parse(text: str) -> str:
        if text not in names:
            raise ConfigError(f"must be one of {', '.join(names)}{nearest(text, names)}")
        return text
    return parse


def listed(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Return the parser of values with commas between them, each of them read by ``parse``; "" is an empty list."""
    return lambda text: [parse(part.strip()) for part in text.split(",") if part.strip()]


def check_device(text: str) -> str:
    """``text``, if it can be the name of a device; whether there is such a device is not looked at.

    Raises:
        ConfigError: it cannot be one.
    """
    parse_device(text)
    return text


def gpu(text: str) -> str:
    """``text``, if it can be the name of a GPU; whether there is such a GPU is not looked at.

    Raises:
        ConfigError: it cannot be one.
    """
    if parse_device(text).kind != "cuda":
        raise ConfigError(f"{text} is no GPU")
    return text
