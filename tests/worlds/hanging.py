"""Seeded worlds in which stores hang: any verb of any store, at any time, for a while or for ever.

Law: no request waits longer than its own deadline plus the store's patience. ``tests.simulated.patience`` says exactly
what that is and holds it against each lease. All other laws of the worlds hold, too: right bytes, who was not cancelled
is served, and when the stores have answered nothing is held and nothing is in flight. Some calls end by a bound of
their own: ``flush(timeout)`` and ``aclose(deadline)``.

There are three kinds of worlds, by the seed: requests of all sorts in one process, with one to three stores that come
and go; the scheduler, on one rank or several; and caches of one to eight ranks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Any

from msgspec import structs

from asynccache import AsyncCache, AsyncCacheError, BackendError, CacheFull, Full, PrefetchPolicy
from asynccache.core.settings import WritePolicy
from asynccache.runtime.lease import Lease
from asynccache.storage import Breaker, CheckedStore
from asynccache.storage.checked import store_layout
from asynccache.worker import Topology
from tests.group import random_worlds
from tests.shim import shim_rank_world
from tests.simulated import world
from tests.simulated.backend import Hang, Hostility, SimulatedBackend
from tests.simulated.drawn import PAGE, Climate
from tests.simulated.leading import leading
from tests.simulated.loop import Order, SimulatedLoop, simulate
from tests.simulated.patience import FOREVER, Patience

VERBS = ("exists", "exists", *["get"] * 4, *["put"] * 4, "delete", "clear", "flush")
CALLS = 8
"""The most calls that one prefetch makes of a store in these worlds, where prompts are short."""
CLOSING = 4.0
"""Seconds after its deadline in which a cache that hangs has closed."""


@dataclass(slots=True)
class Report:
    """The results of a world. ``met``: what it came across; ``hung``: calls that hung, by verb; ``longest``: waits
    beyond what is allowed."""

    kind: str
    met: Counter[str] = field(default_factory=Counter)
    hung: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)


def play(seed: int) -> Report:
    """Run the world of this seed.

    Raises:
        Overdue: a request waited too long.
        Exception: whatever else went wrong; the seed is in its notes.
    """
    kind = (alone, scheduler, alone, ranks)[seed % 4]
    return kind(seed)


def draw_hangs(random: Random, policy: PrefetchPolicy, only: str = "") -> tuple[Hang, ...]:
    """When a store hangs, and in what (``only``: in this verb): once, or again and again. Under ``wait_complete`` it
    lets go of every call sooner or later."""
    hangs = []
    for _ in range(1 if only else random.choice((0, 1, 1, 2))):
        verbs = frozenset((only,) if only else random.sample(VERBS, random.choice((1, 1, 1, 1, 3, len(VERBS)))))
        begin, stubborn = random.choice((0.0, 0.0, 0.03, 0.3)) * random.random(), random.random() < 0.7
        if random.random() < 0.4:
            hangs += [Hang(verbs, begin + 1.3 * number, 1.0, stubborn) for number in range(8)]
            continue
        length = random.choice((0.3, 3.0, 20.0, 60.0, inf, inf))
        if policy is PrefetchPolicy.WAIT_COMPLETE and length == inf:
            stubborn = False
        hangs.append(Hang(verbs, begin, length, stubborn))
    return tuple(hangs)


def patience(hangs: Sequence[Sequence[Hang]], timeout: float) -> Patience:
    """The patience of requests with stores that hang like this, and whose calls have ``timeout`` seconds."""
    stubborn = sum(hang.length for some in hangs for hang in some if hang.stubborn and hang.length < inf)
    asked = not any("exists" in hang.verbs for some in hangs for hang in some)
    return Patience(guard=CALLS * len(hangs) * 2 * timeout + stubborn, questions=asked)


class Hanging:
    """The stores of a world, which hang in some of its lives: from the beginning of ``hang`` on, or when somebody waits
    to grow. ``hung``: calls that did, by verb."""

    def __init__(self, random: Random, patience: Patience) -> None:
        self.stores: list[SimulatedBackend] = []
        self._random = random
        self._patience = patience
        self._lives = 0

    @asynccontextmanager
    async def hang(self, answer: bool = True) -> AsyncIterator[None]:
        """Let them hang for the time of this context, and ``answer`` then. Some first lives fill the stores in
        peace."""
        self._lives += 1
        if self._lives > 1 or self._random.random() < 0.6:
            if self._random.random() < 0.3:
                self._begin()
            else:
                self._patience.grows = self._begin
                asyncio.get_running_loop().call_later(0.4, lambda: self._patience.grows())
        try:
            yield
        except BaseException:
            self.answer()
            raise
        if answer:
            self.answer()
            await asyncio.sleep(1.0)

    async def during(self, work: Awaitable[None], answer: bool = True) -> None:
        """Do ``work``, in which nobody may wait for too long."""
        async with self.hang(answer):
            await work
            self._patience.check()

    def _begin(self) -> None:
        self._patience.grows = lambda: None
        for store in self.stores:
            store.hang()

    def answer(self) -> None:
        """Have all stores answer."""
        self._patience.grows = lambda: None
        for store in self.stores:
            store.answer()

    @property
    def hung(self) -> Counter[str]:
        return sum((store.hung for store in self.stores), Counter())


def order(seed: int) -> Order:
    return Random(f"{seed}/order").choice((Order.FIFO, Order.SHUFFLED, Order.SHUFFLED))


# requests of all sorts, in one process


def alone(seed: int) -> Report:
    random = Random(f"{seed}/hangs")
    climate, only = _climate(seed, random)

    async def main(loop: SimulatedLoop) -> Report:
        made = _World(loop, climate, only, random)
        with made.patience.watching():
            report = await made.run()
        return Report("alone", report.met, made.hanging.hung, made.patience.longest)

    with leading(seed) if climate.leads else nullcontext():
        return simulate(main, seed, order=order(seed))


def quick(hostility: Mapping[int, Hostility]) -> dict[int, Hostility]:
    return {rank: replace(one, delay=min(one.delay, 0.005)) for rank, one in hostility.items()}


def _climate(seed: int, random: Random) -> tuple[Climate, str]:
    """A climate of ``tests.simulated.world`` with a store, and with settings that say how long is waited. Half of them
    have a small host, which calls that hang soon take whole, and few requests at a time, which leave room to grow; the
    verb of these calls is returned, too."""
    drawn = (world.draw_climate(seed + number * 2**32) for number in range(100))
    climate = next(climate for climate in drawn if climate.config.stores)
    config, only, concurrency = climate.config, random.choice(("", "", "put", "get")), random.randint(2, 10)
    config = structs.replace(
        config, prefetch_timeout_base=random.choice((0.05, 1.0)), prefetch_timeout_per_1k=random.choice((0.25, 20.0)),
        prefetch_quota=random.choice((0.2, 0.5, 1.0)), backup_quota=random.choice((0.1, 0.25, 1.0)),
    )  # fmt: skip
    if only:
        full, *others = config.components
        assert isinstance(full, Full)
        full = structs.replace(full, host_tokens=random.choice((3, 5, 8)) * config.page_size)
        policy = WritePolicy.WRITE_THROUGH if only == "put" else WritePolicy.WRITE_BACK  # the device has only copies
        config = structs.replace(
            config, components=(full, *others), write_policy=policy, write_back_watermark=0.1, prefetch_quota=1.0,
            backup_quota=1.0,
        )  # fmt: skip
        concurrency = random.randint(1, 3)
    climate = climate._replace(
        config=config, hostility=quick(climate.hostility), disturb=random.choice((0.0, 0.3, 0.3)),
        requests=random.randint(8, 24), concurrency=concurrency,
    )  # fmt: skip
    return climate, only


class _World(world.World):
    """``closes``: its second life ends while the stores hang."""

    def __init__(self, loop: SimulatedLoop, climate: Climate, only: str, random: Random) -> None:
        super().__init__(loop, climate)
        config, timeout, slow = climate.config, random.choice((2.0, 30.0)), random.choice(("0", "1", "10"))
        self.guest_options = {"timeout": str(timeout), "slow": slow}
        for one in self.stores.values():
            one.hangs = draw_hangs(random, config.prefetch_policy, only)
        self.store = CheckedStore(
            self.stores["backend"], store_layout(config.pools()), threads=0, timeout=timeout, slow=float(slow),
            breaker=Breaker(threshold=random.choice((1, 5, 1000))),
        )  # fmt: skip
        self.closes = random.random() < 0.3
        self.lives = self.prompts = 0
        self.background: list[asyncio.Task[None]] = []
        self.patience = patience([store.hangs for store in self.stores.values()], timeout)
        self.hanging = Hanging(random, self.patience)
        self.hanging.stores += self.stores.values()

    def make(self, **more: Any) -> AsyncCache:
        return AsyncCache(structs.replace(self.climate.config, storage=None), device=self.device, storage=self.store)

    def request(self, random: Random) -> world.Request:
        return _Request(self, random)

    async def live(self) -> None:
        self.lives += 1
        if self.lives == 2 and self.closes:
            await self._close_while_they_hang()
        else:
            await super().live()
        if self.lives == 2:
            await self.store.aclose()

    async def _close_while_they_hang(self) -> None:
        self.cache = self.make()
        await self.cache.__aenter__()
        await self.hanging.during(super().requests(self.climate.requests), answer=False)
        deadline, before = self.random.choice((0.0, 1.0, 5.0)), self.loop.time()
        with suppress(BackendError):
            await self.cache.aclose(deadline)
        took = self.loop.time() - before
        assert took <= deadline + CLOSING, f"aclose({deadline}) took {took:.1f} s"
        self.hanging.answer()
        await asyncio.sleep(1.0)
        await self._background_ends()

    async def requests(self, count: int) -> None:
        await self.hanging.during(super().requests(count))
        await self._background_ends()

    async def _background_ends(self) -> None:
        """The stores have answered, so whoever was waiting for them ends."""
        background, self.background = self.background, []
        if background:
            _, late = await asyncio.wait(background, timeout=10.0)
            assert not late, f"the stores have answered, and these still wait: {late}"
            for task in background:
                task.result()

    # what they do

    async def disturb(self) -> None:
        """Do what an embedder may do at any time, and do not wait for it: it may hang with a store."""
        cache, random = self.cache, self.random
        namespace, prompt = random.choice((None, "tenant")), random.choice(self.said)[1] or [0]
        work: Callable[[], Coroutine[Any, Any, Any]] = random.choice((
            lambda: cache.invalidate(namespace), lambda: self._flush(random.choice((0.0, 0.5, 5.0))), cache.reset,
            lambda: cache.keep(prompt, ttl=0.02), lambda: cache.match(prompt), lambda: self._give_up_a_prefetch(prompt),
            lambda: self._guest(random), lambda: self._guest(random),
        ))  # fmt: skip
        self.background.append(self.loop.create_task(self._tolerant(work()), name="disturbance"))

    async def _tolerant(self, work: Coroutine[Any, Any, Any]) -> None:
        """A store that hung for too long may not do what was asked, and the cache may close meanwhile."""
        with suppress(AsyncCacheError):
            await work

    async def _flush(self, timeout: float) -> None:
        before = self.loop.time()
        with suppress(TimeoutError):
            await self.cache.flush(timeout)
        took = self.loop.time() - before
        assert took <= timeout + 0.1, f"flush({timeout}) took {took:.1f} s"


class _Request(world.Request):
    """One that takes its time, and grows with patience. Nobody has asked for some of their prompts yet."""

    grows = 0.7

    def __init__(self, owner: _World, random: Random) -> None:
        super().__init__(owner, random)
        if random.random() < 0.4:
            owner.prompts += 1
            self.prompt[0] = 1000 + owner.prompts

    async def _extend(self, lease: Lease) -> None:
        try:
            await lease.extend(self.random.randint(1, 3 * PAGE), wait=self.random.random() < 0.8)
        except CacheFull:
            self.met["extend full"] += 1

    async def _compute(self, lease: Lease, text: Sequence[int], start: int) -> None:
        await asyncio.sleep(self.random.choice((0.0, 0.002, 0.02)))
        await super()._compute(lease, text, start)


# the scheduler


def scheduler(seed: int) -> Report:
    random = Random(f"{seed}/hangs")
    topology = random.choice((Topology(), Topology(), Topology(tp=2)))

    async def main(loop: SimulatedLoop) -> Report:
        made = _Scheduling(loop, seed, topology, random)
        with made.patience.watching():
            report = await made.run()
        return Report("scheduler", report.ends + report.hits, made.hanging.hung, made.patience.longest)

    return simulate(main, seed, order=order(seed))


class _Scheduling(shim_rank_world.World):
    """Each request gets its tokens in time: it may have to wait for the others' prefetches as well as its own."""

    def __init__(self, loop: SimulatedLoop, seed: int, topology: Topology, random: Random) -> None:
        super().__init__(loop, seed, topology, has_store=True)
        policy = self.config.prefetch_policy
        self.hostility = replace(self.hostility, delay=min(self.hostility.delay, 0.005))
        self.hangs = {rank: draw_hangs(random, policy) for rank in range(topology.ranks)}
        self.patience = patience(list(self.hangs.values()), 30.0)
        self.hanging = Hanging(random, self.patience)

    def _machines(self, stack: Any) -> Any:
        devices, backends = super()._machines(stack)
        for rank, backend in backends.items():
            backend.hangs = self.hangs[rank]
        self.hanging.stores += backends.values()
        return devices, backends

    async def callers(self) -> None:
        await self.hanging.during(super().callers())

    async def _one(self, ask: shim_rank_world.Ask) -> None:
        before, busy = self.loop.time(), self.patience.busy()
        with suppress(TimeoutError):
            async with asyncio.timeout(FOREVER):
                await super()._one(ask)
        waited = self.loop.time() - before - (self.patience.busy() - busy)
        policy = self.config.prefetch_policy
        deadline = self.patience.guard if policy is PrefetchPolicy.WAIT_COMPLETE else 0.1
        if waited > shim_rank_world.REQUESTS * (deadline + 1.0):
            self.patience.broken.append(f"a request that asked for {ask.new} tokens waited {waited:.1f} s")


