"""Plain functions on numbers that decide where a chunk ends, how many pages a request takes, and whether it may be
admitted.

There are two gates. The first is an estimate from the match, before anything is pinned (``demand``, ``passes``). The
second is the lease itself, which either takes all that it is asked for (``LeaseOffer``) or refuses. What the second
gate grants is reserved, so a request that has passed it cannot run out of memory in its chunk. The pages that load_back
takes are counted at these two gates and nowhere else.

A chunk ends at the end of a page if it reaches one, so that all of it can be published. It never goes beyond a mark,
which is a position whose recurrent state is to be kept. Of the sliding window a chunk takes ``max(min(extend,
remaining_chunk), min(window, extend + more)) + page_size``.

Words, all in tokens: ``extend``: prompt tokens that are not cached; ``remaining_chunk``: what is left of the step's
token budget; ``more``: tokens that may still be generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache import CacheConfig, CacheFull, Full, Mamba, SlidingWindow
from asynccache_shim.request import Matched

WORKING = 1
CHECKPOINTS = 1


class SlotCounts(NamedTuple):
    """Numbers of slots: pages of FULL and of SWA, and states of MAMBA."""

    full: int
    swa: int = 0
    mamba: int = 0


class CacheShape(NamedTuple):
    """The part of a cache's configuration that decides about admission. ``page_size`` and ``window`` in tokens, 0:
    there is no window.
    """

    page_size: int
    window: int
    capacity: SlotCounts
    """The slots of the device."""

    @property
    def has_swa(self) -> bool:
        return self.window > 0

    @property
    def has_mamba(self) -> bool:
        return self.capacity.mamba > 0

    @property
    def window_pages(self) -> int:
        return self.pages(self.window)

    def pages(self, tokens: int) -> int:
        """Return how many pages hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)


class LeaseOffer(NamedTuple):
    """The room that a lease is asked for: ``chunk`` tokens of FULL beyond what is cached, ``swa_chunk`` of SWA, and
    ``states`` slots of MAMBA."""

    chunk: int
    swa_chunk: int
    states: int


def shape_of(config: CacheConfig) -> CacheShape:
    """The shape of the cache that ``config`` describes."""
    full = swa = mamba = window = 0
    for component in config.components:
        if isinstance(component, Full):
            full = component.device_tokens // config.page_size
        elif isinstance(component, SlidingWindow):
            swa, window = component.device_tokens // config.page_size, component.window
        elif isinstance(component, Mamba):
            mamba = component.device_states
    return CacheShape(config.page_size, window, SlotCounts(full, swa, mamba))


def check_fits(shape: CacheShape, tokens: int) -> None:
    """Refuse a request that could not run even if all pools were empty. ``tokens``: those that have KV at its end.

    Of SWA a request needs the window and two pages more: the page that is being filled, and the one that the window is
    about to leave.

    Raises:
        CacheFull: the request could not run.
    """
    if shape.pages(tokens) > shape.capacity.full:
        raise CacheFull(f"request: {tokens} tokens need {shape.pages(tokens)} pages, FULL has {shape.capacity.full}")
    if not shape.has_swa:
        return
    needed = min(shape.pages(tokens), shape.window_pages + 2)
    if needed > shape.capacity.swa:
        raise CacheFull(f"request: a window of {shape.window} takes {needed} pages, SWA has {shape.capacity.swa}")


def swa_budget(shape: CacheShape, extend: int, remaining_chunk: int, more: int) -> int:
    """Return how many tokens of SWA a chunk takes beyond what is cached, without what load_back takes; 0 if there is no
    SWA."""
    if not shape.has_swa:
        return 0
    return max(min(extend, remaining_chunk), min(shape.window, extend + more)) + shape.page_size


def demand(shape: CacheShape, extend: int, remaining_chunk: int, more: int, match: Matched) -> SlotCounts:
    """The first gate's estimate: the slots for this chunk and for what load_back will bring, each in whole pages."""
    pages = shape.pages
    full = pages(min(extend, remaining_chunk)) + pages(match.host_hit_length)
    swa = pages(swa_budget(shape, extend, remaining_chunk, more)) + pages(match.swa_host_hit_length)
    mamba = WORKING + CHECKPOINTS + match.mamba_host_hit_length if shape.has_mamba else 0
    return SlotCounts(full, min(swa, shape.capacity.swa), min(mamba, shape.capacity.mamba))


def passes(need: SlotCounts, room: SlotCounts, growing: int) -> bool:
    """The first gate. Return True if ``need`` fits into ``room``, the free and evictable slots, with one page left for
    each of the ``growing`` requests that hold pages."""
    return (
        need.full + growing <= room.full
        and (not need.swa or need.swa + growing <= room.swa)
        and need.mamba <= room.mamba
    )


def offer(shape: CacheShape, extend: int, remaining_chunk: int, more: int) -> LeaseOffer:
    """Return the room that the second gate reserves. The lease adds what load_back and copy-on-write need."""
    chunk = min(extend, remaining_chunk)
    swa = max(1, swa_budget(shape, extend, remaining_chunk, more))
    return LeaseOffer(chunk, swa, WORKING + CHECKPOINTS if shape.has_mamba else 0)


def cut_offers(shape: CacheShape, whole: LeaseOffer, matched: int) -> list[LeaseOffer]:
    """Offers for a request when no other one holds pages, the largest first, down to one page.

    The first is what fits beside the window that the request's own prefix (``matched`` tokens) pins. The next ones drop
    the part of SWA that is reserved for later steps, and halve the chunk each time. With recurrent states, the last one
    has no slot for a checkpoint.
    """
    page = shape.page_size
    states, chunk, swa = whole.states, whole.chunk, whole.swa_chunk
    if shape.has_mamba:
        states = max(WORKING, min(states, shape.capacity.mamba - (1 if matched else 0)))
    if shape.has_swa:
        pinned = min(shape.window_pages, matched // page)
        room = max(page, (shape.capacity.swa - pinned) * page)
        chunk, swa = min(chunk, room), min(swa, room)
    offers = [LeaseOffer(chunk, swa, states)]
    while chunk > page:
        chunk = max(page, chunk // 2 // page * page)
        offers.append(LeaseOffer(chunk, chunk, states))
    if swa > chunk and shape.has_swa:
        offers.append(LeaseOffer(chunk, chunk, states))
    if states > WORKING:
        offers.append(offers[-1]._replace(states=WORKING))
    return offers


# chunks


def chunk_stop(start: int, end: int, budget: int, page_size: int, marks: Sequence[int] = ()) -> int:
    """Return the position at which a chunk that begins at ``start`` stops: not after ``end``, not after ``budget``
    tokens, not after the next of ``marks``, and at the end of a page if it stops before ``end`` and reaches one."""
    stop = min([end, start + budget, *(mark for mark in marks if mark > start)])
    if stop < end:
        whole = stop // page_size * page_size
        if whole > start:
            return whole
    return stop


def shorter(start: int, stop: int, page_size: int) -> int:
    """The stop to try next when there is no room up to ``stop``: half of the chunk, rounded down to whole pages, but at
    least to the end of the page that ``start`` is in."""
    half = (start + (stop - start) // 2) // page_size * page_size
    least = start // page_size * page_size + page_size
    return min(stop, max(half, least))
