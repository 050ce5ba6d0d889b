"""A prefetch without time: the storage side of ``SynchronousRuntime``, one step at a time.

A fetch asks which pages are stored, is opened for these, takes host slots, fills them, and commits or is released.
Between any two steps the test may do anything else to the tree. Slots hold garbage until their page was read, so
adopting an unread one shows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from asynccache.core.cache import Begin, PrefetchBegun, PrefetchShape, Skip, Taken, needed_pages, usable_end
from asynccache.core.plan import More, Plan, Wait
from tests.simulated.synchronous import FULL, HOST, MAMBA, SPACE, SWA, Slots, SynchronousRuntime

NAMES = {FULL: "full", SWA: "swa", MAMBA: "mamba"}


class Fetch:
    """One prefetch. ``unreadable``: (component, page) that storage has but fails to give."""

    def __init__(
        self, runtime: SynchronousRuntime, opened: PrefetchBegun, key: bytes, space: bytes,
        unreadable: Collection[tuple[int, int]] = (),
    ) -> None:
        self.runtime = runtime
        self.op = opened.op
        self.shape: PrefetchShape = opened.shape
        self.chain = runtime.chain(space, key)
        self.unreadable = unreadable
        self.full = Slots()
        self.pools = [(NAMES[kind], int(kind)) for kind in runtime.kinds]
        self.present = stored_pages(runtime, space, key)

    @property
    def anchor(self) -> int:
        """The number of the first page that it fetches."""
        return self.shape.anchor // self.shape.page_size

    def usable(self, limit: int | None = None) -> int:
        """The longest end worth fetching, in tokens."""
        return usable_end(self.shape, self.pools, self.present, self.shape.length if limit is None else limit)

    def take_full(self, pages: int) -> int:
        """Take host slots for so many more FULL pages and read them; how many slots there were."""
        while isinstance(answer := self.runtime.core.prefetch_take_full(self.op, pages), More):
            self.runtime.perform(answer.plan)
        self.runtime.perform(answer.plan)
        slots = Slots.of(answer.slots)
        for page, slot in enumerate(slots, self.anchor + len(self.full)):
            self._read(FULL, page, slot)
        self.full = Slots((*self.full, *slots))
        return len(slots)

    def take_aux(self, end: int) -> bool:
        """Take host slots for what ``end`` needs of the other components and read them; false if there are too few."""
        while isinstance(answer := self.runtime.core.prefetch_take_aux(self.op, end), More):
            self.runtime.perform(answer.plan)
        assert isinstance(answer, Taken)
        self.runtime.perform(answer.plan)
        if answer.aux is None:
            return False
        for component, slots in answer.aux.items():
            pages = needed_pages(self.shape, component, end)
            for page, slot in zip(pages, Slots.of(slots), strict=True):
                self._read(component, page, slot)
        return True

    def _read(self, component: int, page: int, slot: int) -> None:
        digest = self.chain[page]
        good = (component, page) not in self.unreadable and (component, digest) in self.runtime.storage
        self.present[NAMES[component]][page] &= good
        stored = self.runtime.storage.get((component, digest)) if good else None
        self.runtime.memory[HOST, component, slot] = stored or self.runtime.garbage()

    def finish(self, limit: int | None = None, holders: Sequence[int] = ()) -> int:
        """Fetch everything up to ``limit`` that can be had and commit it; the end reached, or 0 after a release."""
        end = self.usable(limit)
        while end > self.shape.covered:
            missing = end // self.shape.page_size - self.anchor - len(self.full)
            if missing > 0 and self.take_full(missing) < missing:
                end = self.usable((self.anchor + len(self.full)) * self.shape.page_size)
                continue
            if self.usable(end) != end:
                end = self.usable(end)
                continue
            if not self.take_aux(end):
                break
            if self.usable(end) == end:
                self.commit(end, holders)
                return end
            end = self.usable(end)
        self.release()
        return 0

    def commit(self, end: int, holders: Sequence[int] = ()) -> Plan:
        """Hang the fetched pages into the tree; ``holders`` claim them."""
        size = self.shape.page_size
        hashes = b"".join(self.chain[self.anchor : end // size])
        for _ in range(100):
            answer = self.runtime.core.prefetch_commit(self.op, end, hashes, holders)
            if not isinstance(answer, Wait):
                self.runtime.perform(answer)
                return answer
            self.runtime.perform(answer.plan)
            self.runtime.complete(*[op for op in answer.ops if op in self.runtime.jobs])
        raise AssertionError("the commit waits for ever")

    def release(self) -> None:
        """Revoke the prefetch: all its slots are given back."""
        self.runtime.perform(self.runtime.core.prefetch_release(self.op))


def stored_pages(runtime: SynchronousRuntime, space: bytes, key: bytes) -> dict[str, list[bool]]:
    """Which pages of ``key`` storage has, by the name of the component."""
    chain = runtime.chain(space, key)
    return {NAMES[kind]: [(kind, digest) in runtime.storage for digest in chain] for kind in runtime.kinds}


MISS = Skip("storage has nothing of it")


def open_fetch(
    runtime: SynchronousRuntime, key: bytes, space: bytes = SPACE, unreadable: Collection[tuple[int, int]] = (),
    begin: Begin = Begin.NEXT,
) -> Fetch | Wait | Skip:
    """Ask what storage has of ``key``, and open a prefetch for that. If none begins, returns ``MISS`` or the core's
    answer."""
    shape = runtime.core.prefetch_look(space, key)
    if isinstance(shape, Skip):
        return shape
    pools = [(NAMES[kind], int(kind)) for kind in runtime.kinds]
    end = usable_end(shape, pools, stored_pages(runtime, space, key), shape.length)
    if end <= shape.covered:
        return MISS
    key = key[: end // shape.page_size * runtime.core.world.page_bytes]
    while isinstance(answer := runtime.core.prefetch_open(space, key, begin), More):
        runtime.perform(answer.plan)
    if isinstance(answer, PrefetchBegun):
        fetch = Fetch(runtime, answer, key, space, unreadable)
        runtime.perform(answer.plan)
        return fetch
    if isinstance(answer, Wait):
        runtime.perform(answer.plan)
    return answer
