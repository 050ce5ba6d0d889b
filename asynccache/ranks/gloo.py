"""The links of real processes: ``torch.distributed`` groups whose CPU backend is gloo.

``connect`` makes the groups itself, from a topology and a place to meet; ``adopt`` takes the embedder's (of an NCCL
job: its CPU groups). Groups are for the cache alone: gloo pairs calls by their order, whoever makes them. What can
block runs on lanes: one per column group, and per neighbour one for receives and one for sends, which are rendezvous.

Groups are built without torch's default group and its ``new_group``: so only members take part, an embedder's own
``torch.distributed`` is not touched, and new groups can be had in the same process after a failure.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeVar, cast

from asynccache.errors import ConfigError, RankFailure
from asynccache.ranks.circle import Circle
from asynccache.ranks.frames import Words
from asynccache.ranks.handshake import differing
from asynccache.ranks.lane import Lane
from asynccache.ranks.links import Links
from asynccache.ranks.topology import Place, Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

TIMEOUT = 30.0
ARRIVAL = 300.0
GRACE = 2.0
IDLE = 0.05
JOIN = 1.0


@dataclass(frozen=True, slots=True)
class _Circles:
    """``column``: groups to reduce over, cp before tp; ``above`` and ``below``: the neighbour's index, and in what."""

    world: Circle | None = None
    column: Sequence[Circle] = ()
    above: tuple[Circle, int] | None = None
    below: tuple[Circle, int] | None = None

    def each(self) -> list[Circle]:
        """Every one, once."""
        neighbours = [found[0] for found in (self.above, self.below) if found is not None]
        return list(dict.fromkeys(c for c in (self.world, *self.column, *neighbours) if c is not None))


class GlooRanks:
    """One rank's connections to the others; ``connect`` and ``adopt`` make it. ``arrival``: seconds that the first
    ``gather`` has, where ranks come from loading a model, say."""

    def __init__(self, topology: Topology, rank: int, circles: _Circles, arrival: float | None = None) -> None:
        self.topology = topology
        self.rank = rank
        self._circles = circles
        self._arrival = arrival
        self._lanes: list[Lane] = []
        self._links: list[_GlooLink] = []
        if circles.world is not None:
            self._gather = _Caller(circles.world, self._lane("world"))

    def __repr__(self) -> str:
        failed = [circle.failure for circle in self._circles.each() if circle.failure]
        return f"GlooRanks(rank {self.rank} of {self.topology}{', ' if failed else ''}{'; '.join(failed)})"

    async def gather(self, content: bytes) -> list[bytes]:
        """What every rank gives, in the order of the world; all ranks call it at the same point. Cancelling it leaves
        the ranks unable to gather again.

        Raises:
            RankFailure: a rank is gone or silent.
        """
        world = self._circles.world
        if world is None:
            return [content]
        arrival, self._arrival = self._arrival, None
        return await self._gather(partial(world.gather, content, arrival))

    def links(self, length: int) -> Links:
        """What steps send through; to be called once. ``length``: of a frame, in words, and the same on every rank."""
        circles = self._circles
        groups = [GlooGroup(circle, self._lane(f"group-{i}")) for i, circle in enumerate(circles.column)]
        above = self._link("above", length, *circles.above) if circles.above is not None else None
        below = self._link("below", length, *circles.below) if circles.below is not None else None
        return Links(groups, above, below)

    async def aclose(self, grace: float = GRACE) -> None:
        """Wait for the others to close, too, so that nobody loses what is still on its way; then close the connections.
        ``grace``: seconds for that at most, and for frames in flight where a rank has failed. Groups of the embedder's
        are left open unless one has failed or a call is stuck in it. Threads that do not end within ``JOIN`` seconds
        are left behind. Cancelling it skips the grace, and leaves closing to the threads.
        """
        lanes, self._lanes = self._lanes, []
        if not lanes:
            return
        try:
            with suppress(TimeoutError, RankFailure):
                async with asyncio.timeout(grace):
                    await self._farewell()
        finally:
            closer = Lane("asynccache-ranks-closer")
            done = closer.run(partial(_close, self._circles.each(), lanes))
            closer.end()
        await done

    async def _farewell(self) -> None:
        await asyncio.gather(*(link.sent() for link in self._links), return_exceptions=True)
        if not any(circle.failure for circle in self._circles.each()):
            await self.gather(b"")

    def _lane(self, name: str) -> Lane:
        lane = Lane(f"asynccache-ranks-{name}")
        self._lanes.append(lane)
        return lane

    def _link(self, name: str, length: int, circle: Circle, peer: int) -> _GlooLink:
        link = _GlooLink(circle, peer, length, self._lane(f"from-{name}"), self._lane(f"to-{name}"))
        self._links.append(link)
        return link


