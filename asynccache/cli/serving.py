"""Serves one request as an async serving stack would, and verifies every page that the cache hands out.

The steps: prefetch, lease, wait until the pages are on the device, verify each page that is a hit, compute the rest in
chunks and commit them, decode a little, release. Some requests, chosen by their number, also make rarer calls: they
adopt pages, extend the lease beyond the reservation and truncate it. Under ``stress`` the whole page table is verified
once more before the release.

``RequestRunner`` runs the requests of a workload side by side: it lets them arrive, cancels some, and waits until all
have ended. A request waits for its time, then for one of ``concurrency`` places. In a replay by the clock (``--speed``)
a request arrives whether or not a place is free: it prefetches at once and waits for a place after that.
"""

from __future__ import annotations

import asyncio
import random
import time
import traceback
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from asynccache.cli.engine import Engine, EngineStream, Ids, PageRun, Values, page_values
from asynccache.cli.options import RunSettings
from asynccache.cli.tally import Tally
from asynccache.cli.workloads import RunRequest, Source, Tokens, TraceClock
from asynccache.core.settings import ComponentKind
from asynccache.errors import CacheClosed, CacheFull, LoadFailed, RankFailure

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache
    from asynccache.runtime.lease import Lease
    from asynccache.runtime.prefetch import PrefetchHandle

ENTRIES = 32
"""The number of leases that a request takes at most: after a failed load it takes another one."""
_CHUNK = {"replay": 16384, "stress": 1024}
"""Tokens that are computed between two commits, by command."""
_DECODE_CALLS = 4
_LONG = 16384
"""A prompt of at least so many tokens is made in a thread, so that the loop is not held up."""


class Text(NamedTuple):
    """The tokens of a request. ``tokens``: the prompt, then what will be decoded of the output; ``values``: the pattern
    value of every whole page of them; ``prompt``: tokens of the prompt."""

    tokens: Tokens
    values: Values
    prompt: int


