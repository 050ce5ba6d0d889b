"""The law of patience, held against every lease of a simulated world: a request waits no longer than its own deadline
plus the store's patience, whatever hangs in whatever store.

    entering       at most  deadline + PATIENCE + GRACE + MARGIN, beside what others compute meanwhile
    extend(wait)   at most  PATIENCE + MARGIN
    loaded, commit at most  MARGIN

* ``deadline`` is the prefetch policy's: nothing under ``best_effort``; ``prefetch_timeout_base`` and ``_per_1k``, up to
  ``_max``, under ``timeout``. Under ``wait_complete`` the stores' own guards end the wait (``guard``): each call has
  its ``timeout`` for its place and again for its answer, and ends then if the store lets go of a call that is
  cancelled. For a store that does not, such a request waits until it does. ``timeout=`` ends every wait earlier.
* A request of which storage has nothing waits for ``PATIENCE + MARGIN`` at most, as long as all stores answer
  questions.
* ``PATIENCE`` is that of ``runtime.save``: after that a call makes storage late, and nobody waits for its pages any
  more. ``GRACE`` is what a prefetch has that was told to stop.
* What others compute: the seconds in which somebody held a lease and did not wait in ``extend``. They hold theirs for
  moments only, so this hides no hang.
* ``MARGIN`` is for copies between device and host, for links, and for calls that are answered.

Growth waits for nobody's lease, so what others compute is not taken off there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from asynccache.core.keys import TOKEN_BYTES
from asynccache.core.ledger import BACKUP_STORAGE, PREFETCH
from asynccache.core.settings import PrefetchPolicy
from asynccache.runtime.lease import Lease, LeaseState
from asynccache.runtime.prefetch import GRACE
from asynccache.runtime.save import PATIENCE

T = TypeVar("T")

MARGIN = 0.4
FOREVER = 4_000.0
"""Nobody is waited for longer than this: the wait is broken off and the world fails."""


class Overdue(AssertionError):
    """Somebody waited longer than the law allows."""


class Patience:
    """Watches the leases of a world. ``guard``: how long stores may take for one prefetch. ``questions``: whether they
    all answer questions. ``longest``: the longest wait of each kind; ``broken``: those that were too long."""

    def __init__(self, *, guard: float, questions: bool) -> None:
        self.guard = guard
        self.questions = questions
        self.grows: Callable[[], None] = lambda: None
        self.longest: dict[str, float] = {}
        self.broken: list[str] = []
        self._begun: set[bytes] = set()
        self._working = 0
        self._busy = self._at = 0.0

    def check(self) -> None:
        """Raises Overdue if somebody has waited for too long."""
        if self.broken:
            raise Overdue("\n".join(self.broken))

    def allowed(self, lease: Lease) -> float:
        """How long the policy and the stores let ``lease`` wait before it is granted."""
        prefetches, handle = lease._head.prefetches, lease._prefetch
        policy, config, key = prefetches.policy, prefetches._config, lease._ask.key
        asks = lease._wait and (handle is not None or lease._head.worker.has_stores)
        if not asks or (self.questions and key[:TOKEN_BYTES] not in self._begun):
            return PATIENCE
        deadline = 0.0
        if policy is PrefetchPolicy.WAIT_COMPLETE:
            deadline = self.guard
        elif policy is PrefetchPolicy.TIMEOUT:
            deadline = config.prefetch_timeout_base + config.prefetch_timeout_per_1k * len(key) / TOKEN_BYTES / 1024
            deadline = min(deadline, config.prefetch_timeout_max)
        allowed = deadline + PATIENCE + GRACE
        return allowed if lease._timeout is None else min(allowed, lease._timeout)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all leases meanwhile."""
        enter, granted, release = Lease.__aenter__, Lease._granted, Lease.release
        extend, loaded, commit = Lease.extend, Lease.loaded, Lease.commit

        async def entered(lease: Lease) -> Lease:
            what = f"{lease._ask.key.hex()[:8]} entering"
            return await self._timed(what, enter(lease), self.allowed(lease), self.busy)

        def held(lease: Lease, grant: Any) -> None:
            self._begun.add(lease._ask.key[:TOKEN_BYTES])
            granted(lease, grant)
            self._work(1)

        def released(lease: Lease, *args: Any, **terms: Any) -> None:
            was = lease._state
            release(lease, *args, **terms)
            if was is LeaseState.HELD:
                self._work(-1)

        async def extended(lease: Lease, tokens: int, states: int = 0, wait: bool = False) -> Any:
            self._work(-1)
            waits = asyncio.get_running_loop().create_task(self._look(lease))
            try:
                return await self._timed("extend", extend(lease, tokens, states, wait), PATIENCE if wait else 0.0)
            finally:
                waits.cancel()
                self._work(1)

        async def there(lease: Lease) -> None:
            await self._timed("loaded", loaded(lease), 0.0)

        async def committed(lease: Lease, *args: Any, **terms: Any) -> Any:
            return await self._timed("commit", commit(lease, *args, **terms), 0.0)

        with ExitStack() as stack:
            for name, call in {"__aenter__": entered, "_granted": held, "release": released, "extend": extended,
                               "loaded": there, "commit": committed}.items():  # fmt: skip
                stack.enter_context(patch.object(Lease, name, call))
            yield

    def busy(self) -> float:
        """How many seconds somebody has computed, so far."""
        now = asyncio.get_running_loop().time()
        if self._working > 0:
            self._busy += now - self._at
        self._at = now
        return self._busy

    async def _look(self, lease: Lease) -> None:
        """Call ``grows`` when storage has work while ``lease`` waits to grow."""
        count = lease._head.driver.core.world.ledger.count
        for _ in range(50):
            await asyncio.sleep(0.0005)
            if count[BACKUP_STORAGE] or count[PREFETCH]:
                self.grows()
                return

    def _work(self, more: int) -> None:
        self.busy()
        self._working += more

    async def _timed(
        self, what: str, work: Awaitable[T], allowed: float, excused: Callable[[], float] = lambda: 0.0
    ) -> T:
        loop = asyncio.get_running_loop()
        since, before = loop.time(), excused()
        try:
            async with asyncio.timeout(FOREVER) as forever:
                return await work
        except TimeoutError:
            if forever.expired():
                raise Overdue(f"{what}: it would wait for ever") from None
            raise
        finally:
            waited = loop.time() - since - (excused() - before)
            kind = what.split()[-1]
            self.longest[kind] = max(self.longest.get(kind, 0.0), waited - allowed)
            if waited > allowed + MARGIN:
                self.broken.append(f"{what} took {waited:.2f} s from {since:.2f} s on, of {allowed:.2f} s allowed")
