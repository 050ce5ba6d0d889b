"""The process's client: there is one, for set-up freezes the process and close freezes it longer.

Caches with the same options share it, counted; it stays when the last of them has gone, and is closed at exit: left to
the library, that may abort the process while a thread is still inside. Who needs other options while it is in use is
refused; while nobody uses it, it is replaced. Mutable state: ``_current``, under ``_lock``.
"""

from __future__ import annotations

import atexit
from threading import Lock
from typing import Any

from asynccache.errors import ConfigError
from asynccache.storage import Workers, settled
from asynccache_backends.mooncake.client import Client, State, library
from asynccache_backends.mooncake.probe import greet
from asynccache_backends.mooncake.regions import Regions
from asynccache_backends.mooncake.settings import ClientOptions


class Shared:
    """A client that is set up, the memory registered with it, and how many use it."""

    def __init__(self, options: ClientOptions, client: Client, module: Any) -> None:
        self.options = options
        self.client = client
        self.regions = Regions(client)
        self.module = module
        self.users = 1

    def __repr__(self) -> str:
        return f"Shared({self.options.master}, {self.client!r}, users={self.users})"

    def release(self) -> None:
        """One user less. The client stays."""
        with _lock:
            self.users -= 1


_lock = Lock()
_current: Shared | None = None


async def acquire(options: ClientOptions) -> Shared:
    """The process's client, set up at a master that answers. Its user releases it.

    Raises:
        ConfigError: the client is not installed, or is in use with other options.
        Unavailable: the master is not there (``Timeout``: it hangs), or refuses.

    Cancelling it waits for a set-up that has begun, and lets go of it.
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


def _acquire(options: ClientOptions, host: str) -> Shared:
    global _current
    with _lock:
        if _current is not None and _current.client.state is State.READY:
            if _current.options == options:
                _current.users += 1
                return _current
            _refuse_if_used(_current, options)
            _current.client.close()
        module = library()
        client = Client(module.MooncakeDistributedStore)
        client.set_up(options, host)
        atexit.register(client.close)
        _current = Shared(options, client, module)
        return _current


def _refuse_if_used(current: Shared, options: ClientOptions) -> None:
    if current.users:
        different = [name for name in options._fields if getattr(options, name) != getattr(current.options, name)]
        raise ConfigError(
            f"mooncake: this process's client is in use at {current.options.master} with another "
            f"{', '.join(different)}; a process has one client"
        )