class Server:
    """Serves requests from one cache. It keeps nothing of a request between calls."""

    def __init__(self, cache: AsyncCache, engine: Engine, settings: RunSettings, tally: Tally) -> None:
        self._cache = cache
        self._engine = engine
        self._tally = tally
        self._page = settings.page_size
        self._window = settings.window if "swa" in settings.components else 0
        self._mamba = "mamba" in settings.components
        self._prefetches = settings.storage is not None
        self._chunk = max(settings.page_size, _CHUNK[settings.command] // settings.page_size * settings.page_size)
        self._decode = settings.decode_tokens
        self._insert_outputs = settings.insert_outputs
        self._rate = settings.prefill_tokens_per_s
        self._verify = settings.verify
        self._made_up = settings.command == "stress"

    async def serve(self, request: RunRequest, places: AbstractAsyncContextManager[object] | None = None) -> None:
        """Return when the request has its output.

        With ``places`` the request prefetches at once and takes its lease when it has got one of these places. Without
        them it takes its lease at once. Cancelling gives back all that the request held.

        Raises:
            CacheFull: the request cannot fit into the cache.
            LoadFailed: its pages could not be loaded, ``ENTRIES`` times in a row.
        """
        text = await self._text(request)
        handle = self._prefetch(request, text) if places is not None else None
        place: AbstractAsyncContextManager[object] = nullcontext() if places is None else places
        try:
            async with place:
                await self._enter(request, text, handle)
        finally:
            if handle is not None:
                handle.cancel()
        self._tally.served += 1

    async def _text(self, request: RunRequest) -> Text:
        if request.length < _LONG:
            return self._make_text(request)
        return await asyncio.get_running_loop().run_in_executor(None, self._make_text, request)

    def _make_text(self, request: RunRequest) -> Text:
        prompt, output = request.prompt(), request.output()[: self._decode]
        tokens = np.concatenate([prompt, output])
        return Text(tokens, page_values(tokens, self._page, request.extra_key), len(prompt))

    def _prefetch(self, request: RunRequest, text: Text) -> PrefetchHandle | None:
        if not self._prefetches:
            return None
        handle: PrefetchHandle = self._cache.prefetch(text.tokens[: text.prompt], extra_key=request.extra_key)
        return handle

    async def _enter(self, request: RunRequest, text: Text, handle: PrefetchHandle | None) -> None:
        """Serve the request under a lease; when a load fails, do so again with a new lease and a new match."""
        for entry in range(1, ENTRIES + 1):
            handle = handle or self._prefetch(request, text)
            try:
                await self._leased(request, text, handle)
                return
            except LoadFailed:
                if entry == ENTRIES:
                    raise
                self._tally.entered_again += 1
            finally:
                if handle is not None:
                    handle.cancel()
                handle = None

    async def _leased(self, request: RunRequest, text: Text, handle: PrefetchHandle | None) -> None:
        stream = EngineStream(self._engine)
        decode = len(text.tokens) - text.prompt
        reserved = decode // 2 if request.number % 3 == 0 else decode
        began = time.monotonic()
        async with self._lease(request, text, reserved, handle) as lease:
            try:
                await lease.loaded()
                wait = time.monotonic() - began
                if self._verify:
                    self._tally.verdict(request, await stream.verify(list(self._expected(lease, text, lease.cached))))
                await self._prefill(request, text, lease, stream)
                self._tally.prompt(request, lease.cached, lease.hits, wait, self._rate, self._engine.slowdown)
                end = await self._decoded(request, text, lease, stream)
                if self._made_up and self._verify:
                    await self._look_again(request, text, lease, stream, end)
                lease.release(after=stream.work, ended=request.ended)
            except BaseException:
                lease.release(after=stream.work)
                raise

    def _lease(
        self, request: RunRequest, text: Text, new_tokens: int, handle: PrefetchHandle | None
    ) -> AbstractAsyncContextManager[Lease]:
        lease: Lease = self._cache.lease(
            text.tokens[: text.prompt], new_tokens=new_tokens, extra_key=request.extra_key, prefetch=handle,
            shared_tokens=request.shared_tokens,
        )
        return lease

    async def _compute(self, request: RunRequest, stream: EngineStream, pieces: Sequence[PageRun]) -> object:
        """Fill these pages. Every other request acts like an engine with a stream, and goes on while its work is
        queued. Returns what ``commit`` takes as ``ready``: an event or batch number if the pages are still being
        filled, None if they are filled."""
        if request.number % 2:
            await stream.write(pieces)
            return None
        stream.begin(pieces)
        return stream.work

    def _expected(self, lease: Lease, text: Text, end: int) -> Iterator[PageRun]:
        """The pages that a lease with ``end`` cached tokens must hold: all of FULL, SWA over the window before ``end``,
        and the lease's own copy of MAMBA's state."""
        last = end // self._page
        if not last:
            return
        yield PageRun(ComponentKind.FULL, lease.pages[:last], text.values[:last], 0)
        if self._window:
            first = max(0, end - self._window) // self._page
            yield PageRun(ComponentKind.SWA, lease.page_table("swa")[first:last], text.values[first:last], first)
        if self._mamba and end == lease.cached:
            yield PageRun(ComponentKind.MAMBA, lease.states[:1], text.values[last - 1:last], last - 1)

    async def _prefill(self, request: RunRequest, text: Text, lease: Lease, stream: EngineStream) -> None:
        """Compute the prompt from ``lease.cached`` on, chunk by chunk, and commit each chunk."""
        prompt, position = text.prompt, lease.cached
        whole = prompt // self._page * self._page
        for number, (end, due) in enumerate(self._chunks(lease, whole)):
            pieces = list(self._fresh(lease, text, position, end))
            if due:
                pieces += self._states(lease, text, end)
            ready = await self._compute(request, stream, pieces)
            checkpoint = (end, int(lease.states[1])) if due else None
            await lease.commit(text.tokens[: prompt if end == whole else end], ready, checkpoint)
            lease.advance(end, after=stream.work)
            if (request.number + number) % 2:
                lease.adopt(after=stream.work)
            position = end

    def _chunks(self, lease: Lease, whole: int) -> list[tuple[int, bool]]:
        """The chunks up to token ``whole``, each as (its end, whether a MAMBA checkpoint is due there). Checkpoints are
        due where FULL alone matched and at the end of the prompt."""
        ends = dict.fromkeys(range(lease.cached + self._chunk, whole, self._chunk), False)
        ends.update((p, self._mamba) for p in (lease.checkpoint_at, whole) if p > lease.cached)
        return sorted(ends.items())

    def _fresh(self, lease: Lease, text: Text, start: int, end: int) -> Iterator[PageRun]:
        """The pages that computing ``[start, end)`` fills."""
        first, last = start // self._page, end // self._page
        if first == last:
            return
        yield PageRun(ComponentKind.FULL, lease.pages[first:last], text.values[first:last], first)
        if self._window:
            yield _present(ComponentKind.SWA, lease.page_table("swa")[first:last], text.values[first:last], first)

    def _states(self, lease: Lease, text: Text, end: int) -> Iterator[PageRun]:
        """MAMBA's state after ``end`` tokens, in two slots: the working copy, which decoding goes on from, and the
        checkpoint slot, which the commit takes."""
        last = end // self._page
        for slot in (0, 1):
            yield PageRun(ComponentKind.MAMBA, lease.states[slot:slot + 1], text.values[last - 1:last], last - 1)

    async def _decoded(self, request: RunRequest, text: Text, lease: Lease, stream: EngineStream) -> int:
        """Decode in a few calls. Returns the end that was reached, in tokens; it is short of the whole output when the
        cache has no room for more."""
        position, total = text.prompt, len(text.tokens)
        step = max(1, -(-(total - position) // _DECODE_CALLS))
        room = len(lease.pages) * self._page
        while position < total:
            end = min(total, position + step)
            room = await self._room(request, lease, room, end)
            if room < end:
                self._tally.cut_short += 1
                break
            await asyncio.sleep(0)  # lets other requests run, as between two decoding steps
            lease.advance(end)
            position = end
        self._tally.output_tokens += position - text.prompt
        ready = await self._compute(request, stream, list(self._fresh(lease, text, text.prompt, position)))
        if self._insert_outputs and position > text.prompt:
            await lease.commit(text.tokens[:position], ready)
        return position

    async def _room(self, request: RunRequest, lease: Lease, room: int, end: int) -> int:
        """Have the lease reach ``end`` if there is room for it; returns how far its pages reach, in tokens. Some
        requests speculate: they take two pages more and give them back."""
        guess = 2 * self._page if request.number % 7 == 0 else 0
        if room >= end and not guess:
            return room
        try:
            room = len(await lease.extend(max(0, end - room) + guess)) * self._page
        except CacheFull:
            return room
        if guess:
            lease.truncate(end)
            room = len(lease.pages) * self._page
        return room

    async def _look_again(self, request: RunRequest, text: Text, lease: Lease, stream: EngineStream, end: int) -> None:
        """Verify that all pages of the lease still hold what was written: its own pages and those of the tree that
        replaced duplicates."""
        done = end if self._insert_outputs else text.prompt
        pieces = [p for p in self._expected(lease, text, done // self._page * self._page)
                  if p.component is not ComponentKind.MAMBA]
        if self._window:
            pieces[1:] = [_present(p.component, p.ids, p.values, p.first) for p in pieces[1:]]
        self._tally.verdict(request, await stream.verify(pieces))


def _present(component: ComponentKind, ids: Ids, values: Values, first: int) -> PageRun:
    """The pages that there are among these entries of a page table; -1 stands for a missing one."""
    held = np.flatnonzero(ids >= 0)
    return PageRun(component, ids[held], values[held], first)


_T = TypeVar("_T")


class CancelledAt(Generic[_T]):
    """Runs ``work`` and cancels it at its n-th await, so that a seed cancels at the same place in every run.

    To be awaited in a task of its own: at await number ``at`` (None: never) that task cancels itself, as if from
    outside. ``awaits`` counts how often ``work`` has really given control to the event loop.
    """

    def __init__(self, work: Coroutine[Any, Any, _T], at: int | None) -> None:
        self._work = work
        self._at = at
        self.awaits = 0

    def __await__(self) -> Generator[Any, Any, _T]:
        steps = self._work.__await__()
        try:
            waited = next(steps)
            while True:
                self.awaits += 1
                if self.awaits == self._at:
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                try:
                    sent = yield waited
                except BaseException as error:
                    waited = steps.throw(error)
                else:
                    waited = steps.send(sent)
        except StopIteration as end:
            result: _T = end.value
            return result


class RequestRunner:
    """Runs one workload to its end. ``stop`` admits no more requests and lets those that run finish; ``abort``
    cancels those too.

    ``traceback``: the text of the first unexpected error of a request; None if there was none.
    """

    def __init__(
        self, server: Server, source: Source, settings: RunSettings, tally: Tally, clock: TraceClock | None = None
    ) -> None:
        self.tally = tally
        self.running = 0
        self.stopping = False
        self.traceback: str | None = None
        self._clock = clock
        self._server = server
        self._source = source
        self._timed = bool(settings.speed)
        self._cancel_rate = settings.cancel_rate
        self._places = asyncio.Semaphore(settings.concurrency)
        self._rng = random.Random(settings.seed + 1)
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaits = 16.0

    @property
    def total(self) -> int | None:
        """The number of requests that there will be; None if that is not known."""
        return self._source.total

    async def run(self) -> None:
        """Return when the source has no more requests, or after ``stop``, and all requests have ended. Cancelling
        cancels the requests that run and waits for them."""
        began = time.monotonic()
        try:
            while not self.stopping and (request := self._source.next()) is not None:
                await self._arrival(began + request.at)
                if self.stopping:
                    break
                task = asyncio.create_task(self._one(request))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            await self._drained()
        finally:
            self.abort()
            await self._drained()

    def stop(self) -> None:
        """Admit no more requests."""
        self.stopping = True
        self._stopped.set()

    def abort(self) -> None:
        """Admit no more requests, and cancel those that run."""
        self.stop()
        for task in self._tasks:
            task.cancel()

    async def _drained(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _arrival(self, at: float) -> None:
        delay = at - time.monotonic()
        if delay > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopped.wait()
        if not self._timed:
            await self._places.acquire()

    async def _one(self, request: RunRequest) -> None:
        self.running += 1
        self.tally.requests += 1
        if self._clock is not None:
            self._clock.begin(request)
        serving = self._server.serve(request, self._places if self._timed else None)
        work = CancelledAt(serving, self._cancel_at())
        try:
            await work
            self._awaits += (work.awaits - self._awaits) * 0.05
        except asyncio.CancelledError:
            self.tally.cancelled += 1
        except CacheFull as error:
            self.tally.failed += 1
            self.tally.problem(f"request {request.number} gave up: {error}")
        except (CacheClosed, RankFailure):
            self.tally.failed += 1
            self.stop()  # the session that closes the cache reports why the cache had closed itself
        except Exception as error:
            self._broken(request, error)
        finally:
            self.running -= 1
            self._source.done(request)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Give the place back, also if the request was cancelled before its first step."""
        self._tasks.discard(task)
        if not self._timed:
            self._places.release()

    def _broken(self, request: RunRequest, error: Exception) -> None:
        """Note that a request failed by an unexpected error, and stop the run. Only the first traceback is kept."""
        self.tally.failed += 1
        self.tally.problem(f"request {request.number} met {type(error).__name__}: {error}")
        if self.traceback is None:
            self.traceback = "".join(traceback.format_exception(error))
        self.stop()

    def _cancel_at(self) -> int | None:
        """The number of the await at which this request is cancelled, from 1 to as many as a request usually has; None:
        it is not cancelled."""
        if self._rng.random() >= self._cancel_rate:
            return None
        return 1 + int(self._rng.random() * self._awaits)
