"""The process's client, and the only access to Mooncake's library, which segfaults when it is called before set-up or
after close.

The library is called only in the state READY, between ``__enter__`` and ``__exit__``, which count the calls under
way. ``close`` first refuses new calls and then waits until none is under way. The states are READY → CLOSING → CLOSED.
The client is used from several threads.

A process has only one client, because no other thread of the process runs while a client is set up, and for still
longer while one is closed. Caches with the same options share it. It stays when the last of them has closed, for the
next one. It is closed at the end of the process: if that were left to the library, the process might abort while a
thread still calls it. A cache with other options is refused while the client is in use; if nobody uses it, it is
replaced. Mutable state: ``_current``, which ``_lock`` guards.

Memory is registered with the client, which then reads and writes it directly: each run of memory once, however many
caches share it (``Regions``, which several threads use). The client refuses memory that overlaps registered memory.
Pages in memory that it has refused are copied through a *stage* (see ``transfers``).

The master is asked for a sign of life on the event loop before the client is used, because the client would hold the
GIL for seconds to find that out. The names of all objects are asked of its admin server, which also serves its metrics.

The settings in a URL are those of the process's client, and those of one cache:

    mooncake://master:port?segment=0&buffer=16MiB&protocol=tcp|rdma&device=&metadata=P2PHANDSHAKE&host=
        &replicas=1&threads=1&namespace=asynccache.&admin=host:port
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from threading import Condition, Lock
from time import monotonic
from types import TracebackType
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from msgspec import Meta

from asynccache.errors import ConfigError, Timeout, Unavailable
from asynccache.extras import install
from asynccache.redaction import redacted
from asynccache.settings import Settings
from asynccache.storage import KEY_BYTES, HostPort, ParsedUrl, Size, parse_host_port, settled

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
    """The settings in a URL, those of the client and those of one cache."""

    master: HostPort
    metadata: Annotated[str, Meta(pattern=r"^(P2PHANDSHAKE|(https?|etcd|redis)://[^@\s]+)$")] = "P2PHANDSHAKE"
    host: str = ""
    """The name under which other machines reach this one; "" is the address from which it reaches the master."""
    segment: Size = 0
    """Bytes of memory that this process contributes to the store."""
    buffer: Size = 16 << 20        # with RDMA, memory that is not registered is copied through it
    """Bytes of the client's own buffer."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    namespace: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,64}$")] = "asynccache."
    """The beginning of the names of this cache's objects."""
    replicas: Few = 1
    """How many copies of each page are kept."""
    threads: Few = 1
    """How many reads, and how many writes, are made at a time; each keeps a core busy while it waits, so 1 is best
    where there are few cores."""
    admin: Annotated[HostPort | None, Meta(extra={"parse": _host_port})] = None
    """The master's metrics server, which is needed only to list pages."""

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


class Region(NamedTuple):
    """A run of memory, by its first address and the one past its last."""

    start: int
    end: int


class Regions:
    """The memory that is registered with ``client``."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client
        self._wanted: Counter[Region] = Counter()
        self._sorted: tuple[list[int], list[int]] = ([], [])  # replaced, never changed: look-ups need no lock
        self._lock = Lock()

    def add(self, region: Region) -> bool:
        """Register a region, or add a user to one that is registered. Returns False if the client refuses it. Each
        ``add`` that returned True needs a ``remove``."""
        with self._lock:
            if not self._wanted[region]:
                with self._client as store:
                    code: int = store.register_buffer(region.start, region.end - region.start)
                if code != 0:
                    del self._wanted[region]
                    return False
            self._wanted[region] += 1
            self._sort()
            return True

    def remove(self, region: Region) -> None:
        """Take one user from a region. Without users it is unregistered."""
        with self._lock:
            self._wanted[region] -= 1
            if not self._wanted[region]:
                del self._wanted[region]
                self._sort()
                with self._client as store:
                    store.unregister_buffer(region.start)

    def covers(self, start: int, length: int) -> bool:
        """Return True if the ``length`` bytes from the address ``start`` on are in one registered region."""
        starts, ends = self._sorted
        i = bisect_right(starts, start) - 1
        return i >= 0 and start + length <= ends[i]

    def _sort(self) -> None:
        runs = sorted(self._wanted)
        self._sorted = ([run.start for run in runs], [run.end for run in runs])


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of ``view``."""
    if view.readonly:
        address: int = np.frombuffer(view, np.uint8).ctypes.data
        return address
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def region_of(memory: memoryview) -> Region:
    """Return the region of ``memory``."""
    start = address_of(memory)
    return Region(start, start + memory.nbytes)


def copy(to: Any, source: memoryview) -> None:
    """Copy bytes. The GIL is released meanwhile."""
    np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))


ENVIRONMENT: Mapping[str, str] = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # set-up holds the GIL; by default it takes 90 s if the master is away
    "MC_RPC_TIMEOUT_MS": "1000",           # how long a call keeps its buffers if the master hangs; by default 30 s
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",    # how long a transfer keeps its buffers if the owner hangs; by default 30 s
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_LANES_PER_PEER": "16",         # so many transfers wait for a hung owner at the same time, not in turn
    "MC_LOG_LEVEL": "ERROR",               # the library logs to stderr
}
"""Settings of the library, which it reads from environment variables."""

INSTALL = install("mooncake")
LIBRARIES = "apt-get install libibverbs1 libnuma1"


