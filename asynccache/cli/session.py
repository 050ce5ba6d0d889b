"""One run from settings to exit status: open the cache, serve the workload, look for leaks, report.

The order at the end matters. When all requests have ended, the cache is flushed, then the core is audited and its
leaks are counted, then the cache is closed. Tasks that are left are counted last, because the open cache has some.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from asynccache import AsyncCache
from asynccache.cli import output, report
from asynccache.cli.display import Watch, console, show, summary
from asynccache.cli.engine import Engine, StandInEngine
from asynccache.cli.entry import INTERRUPTED
from asynccache.cli.machine import device_faults, faulty_stores, loop_factory, make_device
from asynccache.cli.meter import Meter
from asynccache.cli.options import RunSettings
from asynccache.cli.page import page
from asynccache.cli.presses import Presses
from asynccache.cli.serving import RequestRunner, Server
from asynccache.cli.sizing import check_fits, configure
from asynccache.cli.tally import Sampler, Tally
from asynccache.cli.workloads import Source, StressSource, TraceClock, TraceRequest, TraceSource, read_trace, survey
from asynccache.config import CacheConfig
from asynccache.core import audit
from asynccache.core.cache import CacheCore
from asynccache.errors import BackendError, CacheClosed, ConfigError, InvariantViolation, RankFailure

if TYPE_CHECKING:
    from rich.console import Console

DURATION = 20.0
"""Seconds of a ``stress`` run that was told neither ``--duration`` nor ``--requests``."""
_CONVERSATIONS_PER_PLACE = 4
_FLUSH_SECONDS = 60.0


def execute(settings: RunSettings, presses: Presses | None = None) -> int:
    """Run, print the summary, write the report; returns the exit status. ``presses``: the counter of Ctrl-C, if the
    caller has one already.

    Raises:
        AsyncCacheError: something in the settings, the trace or the store cannot be used.
    """
    if presses is None:
        with Presses() as presses:
            return execute(settings, presses)
    display = console(settings.quiet)
    session = _session(settings)(settings, display, presses)
    with asyncio.Runner(loop_factory=loop_factory(settings.loop)) as runner:
        runner.get_loop().set_exception_handler(presses.loop_error)
        result = runner.run(session.run())
    with presses.counted_only():
        result["interrupted"] = presses.count > 0
        return _told(settings, session, result)


def _session(settings: RunSettings) -> type[Session]:
    if settings.ranks == 1:
        return Session
    from asynccache.cli.ranked.session import RankedSession

    return RankedSession


def _told(settings: RunSettings, session: Session, result: report.Report) -> int:
    """Print and write the report; returns the exit status."""
    out = sys.stderr if settings.json == "-" else sys.stdout
    if not settings.quiet:
        summary(result, out)
    if session.traceback is not None:
        result["traceback"] = session.traceback
        print(session.traceback if output.debugging() else "asynccache: --debug shows where the error was raised",
              file=sys.stderr)
    if settings.json is not None:
        output.dump(result, settings.json)
    if settings.report is not None:
        output.write(settings.report, page(result), "--report")
    written = [path for path in (settings.json, settings.report) if path not in (None, "-")]
    if written and not settings.quiet:
        print("written: " + ", ".join(map(str, written)), file=out)
    if settings.quiet and not result["ok"]:
        print("\n".join(result["problems"]), file=sys.stderr)
    if not result["ok"]:
        return 1
    return INTERRUPTED if result["interrupted"] else 0


def _interrupt(runner: RequestRunner, watch: Watch, count: int) -> None:
    """React to Ctrl-C: after the first press no more requests are admitted, and the second cancels those that run."""
    if count == 1:
        runner.stop()
        watch.note = "interrupted: finishing what runs; press Ctrl-C again to cancel it"
    else:
        runner.abort()


class Session:
    """One run. ``traceback``: the text of the first unexpected error of a request; None if there was none."""

    def __init__(self, settings: RunSettings, display: Console | None, presses: Presses) -> None:
        self.traceback: str | None = None
        self._settings = settings
        self._display = display
        self._tally = Tally()
        self._meter = Meter()
        self._presses = presses
        self._over_time: dict[str, Any] = {}
        self._requests: list[TraceRequest] | None = None

    async def run(self) -> report.Report:
        """Run and return the report. Cancelling cancels the requests that run, and closes the cache."""
        before = asyncio.all_tasks()
        source, config = await self._prepare()
        found = await self._carried_out(config, source)
        left: report.Leaks = found.pop("left", report.Leaks())
        left = left._replace(tasks=left.tasks + len(asyncio.all_tasks() - before))
        if any(left):
            self._tally.problem("left behind: " + ", ".join(f"{n} {name}" for name, n in left._asdict().items() if n))
        result = report.build(self._settings, self._tally, self._meter, found, left)
        return result | self._over_time | {"interrupted": self._presses.count > 0}

    async def _carried_out(self, config: CacheConfig, source: Source) -> dict[str, Any]:
        """Open the device and the cache, serve all requests, and close everything. Returns what is found in the cache
        when they have ended. If the cache closes itself, or cannot close cleanly, that becomes a problem of the report
        and is not raised."""
        import torch  # here, because the head of several ranks needs no torch

        torch.set_num_threads(1)  # the engine has a thread of its own
        settings, found, opened = self._settings, dict[str, Any](), False
        device = make_device(settings.device, device_faults(settings.faults, settings.seed))
        try:
            cache = AsyncCache(config, device=device)
            async with AsyncExitStack() as stack:
                with faulty_stores(settings.faults, settings.seed):
                    await stack.enter_async_context(cache)
                opened = True
                found = await self._served(cache, StandInEngine(cache.config.pools(), cache.pools, device.gate), source)
        except CacheClosed as error:
            self._tally.problem(f"the cache closed itself: {error.__cause__ or error!r}")
        except BackendError as error:
            if not opened:
                raise
            self._tally.problem(f"the cache could not close cleanly: {error}")
        finally:
            await device.aclose()
        return found

    async def _served(self, cache: AsyncCache, engine: Engine, source: Source) -> dict[str, Any]:
        """Serve all requests, and close the engine; returns what is found in the cache when they have ended."""
        try:
            await self._drive(cache, Server(cache, engine, self._settings, self._tally), source)
        finally:
            self._meter.stop()
            engine.close()
        return await self._finish(cache)

    async def _prepare(self) -> tuple[Source, CacheConfig]:
        settings = self._settings
        if settings.trace is None:
            source = StressSource(
                settings.workload or "mixed", seed=settings.seed, requests=settings.requests, hints=settings.end_hints,
                open_conversations=settings.concurrency * _CONVERSATIONS_PER_PLACE, rate=settings.rate,
            )
            return source, configure(settings)
        self._requests = trace = await read_trace(settings.trace, settings.limit)
        found = await asyncio.get_running_loop().run_in_executor(None, survey, trace)
        config = configure(settings, trace, found)
        check_fits(settings, config, trace)
        return TraceSource(
            trace, found, speed=settings.speed or 0.0, hints=settings.end_hints, seed=settings.seed,
            shared_hints=settings.shared_hints,
        ), config  # fmt: skip

    async def _drive(self, cache: AsyncCache, server: Server, source: Source) -> None:
        settings = self._settings
        runner = RequestRunner(server, source, settings, self._tally, self._trace_clock(cache))
        watch = Watch(settings, runner, self._meter, cache, self._duration())
        loop = asyncio.get_running_loop()
        gc.collect()
        gc.freeze()  # a full collection of all that torch and the rest have loaded would hold up the loop for 130 ms
        self._meter.start()
        sampler = Sampler(cache, self._tally, self._meter)
        sampling = asyncio.create_task(sampler.run())
        showing = asyncio.create_task(show(self._display, watch.take))
        ending = None if self._duration() is None else loop.call_later(self._duration() or 0.0, runner.stop)
        try:
            with self._presses.told_to(lambda count: loop.call_soon_threadsafe(_interrupt, runner, watch, count)):
                async with self._exposed(cache, watch):
                    await runner.run()
        finally:
            self.traceback = runner.traceback
            if ending is not None:
                ending.cancel()
            sampler.take()
            self._over_time = {"series": sampler.report()}
            for task in (showing, sampling):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def _trace_clock(self, cache: AsyncCache) -> TraceClock | None:
        """Under ``replay``: a clock that tells the trace's time, which the cache takes ages of pages from, however fast
        the trace is replayed. Under ``stress``: None."""
        if self._requests is None:
            return None
        clock = cache._opened().driver.clock = TraceClock()
        return clock

    @asynccontextmanager
    async def _exposed(self, cache: AsyncCache, watch: Watch) -> AsyncIterator[None]:
        """Serve the cache's metrics over HTTP while this lasts, if ``--serve`` was given."""
        if self._settings.serve is None:
            yield
            return
        try:
            from asynccache.metrics import start_metrics_server
        except ModuleNotFoundError as error:
            raise ConfigError(f"--serve: {error}") from None
        async with await start_metrics_server(cache, port=self._settings.serve) as server:
            watch.note = f"http://127.0.0.1:{server.port}"
            print(f"serving {watch.note}/metrics /healthz /statistics /explain", file=sys.stderr, flush=True)
            yield

    def _duration(self) -> float | None:
        settings = self._settings
        if settings.command == "replay" or (settings.duration is None and settings.requests is not None):
            return None
        return settings.duration or DURATION

    async def _finish(self, cache: AsyncCache) -> dict[str, Any]:
        """To be called when all requests are released. Flushes the cache, audits the core and counts what is left;
        returns that and the cache's own figures."""
        core, idle = cache.core, False
        with suppress(CacheClosed, RankFailure):  # closing the cache raises it again, with the reason
            await self._flush(cache)
            await self._idle(core)
            idle = True
        try:
            audit.check(core, idle=idle)
        except InvariantViolation as error:
            self._tally.problem(f"a law of the core is broken: {error}")
        left = report.look(core) if idle else report.Leaks()  # operations still in flight hold pages rightly
        return {"left": left, **report.facts(cache, self._settings.page_size)}

    async def _flush(self, cache: AsyncCache) -> None:
        try:
            await cache.flush(_FLUSH_SECONDS)
        except TimeoutError:
            self._tally.problem(f"the cache was not flushed within {_FLUSH_SECONDS:.0f} s")
        except BackendError as error:
            if not self._settings.faults:
                self._tally.problem(f"the store could not be flushed: {error}")

    async def _idle(self, core: CacheCore) -> None:
        """Return when no operation is in flight. Prefetches that nobody waits for end on their own."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_SECONDS):
                while any(core.statistics().operations.values()):  # noqa: ASYNC110  there is no event to wait for
                    await asyncio.sleep(0.01)
