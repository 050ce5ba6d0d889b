"""The worker in a rank's process: it connects to the head, opens what the head says, and gives the engine its batches.

Laws:
* The engine sees its device pools, the head's batches and layers to wait for. It never sees what is copied where.
* A worker that loses the head lets its I/O finish, closes all that is open, and tells the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from math import inf
from typing import TYPE_CHECKING, Any

from asynccache import checks
from asynccache.errors import AsyncCacheError, ConfigError, RankFailure
from asynccache.version import VERSION
from asynccache.worker import messages as m
from asynccache.worker.contract import EmbedderParts
from asynccache.worker.group import PINNING
from asynccache.worker.link import Wire
from asynccache.worker.rank_performer import Performer
from asynccache.worker.rank_worker import RankWorker
from asynccache.worker.topology import Topology

if TYPE_CHECKING:
    from asynccache.worker.link import RankLink
    from asynccache.worker.rank_performer import Shard

ARRIVAL = 300.0
COUNTED = 5.0
"""Seconds from an answer until the head is told what the stores count, once for all answers in this time."""


class WorkerEnd:
    """A worker's end of its link. It hands the head's messages to a ``Performer``, and sends the messages of the
    ``Performer`` to the head. ``_concerned``: for each type of message that concerns this end itself, the method that
    acts on it. Mutable state: the stores that are being opened, until when closing is waited for, and whether the link
    is over."""

    def __init__(
        self, link: RankLink, rank: int, topology: Topology, given: EmbedderParts, shard: Shard | None = None
    ) -> None:
        self.performer = Performer(rank, topology, given, shard, self._tell)
        self._concerned: dict[type, Callable[[Any], None]] = {
            m.AllOpen: self._all_open, m.CloseWorker: self._is_closing,
            m.GroupLost: lambda lost: self._end(RankFailure(lost.reason, lost.rank if lost.rank >= 0 else None)),
            m.OpenStore: self._wait_for_stores, m.UseStore: self._wait_for_stores, m.DropStore: self._wait_for_stores,
        }  # fmt: skip
        self.worker = RankWorker(self.performer)
        self._link = link
        self._wire = Wire([link], lambda failure: self._wire.put(m.WorkerDied(failure.reason)))
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._counting: asyncio.TimerHandle | None = None
        self._last_call = 0
        self._gives_up_at = inf
        self._closing_takes = 0.0
        self._opening: set[int] = set()

    def __repr__(self) -> str:
        return f"WorkerEnd({self.performer!r})"

    async def open(self) -> None:
        """Return when all workers have opened. After cancelling it, too, the caller has to call ``aclose``.

        Raises:
            RankFailure: a worker could not open, or the head is gone.
        """
        self._link.patience(PINNING)
        self._link.begin(self._heard, self._lost)
        await self._opened

    async def aclose(self) -> None:
        """Leave the group: end what is under way, and close all that is open. A store that hangs is waited for as long
        as the link's time-out or, if that is longer, as the head has said that closing may take. After that the closing
        goes on by itself. May be called again."""
        if self._counting is not None:
            self._counting.cancel()
        self._gives_up_at = min(self._gives_up_at, self._loop.time() + max(self._link.timeout, self._closing_takes))
        try:
            with suppress(AsyncCacheError, TimeoutError):
                async with asyncio.timeout_at(self._gives_up_at):
                    await self.performer.aclose(1.0)
        finally:
            self._wire.flush()
            self._wire.links = []
            self.performer.finish(None)
            await self._link.aclose()

    def _heard(self, frame: bytes) -> None:
        orders = m.decode_head_messages(frame)
        self._wire.hold()
        for order in orders:
            concerned = self._concerned.get(type(order))
            if concerned is not None:
                try:
                    concerned(order)
                except Exception as error:
                    self.performer.die(error)
            self.performer.take(order)
        self._wire.flush()

    def _all_open(self, _: m.AllOpen) -> None:
        self._link.patience(None)
        if not self._opened.done():
            self._opened.set_result(None)

    def _is_closing(self, order: m.CloseWorker) -> None:
        self._last_call, self._closing_takes = order.call, order.patience

    def _wait_for_stores(self, order: m.OpenStore | m.UseStore | m.DropStore) -> None:
        """Be patient while the head opens a store: its own worker may pin the host's memory meanwhile."""
        (self._opening.add if isinstance(order, m.OpenStore) else self._opening.discard)(order.number)
        self._link.patience(PINNING if self._opening else None)

    def _tell(self, message: m.Message) -> None:
        self._wire.put(message)
        if not isinstance(message, m.Answer):
            return
        if message.call == self._last_call:
            self._wire.flush()
            self._end(None)
        elif self._counting is None:
            self._counting = self._loop.call_later(COUNTED, self._count)

    def _count(self) -> None:
        self._counting = None
        self.performer.count()

    def _lost(self, failure: RankFailure) -> None:
        self._end(RankFailure(f"the head {failure.reason}"))

    def _end(self, failure: RankFailure | None) -> None:
        """Note that the link is over, and tell everybody who waits here. ``failure``: why; None: the head has closed
        the cache."""
        if not self._opened.done():
            self._opened.set_exception(failure or RankFailure("the cache was closed while it was opened"))
            self._opened.exception()
        self.performer.finish(failure)
        if not self._over.done():
            self._over.set_result(None)

    async def over(self) -> None:
        """Return when the head has closed the cache, or is gone, or the group has failed."""
        await self._over


