"""What a host process's memory finds: ``python -m benchmarks.host_eviction [TRACE]``. No server runs, only its books.

``extents``: pages of three sizes, asked for by Zipf's law, in the server's own page table and in memory that has no
fragments, both by recency: hits of each, and how much of the memory is in use. ``mixed`` draws from all three sizes all
the time, ``changing`` from mostly one of them for a while and then from another.

With a trace (the Mooncake format): how many of a prompt's blocks are found before the first that is not, by policy. The
server knows keys and no prefixes, so all policies here have flat keys. ``reversed`` is recency with a call's pages used
in reverse, which the server does. ``classes`` is recency by class: blocks that were found again go after all that never
were, up to four fifths of the memory. ``p2c's classes`` are those of the cache's own policy, with what each is worth at
which age.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from asynccache.core.policies import Curves, bin_of
from asynccache.host.memory import layout_of
from asynccache.host.pages import PageTable, Writer

SIZES = (72 << 10, 328 << 10, (2 << 20) + 4096)
MEMORY = 2 << 30
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
CLASS_OF = (0, 0, 1, 2, 3, 3, 3, 4)
"""By uses after the first: p2c's classes without those of forks."""


def draws(mixed: bool, count: int, random: Random) -> Iterator[tuple[int, int]]:
    """Yield pages, each a number and a size, so that each size asks for about as many bytes."""
    weights = [1 / size for size in SIZES]
    numbers = [2 * MEMORY // size for size in SIZES]
    for at in range(count):
        phase = at * 6 // count % 3
        now = weights if mixed else [weight * (12 if which == phase else 1) for which, weight in enumerate(weights)]
        which = random.choices(range(3), now)[0]
        rank = int(numbers[which] * random.random() ** (1 / 0.3))  # a density of rank ** -0.7
        yield which << 32 | rank, SIZES[which]


def extents(mixed: bool, count: int) -> tuple[float, float, float]:
    """Return the ideal's hits, the table's hits, and how much of its memory the table uses in the second half."""
    layout = layout_of(MEMORY)
    table, writer, label = PageTable(layout, array("Q", bytes(8 * layout.slots))), Writer("w"), None
    table.grow(layout.units)
    label = table.label("")
    ideal, held, hits, found, used = OrderedDict[int, int](), 0, 0, 0, list[float]()
    for at, (page, size) in enumerate(draws(mixed, count, Random(35))):
        measured = at >= count // 2
        if page in ideal:
            ideal.move_to_end(page)
            hits += measured
        else:
            ideal[page] = size
            held += size
            while held > layout.units * 4096:
                held -= ideal.popitem(last=False)[1]
        key = page.to_bytes(32, "little")
        if key in table.index:
            table.touch([key])
            found += measured
        else:
            place = table.reserve(writer, key, "", size, label)
            assert place is not None
            table.publish(writer, place, 0.0)
        if measured and at % 1000 == 0:
            used.append(1 - table.free_bytes / (layout.units * 4096))
    return hits / (count - count // 2), found / (count - count // 2), sum(used) / len(used)


class Policy(Protocol):
    """A cache of keys. ``ask`` says whether it has one, and notes that; ``add`` stores one."""

    def ask(self, key: int) -> bool: ...
    def add(self, key: int) -> None: ...


class Recency:
    """The page that was used longest ago goes."""

    def __init__(self, room: int) -> None:
        self.room, self.pages = room, OrderedDict[int, None]()

    def ask(self, key: int) -> bool:
        return key in self.pages

    def add(self, key: int) -> None:
        self.pages[key] = None
        self.pages.move_to_end(key)
        if len(self.pages) > self.room:
            self.pages.popitem(last=False)


class Classes:
    """Recency in two classes: pages that were found again go last, while they have no more than four fifths."""

    def __init__(self, room: int) -> None:
        self.room, self.new, self.again = room, OrderedDict[int, None](), OrderedDict[int, None]()

    def ask(self, key: int) -> bool:
        return key in self.new or key in self.again

    def add(self, key: int) -> None:
        if key in self.new or key in self.again:
            self.new.pop(key, None)
            self.again[key] = None
            self.again.move_to_end(key)
        else:
            self.new[key] = None
        if len(self.new) + len(self.again) > self.room:
            full = len(self.again) > self.room * 4 // 5 or not self.new
            (self.again if full else self.new).popitem(last=False)


class Sieve:
    """SIEVE: a first-in first-out queue whose hand passes over what was used since it last came by."""

    def __init__(self, room: int) -> None:
        self.room, self.used, self.order, self.kept = room, dict[int, bool](), deque[int](), deque[int]()

    def ask(self, key: int) -> bool:
        return key in self.used

    def add(self, key: int) -> None:
        if key in self.used:
            self.used[key] = True
            return
        while len(self.used) >= self.room:
            if not self.order:
                self.order, self.kept = self.kept, deque()
            oldest = self.order.popleft()
            if self.used[oldest]:
                self.used[oldest] = False
                self.kept.append(oldest)
            else:
                del self.used[oldest]
        self.used[key] = False
        self.order.append(key)


class Queues:
    """S3-FIFO: a tenth for new pages, the rest for those that were used there again, and names of what has gone."""

    def __init__(self, room: int) -> None:
        self.room, self.uses = room, dict[int, int]()
        self.small, self.main, self.ghosts = deque[int](), deque[int](), OrderedDict[int, None]()

    def ask(self, key: int) -> bool:
        return key in self.uses

    def add(self, key: int) -> None:
        if key in self.uses:
            self.uses[key] = min(3, self.uses[key] + 1)
            return
        while len(self.uses) >= self.room:
            self._evict()
        self.uses[key] = 0
        (self.main if key in self.ghosts else self.small).append(key)

    def _evict(self) -> None:
        if len(self.small) > self.room // 10 or not self.main:
            key = self.small.popleft()
            if self.uses[key] > 1:
                self.uses[key] = 0
                self.main.append(key)
                return
            self.ghosts[key] = None
            if len(self.ghosts) > self.room:
                self.ghosts.popitem(last=False)
        else:
            key = self.main.popleft()
            if self.uses[key]:
                self.uses[key] -= 1
                self.main.append(key)
                return
        del self.uses[key]


class Worth:
    """p2c's classes by use and their curves (``asynccache.core.policies``), without its tree: no forks are known, and
    of each class only the oldest page may go; the newest is the head of a prompt here, and no leaf."""

    def __init__(self, room: int) -> None:
        self.room, self.now, self.asked = room, 0, 0
        self.curves, self.kinds = Curves(), [OrderedDict[int, None]() for _ in range(max(CLASS_OF) + 1)]
        self.pages, self.ghosts = dict[int, tuple[int, int]](), OrderedDict[int, tuple[int, int]]()

    def begin(self, now: int) -> None:
        """A request comes, at ``now`` in µs."""
        self.now = now
        self.asked += 1
        if self.asked % 100 == 0:
            self.curves.learn(now)

    def ask(self, key: int) -> bool:
        return key in self.pages

    def add(self, key: int) -> None:
        uses, known = 0, self.pages.get(key)
        if known is not None:
            del self.kinds[CLASS_OF[known[0]]][key]
        else:
            known = self.ghosts.pop(key, None)
        if known is not None:
            self.curves.use(CLASS_OF[known[0]], known[1], self.now, 1)
            uses = min(7, known[0] + 1)
        self.pages[key] = uses, self.now
        self.kinds[CLASS_OF[uses]][key] = None
        self.curves.begin(CLASS_OF[uses], 1)
        if len(self.pages) > self.room:
            oldest = [(self._worth(next(iter(pages))), at) for at, pages in enumerate(self.kinds) if pages]
            gone = self.kinds[min(oldest)[1]].popitem(last=False)[0]
            self.ghosts[gone] = self.pages.pop(gone)
        if len(self.ghosts) > 8 * self.room:
            uses, last = self.ghosts.popitem(last=False)[1]
            self.curves.give_up(CLASS_OF[uses], last, self.now, 1)

    def _worth(self, key: int) -> float:
        uses, last = self.pages[key]
        return self.curves.worth[CLASS_OF[uses]][bin_of(self.now - last)]


def found_blocks(prompts: Sequence[tuple[int, Sequence[int]]], cache: Policy, *, reverse: bool) -> float:
    """Return the share of blocks that are found before the first of their prompt that is not. ``prompts``: when they
    came, in µs, and their blocks."""
    found = total = 0
    for now, prompt in prompts:
        if isinstance(cache, Worth):
            cache.begin(now)
        total += len(prompt)
        hits = 0
        while hits < len(prompt) and cache.ask(prompt[hits]):
            hits += 1
        found += hits
        for key in reversed(prompt) if reverse else prompt:
            cache.add(key)
    return found / total


POLICIES: dict[str, tuple[Callable[[int], Policy], bool]] = {
    "recency": (Recency, False), "reversed": (Recency, True), "classes": (Classes, True), "SIEVE": (Sieve, True),
    "S3-FIFO": (Queues, True), "p2c's classes": (Worth, True),
}  # fmt: skip


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--draws", type=int, default=200_000)
    given = parser.parse_args()
    for name, mixed in (("mixed", True), ("changing", False)):
        ideal, hits, used = extents(mixed, given.draws)
        of_ideal = f"{hits:.3f} ({hits / ideal:.3f} of it)"
        sys.stdout.write(f"extents, {name:<9} ideal {ideal:.3f}  hits {of_ideal}  used {used:.3f}\n")
    for trace in given.traces:
        lines = map(json.loads, Path(trace).read_text().splitlines())
        prompts = [(int(line["timestamp"] * 1000), line["hash_ids"]) for line in lines]
        unique = len({key for _, prompt in prompts for key in prompt})
        sys.stdout.write(f"{trace}: {len(prompts)} prompts, {unique} blocks\n")
        for share in SHARES:
            row = [f"{name} {found_blocks(prompts, make(max(10, int(unique * share))), reverse=reverse):.3f}"
                   for name, (make, reverse) in POLICIES.items()]  # fmt: skip
            sys.stdout.write(f"  room for {share:4.0%}: {'  '.join(row)}\n")


if __name__ == "__main__":
    main()
