"""Models that are split over several ranks: shards in other processes also compute every step.

The scheduler knows of ranks by ``Shards`` and ``RankFailure`` alone.

What always holds:
* A batch is sent in the same turn of the event loop in which this rank begins to compute it, after the loads that it
  needs. Every commit and release names the batch that was sent last, so no page is given to another request before all
  ranks have computed that batch.
* Nothing of a step is published, and none of its tokens is handed out, before all ranks have computed it. An error on
  one rank fails the requests of that step and no others.
* When a rank has failed, every request fails at once, even while the model on this rank is computing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from asynccache import AsyncCache, RankFailure, checks
from asynccache.worker import EngineBatch, RankWorker
from asynccache_shim.model import Batch, Model, ModelThread, returned
from asynccache_shim.payload import PayloadReader, PayloadWriter

R = TypeVar("R")


class Shards:
    """The scheduler's side: sends batches to the other ranks, and waits until all ranks have computed them.

    ``own``: the worker of this process. ``lost`` is called when the group of ranks has failed, at most once.
    """

    def __init__(self, cache: AsyncCache, own: RankWorker, lost: Callable[[RankFailure], None]) -> None:
        self.sent: int | None = None
        """The number of the batch that was sent last; None before the first one."""
        self._cache = cache
        self._own = own
        self._lost = lost
        self._writer = PayloadWriter()
        self._watch = asyncio.get_running_loop().create_task(self._watch_group(), name="shards-watch")

    def close(self) -> None:
        """End watching the group. A second call does nothing."""
        self._watch.cancel()

    async def _watch_group(self) -> None:
        try:
            await self._own.ended()
        except RankFailure as failure:
            self._lost(failure)

    def send(self, batch: Batch) -> None:
        """Have the other ranks compute ``batch``. The caller must await ``everywhere`` after that.

        Raises:
            ConfigError: the batch is too large to be sent in one message; nothing was sent.
            CacheClosed, RankFailure: the cache is closed.
        """
        self.sent = self._cache.send_batch(self._writer.write(batch))

    async def everywhere(self, own: asyncio.Future[R]) -> R:
        """Wait until all ranks have computed the batch that was sent last; ``own`` is its computation on this rank.
        Returns the result of ``own``. A cancellation takes effect when all ranks have computed the batch.

        Raises:
            RankFailure: a rank has failed.
            Exception: the error of ``own``.
            BatchFailed: the model failed on other ranks but not on this one.
        """
        number = self.sent
        assert number is not None
        over = asyncio.get_running_loop().create_task(self._cache.batch_ended(number), name=f"shards-{number}")
        cancelled = await returned(own)
        error = own.exception()  # retrieved in any case, or asyncio would warn of an error that was never retrieved
        if not over.done():
            with suppress(RankFailure):  # ``over`` ends with it as well, and its error must be retrieved
                await self._end_own(number, error)
        cancelled = await returned(over) or cancelled
        if cancelled is not None:
            raise cancelled
        elsewhere = over.exception()
        if isinstance(elsewhere, RankFailure):
            raise elsewhere  # before the error of ``own``, which may be a consequence of it
        answer = own.result()
        if elsewhere is not None:
            raise elsewhere
        return answer

    async def _end_own(self, number: int, error: BaseException | None) -> None:
        batch = await self._own.heard(number)
        assert batch is not None
        _end(batch, error)


def _end(batch: EngineBatch, error: BaseException | None) -> None:
    """End a batch that the model of this rank has computed, or failed to compute with ``error``."""
    if error is None:
        batch.end()
    else:
        batch.fail(repr(error))


async def follow(worker: RankWorker, model: Model) -> None:
    """Compute this rank's shard of every step of the ``Scheduler``, which runs on the head's rank.

    ``model.forward`` gets the same batches as on the head's rank. The tokens that it returns here are ignored; an error
    that it raises fails the requests of that step. Returns when the cache is closed. A cancellation takes effect when
    the model has returned.

    Raises:
        RankFailure: the head or another rank has failed.
        ConfigError: an argument cannot be used, or a batch came that was not sent by a scheduler.
    """
    checks.instance("worker", worker, RankWorker)
    checks.provider("model", model, Model)  # type: ignore[type-abstract]
    reader, thread = PayloadReader(), ModelThread()
    try:
        async for sent in worker:
            future = thread.start(model.forward, reader.read(sent.payload))
            cancelled = await returned(future)
            _end(sent, future.exception())
            if cancelled is not None:
                raise cancelled
    finally:
        thread.close(wait=False)
