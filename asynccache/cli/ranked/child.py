"""One rank: a process that connects, opens its cache, and does what ticks say. ``python -m ... RANK SOCKET [LOOP]``.

Law: it never outlives the command: when the socket is closed the process ends, whatever it is doing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from asynccache import AsyncCache
from asynccache.cli import leaks
from asynccache.cli.devices import GatedDevice, make_device
from asynccache.cli.engine import Engine
from asynccache.cli.faulty import device_faults, open_faulty
from asynccache.cli.meter import Meter, peak_rss
from asynccache.cli.ranked.digest import tree_digest
from asynccache.cli.ranked.messages import Ended, Failure, Job, Leave, Opened, Refused, Tick, receive, send
from asynccache.cli.ranked.scheduler import Delays, Scheduler, history
from asynccache.cli.session import loop_factory
from asynccache.cli.tally import Paths, Tally
from asynccache.cli.watch import facts
from asynccache.core import audit
from asynccache.errors import (
    AsyncCacheError,
    BackendError,
    CacheClosed,
    InvariantViolation,
    RankDivergence,
    RankFailure,
)
from asynccache.memory.faults import Faults
from asynccache.ranks.gloo import GlooRanks, connect
from asynccache.ranks.membership import shard
from asynccache.storage import StorageBackend

ARRIVAL = 120.0
SETTLING_STEPS = 60_000
SETTLING_PAUSE = 0.001
_ALONE, _CONFUSED = 1, 3
_HEARD = 30.0


class Channel:
    """To the command. ``orders`` are what it says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.orders: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = reader
        self._writer = writer
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while True:
            try:
                self.orders.put_nowait(await receive(self._reader))
            except (EOFError, ConnectionError):
                os._exit(_ALONE)
            except ValueError as error:
                print(f"the command {error}", file=sys.stderr, flush=True)
                os._exit(_CONFUSED)

    def send(self, message: object) -> None:
        """Say it."""
        send(self._writer, message)

    async def heard(self) -> None:
        """After the last word: wait until the other end has closed. A socket that is closed while something is on its
        way to it takes along what the other end has not read yet. Cancelling it loses that."""
        await self._deaf()
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_HEARD):
                await self._reader.read()

    async def aclose(self) -> None:
        """Whether anybody has heard or not. Cancelling it leaves closing to the loop."""
        await self._deaf()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _deaf(self) -> None:
        self._listening.cancel()
        with suppress(asyncio.CancelledError):
            await self._listening


async def serve(end: socket.socket) -> None:
    """A whole run."""
    channel = Channel(*await asyncio.open_connection(sock=end))
    job: Job = await channel.orders.get()
    try:
        await Rank(job, channel).run()
        await channel.heard()
    finally:
        await channel.aclose()