# ranks


def ranks(seed: int) -> Report:
    random = Random(f"{seed}/hangs")
    drawn = (random_worlds.draw(seed + number * 2**32) for number in range(100))
    climate = next(climate for climate in drawn if climate.config.stores)
    hangs = {rank: draw_hangs(random, climate.config.prefetch_policy) for rank in range(climate.topology.ranks)}
    climate = climate._replace(
        hostility=quick(climate.hostility), calm=False, fate="", disturb=0.0, requests=random.randint(4, 8),
        concurrency=random.randint(2, 4),
    )  # fmt: skip

    async def main(loop: SimulatedLoop) -> Report:
        made = _Ranks(loop, climate, hangs, random)
        with made.patience.watching():
            report = await made.run()
        return Report("ranks", report.met, made.hanging.hung, made.patience.longest)

    with leading(seed) if climate.leads else nullcontext():
        return simulate(main, seed, order=order(seed), step_limit=400_000)


class _Ranks(random_worlds.RandomWorld):
    """A store of any rank may hang."""

    def __init__(
        self, loop: SimulatedLoop, climate: Climate, hangs: Mapping[int, Sequence[Hang]], random: Random
    ) -> None:
        super().__init__(loop, climate)
        for rank, store in self.world.backends.items():
            store.hangs = hangs[rank]
        self.patience = patience(list(hangs.values()), 30.0)
        self.hanging = Hanging(random, self.patience)
        self.hanging.stores += self.world.backends.values()

    async def _all_requests(self) -> None:
        await self.hanging.during(super()._all_requests())

    def request(self, random: Random) -> random_worlds.Request:
        return _RanksRequest(self, random)


class _RanksRequest(random_worlds.Request):
    """One that leaves it to its lease for how long it waits for a prefetch, and grows."""

    awaits = 0.0

    async def _publish(self, lease: Lease, text: list[int], number: int) -> None:
        if self.random.random() < 0.5:
            with suppress(CacheFull):
                await lease.extend(self.random.randint(1, 2 * PAGE), wait=True)
        await super()._publish(lease, text, number)
