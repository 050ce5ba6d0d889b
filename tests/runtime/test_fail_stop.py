"""Fail-stop: whatever a core call raises that it does not document, either nothing has changed or the cache is closed.

An exception is raised before each statement of the core that a few small worlds reach, one statement a world. Then the
cache must be closed with that exception and everybody must have been told; or the audit holds, nothing is left behind
and requests are served right.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

import pytest

from asynccache import AsyncCache, AsyncCacheError, CacheClosed, CacheFull
from asynccache.core import cache as core_module
from asynccache.core.audit import check
from asynccache.core.plan import EMPTY, More, Plan
from asynccache.memory.faults import Faults
from asynccache.runtime.driver import Driver
from asynccache.testing.simulated_backend import HONEST, SimulatedBackend
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import Order, SimulatedLoop, simulate
from tests.runtime.runtime_kit import PAGE, compute, parts, serve, settings, settled, text, turns

CORE = core_module.__file__.removesuffix("cache.py")
POOLS = ("full", "swa")
PARTS = 4
STEPS = 50_000

Statement = tuple[str, int]
Scenario = Callable[[AsyncCache], Awaitable[None]]


class Injected(Exception):
    """What a statement of the core raises here."""


class Injector:
    """Notes the statements of the core that run, and raises before the first run of ``target``."""

    def __init__(self, target: Statement | None = None) -> None:
        self.target = target
        self.seen: dict[Statement, None] = {}
        self.fired = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        return self._line if name.startswith(CORE) and not name.endswith("audit.py") and not self.fired else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            statement = (frame.f_code.co_filename, frame.f_lineno)
            self.seen.setdefault(statement)
            if statement == self.target and not self.fired:
                self.fired = True
                raise Injected(f"{statement[0].removeprefix(CORE)}:{statement[1]}")
        return self._line


# worlds


async def requests(cache: AsyncCache) -> None:
    """Prompts that share prefixes, checkpoints, and every call of a lease."""
    await asyncio.gather(*(serve(cache, text(5) + text(2, seed), POOLS) for seed in range(3)))
    async with cache.lease(text(6) + text(1, 9), new_tokens=PAGE) as lease:
        await lease.loaded()
        compute(cache, lease, text(6) + text(1, 9), POOLS)
        await lease.commit((text(6) + text(1, 9))[: 6 * PAGE], checkpoint=(6 * PAGE, int(lease.states[1])))
        with suppress(CacheFull):
            await lease.extend(PAGE, states=1)
        lease.advance(8 * PAGE)
        lease.truncate(7 * PAGE)
        await lease.commit(text(6) + text(1, 9))
        lease.release(ended=True)
    kept = await cache.keep(text(5), ttl=5.0)
    kept.release()


async def pressure(cache: AsyncCache) -> None:
    """More than the device and the host hold: evictions, loads, private copies, requests in line."""
    for seed in range(6):
        async with cache.lease(text(6, seed)) as lease:
            compute(cache, lease, text(6, seed), POOLS)
            await lease.commit(text(6, seed), checkpoint=(6 * PAGE, int(lease.states[1])))
    await settled(cache)
    tasks = [asyncio.ensure_future(serve(cache, text(6, seed) + text(1, 50), POOLS)) for seed in range(6)]
    tasks[4].cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome
    await cache.flush()


async def storage(cache: AsyncCache) -> None:
    """Prefixes come back from storage, some of them in vain."""
    for seed in range(5):
        await serve(cache, text(6, seed), POOLS)
        await cache.flush()
    handles = [cache.prefetch(text(6, seed) + text(1, 60)) for seed in range(5)]
    handles[1].cancel()
    for seed in (0, 2, 3):
        async with cache.lease(text(6, seed) + text(1, 60), prefetch=handles[seed]) as lease:
            await lease.loaded()
            compute(cache, lease, text(6, seed) + text(1, 60), POOLS)
            await lease.commit(text(6, seed) + text(1, 60))
    with suppress(AsyncCacheError):
        await handles[4]
    handles[4].cancel()
    await cache.explain(text(6, 1))
    name = await cache.attach_storage("memory:", name="other")
    await cache.detach_storage(name)
    async with cache.lease(text(6, 2)):
        await cache.invalidate()
    await cache.reset()


async def twice(cache: AsyncCache) -> None:
    """The same prompts again, while their first pages are loaded back for others."""
    for _ in range(2):
        await pressure(cache)
        await asyncio.gather(*(serve(cache, text(4, seed) + text(2, 80 + seed), POOLS) for seed in range(4)))


class Play(NamedTuple):
    """What happens in a world, on which device and with which settings."""

    scenario: Scenario
    faults: Faults = Faults()
    settings: Mapping[str, Any] = {}


WORLDS: dict[str, Play] = {
    "requests": Play(requests),
    "pressure": Play(pressure),
    "failing": Play(pressure, Faults(seed=3, failing=0.3)),
    "storage": Play(storage),
    "write_back": Play(twice, settings={"write_policy": "write_back"}),
    "selective": Play(twice, settings={"write_policy": "write_through_selective"}),
}


async def world(loop: SimulatedLoop, name: str, injector: Injector) -> str:
    """Play a world; what became of the cache, in a word: ``closed``, ``whole``, or what is wrong with it."""
    scenario, faults, more = WORLDS[name]
    backend = SimulatedBackend(loop.entropy("backend"), HONEST, {})
    device = SimulatedDevice(latency=(0.0, 0.001), faults=faults)
    config = settings(device=14, host=20, swa=10, mamba=8, close_deadline=5.0, **more)
    cache = AsyncCache(config, device=device, storage=backend)
    verdict = "it never ended"
    try:
        async with asyncio.timeout(600):
            async with cache:
                with suppress(Injected, AsyncCacheError), injector.armed():
                    await scenario(cache)
                verdict = await look(cache)
    except CacheClosed as error:
        if not isinstance(error.__cause__, Injected):
            verdict = f"closed by {error.__cause__!r}"
    except TimeoutError:
        pass
    await backend.aclose()
    await device.aclose()
    return verdict


async def look(cache: AsyncCache) -> str:
    if cache.closed is not None:
        with pytest.raises(CacheClosed):
            await serve(cache, text(2, 70))
        return "closed" if "Injected" in cache.closed else f"closed without a reason: {cache.closed}"
    try:
        parts(cache).claims.drop_all()
        await settled(cache)
        check(parts(cache).core, idle=True)
        for _ in range(2):
            await serve(cache, text(4, 70), POOLS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "whole"


def play(name: str, injector: Injector) -> str:
    return simulate(lambda loop: world(loop, name, injector), 1, order=Order.FIFO, step_limit=STEPS)


def statements() -> dict[Statement, str]:
    """The statements of the core that the worlds reach, and the first world that reaches each."""
    found: dict[Statement, str] = {}
    for name in WORLDS:
        injector = Injector()
        assert play(name, injector) == "whole"
        for statement in injector.seen:
            found.setdefault(statement, name)
    return found


def violations(chosen: Iterable[tuple[Statement, str]]) -> list[str]:
    """What is wrong after an exception at each of these statements, in its world."""
    wrong = []
    for statement, name in chosen:
        try:
            verdict = play(name, Injector(statement))
        except Exception as error:  # a deadlock, a task that is left, a wrong page
            verdict = f"{type(error).__name__}: {error}"
        if verdict not in ("closed", "whole"):
            wrong.append(f"{statement[0].removeprefix(CORE)}:{statement[1]} ({name}): {verdict}")
    return wrong


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_a_core_that_raises_at_any_statement_has_changed_nothing_or_closes_the_cache(part: int) -> None:
    assert violations(list(statements().items())[part::PARTS]) == []


def test_without_fail_stop_that_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Driver, "_break", lambda driver, error: None)
    commits = [found for found in statements().items() if found[0][0].endswith("commits.py")]
    assert len(violations(commits[::10])) > 3


def test_the_worlds_reach_every_mutating_call_of_the_core() -> None:
    files = {statement[0].removeprefix(CORE) for statement in statements()}
    assert {"cache.py", "leases.py", "commits.py", "prefetching.py", "transfers.py", "room.py", "claims.py",
            "invalidation.py", "holds.py", "world.py", "matching.py", "tree.py", "slots.py"} <= files  # fmt: skip


@pytest.mark.asyncio
async def test_a_core_that_raised_is_asked_nothing_more_also_by_those_who_are_in_the_middle_of_a_call() -> None:
    asked = 0

    def call() -> Plan | More:
        nonlocal asked
        asked += 1
        return More(EMPTY) if asked == 1 else EMPTY

    def fails() -> Plan:
        raise Injected("between two slices")

    cache = await AsyncCache(settings()).__aenter__()
    driver = parts(cache).driver
    slices = asyncio.ensure_future(driver.transact(call))
    await turns(1)
    with pytest.raises(Injected):
        driver.unlocked(fails)
    with pytest.raises(CacheClosed, match="between two slices"):
        await slices
    assert asked == 1
    parts(cache).driver.core = parts(cache).core = None  # type: ignore[assignment]  # whoever asks fails
    report = await cache.aclose()
    assert isinstance(report.error, Injected)
    assert report[:2] == (0, 0)
