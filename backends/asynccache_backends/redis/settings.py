"""The settings in a URL and the environment: where the server is, and how it is used. No text or error that is made
here shows a secret.

``redis://user:password@host:6379/0?prefix=...`` or ``rediss://`` with TLS; a cluster may be named by several hosts.
The user's part of a URL is percent-encoded, everything else is literal.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import unquote

from msgspec import Meta
from msgspec.structs import replace

from asynccache.errors import ConfigError
from asynccache.settings import Settings, fields_of
from asynccache.storage import KEY_BYTES, HostPort, ParsedUrl, parse_host_port

ENVIRONMENT = "ASYNCCACHE_REDIS_"
TLS_FILES = ("ca", "cert", "key")

_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)")
_SPANS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _span(name: str, text: str) -> float:
    """Return the seconds that ``text`` stands for, rounded to milliseconds, since the server counts in these."""
    match = _SPAN.fullmatch(text)
    seconds = round(float(match[1]) * _SPANS[match[2]], 3) if match else 0.0
    if not seconds and text != "0":
        raise ConfigError(f"{name}={text!r}: expected a time of 1 ms or more, as in 90s, 12h or 7d")
    return seconds


class RedisSettings(Settings, frozen=True, kw_only=True):
    """The settings of a Redis store."""

    seeds: tuple[HostPort, ...]
    """The servers that the URL names. ``username`` and ``password`` are empty where there is none."""
    database: Annotated[int, Meta(ge=0, le=999_999)] = 0
    username: str = ""
    password: str = ""
    tls: ssl.SSLContext | None = None
    """Made of the files ``ca``, ``cert`` and ``key``."""
    ca: str = ""
    cert: str = ""
    key: str = ""
    tls_name: str = ""
    prefix: Annotated[str, Meta(pattern=r"^[!-z|~]{1,128}$(?!\n)")] = "asynccache:"
    ttl: Annotated[float, Meta(ge=0, extra={"parse": _span})] = 0.0
    """Seconds that a page lives; 0: pages do not expire."""
    cluster: Literal["auto", "on", "off"] = "auto"
    connections: Annotated[int, Meta(ge=1, le=999_999)] = 4
    """How many connections a server has for pages."""
    stall: Annotated[float, Meta(ge=0.001, extra={"parse": _span})] = 5.0
    """Seconds after which a silent server counts as hung."""

    @property
    def pattern(self) -> bytes:
        """A pattern for SCAN. It matches the names of all pages of this store, and maybe others."""
        return re.sub(r"([*?\[\]\\^-])", r"\\\1", self.prefix).encode() + b"*"

    def key_of(self, name: bytes) -> bytes | None:
        """Return the 32 bytes of the page with this name; None if it is no name of this store. All names of a store
        have one length, so that no name belongs to two stores, whatever their prefixes are."""
        key = name[len(self.prefix) :]
        return key if name.startswith(self.prefix.encode()) and len(key) == KEY_BYTES else None

    def __str__(self) -> str:
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{','.join(map(str, self.seeds))}/{self.database}?prefix={self.prefix}"

    def __repr__(self) -> str:
        return f"RedisSettings({str(self)!r})"


def settings_of(url: ParsedUrl, environment: Mapping[str, str] = os.environ) -> RedisSettings:
    """Return the settings in ``url``. The environment may have the user, the password and the TLS files that the URL
    leaves out.

    Raises:
        ConfigError: an option is unknown or unusable. The message names it, and never the user's part of the URL.
    """
    names = ("username", "password", *TLS_FILES)
    given = {name: environment.get(ENVIRONMENT + name.upper(), "").encode(errors="replace").decode() for name in names}
    user, at, place = url.path.rpartition("@")
    username, _, password = user.partition(":")
    hosts, _, database = place.partition("/")
    seeds = [parse_host_port(host, 6379) for host in hosts.split(",")]
    if None in seeds:
        raise ConfigError("storage: expected redis://host:port/database, or host:port,host:port of a cluster")
    settings = url.settings(
        RedisSettings,
        seeds=seeds,
        database=fields_of(RedisSettings)["database"].read("storage: database", database or "0"),
        username=unquote(username) if at else given["username"],
        password=unquote(password) or given["password"],
        tls=None,
    )
    if len(seeds) > 1 and settings.cluster == "off":
        raise ConfigError("storage option cluster='off': several hosts are those of a cluster")
    if url.scheme != "rediss":
        return settings
    ca, cert, key = (getattr(settings, name) or given[name] or None for name in TLS_FILES)
    try:
        tls = ssl.create_default_context(cafile=ca)
        if cert:
            tls.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"storage options ca, cert, key: {error}") from None
    return replace(settings, tls=tls)
