"""Prefixes that are kept without a request, for ``AsyncCache.keep``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from asynccache.core.cache import CoreLease, Grant, LeaseRequest
from asynccache.core.plan import More, Wait
from asynccache.runtime.core_calls import drive

if TYPE_CHECKING:
    from asynccache.runtime.driver import Driver

Holders = MutableMapping[Any, Any]
"""``Head.holders``, among which kept prefixes stand."""


class Kept:
    """A prefix of ``tokens`` tokens, pinned until ``ttl`` seconds have passed or ``release`` is called."""

    __slots__ = ("_driver", "_holders", "_lease", "_timer", "tokens")

    def __init__(self, driver: Driver, holders: Holders, lease: CoreLease | None, ttl: float) -> None:
        self.tokens = 0
        self._driver = driver
        self._holders = holders
        self._lease = lease
        self._timer: asyncio.TimerHandle | None = None
        if lease is not None:
            self.tokens = lease.cached
            self._timer = asyncio.get_running_loop().call_later(ttl, self.release)
            holders[self] = None

    def __repr__(self) -> str:
        return f"Kept({self.tokens} tokens, {'pinned' if self._lease else 'released'})"

    def release(self) -> None:
        """Unpin. Idempotent, synchronous."""
        self._driver.check_thread()
        if self._timer is not None:
            self._timer.cancel()
        lease, self._lease = self._lease, None
        if lease is not None:
            del self._holders[self]
            self._driver.release(lease)


def kept_among(holders: Iterable[object]) -> list[Kept]:
    """Return the prefixes that are kept now."""
    return [holder for holder in holders if isinstance(holder, Kept)]


async def keep(driver: Driver, holders: Holders, space: bytes, key: bytes, ttl: float, cap: int) -> Kept:
    """Pin what is cached of ``key``, loading it back if need be, as far as ``cap`` allows; never waits for pages.
    ``cap``: how many tokens may be kept, over all prefixes. What two of them share counts twice.

    Cancelling it keeps nothing.
    """
    kept: list[Kept] = []

    def lease() -> Grant | Wait | More:  # asked under the lock: others may have kept something meanwhile
        held = sum(one.tokens for one in kept_among(holders))
        return driver.core.lease(LeaseRequest(space, key, max(0, cap - held), 0, 0))

    def done(answer: Grant | Wait) -> None:
        driver.perform(answer.plan)
        kept.append(Kept(driver, holders, answer.lease if isinstance(answer, Grant) else None, ttl))
        if not kept[0].tokens:
            kept[0].release()

    try:
        _: Grant | Wait = await drive(driver, lease, done)
    except asyncio.CancelledError:
        for one in kept:
            one.release()
        raise
    return kept[0]
