"""Prefetch: storage to host. Which pages an end needs from storage is pure arithmetic; the rest is bookkeeping of host
slots.

Before a prefetch begins, ``look`` says which pages to ask storage about. That takes nothing and changes nothing. A
prefetch is then opened for the pages that storage has.

The fetched pages will hang below the *anchor*: the root, or a node whose FULL path is on the host. A prefetch may also
end before its anchor, where the host lacks no more than a window or a state. Until it commits or is released, it holds
the anchor and the windows that it may complete, as far as the host has them, and its slots are its own. It pins nothing
on the device, where requests need the room: a store may hang for as long as it likes.

A prefetch begins when the host has room for all pages that it may bring, beside those of other prefetches within their
quota. If waiting is useless or has lasted long enough, it begins even so, and takes what can be had. So a prefetch that
waits for room holds nothing, and one that has begun never waits for room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from asynccache.core.holds import release_hold, take_hold
from asynccache.core.keys import HASH_BYTES
from asynccache.core.ledger import BACKUP_HOST, HOST, PREFETCH, Hold, Operation
from asynccache.core.match import Matches
from asynccache.core.plan import SLOT_BYTES, Medium, More, Plan, Status, Wait
from asynccache.core.room import FREE, SHORT, SLICE
from asynccache.core.settings import Access, ComponentKind
from asynccache.core.transfers import Transfers
from asynccache.core.tree import ABSENT, ARRIVING, LEAVING, PRESENT, Node, walk
from asynccache.core.world import World, split_at


class PrefetchShape(NamedTuple):
    """The geometry of one prefetch, in tokens."""

    page_size: int
    anchor: int
    """Where the prefetch's FULL pages begin."""
    covered: int
    """Where a match ends without the prefetch."""
    length: int
    """How many tokens the whole pages of the key have."""
    window: int
    """The reach of SWA; 0 if there is no SWA."""
    swa: tuple[tuple[int, int], ...]
    """The runs of SWA that are there before the anchor, each from a position to a position, the first run first."""
    mamba: bool
    """Whether there is MAMBA."""


