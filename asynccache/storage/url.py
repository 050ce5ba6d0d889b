"""Store URLs, parsed once at the edge: ``scheme:path?option=value&...``. Pure functions.

Law: a password in a URL is for its backend alone. What is shown of a URL, in a text or an error, is without it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.redaction import HIDDEN, is_secret, redacted

MOST_BYTES = 2**63 - 1

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)\s*", re.IGNORECASE)


def parse_size(name: str, text: str) -> int:
    """Bytes in ``text``: a number and a unit (``B``, ``KB``, ``MiB``, ``10G``...); K is 1000, Ki is 1024.

    Raises:
        ConfigError: it is no size; the message names the field and the value.
    """
    checks.text("name", name)
    match = _SIZE.fullmatch(checks.text(name, text))
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{name}={text!r} is no size; write for example 512MiB or 10GiB")
    power = " kmgtp".index(match[2].lower() or " ")
    size = float(match[1]) * (1024 if match[3] else 1000) ** power
    if size > MOST_BYTES:
        raise ConfigError(f"{name}={checks.shown(text)} is more than {MOST_BYTES} bytes")
    return int(size)


@dataclass(frozen=True, slots=True, repr=False)
class ParsedUrl:
    """A store URL, taken apart. ``path`` is literal: nothing in it is decoded. As text it has no secrets in it."""

    scheme: str
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.settle_fields(self)
        object.__setattr__(self, "options", checks.texts("options", self.options))

    def __str__(self) -> str:
        query = "&".join(f"{name}={HIDDEN if is_secret(name) else value}" for name, value in self.options.items())
        return redacted(f"{self.scheme}:{self.path}" + (f"?{query}" if query else ""))

    def __repr__(self) -> str:
        return f"ParsedUrl({str(self)!r})"

    def allow_only(self, names: Collection[str]) -> None:
        """Raises ConfigError if there is an option that is not one of ``names``."""
        for name in self.options:
            if name not in names:
                where = redacted(f"{self.scheme}:{self.path}")  # no options: one may be a misspelt password
                raise ConfigError(f"storage={where!r}: unknown option {name!r}; one of {', '.join(sorted(names))}")

    def size(self, name: str, default: int) -> int:
        """An option that is a size in bytes."""
        text = self.options.get(name)
        return default if text is None else parse_size(f"storage option {name}", text)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """An option that is one of ``choices``, the first by default."""
        value = self.options.get(name, choices[0])
        if value not in choices:
            raise ConfigError(f"storage option {name}={value!r}: one of {', '.join(choices)}")
        return value


def _url_text(text: object) -> str:
    """What is no text is not shown: it may have a password in it."""
    if not isinstance(text, str):
        raise ConfigError(f"storage: a URL is text, and this is of type {type(text).__name__}")
    return checks.text("storage", text)


def parse_url(text: str, options: Mapping[str, str] | None = None) -> ParsedUrl:
    """Take ``text`` apart; ``options`` are added to those in it and win.

    Raises:
        ConfigError: there is no scheme, or the query cannot be read.
    """
    location, _, query = _url_text(text).partition("?")
    options = None if options is None else checks.texts("options", options)
    scheme, colon, path = location.partition(":")
    if not scheme or not (colon or scheme == "none"):
        wanted = "scheme:path?option=value, as in file:/var/kv?capacity=10GiB"
        raise ConfigError(f"storage={redacted(text)!r}: expected {wanted}")
    if path.startswith("//"):
        path = path[2:]
    try:
        found = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise ConfigError(f"storage={redacted(location)!r}: options are name=value with & between them") from None
    return ParsedUrl(scheme, path, {**found, **(options or {})})
