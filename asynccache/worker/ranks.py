"""The ranks of a group: their coordinates, and how their workers come in: one for each rank, of the same version as the
head. Ranks are numbered as engines number them: tp fastest, then cp, then pp.

A worker that comes late, or a second time, or with another version is told the reason, and disturbs no other. If a
worker's link ends before all have come, another worker of its rank may take its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from asynccache import checks
from asynccache.config import CacheConfig
from asynccache.errors import ConfigError, RankFailure
from asynccache.version import VERSION
from asynccache.worker.link import Link, open_listener
from asynccache.worker.messages import Hello, Welcome, decoder, encode

if TYPE_CHECKING:
    from asynccache.worker.local import Storage

Shard = Callable[[CacheConfig], CacheConfig]
"""A function from the head's configuration to that of one rank: bytes, layers, ``covers`` and dtypes may differ, and
all else is the same."""

TIMEOUT = 30.0
ARRIVAL = 300.0

_decode_hello = decoder(Hello)
decode_welcome = decoder(Welcome)


class RankPlace(NamedTuple):
    """One rank's coordinates, each from 0 on."""

    tp: int
    cp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The number of ranks in each direction: tensor-, context- and pipeline-parallel."""

    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp"):
            object.__setattr__(self, name, checks.integer(name, getattr(self, name), 1))

    @property
    def ranks(self) -> int:
        """The number of ranks in all."""
        return self.tp * self.cp * self.pp

    def place(self, rank: int) -> RankPlace:
        """Return the coordinates of ``rank``. Raises ``ConfigError``: there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise ConfigError(f"rank={rank} is not one of the {self.ranks} ranks of {self}")
        return RankPlace(rank % self.tp, rank // self.tp % self.cp, rank // (self.tp * self.cp))

    def rank(self, place: RankPlace) -> int:
        """Return the number of the rank at ``place``."""
        return place.tp + self.tp * (place.cp + self.cp * place.pp)


class Workers:
    """The workers of one cache, for ``AsyncCache``. Two arguments are for the head's own rank: ``shard``, as for
    ``connect``, and ``locate``, which returns what to use as the store of a URL.
    """

    def __init__(
        self, topology: Topology, *, own: int | None = 0, timeout: float = TIMEOUT, arrival: float = ARRIVAL,
        shard: Shard | None = None, locate: Callable[[str], Storage] = lambda url: url,
    ) -> None:  # fmt: skip
        self.topology = checks.instance("topology", topology, Topology)
        self.own = None if own is None else checks.integer("own", own, 0, topology.ranks - 1)
        """The rank of the head's own process; None: it has none."""
        self.timeout = checks.number("timeout", timeout, above=0)
        """Seconds of silence that are a failure."""
        self.arrival = checks.number("arrival", arrival, above=0)
        """For how many seconds the next worker is waited for, from when the cache opens and again from each one that
        comes."""
        self.shard = None if shard is None else checks.function("shard", shard)
        self.locate = locate
        self.address = ""
        """Where the head listens."""
        self._links: dict[int, Link] = {}
        self._came = asyncio.Event()
        self._taken = self._complete = self._closed = False

    def __repr__(self) -> str:
        others = self.topology.ranks - (self.own is not None)
        return f"Workers({self.topology}, {others - len(self._missing())} of {others} have come)"

    def _missing(self) -> list[int]:
        here = {rank for rank, link in self._links.items() if not link.ended}
        return [rank for rank in range(self.topology.ranks) if rank != self.own and rank not in here]

    def answer(self, hello: bytes, link: Link) -> bytes:
        """Return the encoded welcome for the worker that says ``hello`` over ``link``, and keep the link. Raises
        ``RankFailure``: the worker is refused; the text is the reason."""
        word: Hello = _decode_hello(hello)
        if word.version != VERSION:
            raise RankFailure(f"asynccache {word.version} cannot work for a head of {VERSION}")
        if not 0 <= word.rank < self.topology.ranks:
            raise RankFailure(f"rank {word.rank} is none of {self.topology}")
        if word.rank == self.own:
            raise RankFailure(f"rank {word.rank} is the head's own")
        if word.rank in self._links and (self._complete or not self._links[word.rank].ended):
            raise RankFailure(f"rank {word.rank} has come before")
        if self._closed:
            raise RankFailure("the group is closed")
        self._links[word.rank] = link
        self._came.set()
        topology = self.topology
        return encode(Welcome((topology.tp, topology.cp, topology.pp)))

    async def arrived(self) -> Mapping[int, Link]:
        """Return the links of all ranks but the head's own, by rank, when all have come. Cancelling it stops the
        waiting.

        Raises:
            RankFailure: workers are missing, and ``arrival`` seconds went by in which none of them came.
            ConfigError: these workers were given to a cache before, or are closed.
        """
        if self._taken or self._closed:
            raise ConfigError("workers: a group serves one cache, once")
        self._taken = True
        fewest = self.topology.ranks
        try:
            async with asyncio.timeout(self.arrival) as patience:
                while missing := len(self._missing()):
                    if missing < fewest:  # else a rank that comes and dies for ever would be waited for as long
                        fewest = missing
                        patience.reschedule(asyncio.get_running_loop().time() + self.arrival)
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            absent = self._missing()
            what = f"did not come within {self.arrival:g} s"
            if len(absent) == 1:
                raise RankFailure(what, absent[0]) from None
            raise RankFailure(f"ranks {absent} {what}") from None
        self._complete = True
        return {rank: self._links[rank] for rank in sorted(self._links)}

    def close(self) -> None:
        """Admit no worker any more, and end the links if no cache has taken them."""
        self._closed = True
        if not self._complete:
            for link in self._links.values():
                link.abort()


@asynccontextmanager
async def listen(
    address: str, topology: Topology, *, secret: bytes | None = None, own: int | None = 0, timeout: float = TIMEOUT,
    arrival: float = ARRIVAL, shard: Shard | None = None,
) -> AsyncIterator[Workers]:  # fmt: skip
    """Listen at ``address`` for the workers of ``topology``, until the end of the ``async with``. It gives the
    ``Workers`` that an ``AsyncCache`` takes as ``workers``. Cancelling it leaves nothing open.

    ``address``: ``127.0.0.1:7011``, ``[::1]:7011`` or ``unix:/path``; with port 0 any port that is free, which
    ``Workers.address`` tells. ``secret``: what both sides must know; by default the value of ``ASYNCCACHE_SECRET``, or
    what is in the file that ``ASYNCCACHE_SECRET_FILE`` names. ``own``: the rank of this process; None: it has none and
    imports no torch, like a scheduler without a GPU. ``timeout``: seconds of silence after which a worker is given up.
    ``arrival``: for how many seconds the cache, when it opens, waits for the next worker. ``shard``: as for
    ``connect``, for the rank ``own``.

    Raises:
        ConfigError: an argument is unusable, the address cannot be used, or there is no secret.
    """
    workers = Workers(topology, own=own, timeout=timeout, arrival=arrival, shard=shard)
    listener = await open_listener(address, secret, workers.answer, timeout=workers.timeout)
    workers.address = listener.address
    try:
        yield workers
    finally:
        workers.close()
        await listener.aclose()
