"""Groups of workers in one simulated world: links in memory on the virtual clock, which delay, break and fall silent.

``SimulatedGroup`` is a head's workers and their processes in a few lines::

    group = SimulatedGroup(loop.entropy("group"), Topology(tp=2))
    async with AsyncCache(config, workers=group.workers, device=...) as cache:   # rank 0 is the head's own
        ...                                                                      # the others run by themselves

Law: frames of one direction arrive in order, each once, however long they take. A link that is *cut* loses what is
under way, and both ends hear it; a process that is *silent* keeps its links, and the other end gives it up after the
time-out; one that is *killed* does nothing any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random

from asynccache.errors import AsyncCacheError, RankFailure
from asynccache.version import VERSION
from asynccache.worker.link import Link, _raised
from asynccache.worker.local import Device, EmbedderParts, Storage
from asynccache.worker.messages import Hello, encode
from asynccache.worker.rank_server import RankProcess, RankWorker
from asynccache.worker.ranks import Shard, Topology, Workers

_TIMEOUT = 30.0


class SimulatedLink(Link):
    """One end, with nothing of a ``Link`` but its calls. ``peer``: the other one. ``frames``: how many were sent from
    here; ``cut_at``: the frame from here that does not arrive any more."""

    def __init__(self, random: Random, delay: float, timeout: float) -> None:
        self.peer: SimulatedLink
        self.frames = 0
        self.cut_at: int | None = None
        self.silent = False
        self.delay = delay
        self._random = random
        self.timeout = self._patience = timeout
        self._under_way: deque[bytes | None] = deque()
        self._kept: list[bytes] = []
        self._hears: Callable[[bytes], None] | None = None
        self._lost: Callable[[RankFailure], None] | None = None
        self.ended = False
        self._left = False
        self._failure: RankFailure | None = None

    def __repr__(self) -> str:
        return f"SimulatedLink({self.frames} frames sent, {'ended' if self.ended else 'open'})"

    def begin(self, heard: Callable[[bytes], None], lost: Callable[[RankFailure], None]) -> None:
        """See ``Link``."""
        self._hears, self._lost = heard, lost
        asyncio.get_running_loop().call_soon(self._replay)

    def _replay(self) -> None:
        kept, self._kept = self._kept, []
        for frame in kept:
            self._hear(frame)
        if self._failure is not None:
            self._tell()

    def send(self, frame: bytes) -> None:
        """See ``Link``."""
        assert frame
        if self.ended or self._left:
            return
        self.frames += 1
        if self.cut_at is not None and self.frames > self.cut_at:
            self.cut()
            return
        self._post(frame)

    def _post(self, frame: bytes | None) -> None:
        self._under_way.append(frame)
        asyncio.get_running_loop().call_later(self._random.random() * self.delay, self._arrive)

    def _arrive(self) -> None:
        """The first of what is under way; None: this end has left."""
        if self.silent or not self._under_way:
            return
        frame = self._under_way.popleft()
        if frame is None:
            self.peer.end(RankFailure("has left"))
        else:
            self.peer.come(frame)

    def come(self, frame: bytes) -> None:
        """A frame of the peer's is here."""
        if self.ended or self._left:
            return
        if self._hears is None or self._kept:
            self._kept.append(frame)
        else:
            self._hear(frame)

    def _hear(self, frame: bytes) -> None:
        if self.ended or self._hears is None or self.silent:
            return
        try:
            self._hears(frame)
        except AssertionError:
            raise  # a law that a test checks is broken
        except Exception as error:
            self._fail(_raised(error))

    def _fail(self, failure: RankFailure) -> None:
        self.end(failure)
        self.peer.end(RankFailure("closed the connection"))

    def patience(self, seconds: float | None) -> None:
        """See ``Link``."""
        self._patience = max(self.timeout, seconds or 0.0)

    async def aclose(self) -> None:
        """See ``Link``."""
        if not self.ended and not self._left:
            self._left, self._lost = True, None
            self._post(None)
        await asyncio.sleep(self.delay)

    def abort(self) -> None:
        """See ``Link``."""
        self._lost = None
        if not self.ended:
            self.ended = True
            self.peer.end(RankFailure("closed the connection"))

    def end(self, failure: RankFailure) -> None:
        """The peer has left, is gone or was given up."""
        if not self.ended:
            self.ended = True
            self._under_way.clear()
            self._failure = failure
            if self._hears is not None:
                asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        lost, self._lost = self._lost, None
        if lost is not None and self._failure is not None and not self.silent:
            lost(self._failure)

    def cut(self) -> None:
        """Cut the link: frames under way are lost, and both ends hear of it."""
        self._under_way.clear()
        self.peer._under_way.clear()
        self._fail(RankFailure("closed the connection"))

    def fall_silent(self) -> None:
        """Let this process do nothing any more, though its link stands; the peer gives it up after the time-out."""
        self.silent = True
        self._under_way.clear()
        peer = self.peer
        asyncio.get_running_loop().call_later(
            peer._patience, peer.end, RankFailure(f"was silent for {peer._patience:g} s")
        )


