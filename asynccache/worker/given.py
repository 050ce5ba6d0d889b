"""What an embedder gives a cache instead of what the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asynccache.config import CacheConfig
from asynccache.worker.contract import Device, Storage

MOMENT = 1.0
"""Seconds that copies on a device of the embedder's are waited for, whatever the deadline."""


class Given:
    """What the embedder gives instead of what the configuration names; the embedder closes what it made. ``locate``:
    what a store's URL stands for, where that is not the URL itself."""

    def __init__(
        self, device: Device | None = None, storage: Storage | None = None,
        locate: Callable[[str], Storage] = lambda url: url,
    ) -> None:  # fmt: skip
        self.device = device
        self.storage = storage
        self.locate = locate

    def stores(self, config: CacheConfig) -> tuple[Storage, ...]:
        """What there is at the start."""
        return tuple(map(self.locate, config.stores)) if self.storage is None else (self.storage,)

    def options(self, config: CacheConfig) -> Mapping[str, str]:
        """What is added to the URL."""
        return config.storage_options if self.storage is None else {}
