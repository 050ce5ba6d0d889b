"""A storage backend that somebody else made and will close: everything passes through but ``aclose``."""

from __future__ import annotations

from asynccache.storage.contract import StorageBackend, is_shared
from asynccache.storage.probing import Probeable
from asynccache.storage.watching import Watchable


class Borrowed:
    """``backend`` for as long as one cache, or one ``Pages``, is open."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self.exists = backend.exists
        self.get = backend.get
        self.put = backend.put
        self.delete = backend.delete
        self.clear = backend.clear
        self.register = backend.register
        self.stats = backend.stats
        self.flush = backend.flush
        self.shared = is_shared(backend)
        if isinstance(backend, Watchable):
            self.watch = backend.watch
        if isinstance(backend, Probeable):
            self.probe = backend.probe

    def __repr__(self) -> str:
        return f"Borrowed({self._backend!r})"

    async def aclose(self) -> None:
        """Leave the backend to its owner. There is nothing to cancel."""
