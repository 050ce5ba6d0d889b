"""Ranks in one process on virtual time: groups and links that are late, lost and killed as a seed says.

Faithful where it hurts: the n-th reduction of one rank meets the n-th of every other, whatever step each is at; frames
of unequal length abort; a killed rank's direct partners hear at once and a hung one's at the time-out; an idle receive
times out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from random import Random
from typing import Generic, TypeVar

import numpy as np

from asynccache.errors import RankFailure
from asynccache.ranks.frames import Words
from asynccache.ranks.links import Links
from asynccache.ranks.topology import Topology

T = TypeVar("T")
R = TypeVar("R")


class Fate(Enum):
    """What has become of a rank."""

    ALIVE = "alive"
    KILLED = "killed"
    HUNG = "hung"


class SimulatedRanks:
    """The connections of all ranks of ``topology``. ``timeout``: seconds of silence that are a failure; ``delay``
    draws how long one message takes."""

    def __init__(self, topology: Topology, random: Random, *, timeout: float = 3.0, latency: float = 0.002) -> None:
        self.topology = topology
        self.timeout = timeout
        self.fates = [Fate.ALIVE] * topology.ranks
        self.sent = 0
        self._random = random
        self._latency = latency
        self._groups: dict[tuple[int, ...], _Meeting[Words, Words]] = {}
        self._world: _Meeting[bytes, list[bytes]] = _Meeting(self, range(topology.ranks), list)
        self._wires: dict[tuple[int, int], _Wire] = {}

    def __repr__(self) -> str:
        return f"SimulatedRanks({self.topology}, {[fate.value for fate in self.fates]})"

    def member(self, rank: int) -> SimulatedMember:
        """What a cache of this rank takes."""
        return SimulatedMember(self, rank)

    def links(self, rank: int) -> Links:
        """The connections of one rank."""
        topology = self.topology
        place = topology.place(rank)
        above, below = topology.above(place), topology.below(place)
        groups = []
        if above is None:
            members = [g for g in (topology.cp_group(place), topology.tp_group(place)) if len(g) > 1]
            groups = [_Member(self._meeting(ranks), rank) for ranks in members]
        return Links(
            groups,
            _Neighbour(self._wire(above, rank), self._wire(rank, above)) if above is not None else None,
            _Neighbour(self._wire(below, rank), self._wire(rank, below)) if below is not None else None,
        )

    async def gather(self, rank: int, content: bytes) -> list[bytes]:
        """What every rank gives, by rank; all call it at the same point."""
        return await self._world.meet(rank, content)

    def kill(self, rank: int) -> None:
        """Its process is gone: connections break."""
        self._end(rank, Fate.KILLED)

    def hang(self, rank: int) -> None:
        """Its process stands still: connections stay and nothing comes."""
        self._end(rank, Fate.HUNG)

    def _end(self, rank: int, fate: Fate) -> None:
        self.fates[rank] = fate
        self._world.lost(rank)
        for meeting in self._groups.values():
            meeting.lost(rank)
        for wire in self._wires.values():
            wire.lost(rank)

    async def stand(self, rank: int) -> None:
        """Where a process that is gone or hangs comes no further."""
        if self.fates[rank] is not Fate.ALIVE:
            await asyncio.get_running_loop().create_future()

    def reconnect(self) -> None:
        """New connections for everybody: another group begins."""
        self._groups.clear()
        self._wires.clear()

    def delay(self) -> float:
        """How long a message takes; now and then very long."""
        self.sent += 1
        return self._random.random() * self._latency * (20 if self._random.random() < 0.02 else 1)

    def _meeting(self, ranks: tuple[int, ...]) -> _Meeting[Words, Words]:
        return self._groups.setdefault(ranks, _Meeting(self, ranks, _lowest))

    def _wire(self, source: int, target: int) -> _Wire:
        return self._wires.setdefault((source, target), _Wire(self, source, target))


class SimulatedMember:
    """One rank's connections, as ``ranks.membership`` wants them."""

    def __init__(self, net: SimulatedRanks, rank: int) -> None:
        self.topology = net.topology
        self.rank = rank
        self._net = net

    def links(self, length: int) -> Links:
        """The connections; here, frames bring their lengths along."""
        return self._net.links(self.rank)

    async def gather(self, content: bytes) -> list[bytes]:
        """What every rank gives, by rank."""
        return await self._net.gather(self.rank, content)


