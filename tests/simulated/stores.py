"""Stores that come and go in a simulated world, at any time and cancelled at any await.

A share of the worlds has them; they outlive the lives of their world's cache, as servers would. What they are and when
they come is drawn from sources of their own, so the rest of the world is the one that its seed always was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from random import Random
from typing import Any

from asynccache.runtime.cache import AsyncCache
from tests.simulated.backend import Hostility, SimulatedBackend
from tests.simulated.loop import SimulatedLoop

_COUNT = 2
_SHARE = 0.5


class Guests:
    """The stores of one world. ``changes``: how often one came or went. ``options``: with which they come."""

    def __init__(self, loop: SimulatedLoop, hostility: Hostility) -> None:
        self._loop = loop
        self._random = loop.entropy("guests")
        self.changes = 0
        self.options: Mapping[str, str] = {}
        self.backends = {
            f"guest{i}": SimulatedBackend(loop.entropy(f"guest {i}"), hostility)
            for i in range(_COUNT if self._random.random() < _SHARE else 0)
        }

    async def come_and_go(self, cache: AsyncCache, over: asyncio.Event) -> None:
        """Attach and detach them until it is ``over``; whoever is attached then stays."""
        while self.backends and not over.is_set():
            await asyncio.sleep(self._random.random() * 0.2)
            name = self._random.choice(list(self.backends))
            await self._change(self._work(cache, name))

    def _work(self, cache: AsyncCache, name: str) -> Coroutine[Any, Any, object]:
        random = self._random
        if name in cache.stores:
            return cache.detach_storage(name, timeout=random.choice((None, 0, 0.05)))
        options = {"write": _yes(random, 0.7), "promote": _yes(random, 0.7), "name": name, **self.options}
        position = random.choice((None, 0))
        return cache.attach_storage(
            self.backends[name], options=options, position=position, backfill=random.random() < 0.5
        )

    async def _change(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(work, name=f"guest change {self.changes}")
        self.changes += 1
        if self._random.random() < 0.4:
            self._loop.cancel_at(task, self._random.randint(1, 30))
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def aclose(self) -> None:
        """Close all stores at the end of the world. None may hold a buffer any more."""
        for name, backend in self.backends.items():
            await backend.aclose()
            assert backend.holding == 0, f"{name} still holds buffers"


def _yes(random: Random, share: float) -> str:
    return "yes" if random.random() < share else "no"