class _Caller:
    """Calls of one kind in one circle. One that is not waited for to its end leaves nobody able to say what the next
    would meet."""

    def __init__(self, circle: Circle, lane: Lane) -> None:
        self._circle = circle
        self._lane = lane
        self._spoilt = False

    async def __call__(self, work: Callable[[], T]) -> T:
        """``work()`` in the lane."""
        self._circle.check()
        if self._spoilt:
            raise RankFailure("a call before this one was cancelled")
        self._spoilt = True
        result = await self._lane.run(work)
        self._spoilt = False
        return result


class GlooGroup:
    """A column group. ``circle`` is what its calls block in, ``lane`` where they do."""

    def __init__(self, circle: Circle, lane: Lane) -> None:
        self.circle = circle
        self.lane = lane

    async def minimum(self, words: Words) -> Words:
        """In place. One that is cancelled goes on in its lane; what its rank hands in next meets the others' next."""
        self.circle.check()
        return await self.lane.run(partial(self.circle.minimum, words))


class _GlooLink:
    """A neighbour. Frames wait for their turn in the send lane, which keeps them alive until the peer has them."""

    def __init__(self, circle: Circle, peer: int, length: int, receives: Lane, sends: Lane) -> None:
        self._circle = circle
        self._call = _Caller(circle, receives)
        self._next = partial(circle.receive, peer, length)
        self._peer = peer
        self._sends = sends

    def send(self, words: Words) -> None:
        """From now on the frame is the link's."""
        self._sends.put(partial(self._send, words))

    def _send(self, words: Words) -> None:
        with suppress(RankFailure):  # the next receive says so
            self._circle.send(self._peer, words)

    async def receive(self) -> Words:
        """The next frame."""
        return await self._call(self._next)

    async def sent(self) -> None:
        """Wait for what was to be sent before."""
        await self._sends.run(self._circle.check)


def _close(circles: Sequence[Circle], lanes: Sequence[Lane]) -> None:
    """Cut what is to be cut, and wait for the threads."""
    for lane in lanes:
        lane.end()
    for circle in circles:
        if circle.own or circle.failure:
            circle.cut()
    if not all(lane.ended(IDLE) for lane in lanes):
        for circle in circles:
            circle.cut()
    end = monotonic() + JOIN
    for lane in lanes:
        lane.ended(max(0.0, end - monotonic()))
    for circle in circles:
        circle.let_go()


# groups of our own


async def connect(
    topology: Topology, rank: int, meeting: str | Store, *, timeout: float = TIMEOUT, arrival: float = ARRIVAL
) -> GlooRanks:
    """Meet the other ranks and make every group. ``meeting``: where, once for each time that ranks connect: host:port
    (of rank 0), what torch knows as an init method (``tcp://``, ``file://``, ``env://``), or a store of torch's.
    ``timeout``: seconds of silence that are a failure, more than the longest gap between steps with anything in flight;
    ``arrival``: how long to wait for ranks that start later, or open their caches later. Cancelling it leaves the
    others to wait in vain.

    Raises:
        ConfigError: the place cannot be used; or ranks were given different topologies.
        RankFailure: not all ranks came.
    """
    topology.place(rank)
    if topology.ranks == 1:
        return GlooRanks(topology, rank, _Circles())
    lane = Lane("asynccache-ranks-connect")
    made = lane.run(partial(_connect, topology, rank, meeting, timeout, arrival))
    lane.end()
    return GlooRanks(topology, rank, await made, arrival)


def _connect(topology: Topology, rank: int, meeting: str | Store, timeout: float, arrival: float) -> _Circles:
    try:
        store = _store(meeting, topology, rank, arrival) if isinstance(meeting, str) else meeting
        store.set_timeout(timedelta(seconds=arrival))
        _same_topology(topology, rank, store)
        return _circles(topology, rank, store, timeout)
    except RuntimeError as error:
        raise RankFailure(f"the {topology.ranks} ranks of {topology} did not meet: {error}") from error


