"""A rank's worker as its engine sees it: pools, batches, layers to wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from asynccache import checks
from asynccache.errors import CopyFailed
from asynccache.worker.rank_performer import Performer
from asynccache.worker.sent_batches import EngineBatch
from asynccache.worker.topology import Topology

if TYPE_CHECKING:
    from asynccache.config import CacheConfig
    from asynccache.worker.contract import DevicePool


class RankWorker:
    """One rank as its engine sees it: its pools, and the batches that the head sends, in an ``async for``. ``connect``
    gives one, and so does ``AsyncCache.worker`` if the head has a rank of its own."""

    def __init__(self, performer: Performer) -> None:
        self._performer = performer

    def __repr__(self) -> str:
        return f"RankWorker(rank {self.rank} of {self.topology})"

    @property
    def rank(self) -> int:
        """The rank's number, from 0 on."""
        return self._performer.rank

    @property
    def topology(self) -> Topology:
        """The topology of the whole group."""
        return self._performer.topology

    @property
    def config(self) -> CacheConfig:
        """This rank's configuration: the head's, changed by ``shard``."""
        assert self._performer.config is not None
        return self._performer.config

    @property
    def pools(self) -> Mapping[str, DevicePool]:
        """The device pools by name, where the engine reads and writes KV; empty once the worker is closed."""
        local = self._performer.local
        return {} if local is None else local.pools

    @property
    def layers(self) -> int:
        """The number of the model's layers, up to the last one that this rank has; 0 once the worker is closed."""
        local = self._performer.local
        return 0 if local is None else local.layers

    def __aiter__(self) -> RankWorker:
        return self

    async def __anext__(self) -> EngineBatch:
        """Return the next batch that ``AsyncCache.send_batch`` has sent and that was not read. Cancelling it loses
        none.

        Raises:
            StopAsyncIteration: the cache is closed.
            RankFailure: the head is gone, or the group has failed.
        """
        return await self._performer.batches.next()

    async def heard(self, number: int) -> EngineBatch | None:
        """Wait until the head has sent batch ``number``, and return the batch; None if it was ended before. By then all
        that the cache decided before the batch is here, too. This is for engines whose own messages may arrive before
        the head's. Cancelling it stops the waiting.

        Raises:
            ConfigError: ``number`` is no integer from 1 on, or the cache was closed and never sent the batch.
            RankFailure: the head is gone, or the group has failed.
        """
        return await self._performer.batches.heard(checks.integer("number", number, 1))

    def end_batch(self, number: int, event: object | None = None) -> None:
        """Call ``EngineBatch.end`` of batch ``number``. From any thread.

        Raises:
            ConfigError: the batch was not sent, or was ended before; or the device cannot wait for ``event``.
            RankFailure: the worker is closed, the group has failed, or its loop has ended.
        """
        self._performer.batches.find(checks.integer("number", number, 1)).end(event)

    def wait_layers(self, stream: object, batch: EngineBatch, i: int) -> None:
        """Hold later work of the engine's ``stream``, on the device, until layer ``i`` of all loads that ``batch``
        needs is there. The calling thread never waits for a copy. From any thread: at the first call for a batch, a
        thread other than the loop's waits for a turn of the loop, so the loop must not be waiting for that thread.

        Raises:
            ConfigError: ``stream`` is no stream, the model has no layer ``i``, or a load of the batch waits for a batch
                that was not ended.
            RankFailure: the worker is closed, the group has failed, or its loop has ended.
        """
        batch = checks.instance("batch", batch, EngineBatch)
        i = checks.integer("i", i, 0, self._performer.layers - 1)
        self._performer.wait_batch(stream, batch, i)

    async def layer(self, batch: EngineBatch, i: int) -> None:
        """Return when layer ``i`` of all loads that ``batch`` needs is on the device. This is for engines without
        streams. Cancelling it stops the waiting.

        Raises:
            CopyFailed: a load failed here. The head hears of it, and takes nothing that the batch computes.
            ConfigError: the model has no layer ``i``.
            RankFailure: the worker is closed, or the group has failed.
        """
        batch = checks.instance("batch", batch, EngineBatch)
        i = checks.integer("i", i, 0, self._performer.layers - 1)
        for op in batch.loads:
            await self._performer.layer(op, i)
        if batch.lost:
            raise CopyFailed(f"a load that batch {batch.number} needs has failed on rank {self.rank}")

    async def ended(self) -> None:
        """Return when the cache is closed, also if batches were not read. Cancelling it stops the waiting.

        Raises:
            RankFailure: the head is gone, or the group has failed.
        """
        await self._performer.batches.ended()