class MooncakeClient:
    """A client of the library, set up. Every call to the library's object is made inside ``with client as store:``.
    ``module`` is the library.
    """

    def __init__(self, options: MooncakeSettings, host: str, module: Any) -> None:
        """Connect to the master. The GIL is held meanwhile. Raises Unavailable if the client could not be set up."""
        self.options = options
        self.module = module
        self.regions = Regions(self)
        """The memory that is registered."""
        self.users = 1
        """How many caches use the client."""
        self._calls = 0
        self._changed = Condition()
        self._store = module.MooncakeDistributedStore()
        code = self._store.setup(
            host, options.metadata, options.segment, options.buffer, options.protocol, options.device,
            str(options.master),
        )  # fmt: skip
        if code != 0:
            raise Unavailable(f"mooncake: the client could not be set up at master {options.master} ({code})")
        self.state = "READY"

    def __repr__(self) -> str:
        return f"MooncakeClient({self.options.master}, {self.state}, users={self.users}, calls={self._calls})"

    def __enter__(self) -> Any:
        with self._changed:
            if self.state != "READY":
                raise Unavailable(f"mooncake: the client is {self.state}")
            self._calls += 1
            return self._store

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._changed:
            self._calls -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse new calls, wait until none is under way, and close the client, which holds the GIL. Calling it twice
        is fine."""
        with self._changed:
            if self.state != "READY":
                return
            self.state = "CLOSING"
            self._changed.wait_for(lambda: self._calls == 0)
            self._store.close()
            self.state = "CLOSED"

    def release(self) -> None:
        """Note that one of the users has ended. The client stays."""
        with _lock:
            self.users -= 1


_lock = Lock()
_current: MooncakeClient | None = None


async def acquire(options: MooncakeSettings) -> MooncakeClient:
    """Return the process's client, set up for the master of ``options``. The caller has to ``release`` it. Cancelling
    it waits for a set-up that has begun, and releases the client.

    Raises:
        ConfigError: the client is not installed, or is in use with other options.
        Unavailable: the master cannot be reached, or refuses. ``Timeout``: it does not answer.
    """
    host = await greet(options.master)
    # no task, because asyncio.run ends all tasks when it is interrupted, and nobody would release the client then
    setup = asyncio.get_running_loop().run_in_executor(None, _acquire, options, options.host or host)
    try:
        await settled([setup])
    except BaseException:
        if setup.exception() is None:
            setup.result().release()
        raise
    return setup.result()


def _acquire(options: MooncakeSettings, host: str) -> MooncakeClient:
    global _current
    with _lock:
        if _current is not None and _current.state == "READY":
            different = [o for o in CLIENT_OPTIONS if getattr(options, o) != getattr(_current.options, o)]
            if not different:
                _current.users += 1
                return _current
            if _current.users:
                raise ConfigError(
                    f"mooncake: this process's client is in use at {_current.options.master} with another "
                    f"{', '.join(different)}; a process has one client"
                )
            _current.close()
        _current = None
        _current = MooncakeClient(options, host, library())
        atexit.register(_current.close)
        return _current


def prepare() -> None:
    """Set the environment variables that the library reads, except those that the user has set."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def library() -> Any:
    """Import and return the library's module, with the environment that it needs.

    Raises:
        ConfigError: it is not installed, or a shared library that it needs is not.
    """
    prepare()
    try:
        from mooncake import store
    except ModuleNotFoundError as error:
        raise ConfigError(f"storage mooncake: the client is not installed; {INSTALL}") from error
    except ImportError as error:
        raise ConfigError(f"storage mooncake: the client cannot be loaded: {error}; {LIBRARIES}") from error
    return store


GREET_WITHIN = 1.0

_HELLO = b"\x15" + bytes(19)  # the header of a request without a function: the master refuses it, so it answers
ADMIN_WITHIN = 10.0
LIST_WITHIN = 60.0
MOST_BYTES = 1 << 30  # of an answer, for about ten million names
PIECE_BYTES = 1 << 20
PATH = "/get_all_keys"


async def greet(master: HostPort, within: float = GREET_WITHIN) -> str:
    """Wait for an answer of the master, and return the address of this machine from which it was reached. Cancelling it
    closes the connection.

    Raises:
        Unavailable: the master cannot be reached.
        Timeout: it did not answer within ``within`` seconds.
    """
    try:
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_connection(master.host, master.port)
            try:
                host: str = writer.get_extra_info("sockname")[0]
                writer.write(_HELLO)
                await reader.read(1)  # any byte will do, and so will the end: the master has read the request
                return host
            finally:
                writer.transport.abort()
    except TimeoutError as error:
        raise Timeout(f"mooncake: master {master} does not answer") from error
    except OSError as error:
        raise Unavailable(f"mooncake: master {master} cannot be reached: {error.strerror or error}") from error


def object_names(admin: HostPort) -> list[str]:
    """Ask the admin server for the names of all objects and return them. It blocks.

    Raises:
        Unavailable: the server cannot be asked, does not answer in time, or answers with more than ``MOST_BYTES``.
    """
    connection = HTTPConnection(admin.host, admin.port, timeout=ADMIN_WITHIN)
    body, end = bytearray(), monotonic() + LIST_WITHIN
    try:
        connection.request("GET", PATH)
        response = connection.getresponse()
        while part := response.read1(PIECE_BYTES):
            body += part
            if len(body) > MOST_BYTES or monotonic() > end:
                raise Unavailable(
                    f"mooncake: the admin server {admin} has no end of its answer to {PATH}: {len(body)} bytes so far"
                )
    except (OSError, HTTPException) as error:
        raise Unavailable(f"mooncake: the admin server {admin} cannot be asked: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise Unavailable(f"mooncake: the admin server {admin} answered {response.status} to {PATH}")
    return body.decode("utf-8", "replace").split()
