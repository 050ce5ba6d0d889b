"""A rank's worker as its engine sees it: pools, batches, layers to wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from asynccache import checks
from asynccache.errors import CopyFailed
from asynccache.worker.performing import Performer
from asynccache.worker.sent import EngineBatch
from asynccache.worker.topology import Topology

if TYPE_CHECKING:
    from asynccache.config import CacheConfig
    from asynccache.worker.contract import DevicePool


class RankWorker:
    """One rank's pools, for its engine, and what the head asks of it. ``connect`` gives one, and ``AsyncCache.worker``
    where the head has a rank of its own."""

    def __init__(self, performer: Performer) -> None:
        self._performer = performer

    def __repr__(self) -> str:
        return f"RankWorker(rank {self.rank} of {self.topology})"

    @property
    def rank(self) -> int:
        """Its number."""
        return self._performer.rank

    @property
    def topology(self) -> Topology:
        """The whole group."""
        return self._performer.topology

    @property
    def config(self) -> CacheConfig:
        """This rank's configuration."""
        assert self._performer.config is not None
        return self._performer.config

    @property
    def pools(self) -> Mapping[str, DevicePool]:
        """The device pools by name: where the engine reads and writes KV."""
        local = self._performer.local
        return {} if local is None else local.pools

    @property
    def layers(self) -> int:
        """The model's layers up to the last one that this rank has."""
        local = self._performer.local
        return 0 if local is None else local.layers

    def __aiter__(self) -> RankWorker:
        return self

    async def __anext__(self) -> EngineBatch:
        """The next batch that ``AsyncCache.send_batch`` has sent and that was not read. Cancelling it loses none.

        Raises:
            StopAsyncIteration: the cache is closed.
            RankFailure: the head is gone, or the group has failed.
        """
        return await self._performer.batches.next()

    async def heard(self, number: int) -> EngineBatch | None:
        """Return when the head's word of batch ``number`` is here, and with it of all that the cache decided before:
        for engines whose own messages may come first. The batch; None, if it was ended before.

        Raises:
            ConfigError: ``number`` is none, or the cache was closed and never sent it.
            RankFailure: the head is gone, or the group has failed.
        """
        return await self._performer.batches.heard(checks.integer("number", number, 1))

    def end_batch(self, number: int, event: object | None = None) -> None:
        """``EngineBatch.end`` of the batch of this number. From any thread.

        Raises:
            ConfigError: it was not sent, or was ended before; or the device cannot wait for ``event``.
            RankFailure: the worker is closed, the group has failed, or its loop has ended.
        """
        self._performer.batches.find(checks.integer("number", number, 1)).end(event)

    def wait_layers(self, stream: object, batch: EngineBatch, i: int) -> None:
        """Hold later work of the engine's ``stream``, on the device, until layer ``i`` of all that ``batch`` needs is
        there. Never waits for a copy on the host. From any thread; another than the loop's waits for a turn of the
        loop, the first time for a batch, so the loop must not be waiting for that thread.

        Raises:
            ConfigError: ``stream`` is no stream, the model has no layer ``i``, or a load of the batch waits for a batch
                that was not ended.
            RankFailure: the worker is closed, the group has failed, or its loop has ended.
        """
        batch = checks.instance("batch", batch, EngineBatch)
        i = checks.integer("i", i, 0, self._performer.layers - 1)
        self._performer.wait_batch(stream, batch, i)

    async def layer(self, batch: EngineBatch, i: int) -> None:
        """Return when layer ``i`` of all that ``batch`` needs is on the device, or the load has failed here: for
        engines without streams. Cancelling it stops the waiting.

        Raises:
            CopyFailed: a load failed, and the head, which hears of it, takes nothing that the batch computes.
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
        """Return when the cache is closed, whatever was not read. Cancelling it stops the waiting.

        Raises:
            RankFailure: the head is gone, or the group has failed.
        """
        await self._performer.batches.ended()
