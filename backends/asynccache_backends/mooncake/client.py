"""The only access to Mooncake's client library, which segfaults when it is called before set-up or after close.

Law: the library is called only in the state READY, between ``__enter__`` and ``__exit__``, which count the calls under
way. ``close`` first refuses new calls and then waits until none is under way. The states are NEW → READY → CLOSING →
CLOSED; a set-up that fails leads from NEW to CLOSED. It is used from several threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import Enum, auto
from threading import Condition
from types import TracebackType
from typing import Any

from asynccache.errors import ConfigError, Unavailable
from asynccache.extras import install
from asynccache_backends.mooncake.settings import ClientOptions

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


class ClientState(Enum):
    """The state of a client."""

    NEW = auto()
    READY = auto()
    CLOSING = auto()
    CLOSED = auto()


class MooncakeClient:
    """A client of the library. Every call to the library's object is made inside ``with client as store:``."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.state = ClientState.NEW
        self._make = make
        self._store: Any = None
        self._calls = 0
        self._changed = Condition()

    def __repr__(self) -> str:
        return f"MooncakeClient({self.state.name}, calls={self._calls})"

    def set_up(self, options: ClientOptions, host: str) -> None:
        """Connect to the master; only once. It holds the GIL meanwhile.

        Raises:
            Unavailable: the client could not be set up, or was set up before.
        """
        with self._changed:
            if self.state is not ClientState.NEW:
                raise Unavailable(f"mooncake: a client is set up once; this one is {self.state.name}")
            self.state = ClientState.CLOSED
            self._store = self._make()
            code = self._store.setup(
                host, options.metadata, options.segment, options.buffer, options.protocol, options.device,
                str(options.master),
            )  # fmt: skip
            if code != 0:
                raise Unavailable(f"mooncake: the client could not be set up at master {options.master} ({code})")
            self.state = ClientState.READY

    def __enter__(self) -> Any:
        with self._changed:
            if self.state is not ClientState.READY:
                raise Unavailable(f"mooncake: the client is {self.state.name}")
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
            if self.state is not ClientState.READY:
                return
            self.state = ClientState.CLOSING
            self._changed.wait_for(lambda: self._calls == 0)
            self._store.close()
            self.state = ClientState.CLOSED


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
        raise ConfigError(f"storage mooncake: {error}; {LIBRARIES}") from error
    return store
