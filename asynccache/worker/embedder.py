"""The device and stores that an embedder gives a cache instead of those that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asynccache.config import CacheConfig
from asynccache.worker.contract import Device, Storage

MOMENT = 1.0
"""Seconds that a closing cache waits at least for copies on a device of the embedder's, whatever the deadline."""


class EmbedderParts:
    """The embedder's ``device`` and ``storage``; None: what the configuration names is used. The embedder closes what
    it made. ``locate``: returns what to open for a store's URL; by default the URL itself."""

    def __init__(
        self, device: Device | None = None, storage: Storage | None = None,
        locate: Callable[[str], Storage] = lambda url: url,
    ) -> None:  # fmt: skip
        self.device = device
        self.storage = storage
        self.locate = locate

    def stores(self, config: CacheConfig) -> tuple[Storage, ...]:
        """Return the stores to open when the cache opens."""
        return tuple(map(self.locate, config.stores)) if self.storage is None else (self.storage,)

    def options(self, config: CacheConfig) -> Mapping[str, str]:
        """Return the options that are added to the URL of each of ``stores``."""
        return config.storage_options if self.storage is None else {}
