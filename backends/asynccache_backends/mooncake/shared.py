"""The process's client. There is only one, because no other thread of the process runs while a client is set up, and
for still longer while one is closed.

Caches with the same options share the client. It stays when the last of them has closed, for the next one. It is closed
at the end of the process: if that were left to the library, the process might abort while a thread still calls it.
A cache with other options is refused while the client is in use; if nobody uses it, it is replaced. Mutable state:
``_current``, which ``_lock`` guards.
"""

from __future__ import annotations

import atexit
from threading import Lock
from typing import Any

from asynccache.errors import ConfigError
from asynccache.storage import Workers, settled
from asynccache_backends.mooncake.client import ClientState, MooncakeClient, library
from asynccache_backends.mooncake.probe import greet
from asynccache_backends.mooncake.regions import Regions
from asynccache_backends.mooncake.settings import ClientOptions


class SharedClient:
    """A client that is set up, the memory that is registered with it, and the number of its users."""

    def __init__(self, options: ClientOptions, client: MooncakeClient, module: Any) -> None:
        self.options = options
        self.client = client
        self.regions = Regions(client)
        self.module = module
        self.users = 1

    def __repr__(self) -> str:
        return f"SharedClient({self.options.master}, {self.client!r}, users={self.users})"

    def release(self) -> None:
        """Note that one of the users has ended. The client stays."""
        with _lock:
            self.users -= 1


_lock = Lock()
_current: SharedClient | None = None


async def acquire(options: ClientOptions) -> SharedClient:
    """Return the process's client, set up for the master of ``options``. The caller has to ``release`` it. Cancelling
    it waits for a set-up that has begun, and releases the client.

    Raises:
        ConfigError: the client is not installed, or is in use with other options.
        Unavailable: the master cannot be reached, or refuses. ``Timeout``: it does not answer.
    """
    host = await greet(options.master)
    worker = Workers(1, "asynccache-mooncake-setup")
    future = worker.call(_acquire, options, options.host or host)
    try:
        await settled([future])
    except BaseException:
        if future.exception() is None:
            future.result().release()
        raise
    finally:
        worker.close()
    return future.result()


def _acquire(options: ClientOptions, host: str) -> SharedClient:
    global _current
    with _lock:
        if _current is not None and _current.client.state is ClientState.READY:
            if _current.options == options:
                _current.users += 1
                return _current
            _refuse_if_used(_current, options)
            _current.client.close()
        module = library()
        client = MooncakeClient(module.MooncakeDistributedStore)
        client.set_up(options, host)
        atexit.register(client.close)
        _current = SharedClient(options, client, module)
        return _current


def _refuse_if_used(current: SharedClient, options: ClientOptions) -> None:
    if current.users:
        different = [name for name in options._fields if getattr(options, name) != getattr(current.options, name)]
        raise ConfigError(
            f"mooncake: this process's client is in use at {current.options.master} with another "
            f"{', '.join(different)}; a process has one client"
        )