def simulated_links(random: Random, *, delay: float = 0.001, timeout: float = _TIMEOUT) -> tuple[
    SimulatedLink, SimulatedLink
]:  # fmt: skip
    """Both ends of a link. ``delay``: seconds that a frame takes at most."""
    ends = SimulatedLink(random, delay, timeout), SimulatedLink(random, delay, timeout)
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    return ends


class SimulatedWorker:
    """The process of one rank: it connects, serves, and ends. ``face``: what its engine has, once it is open.
    ``failure``: why it ended, if not well. ``link``: its end, whose peer is the head's."""

    def __init__(
        self, group: SimulatedGroup, rank: int, link: SimulatedLink, device: Device | None,
        locate: Callable[[str], Storage], shard: Shard | None,
    ) -> None:  # fmt: skip
        self.rank = rank
        self.link = link
        self.failure: BaseException | None = None
        self.opened = asyncio.Event()
        self.server = RankProcess(link, rank, group.topology, EmbedderParts(device, None, locate), shard)
        self.task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._run(), name=f"worker {rank}")

    def __repr__(self) -> str:
        return f"SimulatedWorker({self.rank}, {self.server!r})"

    @property
    def face(self) -> RankWorker:
        """The worker as the rank's engine sees it."""
        return self.server.worker

    async def _run(self) -> None:
        try:
            async with self.server.serving():
                self.opened.set()
                await self.face.ended()
        except AsyncCacheError as error:
            self.failure = error
        finally:
            self.opened.set()

    def kill(self) -> None:
        """End the process, and with it its end of the link. Work that its device and stores had begun goes on."""
        self.link.cut()

    async def ended(self) -> None:
        """Return when the process has ended."""
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.result()


class SimulatedGroup:
    """The workers of ``topology``: those of other processes run at once. ``devices``, ``locates``, ``shards``: by rank,
    what a process gives its worker: a device, what a store's URL stands for, its part of the configuration."""

    def __init__(
        self, random: Random, topology: Topology, *, own: int | None = 0, delay: float = 0.001,
        timeout: float = _TIMEOUT, devices: Mapping[int, Device] | None = None,
        locates: Mapping[int, Callable[[str], Storage]] | None = None, shards: Mapping[int, Shard] | None = None,
        absent: frozenset[int] = frozenset(), arrival: float = 300.0,
    ) -> None:  # fmt: skip
        self.topology = topology
        shards = shards or {}
        locates = locates or {}
        self.workers = Workers(
            topology, own=own, timeout=timeout, arrival=arrival, shard=None if own is None else shards.get(own),
            locate=_as_it_is if own is None else locates.get(own, _as_it_is),
        )  # fmt: skip
        self.processes: dict[int, SimulatedWorker] = {}
        for rank in range(topology.ranks):
            if rank == own or rank in absent:
                continue
            head, worker = simulated_links(random, delay=delay, timeout=timeout)
            self.workers.answer(encode(Hello(VERSION, rank)), head)
            self.processes[rank] = SimulatedWorker(
                self, rank, worker, (devices or {}).get(rank), locates.get(rank, _as_it_is), shards.get(rank)
            )

    def __repr__(self) -> str:
        return f"SimulatedGroup({self.topology}, {len(self.processes)} processes)"

    async def ended(self) -> None:
        """Return when all processes have ended."""
        for process in self.processes.values():
            await process.ended()

    async def aclose(self) -> None:
        """End those processes that have not ended by themselves."""
        for process in self.processes.values():
            process.task.cancel()
            with suppress(asyncio.CancelledError):
                await process.ended()


def _as_it_is(url: str) -> Storage:
    return url
