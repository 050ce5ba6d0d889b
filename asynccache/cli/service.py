"""Serves one request as an async serving stack would, and verifies every page that the cache hands out.

The steps: prefetch, lease, wait until the pages are on the device, verify each page that is a hit, compute the rest in
chunks and commit them, decode a little, release. Some requests, chosen by their number, also make rarer calls: they
adopt pages, extend the lease beyond the reservation and truncate it. Under ``stress`` the whole page table is verified
once more before the release.

Under ``replay`` prompts are computed one after another, from the lease to the last commit, as an engine computes them:
its scheduler looks a prompt up when it begins with it, when the pages of all earlier prompts are known to the cache.
Side by side, requests that come at the same moment would compute what they share as often as there are requests, and
the hits would tell of that and not of the trace. Output is decoded side by side. ``stress`` computes side by side: it
is there to find what goes wrong then.

``RequestRunner`` runs the requests of a workload side by side: it lets them arrive, cancels some, and waits until all
have ended. A request waits for its time, then for one of ``concurrency`` places. In a replay by the clock (``--speed``)
a request arrives whether or not a place is free: it prefetches at once and waits for a place after that.
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asynccache.cli.engine import NOTHING, Comparison, Engine, PageRun, Values, page_values
from asynccache.cli.options import RunSettings
from asynccache.cli.report import Tally, UncachedEngine
from asynccache.cli.workloads import RunRequest, Source, Tokens
from asynccache.config import Full
from asynccache.core.settings import ComponentKind
from asynccache.errors import CacheClosed, CacheFull, LoadFailed, RankFailure

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache
    from asynccache.runtime.lease import Lease
    from asynccache.runtime.prefetch import PrefetchHandle

ENTRIES = 32
"""The number of leases that a request takes at most."""
_CHUNK = {"replay": 16384, "stress": 1024}
"""Tokens that are computed between two commits, by command."""
_DECODE_CALLS = 4
_LONG = 16384
"""A prompt of at least this many tokens is made in a thread, so that the loop is not held up."""


class Text(NamedTuple):
    """The tokens of a request."""

    tokens: Tokens
    """The prompt, then what will be decoded of the output."""
    values: Values
    """The pattern value of every whole page of the tokens."""
    prompt: int
    """How many of the tokens are the prompt."""


class Server:
    """Serves requests from one cache. It keeps nothing of a request between calls."""

    def __init__(self, cache: AsyncCache, engine: Engine, settings: RunSettings, tally: Tally) -> None:
        self._cache = cache
        self._engine = engine
        self._settings = settings
        self._tally = tally
        full = cache.config.components[0]
        assert isinstance(full, Full)
        self._line = UncachedEngine(tally, full.device_tokens)
        self._turn = asyncio.Lock() if settings.command == "replay" else None

    async def serve(self, request: RunRequest, places: AbstractAsyncContextManager[object] | None = None) -> None:
        """Return when the request has its output.

        With ``places`` the request prefetches at once and takes its lease when it has got one of these places. Without
        them it takes its lease at once. After a failed load it takes another lease, with a new match. Cancelling gives
        back all that the request held.

        Raises:
            CacheFull: the request cannot fit into the cache.
            LoadFailed: its pages could not be loaded, ``ENTRIES`` times in a row.
        """
        def made() -> Text:
            prompt, output = request.prompt(), request.output()[: self._settings.decode_tokens]
            tokens = np.concatenate([prompt, output])
            return Text(tokens, page_values(tokens, self._settings.page_size, request.namespace), len(prompt))

        def prefetch() -> PrefetchHandle | None:
            return None if self._settings.storage is None else self._cache.prefetch(
                text.tokens[: text.prompt], namespace=request.namespace)

        long = request.length >= _LONG
        text = await asyncio.get_running_loop().run_in_executor(None, made) if long else made()
        handle = None if places is None else prefetch()
        try:
            async with places or nullcontext():
                for entry in range(1, ENTRIES + 1):
                    handle = handle or prefetch()
                    try:
                        async with AsyncExitStack() as turn:
                            if self._turn is not None:
                                await turn.enter_async_context(self._turn)
                            await self._leased(request, text, handle, turn)
                        break
                    except LoadFailed:
                        if entry == ENTRIES:
                            raise
                        self._tally.entered_again += 1
                    finally:
                        if handle is not None:
                            handle.cancel()
                        handle = None
        finally:
            if handle is not None:
                handle.cancel()
        self._tally.served += 1

    async def _leased(
        self, request: RunRequest, text: Text, handle: PrefetchHandle | None, turn: AsyncExitStack
    ) -> None:
        """Serve the request under one lease. ``turn``: to be closed when the next request may begin."""
        settings, tally, decode, began = self._settings, self._tally, len(text.tokens) - text.prompt, time.monotonic()
        placed = self._line.come(began, -(-len(text.tokens) // settings.page_size) * settings.page_size)
        entered = computes = None
        try:
            async with self._cache.lease(
                text.tokens[: text.prompt], new_tokens=decode // 2 if request.number % 3 == 0 else decode,
                namespace=request.namespace, prefetch=handle, shared_tokens=request.shared_tokens,
            ) as lease:  # fmt: skip
                entered, work = time.monotonic(), _Leased(settings, self._engine, request, text, lease)
                try:
                    await lease.loaded()
                    wait = time.monotonic() - began
                    if settings.verify:
                        tally.verdict(request, await work.verified(work.matched()))
                    await work.prefill()
                    computes = tally.prompt(request, lease.cached, lease.hits, wait, settings.prefill_tokens_per_s,
                                            self._engine.slowdown)
                    await turn.aclose()
                    end = await work.decode()
                    tally.output_tokens += end - text.prompt
                    tally.cut_short += end < len(text.tokens)
                    if settings.command == "stress" and settings.verify:
                        done = (end if settings.insert_outputs else text.prompt) // settings.page_size
                        tally.verdict(request, await work.verified(work.pages(0, done, work.window(done), held=True)))
                    lease.release(after=work.latest, ended=request.ended)
                except BaseException:
                    lease.release(after=work.latest)
                    raise
        finally:
            self._line.left(placed, 0.0 if entered is None else time.monotonic() - entered, computes)


class _Leased:
    """The engine's part of a request that has a lease."""

    def __init__(self, settings: RunSettings, engine: Engine, request: RunRequest, text: Text, lease: Lease) -> None:
        self.latest: Any = None
        """The latest batch, which the request names when it gives its pages back; None: there was none yet."""
        self._engine = engine
        self._settings = settings
        self._page = settings.page_size
        self._request = request
        self._text = text
        self._lease = lease

    def pages(self, first: int, last: int, swa: int, *, held: bool) -> list[PageRun]:
        """The pages ``[first, last)`` of FULL and ``[swa, last)`` of SWA. ``held``: only those of SWA that there are;
        -1 stands for a missing one."""
        if first >= last:
            return []
        lease, values = self._lease, self._text.values
        found = [PageRun(ComponentKind.FULL, lease.pages[first:last], values[first:last], first)]
        if "swa" in self._settings.components:
            ids = lease.page_table("swa")[swa:last]
            which = ids >= 0 if held else slice(None)
            found.append(PageRun(ComponentKind.SWA, ids[which], values[swa:last][which], swa))
        return found

    def window(self, last: int) -> int:
        """The first page of SWA's window before page ``last``."""
        return max(0, last * self._page - self._settings.window) // self._page

    def matched(self) -> list[PageRun]:
        """The pages that the lease must hold from its match: all of FULL, SWA over its window, and the lease's own copy
        of MAMBA's state."""
        last = self._lease.cached // self._page
        found = self.pages(0, last, self.window(last), held=False)
        return found + (self._states(last, 1) if last else [])

    def _states(self, last: int, slots: int) -> list[PageRun]:
        """MAMBA's state after ``last`` pages, in the first of the lease's two slots, the working copy, which decoding
        goes on from, or also in the checkpoint slot, which the commit takes."""
        if "mamba" not in self._settings.components:
            return []
        value = self._text.values[last - 1 : last]
        return [PageRun(ComponentKind.MAMBA, self._lease.states[i : i + 1], value, last - 1) for i in range(slots)]

    async def verified(self, pieces: Sequence[PageRun]) -> Comparison:
        """Compare these pages with what they must hold. Cancelling leaves the batch running; ``latest`` ends with
        it."""
        if not any(len(piece.ids) for piece in pieces):
            return NOTHING
        self.latest, verdict = self._engine.begin(pieces, verifies=True)
        return await verdict()

    async def _compute(self, pieces: Sequence[PageRun]) -> object:
        """Fill these pages. Every other request acts like an engine with a stream, and goes on while its work is
        queued; if that fails, the pages hold wrong bytes. Returns what ``commit`` takes as ``after``: an event or batch
        number if the pages are still being filled, None if they are filled. Cancelling is as for ``verified``."""
        if any(len(piece.ids) for piece in pieces):
            self.latest, verdict = self._engine.begin(pieces, verifies=False)
            if self._request.number % 2:
                await verdict()
        return None if self._request.number % 2 else self.latest

    async def prefill(self) -> None:
        """Compute the prompt from ``lease.cached`` on, chunk by chunk, and commit each chunk. Checkpoints of MAMBA are
        due where FULL alone matched and at the end of the prompt."""
        lease, text, page, position = self._lease, self._text, self._page, self._lease.cached
        whole, chunk = text.prompt // page * page, max(page, _CHUNK[self._settings.command] // page * page)
        mamba = "mamba" in self._settings.components
        ends = dict.fromkeys(range(lease.cached + chunk, whole, chunk), False)
        ends |= {end: mamba for end in (lease.checkpoint_at, whole) if end > lease.cached}
        for number, (end, due) in enumerate(sorted(ends.items())):
            first, last = position // page, end // page
            ready = await self._compute(self.pages(first, last, first, held=True)
                                        + (self._states(last, 2) if due else []))
            checkpoint = (end, int(lease.states[1])) if due else None
            await lease.commit(text.tokens[: text.prompt if end == whole else end], ready, checkpoint)
            lease.advance(end, after=self.latest)
            if (self._request.number + number) % 2:
                lease.adopt(after=self.latest)
            position = end

    async def decode(self) -> int:
        """Decode in a few calls. Returns the end that was reached, in tokens; it is short of the whole output when the
        cache has no room for more. Some requests speculate: they take two pages more and give them back."""
        lease, text, page = self._lease, self._text, self._page
        position, total, room = text.prompt, len(text.tokens), len(lease.pages) * page
        step = max(1, -(-(total - position) // _DECODE_CALLS))
        guess = 2 * page if self._request.number % 7 == 0 else 0
        while position < total:
            end = min(total, position + step)
            if room < end or guess:
                with suppress(CacheFull):
                    room = len(await lease.extend(max(0, end - room) + guess)) * page
                    if guess:
                        lease.truncate(end)
                        room = len(lease.pages) * page
            if room < end:
                break
            await asyncio.sleep(0)  # lets other requests run, as between two decoding steps
            lease.advance(end)
            position = end
        first = text.prompt // page
        ready = await self._compute(self.pages(first, position // page, first, held=True))
        if self._settings.insert_outputs and position > text.prompt:
            await lease.commit(text.tokens[:position], ready)
        return position


class CancelledAt:
    """Runs ``work`` and cancels it at its n-th await, so that a seed cancels at the same place in every run.

    To be awaited in a task of its own: at await number ``at`` (None: never) that task cancels itself, as if from
    outside. ``awaits`` counts how often ``work`` has really given control to the event loop.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], at: int | None) -> None:
        self._work = work
        self._at = at
        self.awaits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        resume: Callable[[], Any] = partial(next, steps)
        try:
            while True:
                waited = resume()
                self.awaits += 1
                if self.awaits == self._at and (task := asyncio.current_task()) is not None:
                    task.cancel()
                try:
                    resume = partial(steps.send, (yield waited))
                except BaseException as error:
                    resume = partial(steps.throw, error)
        except StopIteration as end:
            return end.value


class RequestRunner:
    """Runs one workload to its end. ``stop`` admits no more requests and lets those that run finish; ``abort`` cancels
    those too.
    """

    def __init__(self, server: Server, source: Source, settings: RunSettings, tally: Tally) -> None:
        self.tally = tally
        self.running = 0
        self.total = source.total
        """The number of requests that there will be; None if that is not known."""
        self.traceback: str | None = None
        """The text of the first unexpected error of a request; None if there was none."""
        self.trace_time = 0.0
        """The arrival of the latest request that has begun, in seconds of the trace, however fast it is replayed."""
        self._server = server
        self._source = source
        self._timed = bool(settings.speed)
        self._cancel_rate = settings.cancel_rate
        self._places = asyncio.Semaphore(settings.concurrency)
        self._rng = random.Random(settings.seed + 1)
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaits = 16.0

    async def run(self) -> None:
        """Return when the source has no more requests, or after ``stop``, and all requests have ended. Cancelling
        cancels the requests that run and waits for them."""
        def ended(task: asyncio.Task[None]) -> None:  # also if it was cancelled before its first step
            self._tasks.discard(task)
            if not self._timed:
                self._places.release()

        began = time.monotonic()
        try:
            while not self._stopped.is_set() and (request := self._source.next()) is not None:
                if (delay := began + request.at - time.monotonic()) > 0:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(delay):
                            await self._stopped.wait()
                if not self._timed:
                    await self._places.acquire()
                if self._stopped.is_set():
                    break
                task = asyncio.create_task(self._one(request))
                self._tasks.add(task)
                task.add_done_callback(ended)
            while self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            self.abort()
            while self._tasks:
                await asyncio.wait(self._tasks)

    def stop(self) -> None:
        """Admit no more requests."""
        self._stopped.set()

    def abort(self) -> None:
        """Admit no more requests, and cancel those that run."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    async def _one(self, request: RunRequest) -> None:
        """Serve one request, or cancel it at one of its awaits, from the first to as many as a request usually has."""
        tally, cancelled = self.tally, self._rng.random() < self._cancel_rate
        self.running += 1
        tally.requests += 1
        self.trace_time = max(self.trace_time, request.time or 0.0)
        work = CancelledAt(self._server.serve(request, self._places if self._timed else None),
                           1 + int(self._rng.random() * self._awaits) if cancelled else None)
        try:
            await work
            self._awaits += (work.awaits - self._awaits) * 0.05
        except asyncio.CancelledError:
            tally.cancelled += 1
        except CacheFull as error:
            tally.failed += 1
            tally.problem(f"request {request.number} gave up: {error}")
        except (CacheClosed, RankFailure):
            tally.failed += 1
            self.stop()  # the session that closes the cache reports why the cache had closed itself
        except Exception as error:
            tally.failed += 1
            tally.problem(f"request {request.number} met {type(error).__name__}: {error}")
            self.traceback = self.traceback or "".join(traceback.format_exception(error))
            self.stop()
        finally:
            self.running -= 1
            self._source.done(request)
