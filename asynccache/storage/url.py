"""Parsing of store URLs, ``scheme:path?option=value&...``. Pure functions.

A URL of any scheme may have the options of ``StoreOptions``. They say how the store is used, and backends never see
them. All other options are the backend's.

A password in a URL is for its backend alone. Wherever a URL is shown, in a text or an error, its passwords are
replaced by ``***``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from msgspec import Meta

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.redaction import HIDDEN, is_secret, redacted
from asynccache.settings import Positive, Seconds, Settings, fields_of

_S = TypeVar("_S", bound=Settings)

_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
_LONGEST_NAME = 253


class HostPort(NamedTuple):
    """A host and a port. An IPv6 address is without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(text: str, default: int | None = None) -> HostPort | None:
    """Parse ``host:port`` or ``[v6]:port``; and also ``host`` and ``[v6]`` where there is a ``default`` port.

    Returns None if ``text`` is none of them, if the port does not lie between 1 and 65535, or if the host is neither an
    address nor a name that a machine can have. The name is not looked up.
    """
    match = _HOST_PORT.fullmatch(checks.text("text", text, empty=True))
    default = None if default is None else checks.integer("default", default, 1, 65535)
    port = None if match is None else int(match[3]) if match[3] else default
    if match is None or port is None or not 0 < port < 65536:
        return None
    if not (_is_address(IPv6Address, match[1]) if match[1] else _is_host(match[2])):
        return None
    return HostPort(match[1] or match[2], port)


def _is_host(text: str) -> bool:
    if not text.strip("0123456789."):
        return _is_address(IPv4Address, text)
    labels = text.removesuffix(".").split(".")
    return len(text) <= _LONGEST_NAME and all(map(_LABEL.fullmatch, labels))


def _is_address(kind: type[IPv4Address | IPv6Address], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, repr=False)
class ParsedUrl:
    """The parts of a store URL. ``path`` is the text between the scheme and the options, without a leading ``//``;
    nothing in it is decoded. ``str()`` and ``repr()`` show no secrets."""

    scheme: str
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", checks.text("scheme", self.scheme))
        object.__setattr__(self, "path", checks.text("path", self.path))
        object.__setattr__(self, "options", checks.texts("options", self.options))

    def __str__(self) -> str:
        query = "&".join(f"{name}={HIDDEN if is_secret(name) else value}" for name, value in self.options.items())
        return redacted(f"{self.scheme}:{self.path}" + (f"?{query}" if query else ""))

    def __repr__(self) -> str:
        return f"ParsedUrl({str(self)!r})"

    def settings(self, kind: type[_S], **own: Any) -> _S:
        """Return the options as settings of this kind. ``own``: those of its settings that are no options.

        Raises:
            ConfigError: an option is unknown or unusable; the message names it.
        """
        if not (isinstance(kind, type) and issubclass(kind, Settings)):
            raise ConfigError(f"kind={checks.shown(kind)} must be a subclass of Settings")
        fields = fields_of(kind)
        self.allow_only(fields.keys() - own.keys())
        found = {name: fields[name].read(f"storage option {name}", text) for name, text in self.options.items()}
        return kind(**found, **own)

    def allow_only(self, names: Collection[str]) -> None:
        """Raise ConfigError if the URL has an option that is not one of ``names``, a collection of texts."""
        names = checks.names("names", names)
        for name in self.options:
            if name not in names:
                where = redacted(f"{self.scheme}:{self.path}")  # without options: a misspelt one may be a password
                known = f"one of {', '.join(sorted(names))}" if names else "it has none"
                raise ConfigError(f"storage={where!r}: unknown option {name!r}; {known}")


def _url_text(text: object) -> str:
    """Return ``text`` if it is text. The error shows only its type, since it may have a password in it."""
    if not isinstance(text, str):
        raise ConfigError(f"storage: a URL is text, and this is of type {type(text).__name__}")
    return checks.text("storage", text)


def parse_url(text: str, options: Mapping[str, str] | None = None) -> ParsedUrl:
    """Parse a store URL. ``options`` are added to those in ``text`` and win over them.

    Raises:
        ConfigError: there is no scheme, the options cannot be read, or one is given twice.
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
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ConfigError(f"storage={redacted(location)!r}: options are name=value with & between them") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ConfigError(f"storage={redacted(location)!r}: option {twice!r} is given more than once")
    return ParsedUrl(scheme, path, {**found, **(options or {})})


MOST_CALLS = 1 << 16


class StoreOptions(Settings, frozen=True):
    """The settings of one store."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "store"
    """The store's name among the attached ones."""
    write: bool = True
    """Whether pages are written to the store."""
    promote: bool = True
    """Whether pages that were found in a farther store are copied to this one."""
    timeout: Positive = 30.0
    """Seconds that a call may take."""
    concurrency: Annotated[int, Meta(ge=1, le=MOST_CALLS)] = 16
    """How many reads, and how many writes, the backend has at a time, at most."""
    slow: Seconds = 10.0
    """Seconds after which a call that is still running counts as a failure for the breaker; 0 means never."""

    def _where(self) -> str:
        return "storage option "


NAMES = StoreOptions.__struct_fields__


def take_options(url: ParsedUrl) -> tuple[StoreOptions, ParsedUrl]:
    """Split the options of ``url``. Returns those of ``StoreOptions``, and a URL with the rest, for the backend. The
    scheme is the store's name if there is no option ``name``.

    Raises:
        ConfigError: an option has an unusable value; the message names both.
    """
    checks.instance("url", url, ParsedUrl)
    own = {"name": url.scheme} | {name: text for name, text in url.options.items() if name in NAMES}
    rest = {name: text for name, text in url.options.items() if name not in NAMES}
    return replace(url, options=own).settings(StoreOptions), replace(url, options=rest)


def check_name(name: str, taken: Collection[str]) -> None:
    """Raise ConfigError if ``name`` is one of ``taken``, the names of the other stores."""
    if name in taken:
        raise ConfigError(f"storage: a store {name!r} is attached already; call this one otherwise (name=)")


def place_of(name: str | None, names: Sequence[str]) -> int:
    """Return the place of the store ``name`` in ``names``, those of the stores that are attached; with None, of the
    only one.

    Raises:
        ConfigError: there is no store of this name; or ``name`` is None and there is not exactly one store.
    """
    if name is not None:
        name = checks.text("name", name)
    found = [place for place, one in enumerate(names) if name in (None, one)]
    if len(found) == 1:
        return found[0]
    there = ", ".join(names) or "none"
    raise ConfigError(f"storage: {'name the store' if name is None else f'no store {name!r}'}; attached: {there}")
