"""The one door to the client library. The client segfaults when it is called before set-up or after close.

Law: a call reaches it only in READY, between ``__enter__`` and ``__exit__``, which count who is inside; ``close`` shuts
the door first and waits until everybody is out. The steps are NEW → READY → CLOSING → CLOSED; a set-up that failed
leads from NEW to CLOSED. Used from threads.
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
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",          # set-up holds the GIL: with a dead master 90 s otherwise
    "MC_RPC_TIMEOUT_MS": "1000",                   # how long a hung master holds a call's buffers; 30 s otherwise
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",            # how long a hung owner holds a transfer's; 30 s otherwise
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_LANES_PER_PEER": "16",                 # transfers that a hung owner holds up together, not one by one
    "MC_LOG_LEVEL": "ERROR",                       # it logs to stderr
}

INSTALL = install("mooncake")
LIBRARIES = "apt-get install libibverbs1 libnuma1"


class State(Enum):
    """Where a client's life has got to."""

    NEW = auto()
    READY = auto()
    CLOSING = auto()
    CLOSED = auto()


class Client:
    """``with client as store:`` around every call to ``store``, the library's own object."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.state = State.NEW
        self._make = make
        self._store: Any = None
        self._inside = 0
        self._door = Condition()

    def __repr__(self) -> str:
        return f"Client({self.state.name}, inside={self._inside})"

    def set_up(self, options: ClientOptions, host: str) -> None:
        """Connect; once. Holds the GIL while it lasts.

        Raises:
            Unavailable: the client could not be set up, or was before.
        """
        with self._door:
            if self.state is not State.NEW:
                raise Unavailable(f"mooncake: a client is set up once; this one is {self.state.name}")
            self.state = State.CLOSED
            self._store = self._make()
            code = self._store.setup(
                host, options.metadata, options.segment, options.buffer, options.protocol, options.device,
                str(options.master),
            )  # fmt: skip
            if code != 0:
                raise Unavailable(f"mooncake: the client could not be set up at master {options.master} ({code})")
            self.state = State.READY

    def __enter__(self) -> Any:
        with self._door:
            if self.state is not State.READY:
                raise Unavailable(f"mooncake: the client is {self.state.name}")
            self._inside += 1
            return self._store

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._door:
            self._inside -= 1
            self._door.notify_all()

    def close(self) -> None:
        """Shut the door, wait until nobody is inside, and close. Holds the GIL in the end. Twice is fine."""
        with self._door:
            if self.state is not State.READY:
                return
            self.state = State.CLOSING
            self._door.wait_for(lambda: self._inside == 0)
            self._store.close()
            self.state = State.CLOSED


def prepare() -> None:
    """Set what the library reads from the environment, unless the user has."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def library() -> Any:
    """The library's module, imported with the environment that it needs.

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
