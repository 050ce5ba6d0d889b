"""``AsyncCache.keep``: prefixes that are pinned for some seconds though no request has a lease on them, within a
cap."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING, Any

from asynccache.core.cache import CoreLease, Grant, LeaseRequest
from asynccache.core.plan import More, Wait
from asynccache.runtime.core_calls import drive

if TYPE_CHECKING:
    from asynccache.config import CacheConfig
    from asynccache.runtime.driver import Driver


class Kept:
    """A prefix of ``tokens`` tokens, pinned until ``ttl`` seconds have passed or ``release`` is called."""

    __slots__ = ("_lease", "_prefixes", "_timer", "tokens")

    def __init__(self, prefixes: KeptPrefixes, lease: CoreLease | None, ttl: float) -> None:
        self.tokens = lease.cached if lease is not None else 0
        self._prefixes = prefixes
        self._lease = lease
        self._timer = prefixes.call_later(ttl, self.release) if lease is not None else None

    def __repr__(self) -> str:
        return f"Kept({self.tokens} tokens, {'pinned' if self._lease else 'released'})"

    def release(self) -> None:
        """Unpin. Idempotent, synchronous."""
        self._prefixes.check_thread()
        if self._timer is not None:
            self._timer.cancel()
        lease, self._lease = self._lease, None
        if lease is not None:
            self._prefixes.release(self, lease)


class KeptPrefixes:
    """All prefixes that are kept. Their sum is at most ``kept_fraction`` of the device's FULL pages; what two of them
    share counts twice. ``holders``: see ``Head``."""

    def __init__(
        self, config: CacheConfig, driver: Driver, holders: dict[object, weakref.ref[asyncio.Task[Any]] | None]
    ) -> None:
        self._driver = driver
        self._holders = holders
        self.check_thread = driver.check_thread
        self.call_later = asyncio.get_running_loop().call_later
        self._kept: set[Kept] = set()
        self._cap = int(config.pools()[0].device_pages * config.kept_fraction) * config.page_size

    def __repr__(self) -> str:
        return f"KeptPrefixes({self.tokens()} of {self._cap} tokens)"

    def tokens(self) -> int:
        """Return how many tokens are kept, over all prefixes."""
        return sum(kept.tokens for kept in self._kept)

    async def keep(self, space: bytes, key: bytes, ttl: float) -> Kept:
        """Pin what is cached of ``key``, loading it back if need be, as far as the cap allows; never waits for pages.

        Cancelling it keeps nothing.
        """
        driver = self._driver
        kept: list[Kept] = []

        def lease() -> Grant | Wait | More:  # asked under the lock: others may have kept something meanwhile
            return driver.core.lease(LeaseRequest(space, key, max(0, self._cap - self.tokens()), 0, 0))

        def done(answer: Grant | Wait) -> None:
            driver.perform(answer.plan)
            kept.append(self._kept_by(answer, ttl))

        try:
            _: Grant | Wait = await drive(driver, lease, done)
        except asyncio.CancelledError:
            for one in kept:
                one.release()
            raise
        return kept[0]

    def _kept_by(self, answer: Grant | Wait, ttl: float) -> Kept:
        kept = Kept(self, answer.lease if isinstance(answer, Grant) else None, ttl)
        if isinstance(answer, Grant):
            self._kept.add(kept)
            self._holders[kept] = None
        if not kept.tokens:
            kept.release()
        return kept

    def release(self, kept: Kept, lease: CoreLease) -> None:
        """Unpin ``kept``, whose pins ``lease`` has. For ``Kept.release`` alone."""
        self._kept.discard(kept)
        del self._holders[kept]
        self._driver.release(lease)

    def close(self) -> None:
        """Release every prefix: the cache closes."""
        for kept in tuple(self._kept):
            kept.release()
