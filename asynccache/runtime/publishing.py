"""One lease's commits: in the order of the calls, and with the engine's batches that they and its pages wait for.

Laws:
* Nothing is published below pages whose load may yet fail. The caller sees to that (``Lease.loaded``).
* A backup waits for the ``ready`` batch of the pages that it copies: the engine's part of the runtime hears of that
  batch before the commit's plan is performed.
* A commit may find that the tree has some pages already. The lease's own copies of these are *duplicates*. They are
  free once the engine uses the new page table and has let go of the old one (``adopt``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asynccache.core.cache import Committed, CoreLease, LeaseRequest
from asynccache.core.plan import Wait
from asynccache.errors import ConfigError
from asynccache.runtime.driving import holding
from asynccache.runtime.engine_batches import not_over
from asynccache.runtime.hashing import Chain
from asynccache.runtime.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from asynccache.runtime.driver import Driver
    from asynccache.runtime.engine_batches import EngineBatches, RetireStage
    from asynccache.worker.contract import BatchInFlight


class Publisher:
    """The part that the commits of all leases share. ``hashes``: whether pages are hashed when they are published, for
    storage or for events. ``commits``: how many commits there were."""

    def __init__(self, driver: Driver, engine: EngineBatches, retire: RetireStage, *, hashes: bool) -> None:
        self.driver = driver
        self.engine = engine
        self.retire = retire
        self.hashes = hashes
        self.commits = 0

    def __repr__(self) -> str:
        return f"Publisher({self.commits} commits)"


class Publishing:
    """The commits of one lease. Mutable state: the longest key committed so far, its hashes, the ``ready`` batches that
    may not be over, and the duplicates that wait to be adopted. ``order``: one commit after the other."""

    __slots__ = ("_chain", "_core", "_key", "_publisher", "_ready", "_retiring", "_space", "order")

    def __init__(self, publisher: Publisher, core: CoreLease, ask: LeaseRequest, chain: Chain | None) -> None:
        self.order = asyncio.Lock()
        self._publisher = publisher
        self._core = core
        self._space = ask.space
        self._key = ask.key
        self._chain = chain or Chain(ask.space, publisher.driver.core.config.page_size)
        self._ready: list[BatchInFlight] = []
        self._retiring: list[int] = []

    def __repr__(self) -> str:
        return f"Publishing({self._core!r}, {len(self._ready)} batches, {len(self._retiring)} retiring)"

    def check(self, key: bytes, checkpoint: object) -> tuple[int, int] | None:
        """Check that the lease may commit ``key`` and ``checkpoint``. Returns the checkpoint as two integers; None if
        there is none.

        Raises:
            ConfigError: the key does not continue what the lease holds, or the checkpoint is not one of its own.
        """
        core, tokens = self._core, len(key) // TOKEN_BYTES
        if not (key.startswith(self._key) or self._key.startswith(key)):
            raise ConfigError("commit: tokens do not begin with the prompt of the lease")
        if tokens < core.length:
            raise ConfigError(f"commit: {tokens} tokens are fewer than the {core.length} committed")
        if tokens > core.reserved:
            raise ConfigError(f"commit: {tokens} tokens do not fit the {core.reserved} reserved")
        return None if checkpoint is None else self._publisher.driver.core.check_checkpoint(core, tokens, checkpoint)

    def expect(self, ready: BatchInFlight) -> None:
        """The engine writes into the lease's pages until ``ready`` is over. From now on a release waits for it,
        whatever becomes of the commit, and so do copies into these pages, some of which the commit may hand to
        others."""
        self._named(ready)

    def _named(self, batch: BatchInFlight) -> None:
        self._ready = [*not_over(*self._ready), batch]
        self._publisher.engine.fence(self._core, batch)

    async def publish(self, key: bytes, ready: BatchInFlight | None, checkpoint: tuple[int, int] | None) -> None:
        """Commit ``key``; the caller holds ``order``. Waits while pages of it are being loaded for others. Cancelling
        it has published everything or nothing."""
        hashes = await self._hashes(key) if self._publisher.hashes else b""
        self.adopt()
        while isinstance(answer := await self._try(key, hashes, ready, checkpoint), Wait):
            await self._publisher.driver.ops.any(answer.ops)

    async def _try(
        self, key: bytes, hashes: bytes, ready: BatchInFlight | None, checkpoint: tuple[int, int] | None
    ) -> Committed | Wait:
        driver = self._publisher.driver
        async with holding(driver.lock):
            driver.apply_outcomes()
            if self._core.released:
                raise RuntimeError("the lease is released")
            answer = driver.locked(driver.core.commit, self._core, key, hashes, checkpoint)
            if not isinstance(answer, Wait):
                self._published(key, ready)
            driver.perform(answer.plan, self._retiring)
        return answer

    async def _hashes(self, key: bytes) -> bytes:
        if not self._chain.covers(key):
            self._chain.known(key, self._publisher.driver.core.known_hashes(self._space, key))
        return await self._chain.extend(key)

    def _published(self, key: bytes, ready: BatchInFlight | None) -> None:
        """Note the commit before its plan is performed: the plan's backups must find ``ready``."""
        if len(key) > len(self._key):
            self._key = key
        if ready is not None:
            self._publisher.engine.expect(ready)
        self._publisher.commits += 1

    def adopt(self, after: BatchInFlight | None = None) -> None:
        """The engine uses the table of the last commit. Duplicates are free when ``after`` and every ``ready`` are
        over."""
        if after is not None:
            self._named(after)
        if self._retiring:
            retiring, self._retiring = self._retiring, []
            self._publisher.retire.put(retiring, not_over(*self._ready))

    def release(self, after: BatchInFlight | None, ended: bool) -> None:
        """Give the lease's pages back when ``after`` and every ``ready`` are over."""
        driver, batches = self._publisher.driver, not_over(*self._ready, after)
        self._publisher.engine.fence(self._core, *batches)
        plan = driver.give_back(driver.core.release, self._core, ended=ended, retire=bool(batches))
        driver.perform(plan, self._retiring)
        if self._retiring:
            self._publisher.retire.put(self._retiring, batches)
            self._retiring = []
