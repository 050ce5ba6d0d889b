"""One run from settings to exit status: build the cache, drive the workload, look for what is left, report.

The order at the end matters: all requests have ended, then the cache is flushed, then the core is counted and audited,
then the cache is closed, and then only may no task be left.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from asynccache import AsyncCache
from asynccache.cli import leaks, output, report
from asynccache.cli.capacity import capacity
from asynccache.cli.devices import GatedDevice, make_device
from asynccache.cli.display import Display, choose
from asynccache.cli.driver import Driver
from asynccache.cli.engine import Engine
from asynccache.cli.entry import INTERRUPTED
from asynccache.cli.faulty import device_faults, faulty_stores
from asynccache.cli.loops import loop_factory
from asynccache.cli.meter import Meter
from asynccache.cli.options import Settings
from asynccache.cli.presses import Next, Presses
from asynccache.cli.request import Source
from asynccache.cli.samples import Sampler, memcpy_rate
from asynccache.cli.serving import Server
from asynccache.cli.sizing import check_fits, configure
from asynccache.cli.summary import summary
from asynccache.cli.tally import Paths, Tally
from asynccache.cli.trace import Survey, TraceClock, TraceRequest, TraceSource, read_trace, survey
from asynccache.cli.watch import Watch, facts
from asynccache.cli.workloads import StressSource
from asynccache.config import CacheConfig
from asynccache.core import audit
from asynccache.core.cache import CacheCore
from asynccache.errors import BackendError, CacheClosed, InvariantViolation, RankFailure
from asynccache.metrics import Exposed

DURATION = 20.0
_SESSIONS_PER_PLACE = 4
_FLUSH_SECONDS = 60.0


def execute(settings: Settings, presses: Presses | None = None) -> int:
    """Run, print, write; the exit status. ``presses``: of Ctrl-C, if somebody counts them already.

    Raises:
        AsyncCacheError: something in the settings, the trace or the store cannot be used.
    """
    if presses is None:
        with Presses() as presses:
            return execute(settings, presses)
    if settings.json is not None:
        output.check_writable(settings.json)
    if settings.report is not None:
        output.check_writable(settings.report, "--report")
    display = choose(settings.quiet)
    session = _session(settings)(settings, display, presses)
    with asyncio.Runner(loop_factory=loop_factory(settings.loop)) as runner:
        result = runner.run(session.run())
    if settings.json is not None or settings.report is not None:
        with suppress(KeyboardInterrupt), presses.meaning(Next.SKIPS):  # who does not want to wait goes without it
            result |= session.afterwards(result)
    with presses.meaning(Next.WAITS):
        result["interrupted"] = presses.count > 0
        return _told(settings, session, result)


def _session(settings: Settings) -> type[Session]:
    if settings.ranks == 1:
        return Session
    from asynccache.cli.ranked.session import RankedSession

    return RankedSession


def _told(settings: Settings, session: Session, result: report.Report) -> int:
    """Print and write the report; the exit status."""
    if not settings.quiet:
        out = sys.stderr if settings.json == "-" else sys.stdout
        print(summary(result, color=out.isatty()), file=out)
    if session.trace is not None:
        result["trace"] = session.trace
        print(session.trace if output.debugging() else "asynccache: --debug shows where the error is from",
              file=sys.stderr)
    if settings.json is not None:
        output.dump(result, settings.json)
    if settings.report is not None:
        output.write_page(result, settings.report)
    if settings.quiet and not result["ok"]:
        print("\n".join(result["problems"]), file=sys.stderr)
    if not result["ok"]:
        return 1
    return INTERRUPTED if result["interrupted"] else 0


def _interrupt(driver: Driver, watch: Watch, count: int) -> None:
    """Once: no new requests. Twice: cancel those that run."""
    if count == 1:
        driver.stop()
        watch.note = "interrupted: finishing what runs; press Ctrl-C again to cancel it"
    else:
        driver.abort()


class Session:
    """One run. ``trace`` is the stack of an error that no run may meet."""

    def __init__(self, settings: Settings, display: Display, presses: Presses) -> None:
        self.trace: str | None = None
        self._settings = settings
        self._display = display
        curve = settings.json is not None or settings.report is not None
        self._tally = Tally(paths=Paths() if curve else Paths(limit=0))
        self._meter = Meter()
        self._presses = presses
        self._over_time: dict[str, Any] = {}
        self._requests: list[TraceRequest] | None = None

    def afterwards(self, result: report.Report) -> dict[str, Any]:
        """What is worked out when the run is over: the limit that this machine sets, and what caches of other sizes
        would have had."""
        return {"memcpy_bytes_per_s": round(memcpy_rate()),
                "capacity": capacity(self._settings, self._requests, self._tally, result,
                                     compare=self._settings.report is not None)}

    async def run(self) -> report.Report:
        """The report. Cancelling it cancels the requests that run, and closes the cache."""
        before = asyncio.all_tasks()
        source, config = await self._prepare()
        device = make_device(self._settings.device, device_faults(self._settings.faults, self._settings.seed))
        try:
            found = await self._serve(config, device, source)
        finally:
            await device.aclose()
        left: leaks.Left = found.pop("left")
        tasks = len(asyncio.all_tasks() - before)
        return self._report(found, report.Leaks(left.device_pages, left.host_pages, left.pins, tasks))

    async def _serve(self, config: CacheConfig, device: GatedDevice, source: Source) -> dict[str, Any]:
        """What is found in the cache when all requests have ended. That the cache closed itself is a problem, not an
        error."""
        import torch  # here, since the head of several ranks needs none

        torch.set_num_threads(1)  # the engine's own threads are the parallel part
        cache, found = AsyncCache(config, device=device), dict[str, Any]()
        try:
            async with AsyncExitStack() as stack:
                with faulty_stores(self._settings.faults, self._settings.seed):
                    await stack.enter_async_context(cache)
                engine = Engine(cache.config.pools(), cache.pools, device.gate)
                try:
                    await self._drive(cache, Server(cache, engine, self._settings, self._tally), source)
                finally:
                    self._meter.stop()
                    engine.close()
                found = await self._settle(cache)
        except CacheClosed as error:
            self._tally.problem(f"the cache closed itself: {error.__cause__ or error!r}")
        return found

    async def _prepare(self) -> tuple[Source, CacheConfig]:
        settings = self._settings
        if settings.trace is None:
            return self._workload(), configure(settings)
        trace = await read_trace(settings.trace, settings.limit)
        self._requests = trace
        found: Survey = await asyncio.get_running_loop().run_in_executor(None, survey, trace)
        return self._replay(trace, found), self._fitting(trace, found)

    def _workload(self) -> Source:
        settings = self._settings
        return StressSource(
            settings.workload or "mixed", seed=settings.seed, requests=settings.requests, hints=settings.end_hints,
            open_sessions=settings.concurrency * _SESSIONS_PER_PLACE, rate=settings.rate,
        )

    def _replay(self, trace: list[TraceRequest], found: Survey) -> Source:
        settings = self._settings
        return TraceSource(
            trace, found, speed=settings.speed or 0.0, hints=settings.end_hints, seed=settings.seed,
            shared_hints=settings.shared_hints,
        )  # fmt: skip

    def _fitting(self, trace: list[TraceRequest], found: Survey) -> CacheConfig:
        config = configure(self._settings, trace, found)
        check_fits(self._settings, config, trace)
        return config

    async def _drive(self, cache: AsyncCache, server: Server, source: Source) -> None:
        settings = self._settings
        driver = Driver(server, source, settings, self._tally, self._by_the_trace(cache))
        watch = Watch(settings, driver, self._meter, cache, self._duration())
        loop = asyncio.get_running_loop()
        self._meter.start()
        sampler = Sampler(cache, self._tally, self._meter)
        sampling = asyncio.create_task(sampler.run())
        showing = asyncio.create_task(self._display.show(watch.take))
        ending = None if self._duration() is None else loop.call_later(self._duration() or 0.0, driver.stop)
        try:
            with self._presses.told_to(lambda count: loop.call_soon_threadsafe(_interrupt, driver, watch, count)):
                async with self._exposed(cache, watch):
                    await driver.run()
        finally:
            self.trace = driver.trace
            if ending is not None:
                ending.cancel()
            sampler.take()
            self._over_time = sampler.report()
            for task in (showing, sampling):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def _by_the_trace(self, cache: AsyncCache) -> TraceClock | None:
        """In a replay ages are those of the trace, however fast it is replayed."""
        if self._requests is None:
            return None
        clock = cache._opened().driver.clock = TraceClock()
        return clock

    @asynccontextmanager
    async def _exposed(self, cache: AsyncCache, watch: Watch) -> AsyncIterator[None]:
        """Whoever wants to look in from outside may, if ``--serve`` says so."""
        if self._settings.serve is None:
            yield
            return
        async with Exposed(cache, port=self._settings.serve) as exposed:
            watch.note = f"http://127.0.0.1:{exposed.port}"
            print(f"serving {watch.note}/metrics /healthz /statistics /explain", file=sys.stderr, flush=True)
            yield

    def _duration(self) -> float | None:
        settings = self._settings
        if settings.command == "replay" or (settings.duration is None and settings.requests is not None):
            return None
        return settings.duration or DURATION

    async def _settle(self, cache: AsyncCache) -> dict[str, Any]:
        """All requests are released: what does the core hold, and is it sound?"""
        core, idle = cache.core, False
        with suppress(CacheClosed, RankFailure):  # closing says why
            await self._flush(cache)
            await self._idle(core)
            idle = True
        try:
            audit.check(core, idle=idle)
        except InvariantViolation as error:
            self._tally.problem(f"a law of the core is broken: {error}")
        left = leaks.look(core) if idle else leaks.Left(0, 0, 0)  # what is in flight for ever is no leak
        return {"left": left, **facts(cache, self._settings.page_size)}

    async def _flush(self, cache: AsyncCache) -> None:
        try:
            await cache.flush(_FLUSH_SECONDS)
        except TimeoutError:
            self._tally.problem(f"the cache was not flushed within {_FLUSH_SECONDS:.0f} s")
        except BackendError as error:
            if not self._settings.faults:
                self._tally.problem(f"the store could not be flushed: {error}")

    async def _idle(self, core: CacheCore) -> None:
        """Fetches that nobody wants any more end on their own."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                while any(core.statistics().operations.values()):  # noqa: ASYNC110  nothing tells of the last one
                    await asyncio.sleep(0.01)

    def _report(self, found: dict[str, Any], left: report.Leaks) -> report.Report:
        if any(left):
            self._tally.problem("left behind: " + ", ".join(f"{n} {name}" for name, n in left._asdict().items() if n))
        result = report.build(self._settings, self._tally, self._meter, found, left)
        result |= self._over_time
        result["interrupted"] = self._presses.count > 0
        return result