class _Meeting(Generic[T, R]):
    """Where ranks do the same call. ``waiting``: by rank, what it has handed in and nobody has picked up yet."""

    def __init__(self, net: SimulatedRanks, ranks: Iterable[int], combine: Callable[[list[T]], R]) -> None:
        self.net = net
        self._combine = combine
        self._waiting: dict[int, deque[tuple[T, asyncio.Future[R]]]] = {rank: deque() for rank in ranks}

    async def meet(self, rank: int, item: T) -> R:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting[rank].append((item, future))
        self._meet(loop)
        if any(self.net.fates[other] is Fate.KILLED for other in self._waiting):
            loop.call_later(self.net.delay(), _fail, future, "connection closed by peer")
        try:
            async with asyncio.timeout(self.net.timeout):
                return await future
        except TimeoutError:
            raise RankFailure(f"a group of {len(self._waiting)} ranks did not answer") from None

    def _meet(self, loop: asyncio.AbstractEventLoop) -> None:
        while all(self._waiting.values()):
            calls = [queue.popleft() for queue in self._waiting.values()]
            result = self._combine([item for item, _ in calls])
            for _, future in calls:
                loop.call_later(self.net.delay(), _give, future, result)

    def lost(self, rank: int) -> None:
        if rank in self._waiting and self.net.fates[rank] is Fate.KILLED:
            for queue in self._waiting.values():
                for _, future in queue:
                    _fail(future, "connection closed by peer")


def _lowest(frames: list[Words]) -> Words:
    if len({len(words) for words in frames}) > 1:
        raise SystemError("op.preamble.length <= op.nbytes: the process aborts")
    lowest: Words = np.minimum.reduce(frames)
    return lowest


class _Member:
    """A group as one rank sees it."""

    def __init__(self, meeting: _Meeting[Words, Words], rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    async def minimum(self, words: Words) -> Words:
        await self._meeting.net.stand(self._rank)
        return (await self._meeting.meet(self._rank, words.copy())).copy()


class _Wire:
    """Frames from ``source`` to ``target``, in order."""

    def __init__(self, net: SimulatedRanks, source: int, target: int) -> None:
        self._net = net
        self._ends = (source, target)
        self._flying: deque[Words] = deque()
        self._arrived: deque[Words] = deque()
        self._last = 0.0
        self._receiver: asyncio.Future[None] | None = None

    def send(self, words: Words) -> None:
        if any(self._net.fates[end] is not Fate.ALIVE for end in self._ends):
            return
        loop = asyncio.get_running_loop()
        self._last = max(self._last, loop.time() + self._net.delay())
        self._flying.append(words.copy())
        loop.call_at(self._last, self._arrive)

    def _arrive(self) -> None:
        self._arrived.append(self._flying.popleft())
        self._wake()

    def _wake(self) -> None:
        if self._receiver is not None and not self._receiver.done():
            self._receiver.set_result(None)

    def lost(self, rank: int) -> None:
        if rank in self._ends and self._net.fates[rank] is Fate.KILLED:
            self._wake()

    async def receive(self) -> Words:
        await self._net.stand(self._ends[1])
        try:
            async with asyncio.timeout(self._net.timeout):
                while not self._arrived:
                    if self._net.fates[self._ends[0]] is Fate.KILLED:
                        raise RankFailure(f"rank {self._ends[0]} closed the connection")
                    self._receiver = asyncio.get_running_loop().create_future()
                    await self._receiver
        except TimeoutError:
            raise RankFailure(f"rank {self._ends[0]} did not answer") from None
        return self._arrived.popleft()


class _Neighbour:
    """A pair of wires."""

    def __init__(self, incoming: _Wire, outgoing: _Wire) -> None:
        self.send = outgoing.send
        self.receive = incoming.receive


def _give(future: asyncio.Future[R], result: R) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[R], reason: str) -> None:
    if not future.done():
        future.set_exception(RankFailure(reason))
