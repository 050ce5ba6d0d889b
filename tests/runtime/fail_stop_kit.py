"""Worlds in whose core an exception is raised before one of its lines, wherever that is reached first."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from linecache import getline
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from asynccache import AsyncCache, AsyncCacheError, CacheClosed, CacheConfig, core
from asynccache.core import eviction, ledger, policies
from asynccache.core.audit import check
from asynccache.core.policies import POLICIES, P2c
from asynccache.core.settings import CoreConfig
from asynccache.runtime import head
from asynccache.runtime.core_calls import holding
from tests.simulated import world
from tests.simulated.backend import Hostility
from tests.simulated.loop import SimulatedLoop

FILES = frozenset(str(file) for file in Path(core.__path__[0]).rglob("*.py") if file.name != "audit.py")
"""The files of the core, but for the one that no call of the cache runs."""


STEPS = 50_000


class Point(NamedTuple):
    """A line of the core."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} {getline(*self).strip()}"


def points() -> frozenset[Point]:
    """All lines of the core that are within a function."""

    def lines(code: CodeType, within: bool) -> Iterator[Point]:
        if within:
            numbers = {line for _, _, line in code.co_lines()} - {None, code.co_firstlineno}
            yield from (Point(code.co_filename, line) for line in numbers if line is not None)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from lines(constant, within or bool(constant.co_flags & 1))

    return frozenset(point for file in FILES for point in lines(compile(Path(file).read_text(), file, "exec"), False))


class Injected(Exception):
    """The exception that is raised before a line of the core."""


class Injector:
    """Notes the lines that are reached while it is ``armed``, or raises where ``target`` is reached first."""

    def __init__(self, target: Point | None = None, clock: Callable[[], int] = int) -> None:
        self.target = target
        self.clock = clock
        self.seen: dict[Point, int] = {}
        self.fired = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        file = frame.f_code.co_filename
        if file not in FILES or self.fired or (self.target is not None and self.target.file != file):
            return None
        return self._reached

    def _reached(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            point = Point(frame.f_code.co_filename, frame.f_lineno)
            if self.target is None:
                self.seen.setdefault(point, self.clock())
            elif point == self.target and not self.fired:
                self.fired = True
                raise Injected(str(point))
        return self._reached


class FailStopWorld(world.World):
    """Where nothing is raised, or nothing has changed, all goes on. If the cache is closed, that is the reason."""

    goes_on = False

    def __init__(self, loop: SimulatedLoop, seed: int, injector: Injector) -> None:
        super().__init__(loop, world.draw_climate(seed))
        self.injector = injector
        if seed % 4 == 0:  # a store that is late
            self.stores["backend"].hostility = Hostility(delay=0.3)
        injector.clock = lambda: loop.steps

    def make(self, **more: Any) -> AsyncCache:
        return super().make(on_event=[].append if self.loop.seed % 2 else None)

    async def live(self) -> None:
        if self.injector.fired:
            return
        self.cache, self.goes_on = self.make(), False
        with self._excused(), ExitStack() as arming:
            arming.enter_context(self.injector.armed())
            async with asyncio.timeout(600), self.cache:
                with self._excused():
                    await self.requests(self.climate.requests)
                    await self.settle()
                arming.close()
                if self.cache.closed is None:
                    self.goes_on = True
                    await self._go_on()
                else:
                    assert "Injected" in self.cache.closed
                    with pytest.raises(CacheClosed):
                        await self.cache.match([1])
        await self.engine()

    async def _go_on(self) -> None:
        """Nothing was left behind by the call that raised, and requests are served right."""
        await self.settle()
        opened = self.cache._opened()
        opened.prefetches.drop_claims()
        async with holding(opened.driver.lock):
            while opened.core.world.dead_roots:
                opened.driver.perform(opened.driver.call_locked(opened.core.follow_up))
        check(opened.core, idle=True)
        await self.requests(2)

    def failed(self, error: BaseException) -> None:
        with self._excused():
            raise error

    @contextmanager
    def _excused(self) -> Iterator[None]:
        """What was raised here may come out, but not when all goes on; and that the cache is closed, if this is why."""
        try:
            yield
        except (Injected, AsyncCacheError) as error:
            came = not self.goes_on if isinstance(error, Injected) else isinstance(error.__cause__, Injected)
            if not (self.injector.fired and isinstance(error, (Injected, CacheClosed)) and came):
                raise


def play(seed: int, injector: Injector) -> None:
    """Play the world of this seed.

    Raises:
        Exception: fail-stop does not hold, or something else is wrong.
    """
    with grained(seed % 3):
        world.played(seed, world.draw_climate(seed).leads, lambda loop: FailStopWorld(loop, seed, injector), STEPS)


@contextmanager
def grained(steps: int) -> Iterator[None]:
    """The core's limits are so small that small worlds reach them."""
    def small(config: CacheConfig) -> CoreConfig:
        return replace(usual(config), slice_steps=steps or usual(config).slice_steps)

    usual = CacheConfig.core
    with (
        patch.object(CacheConfig, "core", small),
        patch.object(eviction, "_CHUNK", 2), patch.dict(POLICIES, {"p2c": lambda config: P2c(config, learn_every=2)}),
        patch.object(policies, "_COHORTS", 2), patch.object(policies, "_MOST_GHOSTS", 4),
        patch.object(policies, "_PRIOR_BLOCKS", 0.01), patch.object(policies, "_MOST_PAGES", 24),
        patch.object(policies, "_FEWEST", 4), patch.object(policies, "_ALARM", 4.0),
        patch.object(ledger, "_SHORT", 4), patch.object(head, "REMEMBERED", 4),
    ):  # fmt: skip
        yield
