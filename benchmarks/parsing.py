"""Turns the text of a benchmark's option into its value, for argparse."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

from asynccache.checks import nearest, unmet
from asynccache.errors import ConfigError
from asynccache.memory.device import parse_device

_T = TypeVar("_T")


def integer(low: float | None, high: float | None = None) -> Callable[[str], int]:
    """Return the parser of an integer, at least ``low`` and at most ``high``."""
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text} must be an integer") from None
        if why := unmet(value, low, high):
            raise ArgumentTypeError(f"{text} {why}")
        return value
    return parse


def choice(*names: str) -> Callable[[str], str]:
    """Return the parser of one of ``names``."""
    def parse(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"{text} must be one of {', '.join(names)}{nearest(text, names)}")
        return text
    return parse


def listed(parse: Callable[[str], _T]) -> Callable[[str], list[_T]]:
    """Return the parser of values with commas between them, each of them read by ``parse``; "" is an empty list."""
    return lambda text: [parse(part.strip()) for part in text.split(",") if part.strip()]


def gpu(text: str) -> str:
    """``text``, if it can be the name of a GPU; whether there is such a GPU is not looked at."""
    try:
        if parse_device(text).kind == "cuda":
            return text
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None
    raise ArgumentTypeError(f"{text} is no GPU")
