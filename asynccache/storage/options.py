"""The options that a store's URL may have whatever its scheme. They say how the store is used; backends never see
them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from math import isfinite

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.storage.url import ParsedUrl

YES_NO = ("yes", "no")
MOST_CALLS = 1 << 16

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How one store is used.

    ``name``: what it is called among the attached stores. ``write``: whether pages are written to it. ``promote``:
    whether pages that were found in a farther store are copied to it. ``timeout``: seconds that a call may take.
    ``concurrency``: how many calls it has at a time, at most. ``slow``: seconds after which a call that is still
    running counts as a failure for the breaker; 0 means never.
    """

    name: str = "store"
    write: bool = True
    promote: bool = True
    timeout: float = field(default=30.0, metadata=checks.within(above=0))
    concurrency: int = field(default=16, metadata=checks.within(1, MOST_CALLS))
    slow: float = field(default=10.0, metadata=checks.within(0))

    def __post_init__(self) -> None:
        checks.check_fields(self, "storage option ")


NAMES = tuple(StoreOptions.__dataclass_fields__)


def take_options(url: ParsedUrl) -> tuple[StoreOptions, ParsedUrl]:
    """Split the options of ``url``. Returns those of ``StoreOptions``, and a URL with the rest, for the backend. A
    store without the option ``name`` is called as its scheme.

    Raises:
        ConfigError: an option has an unusable value; the message names both.
    """
    checks.instance("url", url, ParsedUrl)
    default = StoreOptions()
    options = StoreOptions(
        name=_name(url),
        write=url.choice("write", YES_NO) == "yes",
        promote=url.choice("promote", YES_NO) == "yes",
        timeout=_seconds(url, "timeout", default.timeout, positive=True),
        concurrency=_count(url, "concurrency", default.concurrency),
        slow=_seconds(url, "slow", default.slow, positive=False),
    )
    return options, replace(url, options={name: value for name, value in url.options.items() if name not in NAMES})


def check_name(name: str, taken: Collection[str]) -> None:
    """Raise ConfigError if ``name`` is one of ``taken``, the names of the other stores."""
    if name in taken:
        raise ConfigError(f"storage: a store {name!r} is attached already; call this one otherwise (name=)")


def _name(url: ParsedUrl) -> str:
    name = url.options.get("name", url.scheme)
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"storage option name={name!r}: up to 64 letters, digits, '.', '_' and '-', as in name=disk")
    return name


def _seconds(url: ParsedUrl, name: str, default: float, *, positive: bool) -> float:
    text = url.options.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not isfinite(seconds) or seconds < 0 or (positive and not seconds):
        raise ConfigError(f"storage option {name}={text!r}: expected seconds, as in {name}=2.5")
    return seconds


def _count(url: ParsedUrl, name: str, default: int) -> int:
    text = url.options.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 9 or not int(text):
        raise ConfigError(f"storage option {name}={text!r}: expected a whole number of at least 1")
    return int(text)
