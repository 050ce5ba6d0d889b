"""How much a request takes, and whether it may come in: plain functions on numbers.

Laws:
* The sliding window's budget is ``max(min(extend, remaining_chunk), min(window, extend + more)) + page_size``.
* What load_back will take is charged at the two admission gates and nowhere else: before the prefix is pinned, as an
  estimate from the match (``demand``); when it is pinned, by the lease, which takes it or refuses (``Offer``).
* The second gate is a reservation, so what passed it cannot run out of memory.

Words: ``extend`` prompt tokens that are not cached; ``remaining_chunk`` what the step's token budget has left;
``more`` tokens that may still be generated.
"""

from __future__ import annotations

from typing import NamedTuple

from asynccache import CacheConfig, CacheFull, Full, Mamba, SlidingWindow
from asynccache_shim.request import Matched

WORKING = 1
CHECKPOINTS = 1


class Slots(NamedTuple):
    """Pages of FULL and SWA, and MAMBA states."""

    full: int
    swa: int = 0
    mamba: int = 0


class Shape(NamedTuple):
    """What of a cache's configuration decides about admission. ``window`` in tokens; ``capacity``: the device's."""

    page_size: int
    window: int
    capacity: Slots

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
        """As many pages as hold so many tokens."""
        return -(-tokens // self.page_size)


class Offer(NamedTuple):
    """What the lease is asked for: so many tokens beyond what is cached, and so many states."""

    chunk: int
    swa_chunk: int
    states: int


def shape_of(config: CacheConfig) -> Shape:
    """The shape of a cache."""
    full = swa = mamba = window = 0
    for component in config.components:
        if isinstance(component, Full):
            full = component.device_tokens // config.page_size
        elif isinstance(component, SlidingWindow):
            swa, window = component.device_tokens // config.page_size, component.window
        elif isinstance(component, Mamba):
            mamba = component.device_states
    return Shape(config.page_size, window, Slots(full, swa, mamba))


def check_fits(shape: Shape, tokens: int) -> None:
    """Whether a request that ends with KV for so many tokens could run in empty pools.

    Two pages beside the window: the one being filled, and the one that the window is about to leave.

    Raises:
        CacheFull: it could not.
    """
    if shape.pages(tokens) > shape.capacity.full:
        raise CacheFull(f"request: {tokens} tokens need {shape.pages(tokens)} pages, FULL has {shape.capacity.full}")
    if not shape.has_swa:
        return
    needed = min(shape.pages(tokens), shape.window_pages + 2)
    if needed > shape.capacity.swa:
        raise CacheFull(f"request: a window of {shape.window} takes {needed} pages, SWA has {shape.capacity.swa}")


def swa_budget(shape: Shape, extend: int, remaining_chunk: int, more: int) -> int:
    """Tokens of the sliding window's pool that a chunk takes beyond what is cached, load_back apart."""
    if not shape.has_swa:
        return 0
    return max(min(extend, remaining_chunk), min(shape.window, extend + more)) + shape.page_size


def demand(shape: Shape, extend: int, remaining_chunk: int, more: int, match: Matched) -> Slots:
    """The first gate's estimate: this chunk, and what load_back will bring. Every part in whole pages."""
    pages = shape.pages
    full = pages(min(extend, remaining_chunk)) + pages(match.host_hit_length)
    swa = pages(swa_budget(shape, extend, remaining_chunk, more)) + pages(match.swa_host_hit_length)
    mamba = WORKING + CHECKPOINTS + match.mamba_host_hit_length if shape.has_mamba else 0
    return Slots(full, min(swa, shape.capacity.swa), min(mamba, shape.capacity.mamba))


def passes(need: Slots, room: Slots, growing: int) -> bool:
    """The first gate. ``room``: free and evictable; ``growing``: requests that may each need a page next."""
    return (
        need.full + growing <= room.full
        and (not need.swa or need.swa + growing <= room.swa)
        and need.mamba <= room.mamba
    )


def offer(shape: Shape, extend: int, remaining_chunk: int, more: int) -> Offer:
    """What the second gate reserves. The lease adds what load_back and copy-on-write take."""
    chunk = min(extend, remaining_chunk)
    swa = max(1, swa_budget(shape, extend, remaining_chunk, more))
    return Offer(chunk, swa, WORKING + CHECKPOINTS if shape.has_mamba else 0)


def cut_offers(shape: Shape, whole: Offer, matched: int) -> list[Offer]:
    """For a request that is alone: what fits beside the window that its own prefix pins, then ever less, to a page.

    The reservation of a window beyond the chunk goes first: it is for later steps.
    """
    page = shape.page_size
    states, chunk, swa = whole.states, whole.chunk, whole.swa_chunk
    if shape.has_mamba:
        states = max(WORKING, min(states, shape.capacity.mamba - (1 if matched else 0)))
    if shape.has_swa:
        pinned = min(shape.window_pages, matched // page)
        room = max(page, (shape.capacity.swa - pinned) * page)
        chunk, swa = min(chunk, room), min(swa, room)
    offers = [Offer(chunk, swa, states)]
    while chunk > page:
        chunk = max(page, chunk // 2 // page * page)
        offers.append(Offer(chunk, chunk, states))
    if swa > chunk and shape.has_swa:
        offers.append(Offer(chunk, chunk, states))
    if states > WORKING:
        offers.append(offers[-1]._replace(states=WORKING))
    return offers
