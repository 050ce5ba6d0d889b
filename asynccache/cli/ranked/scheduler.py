"""A rank's scheduler: one iteration for each tick, in the one task that calls the cache."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

from asynccache.cli.engine import Engine
from asynccache.cli.meter import Meter, peak_rss, spread
from asynccache.cli.options import Settings
from asynccache.cli.ranked.digest import tree_digest
from asynccache.cli.ranked.lives import Aborted, Life, turn
from asynccache.cli.ranked.messages import Answer, Pulse, Tick
from asynccache.cli.ranked.server import Places, RankedServer
from asynccache.cli.request import Request
from asynccache.cli.tally import Tally
from asynccache.errors import CacheFull

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache


SMALL_TREE = 1024
"""Nodes of a tree that is looked at in every tick: that costs some milliseconds."""


class Scheduler:
    """Mutable state: the requests under way, in the order of their arrival."""

    def __init__(self, cache: AsyncCache, engine: Engine, settings: Settings, tally: Tally, meter: Meter) -> None:
        self.tally = tally
        self._cache = cache
        self._meter = meter
        self._server = RankedServer(cache, engine, settings, tally)
        self._places = Places(settings.concurrency) if settings.speed else None
        self._lives: dict[int, Life] = {}

    async def iterate(self, tick: Tick, pause: float = 0.0) -> Answer:
        """Everything that a tick asks for, and a step. ``pause``: seconds before the step. Cancelling it leaves the
        group unusable.

        Raises:
            RankFailure, RankDivergence: another rank is gone, or has done something else.
        """
        for arrival in tick.arrivals:
            request = arrival.whole()
            self._lives[request.number] = life = Life(self._one(request))
            await life.resume()  # as far as its first turn, where an abort in this tick may meet it
        for number in tick.aborts:
            if number in self._lives:
                self._lives[number].abort()
        ended = [number for number, life in tuple(self._lives.items()) if await life.resume()]
        for number in ended:
            del self._lives[number]
        if pause:
            await asyncio.sleep(pause)
        await self._cache.step()
        return self._answer(tick, tuple(ended))

    def close(self) -> None:
        """The group is gone: every request gives back what it holds."""
        for life in self._lives.values():
            life.close()
        self._lives.clear()

    async def _one(self, request: Request) -> None:
        self.tally.requests += 1
        try:
            await turn()
            await self._server.serve(request, self._places)
        except Aborted:
            self.tally.cancelled += 1
        except CacheFull as error:
            self.tally.failed += 1
            self.tally.problem(f"request {request.number} gave up: {error}")

    def _answer(self, tick: Tick, ended: tuple[int, ...]) -> Answer:
        steps, digest = history(self._cache)
        core = self._cache.core
        small = core.statistics().nodes <= SMALL_TREE
        tree = tree_digest(core) if tick.look or small else None
        return Answer(tick.number, steps, digest, ended, tree, self._pulse() if tick.look else None)

    def _pulse(self) -> Pulse:
        tally, statistics = self.tally, self._cache.statistics()
        shelves = (("L1", statistics.device["full"]), ("L2", statistics.host["full"]))
        lag = spread(self._meter.recent(), 1e3)
        return Pulse(
            (tally.served, tally.cancelled, tally.failed), tally.tokens, (tally.device, tally.host, tally.storage),
            tally.verified, tally.mismatches,
            tuple((name, 1 - shelf.free / shelf.capacity) for name, shelf in shelves if shelf.capacity),
            {name: stage.bytes for name, stage in statistics.stages.items()}, (lag.p99, lag.max), peak_rss(),
        )  # fmt: skip


def history(cache: AsyncCache) -> tuple[int, int]:
    """How many steps there were, and the digest of every call and decision."""
    lockstep = cache._opened().lockstep
    assert lockstep is not None
    return lockstep.steps.step_number, lockstep.chain.digest


class Delays:
    """How long a rank dawdles: up to ``longest`` seconds, by a seed of its own."""

    def __init__(self, longest: float, seed: int, rank: int) -> None:
        self._longest = longest
        self._random = Random(f"delays {seed}/{rank}")

    def draw(self) -> float:
        """The next one."""
        return self._random.random() * self._longest if self._longest else 0.0
