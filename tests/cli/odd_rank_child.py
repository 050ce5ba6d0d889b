"""A rank of ``asynccache stress`` of which number 1 is odd, as the environment says: ``ASYNCCACHE_ODD``."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable
from typing import Any

from asynccache.cli.engine import Engine
from asynccache.cli.ranked import child, messages
from asynccache.cli.ranked.messages import Answer
from asynccache.cli.ranked.scheduler import Scheduler

TICK = 10


def forgetful() -> None:
    """Every fifth write is left out."""
    write, count = Engine.write, iter(range(1 << 30))

    def writes(self: Engine, pieces: Any) -> None:
        if next(count) % 5 != 3:
            write(self, pieces)

    Engine.write = writes  # type: ignore[method-assign]


def at_tick(act: Any) -> None:
    """``await act(cache)`` before the step of tick ``TICK``."""
    iterate = Scheduler.iterate

    async def iterates(self: Scheduler, tick: Any, pause: float = 0.0) -> Any:
        if tick.number == TICK:
            await act(self._cache)
        return await iterate(self, tick, pause)

    Scheduler.iterate = iterates  # type: ignore[method-assign]


async def call(cache: Any) -> None:
    """One that no other rank makes."""
    await cache.match(list(range(64)))


async def tamper(cache: Any) -> None:
    """With what no call and no decision has touched."""
    for root in cache.core.world.roots.values():
        root.stored = 1 << 40


def garbled() -> None:
    """The answer to tick ``TICK`` is nothing that can be read."""
    send = messages.send

    def sends(writer: Any, message: object) -> None:
        if isinstance(message, Answer) and message.tick == TICK:
            writer.write(struct.pack("<I", 7) + b"garbage")
        else:
            send(writer, message)

    child.send = sends  # type: ignore[attr-defined]


ODD: dict[str, Callable[[], None]] = {
    "forgetful": forgetful, "call": lambda: at_tick(call), "tampered": lambda: at_tick(tamper),
    "garbled": garbled,
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1] == "1":
        ODD[os.environ["ASYNCCACHE_ODD"]]()
    child.main()
