"""One request's life, as an async serving stack would lead it, with every page checked that the cache hands out.

Prefetch, lease, wait until the pages are there, verify each page that is a hit, compute the rest in chunks and commit
them, decode a little, release. The rarer calls (adopt, extend beyond the reservation, truncate, a last look at the
whole table) depend on the request's number, so that a run makes all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from asynccache.cli.engine import Ids, Piece, Verdict
from asynccache.cli.options import Settings
from asynccache.cli.pattern import Values, page_values
from asynccache.cli.request import Request, Tokens
from asynccache.cli.tally import Tally
from asynccache.core.settings import ComponentKind
from asynccache.errors import CacheFull, LoadFailed

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache
    from asynccache.runtime.lease import Lease
    from asynccache.runtime.prefetch import PrefetchHandle

ENTRIES = 32
_CHUNK = {"replay": 16384, "stress": 1024}
_DECODE_CALLS = 4
_LONG = 16384


class Text(NamedTuple):
    """The prompt and what will be decoded of the output, with the value of every whole page of both."""

    tokens: Tokens
    values: Values
    prompt: int


class Lane(Protocol):
    """One request's work on the engine. ``work``: what its last job ends with, for ``release``; None: there was
    none."""

    @property
    def work(self) -> object: ...

    async def write(self, pieces: Sequence[Piece]) -> None: ...

    async def verify(self, pieces: Sequence[Piece]) -> Verdict: ...


class Engine(Protocol):
    """What fills and verifies pages: this process's, or that of several ranks. ``slowdown``: by how much a busy machine
    makes its work longer."""

    @property
    def slowdown(self) -> float: ...

    def lane(self) -> Lane: ...


class Server:
    """Serves requests from one cache. Holds nothing of a request between calls."""

    def __init__(self, cache: AsyncCache, engine: Engine, settings: Settings, tally: Tally) -> None:
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
        self._looks_twice = settings.command == "stress"

    async def serve(self, request: Request, places: AbstractAsyncContextManager[object] | None = None) -> None:
        """Return when the request has its output. ``places``: it has arrived, and enters when it gets one of these.

        Cancelling leaves the cache as if the request had never been.

        Raises:
            CacheFull: it cannot fit.
            LoadFailed: its pages failed to arrive, ``ENTRIES`` times over.
        """
        text = await self._text(request)
        handle = self._prefetch(request, text) if places is not None else None
        turn: AbstractAsyncContextManager[object] = nullcontext() if places is None else places
        try:
            async with turn:
                await self._enter(request, text, handle)
        finally:
            if handle is not None:
                handle.cancel()
        self._tally.served += 1

    async def _text(self, request: Request) -> Text:
        if request.length < _LONG:
            return self._make_text(request)
        return await asyncio.get_running_loop().run_in_executor(None, self._make_text, request)

    def _make_text(self, request: Request) -> Text:
        prompt, output = request.prompt(), request.output()[: self._decode]
        tokens = np.concatenate([prompt, output])
        return Text(tokens, page_values(tokens, self._page, request.extra_key), len(prompt))

    def _prefetch(self, request: Request, text: Text) -> PrefetchHandle | None:
        if not self._prefetches:
            return None
        handle: PrefetchHandle = self._cache.prefetch(text.tokens[: text.prompt], extra_key=request.extra_key)
        return handle

    async def _enter(self, request: Request, text: Text, handle: PrefetchHandle | None) -> None:
        """Enter again, with a new match, when a load has failed."""
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

    async def _leased(self, request: Request, text: Text, handle: PrefetchHandle | None) -> None:
        lane = self._engine.lane()
        decode = len(text.tokens) - text.prompt
        reserved = decode // 2 if request.number % 3 == 0 else decode
        began = time.monotonic()
        async with self._lease(request, text, reserved, handle) as lease:
            try:
                await self._arrived(lease)
                wait = time.monotonic() - began
                self._tally.verdict(request, await lane.verify(list(self._expected(lease, text, lease.cached))))
                await self._prefill(request, text, lease, lane)
                self._tally.prompt(request, lease.cached, lease.hits, wait, self._rate, self._engine.slowdown)
                end = await self._decoded(request, text, lease, lane)
                if self._looks_twice:
                    self._note_path(text, end)
                if self._looks_twice:
                    await self._look_again(request, text, lease, lane, end)
                lease.release(after=lane.work, ended=request.ended)
            except BaseException:
                lease.release(after=lane.work)
                raise

    def _lease(
        self, request: Request, text: Text, new_tokens: int, handle: PrefetchHandle | None
    ) -> AbstractAsyncContextManager[Lease]:
        lease: Lease = self._cache.lease(
            text.tokens[: text.prompt], new_tokens=new_tokens, extra_key=request.extra_key, prefetch=handle,
            shared_tokens=request.shared_tokens,
        )
        return lease

    async def _arrived(self, lease: Lease) -> None:
        """Return when the pages are on the device."""
        await lease.loaded()

    async def _compute(self, request: Request, lane: Lane, pieces: Sequence[Piece]) -> object:
        """Fill these pages; what ``commit`` must wait for if that is not over yet."""
        await lane.write(pieces)
        return None

    async def _iterate(self) -> None:
        """Let others have their turn."""
        await asyncio.sleep(0)

    def _note_path(self, text: Text, end: int) -> None:
        prompt = text.prompt // self._page
        self._tally.path(text.values, prompt, end // self._page if self._insert_outputs else prompt, text.prompt)

    def _expected(self, lease: Lease, text: Text, end: int) -> Iterator[Piece]:
        """What a lease with ``end`` cached tokens must hold: FULL all the way, SWA over the window, MAMBA's copy."""
        last = end // self._page
        if not last:
            return
        yield Piece(ComponentKind.FULL, lease.pages[:last], text.values[:last], 0)
        if self._window:
            first = max(0, end - self._window) // self._page
            yield Piece(ComponentKind.SWA, lease.page_table("swa")[first:last], text.values[first:last], first)
        if self._mamba and end == lease.cached:
            yield Piece(ComponentKind.MAMBA, lease.states[:1], text.values[last - 1:last], last - 1)

    async def _prefill(self, request: Request, text: Text, lease: Lease, lane: Lane) -> None:
        """Compute the prompt from ``lease.cached`` on, chunk by chunk, and commit each."""
        prompt, position = text.prompt, lease.cached
        whole = prompt // self._page * self._page
        for number, (end, due) in enumerate(self._chunks(lease, whole)):
            pieces = list(self._fresh(lease, text, position, end))
            if due:
                pieces += self._states(lease, text, end)
            ready = await self._compute(request, lane, pieces)
            checkpoint = (end, int(lease.states[1])) if due else None
            await lease.commit(text.tokens[: prompt if end == whole else end], ready, checkpoint)
            lease.advance(end, after=lane.work)
            if (request.number + number) % 2:
                lease.adopt(after=lane.work)
            position = end

    def _chunks(self, lease: Lease, whole: int) -> list[tuple[int, bool]]:
        """(end, whether a MAMBA checkpoint is due there) up to ``whole``. One is due where FULL alone matched and at
        the prompt's end."""
        ends = dict.fromkeys(range(lease.cached + self._chunk, whole, self._chunk), False)
        ends.update((p, self._mamba) for p in (lease.checkpoint_at, whole) if p > lease.cached)
        return sorted(ends.items())

    def _fresh(self, lease: Lease, text: Text, start: int, end: int) -> Iterator[Piece]:
        """The pages that computing ``[start, end)`` fills."""
        first, last = start // self._page, end // self._page
        if first == last:
            return
        yield Piece(ComponentKind.FULL, lease.pages[first:last], text.values[first:last], first)
        if self._window:
            yield _present(ComponentKind.SWA, lease.page_table("swa")[first:last], text.values[first:last], first)

    def _states(self, lease: Lease, text: Text, end: int) -> Iterator[Piece]:
        """The state after ``end`` tokens: the working copy goes on from it, the first checkpoint slot keeps it."""
        last = end // self._page
        for slot in (0, 1):
            yield Piece(ComponentKind.MAMBA, lease.states[slot:slot + 1], text.values[last - 1:last], last - 1)

    async def _decoded(self, request: Request, text: Text, lease: Lease, lane: Lane) -> int:
        """Decode in a few calls; the end reached, in tokens. Stops early when the cache has no room to go on."""
        position, total = text.prompt, len(text.tokens)
        step = max(1, -(-(total - position) // _DECODE_CALLS))
        room = len(lease.pages) * self._page
        while position < total:
            end = min(total, position + step)
            room = await self._room(request, lease, room, end)
            if room < end:
                self._tally.cut_short += 1
                break
            await self._iterate()
            lease.advance(end)
            position = end
        self._tally.output_tokens += position - text.prompt
        ready = await self._compute(request, lane, list(self._fresh(lease, text, text.prompt, position)))
        if self._insert_outputs and position > text.prompt:
            await lease.commit(text.tokens[:position], ready)
        return position

    async def _room(self, request: Request, lease: Lease, room: int, end: int) -> int:
        """How far the lease's pages reach, after asking for ``end`` if need be. Some requests speculate: they take two
        pages more and give them back."""
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

    async def _look_again(self, request: Request, text: Text, lease: Lease, lane: Lane, end: int) -> None:
        """What the lease holds now, own pages and those it was given instead, must still be what was written."""
        done = end if self._insert_outputs else text.prompt
        pieces = [p for p in self._expected(lease, text, done // self._page * self._page)
                  if p.component is not ComponentKind.MAMBA]
        if self._window:
            pieces[1:] = [_present(p.component, p.ids, p.values, p.first) for p in pieces[1:]]
        verdict: Verdict = await lane.verify(pieces)
        self._tally.verdict(request, verdict)


def _present(component: ComponentKind, ids: Ids, values: Values, first: int) -> Piece:
    """The part of a table that has pages."""
    held = np.flatnonzero(ids >= 0)
    return Piece(component, ids[held], values[held], first)
