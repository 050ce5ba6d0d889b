"""What ``--faults`` does to a device and to the backends of a run."""

from __future__ import annotations

from asynccache.config import CacheConfig
from asynccache.memory.faults import Faults
from asynccache.storage import StorageBackend, backend_class, parse_url, take_options
from asynccache.storage.records import store_layout
from asynccache.testing.faulty_backend import FaultyBackend


def device_faults(share: float, seed: int) -> Faults:
    """Of all copies."""
    return Faults(seed=seed, delayed=share / 2, failing=share / 4)


async def open_faulty(
    config: CacheConfig, share: float, seed: int, stores: list[tuple[StorageBackend, dict[str, str]]]
) -> None:
    """The backends, which fail now and then, and how the cache is to use each; added to ``stores`` as they open."""
    for number, storage in enumerate(config.stores):
        url = parse_url(storage, config.storage_options)
        _, own = take_options(url)
        common = {name: value for name, value in url.options.items() if name not in own.options}
        backend = await backend_class(url.scheme).open(own, store_layout(config.pools()))
        stores.append((FaultyBackend(backend, share, seed + number), {"name": url.scheme, **common}))