def _store(meeting: str, topology: Topology, rank: int, arrival: float) -> Store:
    from torch.distributed.rendezvous import rendezvous

    url = meeting if "://" in meeting else f"tcp://{meeting}"
    try:
        found: tuple[Store, int, int] = next(
            rendezvous(url, rank, topology.ranks, timeout=timedelta(seconds=arrival))
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"ranks cannot meet at {meeting!r}: {error}") from None
    return found[0]


def _same_topology(topology: Topology, rank: int, store: Store) -> None:
    """Everybody is there, and means the same; or no group would ever be complete."""
    mine = asdict(topology)
    store.set(f"asynccache/topology/{rank}", json.dumps(mine))
    for other in range(topology.ranks):
        theirs = json.loads(store.get(f"asynccache/topology/{other}"))
        found = differing({rank: mine, other: theirs})
        if found is not None:
            raise ConfigError(found)


def _circles(topology: Topology, rank: int, store: Store, timeout: float) -> _Circles:
    """Every group that this rank is in: in one order everywhere, as each waits for its members."""
    from torch.distributed import ProcessGroupGloo
    from torch.distributed.distributed_c10d import PrefixStore

    def circle(name: str, ranks: Sequence[int]) -> Circle:
        index = ranks.index(rank)
        prefix = PrefixStore(f"asynccache/{name}/{'-'.join(map(str, ranks))}", store)
        group = ProcessGroupGloo(prefix, index, len(ranks), timedelta(seconds=timeout))
        return Circle(cast("ProcessGroup", group), ranks, index, timeout, own=True)  # a backend has the same calls

    place = topology.place(rank)
    world = circle("world", range(topology.ranks))
    above, below = topology.above(place), topology.below(place)
    column = [circle(name, ranks) for name, ranks in _column(topology, place) if above is None]
    pair_above = (circle("pair", (above, rank)), 0) if above is not None else None
    pair_below = (circle("pair", (rank, below)), 1) if below is not None else None
    return _Circles(world, column, pair_above, pair_below)


def _column(topology: Topology, place: Place) -> Iterator[tuple[str, tuple[int, ...]]]:
    if topology.cp > 1:
        yield "cp", topology.cp_group(place)
    if topology.tp > 1:
        yield "tp", topology.tp_group(place)


# groups of the embedder's


def adopt(
    world: ProcessGroup,
    *,
    tp: ProcessGroup | None = None,
    cp: ProcessGroup | None = None,
    pp: ProcessGroup | None = None,
    timeout: float = TIMEOUT,
    arrival: float = ARRIVAL,
) -> GlooRanks:
    """Use groups that exist. ``world``: all ranks of the cache; the others: this rank's, in the order of its
    coordinates, and None where there is but one. Errors name ranks as ``torch.distributed`` numbers them. In ``pp`` a
    neighbour that is silent costs the link to the other neighbour, too.

    Raises:
        ConfigError: a group has no gloo for CPU tensors, or is not this rank's; or sizes do not fit.
    """
    if not all(group is None or hasattr(group, "size") for group in (world, tp, cp, pp)):
        raise ConfigError("this rank is not a member of a group that it was given")
    topology = Topology(*(1 if group is None else group.size() for group in (tp, cp, pp)))
    if topology.ranks != world.size():
        raise ConfigError(f"world has {world.size()} ranks, and {topology} {topology.ranks}")
    place = Place(*(0 if group is None else group.rank() for group in (tp, cp, pp)))
    circles = {
        name: _adopted(name, group, timeout)
        for name, group in (("world", world), ("cp", cp), ("tp", tp), ("pp", pp))
        if group is not None and group.size() > 1
    }
    line, stage = circles.get("pp"), place.pp
    column = [circles[name] for name in ("cp", "tp") if name in circles and stage == 0]
    above = (line, stage - 1) if line is not None and stage > 0 else None
    below = (line, stage + 1) if line is not None and stage + 1 < topology.pp else None
    found = _Circles(circles.get("world"), column, above, below)
    return GlooRanks(topology, topology.rank(place), found, arrival)


def _adopted(name: str, group: ProcessGroup, timeout: float) -> Circle:
    from torch.distributed import get_backend_config, get_process_group_ranks

    backends = get_backend_config(group)
    if "cpu:gloo" not in backends.split(","):
        hint = "new_group(ranks, backend='gloo') makes one"
        raise ConfigError(f"{name}: the group has no gloo for CPU tensors ({backends}); {hint}")
    return Circle(group, get_process_group_ranks(group), group.rank(), timeout, own=False)
