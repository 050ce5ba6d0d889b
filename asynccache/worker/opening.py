"""Opens the worker of this process: its pools, and its stores. The module is apart from ``local``, because torch comes
with it."""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.config import CacheConfig, PoolSpec
from asynccache.errors import ConfigError
from asynccache.extras import without_torch
from asynccache.memory.device import Device, parse_device
from asynccache.settle import completed, completed_in_thread
from asynccache.storage.checked import store_layout
from asynccache.storage.tiers import TieredStore
from asynccache.worker.local import MOMENT, EmbedderParts, LocalWorker, close_all
from asynccache.worker.pool_layout import PoolMap

try:
    from asynccache.memory.cpu import CpuDevice
    from asynccache.memory.pools import Mover
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(without_torch(error), name=error.name) from None


def open_device(name: str) -> Device:
    """Open the device that a configuration names."""
    if parse_device(name).kind == "cpu":
        return CpuDevice()
    from asynccache.memory.cuda.device import open_device

    return open_device(name)


async def open_local(config: CacheConfig, specs: Sequence[PoolSpec], given: EmbedderParts) -> LocalWorker:
    """Allocate the pools of ``specs`` and open the stores. Cancelling it leaves nothing open.

    Raises:
        ConfigError: the pools do not fit in memory, or the device or a backend is unknown.
        Unavailable: a store cannot be opened now.
    """
    device, tiers, own = given.device, TieredStore(), given.device is None
    mover: Mover | None = None

    def allocate() -> Mover:
        nonlocal device, mover
        if device is None:
            device = open_device(config.device)
        mover = Mover(device, specs)
        return mover

    takes_stores = config.pools()[0].host_pages > 0
    try:
        # Pools first: they may be refused, and a store leaves traces. In a thread: a GPU is measured, and to pin
        # 100 GiB takes half a minute.
        made = await completed_in_thread(allocate)
        if given.storage is not None and not takes_stores:
            raise ConfigError("storage: it needs a host tier, and host_tokens is 0")
        pools = PoolMap(specs, config.page_size, made.host_pools)
        layout = store_layout(config.pools())
        worker = LocalWorker(made, pools, tiers, layout, takes_stores=takes_stores, own_device=own)
        if given.storage is None:
            await worker.open_first(list(map(given.locate, config.stores)), config.storage_options)
        else:
            await worker.open_first([given.storage], {})
    except BaseException:
        await completed(close_all(tiers, mover, device, MOMENT, own=own))
        raise
    return worker
