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
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from asynccache.errors import ConfigError
from asynccache.storage import HostPort, ParsedUrl, parse_host_port

ENVIRONMENT = "ASYNCCACHE_REDIS_"
OPTIONS = ("ca", "cert", "cluster", "connections", "key", "prefix", "stall", "tls_name", "ttl")

MOST_NUMBER = 999_999

_PREFIX = re.compile(r"[!-z|~]{1,128}")
_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)")
_SPANS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The settings of a Redis store. ``seeds``: the servers that the URL names. ``username`` and ``password`` are empty
    where there is none. ``ttl``: seconds that a page lives; 0: pages do not expire. ``connections``: how many a server
    has for pages. ``stall``: seconds after which a silent server counts as hung."""

    seeds: tuple[HostPort, ...]
    database: int = 0
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    tls_name: str = ""
    prefix: bytes = b"asynccache:"
    ttl: float = 0.0
    cluster: str = "auto"
    connections: int = 4
    stall: float = 5.0

    def __str__(self) -> str:
        scheme = "redis" if self.tls is None else "rediss"
        return f"{scheme}://{','.join(map(str, self.seeds))}/{self.database}?prefix={self.prefix.decode()}"


def settings_of(url: ParsedUrl, environment: Mapping[str, str] = os.environ) -> RedisSettings:
    """Return the settings in ``url``. The environment may have the user, the password and the TLS files that the URL
    leaves out.

    Raises:
        ConfigError: an option is unknown or unusable. The message names it, and never the user's part of the URL.
    """
    url.allow_only(OPTIONS)
    user, at, place = url.path.rpartition("@")
    username, _, password = user.partition(":")
    hosts, _, database = place.partition("/")
    prefix = url.options.get("prefix", "asynccache:")
    if _PREFIX.fullmatch(prefix) is None:
        raise ConfigError(f"storage option prefix={prefix!r}: 1 to 128 printable ASCII characters, no space, no braces")
    ttl = url.options.get("ttl", "0")
    seeds = tuple(_address(host) for host in hosts.split(","))
    if len(seeds) > 1 and url.options.get("cluster") == "off":
        raise ConfigError("storage option cluster='off': several hosts are those of a cluster")
    return RedisSettings(
        seeds=seeds,
        database=replace(url, options={"database": database or "0"}).whole_number("database", 0, 0, MOST_NUMBER),
        username=unquote(username) if at else environment.get(f"{ENVIRONMENT}USERNAME", ""),
        password=unquote(password) or environment.get(f"{ENVIRONMENT}PASSWORD", ""),
        tls=_tls(url, environment) if url.scheme == "rediss" else None,
        tls_name=url.options.get("tls_name", ""),
        prefix=prefix.encode(),
        ttl=0.0 if ttl == "0" else _span("ttl", ttl),
        cluster=url.choice("cluster", ("auto", "on", "off")),
        connections=url.whole_number("connections", 4, 1, MOST_NUMBER),
        stall=_span("stall", url.options.get("stall", "5")),
    )


def _address(text: str) -> HostPort:
    address = parse_host_port(text, 6379)
    if address is None:
        raise ConfigError("storage: expected redis://host:port/database, or host:port,host:port of a cluster")
    return address


def _span(name: str, text: str) -> float:
    """Return the seconds that ``text`` stands for, rounded to milliseconds, since the server counts in these."""
    match = _SPAN.fullmatch(text)
    seconds = round(float(match[1]) * _SPANS[match[2]], 3) if match else 0.0
    if not seconds:
        raise ConfigError(f"storage option {name}={text!r}: expected a time of 1 ms or more, as in 90s, 12h or 7d")
    return seconds


def _tls(url: ParsedUrl, environment: Mapping[str, str]) -> ssl.SSLContext:
    """Return the settings of TLS. A server's certificate is always verified: against ``ca``, or against the authorities
    that the system trusts."""
    names = ("ca", "cert", "key")
    ca, cert, key = (url.options.get(name) or environment.get(ENVIRONMENT + name.upper()) or None for name in names)
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"storage options ca, cert, key: {error}") from None
    return context
