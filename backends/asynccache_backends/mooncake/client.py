"""The process's client, and the only access to Mooncake's library, which segfaults when it is called before set-up or
after close.

Law: the library is called only in the state READY, between ``__enter__`` and ``__exit__``, which count the calls under
way. ``close`` first refuses new calls and then waits until none is under way. The states are READY → CLOSING → CLOSED.
The client is used from several threads.

A process has only one client, because no other thread of the process runs while a client is set up, and for still
longer while one is closed. Caches with the same options share it. It stays when the last of them has closed, for the
next one. It is closed at the end of the process: if that were left to the library, the process might abort while a
thread still calls it. A cache with other options is refused while the client is in use; if nobody uses it, it is
replaced. Mutable state: ``_current``, which ``_lock`` guards.
"""

from __future__ import annotations

import asyncio
import atexit
import os
from collections.abc import Mapping
from threading import Condition, Lock
from types import TracebackType
from typing import Any

from asynccache.errors import ConfigError, Unavailable
from asynccache.extras import install
from asynccache.storage import settled
from asynccache_backends.mooncake.master import greet
from asynccache_backends.mooncake.regions import Regions
from asynccache_backends.mooncake.settings import CLIENT_OPTIONS, MooncakeSettings

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
    ``module`` is the library; ``regions``: the memory that is registered; ``users``: how many caches use the client."""

    def __init__(self, options: MooncakeSettings, host: str, module: Any) -> None:
        """Connect to the master. The GIL is held meanwhile. Raises Unavailable if the client could not be set up."""
        self.options = options
        self.module = module
        self.regions = Regions(self)
        self.users = 1
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
