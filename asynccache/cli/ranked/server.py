"""Serving a request where several ranks do it together: as ``cli.serving``, by turns instead of waits.

Law: nothing here asks a clock what to do. Who is refused for want of room stands at the head of the line, and nobody
overtakes it; a prefetch that runs is waited for beside the line.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from asynccache.cli.engine import Engine, Lane, Piece
from asynccache.cli.options import Settings
from asynccache.cli.ranked.lives import turn
from asynccache.cli.request import Request
from asynccache.cli.serving import Server, Text
from asynccache.cli.tally import Tally
from asynccache.core.settings import PrefetchPolicy
from asynccache.errors import CacheFull
from asynccache.memory.device import Event

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache
    from asynccache.runtime.lease import Lease
    from asynccache.runtime.prefetch import PrefetchHandle


class Places:
    """So many requests run at the same time; used as a context."""

    def __init__(self, count: int) -> None:
        self._free = count

    async def __aenter__(self) -> None:
        while not self._free:
            await turn()
        self._free -= 1

    async def __aexit__(self, *_: object) -> None:
        self._free += 1


class RankedServer(Server):
    """Mutable state: the requests that were refused, in order, and how many hold a lease."""

    def __init__(self, cache: AsyncCache, engine: Engine, settings: Settings, tally: Tally) -> None:
        super().__init__(cache, engine, settings, tally)
        self._refused: list[int] = []
        self._holding = 0
        self._stops_early = settings.prefetch_policy is PrefetchPolicy.BEST_EFFORT

    def _lease(
        self, request: Request, text: Text, new_tokens: int, handle: PrefetchHandle | None
    ) -> AbstractAsyncContextManager[Lease]:
        return self._held(request, text, new_tokens, handle)

    @asynccontextmanager
    async def _held(
        self, request: Request, text: Text, new_tokens: int, handle: PrefetchHandle | None
    ) -> AsyncIterator[Lease]:
        lease = await self._admitted(request, text, new_tokens, handle)
        self._holding += 1
        try:
            yield lease
        finally:
            self._holding -= 1
            lease.release()

    async def _admitted(
        self, request: Request, text: Text, new_tokens: int, handle: PrefetchHandle | None
    ) -> Lease:
        try:
            while True:
                if self._may_try(request, handle):
                    lease = self._cache.lease(
                        text.tokens[: text.prompt], new_tokens=new_tokens, extra_key=request.extra_key,
                        prefetch=handle, wait=False,
                    )  # fmt: skip
                    try:
                        return await lease.__aenter__()
                    except CacheFull as error:
                        self._note_refusal(request, error)
                await turn()
        finally:
            if request.number in self._refused:
                self._refused.remove(request.number)

    def _may_try(self, request: Request, handle: PrefetchHandle | None) -> bool:
        if handle is not None and not handle.done() and not self._stops_early:
            return False
        return not self._refused or self._refused[0] == request.number

    def _note_refusal(self, request: Request, error: CacheFull) -> None:
        """Raises ``error`` if nothing is under way that could make room."""
        if not self._holding and not self._cache.in_flight:
            raise error
        if not self._refused:
            self._refused.append(request.number)

    async def _arrived(self, lease: Lease) -> None:
        while lease.loading:
            await turn()
        await lease.loaded()

    async def _compute(self, request: Request, lane: Lane, pieces: Sequence[Piece]) -> Event | None:
        """Every other request does as an engine with a stream: it goes on while the work is queued."""
        if request.number % 2:
            return await super()._compute(request, lane, pieces)
        lane.begin(pieces)
        return lane.work

    async def _iterate(self) -> None:
        await turn()
