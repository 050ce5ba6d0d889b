"""``AsyncCache.keep``: prefixes that are pinned for some seconds though no request has a lease on them, within a
cap. What is kept is among the holders of the head (``Head.holders``)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asynccache.core.cache import CoreLease, Grant, LeaseRequest
from asynccache.core.plan import More, Wait
from asynccache.runtime.core_calls import drive

if TYPE_CHECKING:
    from asynccache.runtime.head import Head


class Kept:
    """A prefix of ``tokens`` tokens, pinned until ``ttl`` seconds have passed or ``release`` is called."""

    __slots__ = ("_head", "_lease", "_timer", "tokens")

    def __init__(self, head: Head, lease: CoreLease | None, ttl: float) -> None:
        self.tokens = 0
        self._head = head
        self._lease = lease
        self._timer: asyncio.TimerHandle | None = None
        if lease is not None:
            self.tokens = lease.cached
            self._timer = head.loop.call_later(ttl, self.release)
            head.holders[self] = None

    def __repr__(self) -> str:
        return f"Kept({self.tokens} tokens, {'pinned' if self._lease else 'released'})"

    def release(self) -> None:
        """Unpin. Idempotent, synchronous."""
        self._head.driver.check_thread()
        if self._timer is not None:
            self._timer.cancel()
        lease, self._lease = self._lease, None
        if lease is not None:
            del self._head.holders[self]
            self._head.driver.release(lease)


def kept_prefixes(head: Head) -> list[Kept]:
    """Return all prefixes that are kept now."""
    return [holder for holder in head.holders if isinstance(holder, Kept)]


async def keep(head: Head, space: bytes, key: bytes, ttl: float, cap: int) -> Kept:
    """Pin what is cached of ``key``, loading it back if need be, as far as ``cap`` allows; never waits for pages.
    ``cap``: how many tokens may be kept, over all prefixes. What two of them share counts twice.

    Cancelling it keeps nothing.
    """
    driver = head.driver
    kept: list[Kept] = []

    def lease() -> Grant | Wait | More:  # asked under the lock: others may have kept something meanwhile
        held = sum(one.tokens for one in kept_prefixes(head))
        return driver.core.lease(LeaseRequest(space, key, max(0, cap - held), 0, 0))

    def done(answer: Grant | Wait) -> None:
        driver.perform(answer.plan)
        kept.append(Kept(head, answer.lease if isinstance(answer, Grant) else None, ttl))
        if not kept[0].tokens:
            kept[0].release()

    try:
        _: Grant | Wait = await drive(driver, lease, done)
    except asyncio.CancelledError:
        for one in kept:
            one.release()
        raise
    return kept[0]