@asynccontextmanager
async def serving(serve: WorkerEnd) -> AsyncIterator[RankWorker]:
    """Open ``serve`` and give its worker. The worker closes when the head closes the cache, and at the end of the
    ``async with`` at the latest."""
    try:
        await serve.open()
        closing = asyncio.get_running_loop().create_task(_close_when_over(serve), name="asynccache-worker")
        try:
            yield serve.worker
        finally:
            closing.cancel()
            await asyncio.wait([closing])
    finally:
        await serve.aclose()


async def _close_when_over(serve: WorkerEnd) -> None:
    await serve.over()
    await serve.aclose()


@asynccontextmanager
async def connect(
    address: str, rank: int, *, secret: bytes | None = None, shard: Shard | None = None, device: object | None = None,
    arrival: float = ARRIVAL,
) -> AsyncIterator[RankWorker]:  # fmt: skip
    """Be ``rank`` of the group whose head listens at ``address``: connect, wait until the head's cache opens, and open
    the pools and stores that its configuration names, here; all ranks or none.

    ``secret``: see ``listen``. ``shard``: a function from the head's configuration to this rank's, which may differ in
    bytes, layers, ``covers`` and dtypes; by default the head's is used. ``{rank}`` in a store's URL is this rank's
    number. ``device``: used instead of the one that the configuration names; the caller closes it. ``arrival``: how
    many seconds to wait for the head.

    At the end of the ``async with`` this rank leaves; if the cache is not closed by then, the group ends with it.
    Cancelling it leaves nothing open.

    Raises:
        ConfigError: an argument is unusable, or there is no secret.
        RankFailure: no head answered, the head refused or is gone, or a rank could not open.
    """
    from asynccache.worker.contract import check_device
    from asynccache.worker.sockets import open_link

    rank = checks.integer("rank", rank, 0)
    if shard is not None:
        checks.function("shard", shard)
    if device is not None:
        check_device("device", device)
    hello = m.encode(m.Hello(VERSION, rank))
    link, welcome = await open_link(address, secret, hello, timeout=checks.number("arrival", arrival, above=0))
    try:
        topology = Topology(*m.decode_welcome(welcome).topology)
        serve = WorkerEnd(link, rank, topology, EmbedderParts(device), shard)  # type: ignore[arg-type]
    except (RankFailure, ConfigError):
        link.abort()
        raise
    async with serving(serve) as worker:
        yield worker
