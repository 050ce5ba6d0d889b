"""The settings in a Mooncake URL: those of the process's client, and those of one cache. Pure functions.

    mooncake://master:port?segment=0&buffer=16MiB&protocol=tcp|rdma&device=&metadata=P2PHANDSHAKE&host=
        &replicas=1&threads=1&namespace=asynccache.&admin=host:port
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from asynccache.errors import ConfigError
from asynccache.redaction import redacted
from asynccache.settings import Settings
from asynccache.storage import KEY_BYTES, HostPort, ParsedUrl, Size, parse_host_port

DEFAULT_PORT = 50051
Few = Annotated[int, Meta(ge=1, le=16)]


CLIENT_OPTIONS = ("master", "metadata", "host", "segment", "buffer", "protocol", "device")
"""The settings of a process's client. Caches of the process can share it only if all of these are equal."""


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


class MooncakeSettings(Settings, frozen=True, kw_only=True):
    """The settings in a URL, those of the client and those of one cache.

    ``host``: the name under which other machines reach this one; "" is the address from which it reaches the master.
    ``segment``: bytes of memory that this process contributes to the store. ``buffer``: bytes of the client's own
    buffer. ``namespace``: the beginning of the names of this cache's objects. ``replicas``: copies of each page.
    ``threads``: how many reads, and how many writes, are made at a time; each keeps a core busy while it waits, so 1 is
    best where there are few cores. ``admin``: the master's metrics server, which is needed only to list pages.
    """

    master: HostPort
    metadata: Annotated[str, Meta(pattern=r"^(P2PHANDSHAKE|(https?|etcd|redis)://[^@\s]+)$")] = "P2PHANDSHAKE"
    host: str = ""
    segment: Size = 0
    buffer: Size = 16 << 20        # with RDMA, memory that is not registered is copied through it
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    namespace: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,64}$")] = "asynccache."
    replicas: Few = 1
    threads: Few = 1
    admin: Annotated[HostPort | None, Meta(extra={"parse": _host_port})] = None

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
    return url.settings(MooncakeSettings, master=_host_port("the master", url.path.rstrip("/"), DEFAULT_PORT))
