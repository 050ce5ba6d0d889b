"""The settings in a Mooncake URL: those of the process's client, and those of one cache. Pure functions.

    mooncake://master:port?segment=0&buffer=16MiB&protocol=tcp|rdma&device=&metadata=P2PHANDSHAKE&host=
        &replicas=1&threads=1&namespace=asynccache.&admin=host:port
"""

from __future__ import annotations

import re
from typing import NamedTuple

from asynccache.errors import ConfigError
from asynccache.redaction import redacted
from asynccache.storage import KEY_BYTES, HostPort, ParsedUrl, parse_host_port

OPTIONS = ("segment", "buffer", "protocol", "device", "metadata", "host", "replicas", "threads", "namespace", "admin")
DEFAULT_PORT = 50051
DEFAULT_BUFFER = 16 << 20  # with RDMA the client copies memory that is not registered through a buffer of this size
HANDSHAKE = "P2PHANDSHAKE"

_NAMESPACE = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_METADATA = re.compile(r"P2PHANDSHAKE|(https?|etcd|redis)://[^@\s]+")


class ClientOptions(NamedTuple):
    """The settings of a process's client. Caches of the process can share it only if all of these are equal.

    ``host``: the name under which other machines reach this one; "" is the address from which it reaches the master.
    ``segment``: bytes of memory that this process contributes to the store. ``buffer``: bytes of the client's own
    buffer.
    """

    master: HostPort
    metadata: str
    host: str
    segment: int
    buffer: int
    protocol: str
    device: str


class MooncakeSettings(NamedTuple):
    """The settings in a URL, those of the client and those of one cache.

    ``namespace``: the beginning of the names of this cache's objects. ``replicas``: copies of each page. ``threads``:
    how many reads, and how many writes, are made at a time; each keeps a core busy while it waits, so 1 is best where
    there are few cores. ``admin``: the master's metrics server, which is needed only to list pages.
    """

    client: ClientOptions
    namespace: str
    replicas: int
    threads: int
    admin: HostPort | None

    def name(self, key: bytes) -> str:
        """Return the name of a page's object: the namespace and the key in hex."""
        return self.namespace + key.hex()

    def key_of(self, name: str) -> bytes | None:
        """Return the key of the page with this object name; None if the object is not of this namespace."""
        if not re.fullmatch(self.pattern, name):
            return None
        return bytes.fromhex(name.removeprefix(self.namespace))

    @property
    def pattern(self) -> str:
        """A regular expression for all objects of this namespace."""
        return f"^{self.namespace.replace('.', '[.]')}[0-9a-f]{{{2 * KEY_BYTES}}}$"


def settings_of(url: ParsedUrl) -> MooncakeSettings:
    """Return the settings in ``url``.

    Raises:
        ConfigError: an option is unknown or unusable, or no master is named.
    """
    url.allow_only(OPTIONS)
    options = url.options
    return MooncakeSettings(
        ClientOptions(
            _host_port("the master", url.path.rstrip("/"), DEFAULT_PORT),
            _matching("metadata", options.get("metadata", HANDSHAKE), _METADATA),
            options.get("host", ""),
            url.size("segment", 0),
            url.size("buffer", DEFAULT_BUFFER),
            url.choice("protocol", ("tcp", "rdma")),
            options.get("device", ""),
        ),
        _matching("namespace", options.get("namespace", "asynccache."), _NAMESPACE),
        url.whole_number("replicas", 1, 1, 16),
        url.whole_number("threads", 1, 1, 16),
        _host_port("admin", options["admin"]) if "admin" in options else None,
    )


def _host_port(what: str, text: str, default: int | None = None) -> HostPort:
    """Parse ``host:port`` or ``[v6]:port``; or ``host`` alone if there is a default port. ``what`` names it in errors.

    Raises:
        ConfigError: ``text`` has none of these forms.
    """
    found = parse_host_port(text, default)
    if found is None:
        shown = redacted(f"mooncake://{text}").removeprefix("mooncake://")
        raise ConfigError(f"mooncake: {what} is named {shown!r}; expected host:port, as in mooncake://10.0.0.1:50051")
    return found


def _matching(name: str, value: str, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(value):
        raise ConfigError(f"storage option {name}={value!r} does not match {pattern.pattern}")
    return value