def needed_pages(shape: PrefetchShape, component: int, end: int) -> tuple[int, ...]:
    """Return the numbers of the pages of ``component`` that storage must give for the match to end at ``end``
    (tokens)."""
    size = shape.page_size
    anchor, stop = shape.anchor // size, end // size
    if component == ComponentKind.FULL:
        return tuple(range(anchor, stop))
    if component == ComponentKind.MAMBA:
        return (stop - 1,) if shape.mamba and stop else ()
    if not shape.window:
        return ()
    pages: list[int] = []
    at = max(0, stop - -(-shape.window // size))
    for start, end in shape.swa:
        pages.extend(range(at, min(start // size, stop)))
        at = max(at, end // size)
    return (*pages, *range(at, stop))


def usable_end(
    shape: PrefetchShape, pools: Sequence[tuple[str, int]], present: Mapping[str, Sequence[bool] | bytes], limit: int
) -> int:
    """Return the longest end up to ``limit`` (both in tokens) for which every pool has all pages it needs, or else
    ``shape.covered``.

    ``pools``: (name, component). ``present[name][i]``: whether page ``i`` of the key is in storage.
    """
    size = shape.page_size
    stop, covered = min(limit, shape.length) // size, shape.covered // size
    for name, component in pools:
        if component == ComponentKind.FULL:
            hole = bytes(present[name]).find(0, shape.anchor // size, stop)
            stop = stop if hole < 0 else hole
    if stop <= covered:
        return shape.covered
    ends = b"\1" * stop  # a byte for each page: whether a match may end behind it
    for name, component in pools:
        if component == ComponentKind.SWA and shape.window:
            ends = _both(ends, _window_ends(shape, bytes(present[name])[:stop]))
        elif component == ComponentKind.MAMBA and shape.mamba:
            ends = _both(ends, bytes(present[name])[:stop])
    return (ends.rfind(1, covered) + 1) * size or shape.covered


def _window_ends(shape: PrefetchShape, pages: bytes) -> bytes:
    """Return for each of ``pages`` whether the whole window before its end is in storage or on the host. Runs are
    doubled until they are as long as the window, so that takes a few passes over all pages."""
    size = shape.page_size
    for start, stop in shape.swa:
        first, last = start // size, min(stop // size, len(pages))
        pages = pages[:first] + b"\1" * (last - first) + pages[max(first, last) :]
    window = min(-(-shape.window // size), len(pages))
    run = 1
    while run < window:
        more = min(run, window - run)
        pages = _both(pages, (b"\1" * more + pages)[: len(pages)])
        run += more
    return pages


def _both(some: bytes, others: bytes) -> bytes:
    return (int.from_bytes(some, "big") & int.from_bytes(others, "big")).to_bytes(len(some), "big")


class Begin(Enum):
    """The caller's word on whether a prefetch may begin now."""

    LATER = "others wait before it"
    NEXT = "it may, but waits for room and for its part of the quota"
    NOW = "it waited long enough: it takes what can be had"


class PrefetchBegun(NamedTuple):
    """A prefetch began."""

    op: int
    shape: PrefetchShape
    plan: Plan


class Skip(NamedTuple):
    """No prefetch: storage has nothing more to give, or too little to be worth it."""

    reason: str
    """Why there is none, in a few words."""


class Taken(NamedTuple):
    """Host slots for a prefetch."""

    slots: bytes
    """FULL's slots, fewer than were asked for if the host is short."""
    aux: dict[int, bytes] | None
    """The other components' slots, by kind; None if they cannot be had together."""
    plan: Plan


class PrefetchInFlight:
    """One prefetch in flight."""

    __slots__ = ("anchor", "aux_end", "held", "hold", "key", "op", "shape", "spare", "total", "wants")

    def __init__(
        self, op: Operation, anchor: Node, key: bytes, shape: PrefetchShape, hold: Hold, components: int
    ) -> None:
        self.op = op
        self.anchor = anchor
        """The node that the fetched pages will hang below."""
        self.key = key
        """The prompt from the root, ``total`` pages long."""
        self.shape = shape
        self.total = shape.length // shape.page_size
        self.held: dict[int, bytes] = {}
        """The host slots that the prefetch has taken, by component."""
        self.aux_end = 0
        """The end, in tokens, for which auxiliary slots are held."""
        self.spare = b""
        """Host slots of FULL whose pages turned out to be duplicates."""
        self.hold = hold
        """The pins on the anchor and on what the host has of the windows."""
        self.wants = [0] * components
        """How many more slots the prefetch may take, by component."""

    def take(self, size: int) -> bytes:
        """Take the next ``size`` bytes of the FULL slots that it holds, in page order, and return them."""
        slots = self.held.get(0, b"")
        self.held[0] = slots[size:]
        return slots[:size]


class PrefetchOperations:
    """The prefetches of one world."""

    def __init__(self, world: World, transfers: Transfers, matches: Matches) -> None:
        self._world = world
        self._transfers = transfers
        self._matches = matches
        self._size = world.config.page_size
        self.active: dict[int, PrefetchInFlight] = {}

    # open

    def look(self, space: bytes, key: bytes) -> PrefetchShape | Skip:
        world = self._world
        if world.access is Access.NONE:
            return Skip("no storage")
        key = self._whole(key)
        path, reached = world.find(space, key)
        return self._never(path) or self._shape_of(path, reached, key)

    def open(self, space: bytes, key: bytes, begin: Begin) -> PrefetchBegun | Wait | Skip | More:
        root = self._world.enter(space)
        answer = self._open(root, self._whole(key), begin)
        if not isinstance(answer, PrefetchBegun):
            self._world.leave(root)
        return answer

    def _whole(self, key: bytes) -> bytes:
        return key[: len(key) // self._world.page_bytes * self._world.page_bytes]

    def _open(self, root: Node, key: bytes, begin: Begin) -> PrefetchBegun | Wait | Skip | More:
        world, page = self._world, self._world.page_bytes
        path, reached = walk(root, key, 0, page)
        shape = self._never(path) or self._shape_of(path, reached, key)
        if isinstance(shape, Skip):
            return shape
        blocked = self._not_on_host(path, begin)
        if blocked is not None:
            return blocked
        anchor, total = shape.anchor // self._size, shape.length // self._size
        in_flight = sum(f.total - f.shape.anchor // self._size for f in self.active.values())
        full = in_flight and in_flight + total - anchor > world.config.max_prefetch_pages
        if begin is Begin.LATER or (full and begin is Begin.NEXT):
            return Wait(world.plan())
        if not self._has_room(path, self._wants(anchor, total), begin):
            return Wait(world.plan())
        return self._begin(root, path, shape, key[: total * page])

    def _shape_of(self, path: Sequence[Node], reached: int, key: bytes) -> PrefetchShape | Skip:
        """Return the shape of a prefetch of ``key``, which was followed along ``path`` up to byte ``reached``."""
        world, size, page = self._world, self._size, self._world.page_bytes
        anchor, total = reached // page, len(key) // page
        covered = world.valid_end(path, anchor, True)
        if (total - covered) * size < max(world.config.prefetch_threshold, 1):
            return Skip("below the threshold")
        return PrefetchShape(
            size, anchor * size, covered * size, min(total, anchor + world.config.max_prefetch_pages) * size,
            world.config.components[world.swa].window, tuple(self._runs(path, anchor, covered)), bool(world.mamba),
        )  # fmt: skip

    def _wants(self, anchor: int, total: int) -> list[int]:
        """Return, by component, the most slots that a prefetch of the pages ``anchor`` to ``total`` may take."""
        world = self._world
        wants = [total - anchor, *[total - component.first_page(total) for component in world.auxiliary]]
        host = [shelf.slots.capacity for shelf in world.shelves[world.count :]]
        return [min(want, room) for want, room in zip(wants, [max(0, host[0] - anchor), *host[1:]], strict=True)]

    def _has_room(self, path: Sequence[Node], wants: Sequence[int], begin: Begin) -> bool:
        """Return True if a prefetch may begin, which is so in three cases. The host has room for ``wants``, beside the
        slots that other prefetches may still take and without evicting ``path``; or there is nothing to wait for that
        would give room back; or the prefetch has waited long enough."""
        world = self._world
        if path:
            world.pin_full(path[-1], HOST)
        while not (fits := self._fits(wants)) and begin is Begin.NOW and self._transfers.claims.release_one(False):
            if world.spent():
                break
        if path:
            world.unpin_full(path[-1], HOST)
        return fits or begin is Begin.NOW or not self._something_ends()

    def _something_ends(self) -> bool:
        """Return True if there is an operation or a claim that will let go of host pages."""
        return self._transfers.room.host_is_busy() or bool(self._transfers.claims.held)

    def _fits(self, wants: Sequence[int]) -> bool:
        shelves, promised = self._world.shelves[self._world.count :], self._transfers.promised
        return all(wants[c] + promised[c] <= shelf.reachable() for c, shelf in enumerate(shelves))

    def _promise(self, fetch: PrefetchInFlight, wants: list[int]) -> None:
        """Note how many slots ``fetch`` may still take, by component. No backup takes these
        (``Transfers.promised``)."""
        promised = self._transfers.promised
        for c, want in enumerate(wants):
            promised[c] += want - fetch.wants[c]
        fetch.wants = wants

    def _never(self, path: Sequence[Node]) -> Skip | None:
        """Return None if FULL of ``path`` is on the host or could be; else why it never will be."""
        node, place = (path[-1] if path else None), self._world.count
        if node is None or node.state[place] != ABSENT:
            return None
        if node.end > self._world.shelves[place].slots.capacity:
            return Skip("the host is too small for the anchor")
        return Skip("the anchor cannot be backed up") if node.unsavable else None

    def _not_on_host(self, path: Sequence[Node], begin: Begin) -> Wait | Skip | More | None:
        """Return None if FULL of ``path`` is on the host. If it is not, its backup must come first: start it, and
        return what to answer for now."""
        place = self._world.count
        node = path[-1] if path else None
        if node is None or node.state[place] == PRESENT:
            return None
        if node.state[place] == ABSENT:
            room = self._transfers.backup_host(node)
            if room is SLICE:
                return More(self._world.plan())
            if room is SHORT:
                waits = begin is not Begin.NOW and self._something_ends()
                return Wait(self._world.plan()) if waits else Skip("the anchor cannot be backed up now")
        return Wait(self._world.plan(), tuple([op.id for op in node.ops if op.kind is BACKUP_HOST]))

    def _begin(self, root: Node, path: list[Node], shape: PrefetchShape, key: bytes) -> PrefetchBegun:
        world, anchor = self._world, shape.anchor // self._size
        node = path[-1] if path else root
        if node.end > anchor:
            node = split_at(world, node, anchor)
        op = world.ledger.open(PREFETCH)
        hold = take_hold(world, node, shape.covered // self._size + 1, HOST)
        fetch = PrefetchInFlight(op, node, key, shape, hold, world.count)
        self._promise(fetch, self._wants(anchor, fetch.total))
        self.active[op.id] = fetch
        return PrefetchBegun(op.id, shape, world.plan())

    def _runs(self, path: Sequence[Node], anchor: int, covered: int) -> list[tuple[int, int]]:
        """Return the runs of SWA on either tier along ``path`` before page ``anchor``: each from a token to a token,
        the first run first. The walk goes up as far as a window that ends behind page ``covered`` could begin."""
        world, swa, size = self._world, self._world.swa, self._size
        runs: list[tuple[int, int]] = []
        if not swa or not path:
            return runs
        low = world.components[swa].first_page(covered + 1)
        node = path[-1]
        while node.parent is not None and node.end > low:
            if node.state[swa + world.count] == PRESENT or node.state[swa] == PRESENT:
                start, end = node.parent.end * size, min(node.end, anchor) * size
                if runs and runs[0][0] == end:
                    end = runs.pop(0)[1]
                runs.insert(0, (start, end))
            node = node.parent
        return runs

    def _close(self, fetch: PrefetchInFlight, status: Status) -> None:
        self._promise(fetch, [0] * self._world.count)
        world = self._world
        release_hold(world, fetch.hold)
        for c, slots in fetch.held.items():
            self._give(c, slots)
        self._give(0, fetch.spare)
        del self.active[fetch.op.id]
        world.leave(fetch.anchor.root)
        world.end(fetch.op, status)

    def _give(self, c: int, slots: bytes) -> None:
        self._world.shelves[self._world.count + c].slots.give(slots)

    # slots

    def take_full(self, op: int, pages: int, later: int) -> Taken | More:
        world, fetch = self._world, self.active[op]
        needs = [0] * world.count
        needs[0] = min(pages, world.shelves[world.count].reachable())
        room = self._transfers.room.make(HOST, needs)
        if room is SLICE:
            return More(world.plan())
        count = min(needs[0], world.shelves[world.count].slots.left)
        slots = world.shelves[world.count].slots.take(count)
        fetch.held[0] = fetch.held.get(0, b"") + slots
        self._promise(fetch, [later, *fetch.wants[1:]])
        return Taken(slots, {}, world.plan())

    def take_aux(self, op: int, end: int) -> Taken | More:
        world, fetch = self._world, self.active[op]
        for c in [c for c in fetch.held if c]:
            self._give(c, fetch.held.pop(c))
        self._promise(fetch, [0] * world.count)
        needs = [0] * world.count
        for component in world.components[1:]:
            needs[component.index] = len(needed_pages(fetch.shape, component.kind, end))
        room = self._transfers.room.make(HOST, needs)
        if room is SLICE:
            return More(world.plan())
        if room is not FREE:
            return Taken(b"", None, world.plan())
        fetch.aux_end = end
        aux = {}
        for component in world.components[1:]:
            c = component.index
            aux[int(component.kind)] = fetch.held[c] = world.shelves[world.count + c].slots.take(needs[c])
        return Taken(b"", aux, world.plan())

    # end

    def release(self, op: int) -> None:
        if op in self.active:
            self._close(self.active[op], Status.FAILED)

    def commit(self, op: int, end: int, hashes: bytes, holders: Sequence[int]) -> tuple[int, ...]:
        """Commit, and return the ids of the backups that must end first; none if the commit is done."""
        world, fetch = self._world, self.active[op]
        if fetch.anchor.root.dead:
            self.release(op)
            return ()
        page, anchor, stop = world.page_bytes, fetch.anchor.end, end // self._size
        key = fetch.key[anchor * page : stop * page]
        path, reached = walk(fetch.anchor, key, 0, page)
        blockers = [o.id for node in path if node.state[world.count] in (ARRIVING, LEAVING)
                    for o in node.ops if o.kind is BACKUP_HOST]  # fmt: skip
        if blockers:
            return tuple(blockers)
        if path and path[-1].end > anchor + reached // page:
            path[-1] = split_at(world, path[-1], anchor + reached // page)
        last = self._grow(fetch, self._merge(fetch, path), stop, key, hashes)
        if last.end > stop:  # the end lies before the anchor: only a window or a state was missing there
            while last.parent is not None and last.parent.end >= stop:
                last = last.parent
            last = split_at(world, last, stop) if last.end > stop else last
        if fetch.aux_end == end and last.end == stop:
            self._fill_window(fetch, last, stop)
            mamba, state, count = world.mamba, last.state, world.count
            if mamba and fetch.held.get(mamba) and state[count + mamba] == ABSENT and state[count] == PRESENT:
                self._put_on_host(fetch, last, mamba, fetch.held.pop(mamba))
        if last.parent is not None:
            self._matches.touch(last, last.end)
            for holder in holders:
                self._transfers.claims.take(holder, [last], last.end)
        self._close(fetch, Status.DONE)
        return ()

    def _merge(self, fetch: PrefetchInFlight, path: Sequence[Node]) -> Node:
        """Merge fetched FULL pages into the nodes of ``path``, which appeared below the anchor meanwhile. A node
        without host data takes them over; else they are duplicates. Return the last node, or the anchor."""
        world, last = self._world, fetch.anchor
        spare = b""
        for node in path:
            slots = fetch.take((node.end - last.end) * SLOT_BYTES)
            if node.state[world.count] == ABSENT:
                self._put_on_host(fetch, node, 0, slots)
            else:
                spare += slots
            last = node
        fetch.spare = spare
        return last

    def _put_on_host(self, fetch: PrefetchInFlight, node: Node, c: int, slots: bytes) -> None:
        """Give component ``c`` of ``node`` its ``slots`` on the host. The data came from storage, so it is stored
        already."""
        self._world.fill(node, self._world.count + c, slots, PRESENT)
        self._world.note_stored(node, 1 << c, fetch.op)
        if c == 0:
            self._world.publish(Medium.CPU, True, node)
            self._world.publish(Medium.STORAGE, True, node)

    def _grow(self, fetch: PrefetchInFlight, last: Node, stop: int, key: bytes, hashes: bytes) -> Node:
        """Add host-only nodes below ``last``, up to page ``stop``, for what the tree does not have, cut where the
        window begins. Return the last node."""
        world, page, anchor = self._world, self._world.page_bytes, fetch.anchor.end
        cuts = [stop] if last.end < stop else []
        if world.swa and last.end < (first := world.components[world.swa].first_page(stop)) < stop:
            cuts.insert(0, first)
        for cut in cuts:
            start, end = last.end - anchor, cut - anchor
            last = world.add(last, key[start * page : end * page], hashes[start * HASH_BYTES : end * HASH_BYTES])
            self._put_on_host(fetch, last, 0, fetch.take((end - start) * SLOT_BYTES))
        return last

    def _fill_window(self, fetch: PrefetchInFlight, last: Node, stop: int) -> None:
        """Give the window's SWA pages to the nodes above page ``stop`` that have none on the host."""
        world, swa = self._world, self._world.swa
        held = fetch.held.get(swa, b"") if swa else b""
        if not held:
            return
        pages = needed_pages(fetch.shape, ComponentKind.SWA, stop * self._size)
        slots = {page: held[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for i, page in enumerate(pages)}
        first, node = world.components[swa].first_page(stop), last
        while node.parent is not None and node.end > first:
            start = node.parent.end
            if start < first and node.state[world.count + swa] == ABSENT:
                split_at(world, node, first)
                start = first
            wanted = range(start, node.end)
            state = node.state
            free = state[world.count + swa] == ABSENT and state[world.count] == PRESENT
            if free and all(page in slots for page in wanted):
                self._put_on_host(fetch, node, swa, b"".join([slots.pop(page) for page in wanted]))
            node = node.parent
        fetch.held[swa] = b"".join(slots.values())