class Rank:
    """One run. Mutable state: what was counted, and what ended it too early."""

    def __init__(self, job: Job, channel: Channel) -> None:
        self.tally = Tally()
        self._job = job
        self._channel = channel
        self._meter = Meter()
        self._delays = Delays(job.settings.rank_delay / 1e3, job.settings.seed, job.rank)
        self._failure: Failure | None = None
        self._found: dict[str, Any] = {}
        self._scheduler: Scheduler | None = None

    async def run(self) -> None:
        """From connecting to the last word. Cancelling it leaves the others to find out."""
        before = asyncio.all_tasks()
        try:
            async with AsyncExitStack() as stack:
                cache, engine = await self._open(stack)
                self._channel.send(Opened())
                await self._live(cache, engine)
        except (RankFailure, RankDivergence) as error:
            self._failed(error)
        except AsyncCacheError as error:
            if self._scheduler is None:
                self._channel.send(Refused(type(error).__name__, str(error)))
                return
            self._failed(error)
        except Exception as error:
            self._failed(error, "".join(traceback.format_exception(error)))
        if self._scheduler is None:
            assert self._failure is not None
            self._channel.send(Refused(self._failure.kind, self._failure.sentence))
            return
        self._channel.send(self._ended(len(asyncio.all_tasks() - before)))

    def _failed(self, error: BaseException, trace: str | None = None) -> None:
        if self._failure is None:
            self._failure = Failure(type(error).__name__, str(error), time.time(), trace)
            if self._scheduler is not None:
                self._channel.send(self._failure)

    # opening

    async def _open(self, stack: AsyncExitStack) -> tuple[AsyncCache, Engine]:
        """``stack`` closes everything again, in the right order."""
        job = self._job
        settings, config = job.settings, job.config
        ranks = await connect(
            job.topology, job.rank, job.meeting, timeout=settings.rank_timeout, arrival=ARRIVAL
        )
        stack.push_async_callback(ranks.aclose)
        device = make_device(settings.device, self._faults())
        stack.push_async_callback(device.aclose)
        stores: list[tuple[StorageBackend, dict[str, str]]] = []
        stack.push_async_callback(_close_all, stores)
        if settings.faults:
            await open_faulty(config, settings.faults, _own(settings.seed, job.rank), stores)
            config = replace(config, storage=None, storage_options={})
        cache = AsyncCache(config, device=device, ranks=ranks)
        await stack.enter_async_context(self._closing(cache))
        for backend, options in stores:
            await cache.attach_storage(backend, options=options, backfill=False)
        return cache, self._engine(cache, device, ranks)

    def _faults(self) -> Faults:
        settings = self._job.settings
        return device_faults(settings.faults, _own(settings.seed, self._job.rank))

    def _engine(self, cache: AsyncCache, device: GatedDevice, ranks: GlooRanks) -> Engine:
        specs = [spec.on_rank(*shard(ranks)) for spec in cache.config.pools()]
        return Engine(specs, cache.pools, device.gate, threads=1)

    @asynccontextmanager
    async def _closing(self, cache: AsyncCache) -> AsyncIterator[None]:
        """The cache, and after its end a look at what requests still held then."""
        try:
            async with cache:
                yield
        except CacheClosed as error:
            self._failed(error if error.__cause__ is None else error.__cause__)
        except (RankFailure, RankDivergence) as error:
            self._failed(error)
        if self._scheduler is not None and self._failure is not None:
            self._scheduler.close()
            try:
                audit.check(cache.core)
            except InvariantViolation as error:
                self.tally.problem(f"a law of the core is broken: {error}")

    # running

    async def _live(self, cache: AsyncCache, engine: Engine) -> None:
        self._scheduler = scheduler = Scheduler(cache, engine, self._job.settings, self.tally, self._meter)
        self._meter.start()
        try:
            while isinstance(order := await self._channel.orders.get(), Tick):
                self._channel.send(await scheduler.iterate(order, self._delays.draw()))
                if order.last:
                    await self._settle(cache)
                    return
            assert isinstance(order, Leave)
            await cache.aclose(0.0)    # nothing can be agreed on any more
            raise RankFailure("the command said that another rank is gone")
        except Exception as error:
            self._failed(error, None if isinstance(error, AsyncCacheError) else traceback.format_exc())
        finally:
            self._meter.stop()
            engine.close()

    async def _settle(self, cache: AsyncCache) -> None:
        """All requests have ended: save, count, audit."""
        try:
            await cache.flush()
        except BackendError as error:
            if not self._job.settings.faults:
                self.tally.problem(f"the store could not be flushed: {error}")
        await self._idle(cache)
        try:
            audit.check(cache.core, idle=True)
        except InvariantViolation as error:
            self.tally.problem(f"a law of the core is broken: {error}")
        steps, digest = history(cache)
        self._found = {
            "facts": facts(cache, self._job.settings.page_size), "left": leaks.look(cache.core), "steps": steps,
            "digest": digest, "tree": tree_digest(cache.core),
        }

    async def _idle(self, cache: AsyncCache) -> None:
        """Fetches that nobody wants any more end by steps."""
        for _ in range(SETTLING_STEPS):
            if not cache.in_flight:
                return
            await cache.step()
            await asyncio.sleep(SETTLING_PAUSE)
        self.tally.problem(f"operations were still in flight {SETTLING_STEPS} steps after the last request")

    def _ended(self, tasks: int) -> Ended:
        nothing: dict[str, Any] = {"facts": {}, "left": leaks.Left(0, 0, 0), "steps": 0, "digest": 0, "tree": 0}
        meter = self._meter
        if self._job.rank:
            self.tally.paths = Paths()  # the first rank's are enough
        return Ended(
            tally=self.tally, tasks=tasks, lag=meter.lag_ms(), run_queue=meter.run_queue_ms(), cpu=meter.cpu(),
            memory=peak_rss(), failure=self._failure, **(nothing | self._found),
        )  # fmt: skip


def _own(seed: int, rank: int) -> int:
    """Faults are to differ by rank."""
    return seed + 1000 * rank


async def _close_all(stores: Sequence[tuple[StorageBackend, dict[str, str]]]) -> None:
    for backend, _ in stores:
        await backend.aclose()


def main() -> None:
    """``sys.argv``: the rank, for who looks at the list of processes, the socket, and the loop, if one is named."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the command decides what they mean, and ends its ranks
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    end = socket.socket(fileno=int(sys.argv[2]))
    with asyncio.Runner(loop_factory=loop_factory(sys.argv[3] if sys.argv[3:] else None)) as runner:
        runner.run(serve(end))


if __name__ == "__main__":
    main()
