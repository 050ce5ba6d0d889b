"""Several ranks: a model's shards in other processes compute every step, too. Nothing else in here knows of them.

Laws:
* A batch is sent in the turn in which its step begins, behind the loads that it stands on. Every commit and release
  names the last one that was sent, so no page goes to anybody else before all ranks have done with it.
* Nothing of a step is published, and none of its tokens leaves, before all ranks have computed it. What fails on one of
  them fails the requests of that step and nothing else.
* When a rank is gone every request is told at once, whatever the model here is busy with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from asynccache import AsyncCache, RankFailure, checks
from asynccache.worker import RankWorker
from asynccache_shim.model import Batch, Model
from asynccache_shim.payload import PayloadReader, PayloadWriter
from asynccache_shim.thread import ModelThread, returned

R = TypeVar("R")


class Shards:
    """The scheduler's side. ``sent``: the number of the last batch that was sent; None before the first.

    ``own``: the worker of this process. ``lost`` is called, at most once, when the group has failed.
    """

    def __init__(self, cache: AsyncCache, own: RankWorker, lost: Callable[[RankFailure], None]) -> None:
        self.sent: int | None = None
        self._cache = cache
        self._own = own
        self._lost = lost
        self._writer = PayloadWriter()
        self._watch = asyncio.get_running_loop().create_task(self._watch_group(), name="shards-watch")

    def __repr__(self) -> str:
        return f"Shards({self._own!r}, batch {self.sent})"

    def close(self) -> None:
        """Watch the group no more. Idempotent."""
        self._watch.cancel()

    async def _watch_group(self) -> None:
        try:
            await self._own.ended()
        except RankFailure as failure:
            self._lost(failure)

    def send(self, batch: Batch) -> None:
        """Have the other ranks compute ``batch``; ``everywhere`` is to follow.

        Raises:
            ConfigError: it is larger than what can be sent at once; nothing was sent.
            CacheClosed, RankFailure: the cache is closed.
        """
        self.sent = self._cache.send_batch(self._writer.write(batch))

    async def everywhere(self, own: asyncio.Future[R]) -> R:
        """What ``own``, this rank's part of the batch that was sent last, returns, when all ranks have computed theirs.
        Cancelling it takes effect then.

        Raises:
            RankFailure: a rank is gone.
            Exception: what ``own`` raises.
            BatchFailed: the model failed on other ranks alone.
        """
        number = self.sent
        assert number is not None
        over = asyncio.get_running_loop().create_task(self._cache.batch_ended(number), name=f"shards-{number}")
        cancelled = await returned(own)
        error = own.exception()  # looked at also where another rank's failure is what is told
        if not over.done():
            await self._end_own(number, error)
        cancelled = await returned(over) or cancelled
        if cancelled is not None:
            raise cancelled
        elsewhere = over.exception()
        if isinstance(elsewhere, RankFailure):
            raise elsewhere  # of which the model here may have failed, too
        answer = own.result()
        if elsewhere is not None:
            raise elsewhere
        return answer

    async def _end_own(self, number: int, error: BaseException | None) -> None:
        batch = await self._own.heard(number)
        assert batch is not None
        if error is None:
            batch.end()
        else:
            batch.fail(repr(error))


async def follow(worker: RankWorker, model: Model) -> None:
    """Compute this rank's shard of every step of the ``Scheduler`` on the head's rank: ``model.forward`` gets the same
    batches there and here, and what it returns here is not looked at. What it raises fails the requests of that step.

    Returns when the cache is closed. Cancelling it takes effect when the model has returned.

    Raises:
        RankFailure: the head is gone, or the group has failed.
        ConfigError: an argument is unusable, or a batch came that no scheduler has sent.
    """
    checks.instance("worker", worker, RankWorker)
    checks.provider("model", model, Model)  # type: ignore[type-abstract]
    reader, thread = PayloadReader(), ModelThread()
    try:
        async for sent in worker:
            future = thread.start(model.forward, reader.read(sent.payload))
            cancelled = await returned(future)
            error = future.exception()
            if error is None:
                sent.end()
            else:
                sent.fail(repr(error))
            if cancelled is not None:
                raise cancelled
    finally:
        thread.close(wait=False)
