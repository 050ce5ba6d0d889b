"""The few things that several backends share: options of their URLs, and when a thing that fails is left alone."""

from __future__ import annotations

from asynccache.errors import ConfigError
from asynccache.storage import Breaker


def whole_number(name: str, text: str, least: int, most: int = 999_999) -> int:
    """Return the number in ``text``. Raises ConfigError if it is none, or not one from ``least`` to ``most``; ``name``
    is the option's."""
    if not text.isascii() or not text.isdecimal() or len(text) > 6 or not least <= int(text) <= most:
        raise ConfigError(f"storage option {name}={text!r}: expected a whole number from {least} to {most}")
    return int(text)


def brief_breaker() -> Breaker:
    """Return a breaker for one thing within a store, such as a server, or the room for new pages. It opens at the first
    failure, for 0.1 s; each further time in a row takes twice as long, up to 1 s."""
    return Breaker(threshold=1, backoff=0.1, max_backoff=1.0)
