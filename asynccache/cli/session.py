"""One run from settings to exit status: open the cache, serve the workload, look for leaks, report.

The order at the end matters. When all requests have ended, the cache is flushed, then the core is audited and its
leaks are counted, then the cache is closed. Tasks that are left are counted last, because the open cache has some.

The first Ctrl-C ends the run early: no more requests are admitted, those that run have ``GRACE`` seconds to end, and
there is a report. The second one ends the command at once, without a report, as ``asyncio.Runner`` does.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from asynccache import AsyncCache
from asynccache.cli import output, report
from asynccache.cli.engine import Engine, StandInEngine, device_faults, faulty_stores, make_device
from asynccache.cli.entry import INTERRUPTED
from asynccache.cli.meter import Meter
from asynccache.cli.options import RunSettings, loop_factory
from asynccache.cli.page import page
from asynccache.cli.report import Sampler, Tally
from asynccache.cli.run_cache import check_fits, configure
from asynccache.cli.service import RequestRunner, Server
from asynccache.cli.traces import read_trace, survey
from asynccache.cli.workloads import Source, StressSource, TraceSource
from asynccache.config import CacheConfig
from asynccache.core import audit
from asynccache.errors import BackendError, CacheClosed, ConfigError, InvariantViolation, RankFailure
from asynccache.extras import install

if TYPE_CHECKING:
    from asynccache.cli.display import Watch

GRACE = 10.0
"""Seconds that requests have to end by themselves after Ctrl-C, before they are cancelled."""
_CONVERSATIONS_PER_PLACE = 4
_FLUSH_SECONDS = 60.0


def execute(settings: RunSettings) -> int:
    """Run, print the summary, write the report; returns the exit status.

    Raises:
        AsyncCacheError: something in the settings, the trace or the store cannot be used.
        KeyboardInterrupt: Ctrl-C was pressed a second time.
    """
    if not settings.quiet:
        try:
            import rich  # noqa: F401
        except ImportError:
            raise ConfigError(f"the display and the summary need rich: {install('cli')}, or use --quiet") from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    session, broken_off = Session(settings), False

    def heard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not broken_off and not isinstance(context.get("exception"), KeyboardInterrupt):
            loop.default_exception_handler(context)

    with asyncio.Runner(loop_factory=loop_factory(settings.loop)) as runner:
        runner.get_loop().set_exception_handler(heard)
        try:
            runner.run(session.execute())
        except KeyboardInterrupt:
            broken_off = True  # what this does to tasks need not be told
            if session.status is None:
                raise
    assert session.status is not None
    return session.status


class Session:
    """One run."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.status: int | None = None
        """The run's exit status, once it is known."""
        self.interrupted = False
        """Whether Ctrl-C was pressed."""
        self.tally = Tally()
        self.meter = Meter()
        self.cache: AsyncCache | None = None
        self.runner: RequestRunner | None = None
        """``cache`` and ``runner`` are None until the run has begun."""
        self._watch: Watch | None = None
        self._over_time: dict[str, Any] = {}
        self._read: dict[str, Any] = {}

    async def execute(self) -> None:
        """Run, and tell the result. Cancelling it once ends the run early; see ``reported``."""
        result = await self.reported()
        settings, out = self.settings, sys.stderr if self.settings.json == "-" else sys.stdout
        if not settings.quiet:
            from asynccache.cli.display import summary

            summary(result, out)
        if "traceback" in result:
            print(result["traceback"] if output.debugging()
                  else "asynccache: --debug shows where the error was raised", file=sys.stderr)
        output.answer(result, None, settings.json)
        if settings.report is not None:
            output.write(settings.report, page(result), "--report")
        written = [path for path in (settings.json, settings.report) if path not in (None, "-")]
        if written and not settings.quiet:
            print("written: " + ", ".join(map(str, written)), file=out)
        if settings.quiet and not result["ok"]:
            print("\n".join(result["problems"]), file=sys.stderr)
        self.status = 1 if not result["ok"] else INTERRUPTED if self.interrupted else 0

    async def reported(self) -> report.Report:
        """Run, and return the report. The first time that this is cancelled, which is what Ctrl-C does, no more
        requests are admitted, and the run goes on to its end."""
        run = asyncio.create_task(self.run())
        try:
            result = await asyncio.shield(run)
        except asyncio.CancelledError:
            self.interrupted = True
            if self.runner is not None:
                self.runner.stop()
                asyncio.get_running_loop().call_later(GRACE, self.runner.abort)
            if self._watch is not None:
                self._watch.note = "interrupted: finishing what runs; press Ctrl-C again to end at once, unreported"
            result = await run
        return result | {"interrupted": self.interrupted}

    async def run(self) -> report.Report:
        """Run and return the report. Cancelling cancels the requests that run, and closes the cache."""
        before, settings = asyncio.all_tasks(), self.settings
        if settings.trace is None:
            config = configure(settings)
            source: Source = StressSource(
                settings.workload or "mixed", seed=settings.seed, requests=settings.requests, hints=settings.end_hints,
                open_conversations=settings.concurrency * _CONVERSATIONS_PER_PLACE, rate=settings.rate,
            )
        else:
            trace = await asyncio.to_thread(
                read_trace, settings.trace, settings.limit, block_size=settings.block_size,
                conversations=settings.conversations,
            )
            found = await asyncio.to_thread(survey, trace)
            config = configure(settings, trace, found)
            check_fits(settings, config, trace)
            self._read = {"format": trace.form, "block_size": trace.block_size}
            source = TraceSource(
                trace, found, speed=settings.speed or 0.0, hints=settings.end_hints, seed=settings.seed,
                shared_hints=settings.shared_hints,
            )
        ranks, own = None, dict(report.NOTHING)
        if settings.ranks > 1:
            from asynccache.cli.ranks import Ranks

            ranks = Ranks(settings, config, self.tally)
        async with self._opened(config) if ranks is None else ranks.opened() as (cache, engine):
            try:
                await self._drive(cache, engine, source)
            finally:
                self.meter.stop()
                engine.close()
            own |= await self._finish(cache)
        left: report.Leaks = own.pop("left")
        left = left._replace(tasks=len(asyncio.all_tasks() - before) + (0 if ranks is None else ranks.count()))
        if any(left):
            self.tally.problem("left behind: " + ", ".join(f"{n} {name}" for name, n in left._asdict().items() if n))
        result = report.build(settings, self.tally, self.meter, own, left) | self._read | self._over_time
        if self.runner is not None and self.runner.traceback is not None:
            result["traceback"] = self.runner.traceback
        return result if ranks is None else ranks.told_in(result)

    @asynccontextmanager
    async def _opened(self, config: CacheConfig) -> AsyncIterator[tuple[AsyncCache, Engine]]:
        """Open the device and the cache, and close them at the end. If the cache closes itself, or cannot close
        cleanly, that becomes a problem of the report and is not raised."""
        import torch  # here, because the head of several ranks needs no torch

        torch.set_num_threads(1)  # the engine has a thread of its own
        settings, opened = self.settings, False
        device = make_device(settings.device, device_faults(settings.faults, settings.seed))
        try:
            cache = AsyncCache(config, device=device, debug=False)
            async with AsyncExitStack() as stack:
                with faulty_stores(settings.faults, settings.seed):
                    await stack.enter_async_context(cache)
                opened = True
                yield cache, StandInEngine(cache.config.pools(), cache.pools, device.gate)
        except (CacheClosed, BackendError) as error:
            if not opened:
                raise
            closed = isinstance(error, CacheClosed)
            self.tally.problem(f"the cache closed itself: {error.__cause__ or error!r}" if closed
                               else f"the cache could not close cleanly: {error}")
        finally:
            await device.aclose()

    async def _drive(self, cache: AsyncCache, engine: Engine, source: Source) -> None:
        settings, duration, loop = self.settings, self.settings.admits_for, asyncio.get_running_loop()
        runner = RequestRunner(Server(cache, engine, settings, self.tally), source, settings, self.tally)
        if settings.command == "replay":  # ages of pages are by the trace's time, however fast it is replayed
            cache._opened().driver.clock = lambda: runner.trace_time
        self.cache, self.runner = cache, runner
        if self.interrupted:
            runner.stop()
        gc.collect()
        gc.freeze()  # a full collection of all that torch and the rest have loaded would hold up the loop for 130 ms
        self.meter.start()
        sampler = Sampler(cache, self.tally, self.meter)
        beside = [asyncio.create_task(sampler.run())]
        if not settings.quiet:
            from rich.console import Console

            from asynccache.cli.display import Watch, show

            self._watch = Watch(settings, runner, self.meter, cache)
            beside.append(asyncio.create_task(show(Console(file=sys.stderr), self._watch.take)))
        ending = None if duration is None else loop.call_later(duration, runner.stop)
        try:
            async with self._exposed(cache):
                await runner.run()
        finally:
            if ending is not None:
                ending.cancel()
            sampler.take()
            self._over_time = {"series": sampler.report()}
            for task in beside:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    @asynccontextmanager
    async def _exposed(self, cache: AsyncCache) -> AsyncIterator[None]:
        """Serve the cache's metrics over HTTP while this lasts, if ``--serve`` was given."""
        if self.settings.serve is None:
            yield
            return
        try:
            from asynccache.metrics import start_metrics_server
        except ModuleNotFoundError as error:
            raise ConfigError(f"--serve: {error}") from None
        async with await start_metrics_server(cache, port=self.settings.serve) as server:
            address = f"http://127.0.0.1:{server.port}"
            if self._watch is not None:
                self._watch.note = address
            print(f"serving {address}/metrics /healthz /statistics /explain", file=sys.stderr, flush=True)
            yield

    async def _finish(self, cache: AsyncCache) -> dict[str, Any]:
        """To be called when all requests are released. Flushes the cache, audits the core and counts what is left;
        returns that and the cache's own figures."""
        core, idle = cache.core, False
        with suppress(CacheClosed, RankFailure):  # closing the cache raises it again, with the reason
            try:
                await cache.flush(_FLUSH_SECONDS)
            except TimeoutError:
                self.tally.problem(f"the cache was not flushed within {_FLUSH_SECONDS:.0f} s")
            except BackendError as error:
                if not self.settings.faults:
                    self.tally.problem(f"the store could not be flushed: {error}")
            with suppress(TimeoutError):  # prefetches that nobody waits for end on their own
                async with asyncio.timeout(_FLUSH_SECONDS):
                    while any(core.statistics().operations.values()):  # noqa: ASYNC110  there is no event to wait for
                        await asyncio.sleep(0.01)
            idle = True
        try:
            audit.check(core, idle=idle)
        except InvariantViolation as error:
            self.tally.problem(f"a law of the core is broken: {error}")
        left = report.look(core) if idle else report.Leaks()  # operations still in flight hold pages rightly
        tally, lookups = self.tally, cache.statistics().lookups
        most = report.ceiling(lookups, tally.tokens, tally.hit())
        return {"left": left, "ceiling": round(most / tally.tokens, 5) if tally.tokens else 0.0,
                **report.facts(cache, self.settings.page_size)}
